"""What virtual GPUs cost in many processes: steps of DistributedDataParallel on four of them, in four processes with a
thread each, against the same on plain CPU tensors with gloo, side by side in one run.

    python -m benchmarks.ddp_overhead    # prints the ratios and their bound; exit code 1 if it is not kept

One ratio is the time of a step on virtual GPUs over that of the step before it on the CPU, because a busy machine
slows both. The median of many is quoted.
"""

import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mgpu_lib as mgpu

RANKS, BOUND = 4, 1.15
LIMIT = 900  # seconds for the ranks


class GPT(nn.Module):
    """Six layers of width 384, 256 tokens."""

    def __init__(self, tokens=256, width=384, vocabulary=1000):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, X):
        steps = torch.arange(X.shape[1], device=X.device)
        mask = nn.Transformer.generate_square_subsequent_mask(X.shape[1], device=X.device)
        hidden = self.layers(self.embedding(X) + self.position(steps), mask=mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


def resnet():
    """ResNet-18 for small images, 64 of them on each rank."""
    return mgpu.resnet18(), torch.rand(64, 1, 28, 28), torch.randint(10, (64,))


def gpt():
    """Four sequences on each rank."""
    return GPT(), torch.randint(1000, (4, 256)), torch.randint(1000, (4 * 256,))


def step_on(device, make, group):
    """A step of training with DistributedDataParallel among the ranks of `group`."""
    net, X, y = make()
    net = DistributedDataParallel(net.to(device), process_group=group)
    optimizer, X, y = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), X.to(device), y.to(device)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()

    return step


def seconds(step):
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def ratios(rank, make, pairs):
    """`pairs` ratios, virtual over plain, each of two steps taken one right after the other."""
    plain, machine, found = step_on("cpu", make, dist.group.WORLD), mgpu.virtual_gpus(RANKS), []
    with machine:
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
        virtual = step_on(f"cuda:{rank}", make, group)
    for step in range(pairs + 2):  # the first make the optimizer's state, and DistributedDataParallel's buckets anew
        before = seconds(plain)
        with machine:
            torch.cuda.set_device(rank)
            after = seconds(virtual)
        found += [after / before] if step >= 2 else []
    return found


def on_a_rank():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, make, pairs in (("ResNet-18, 64 images a rank", resnet, 10), ("GPT, 4 x 256 tokens a rank", gpt, 6)):
        report(rank, name, ratios(rank, make, pairs), BOUND)
    dist.destroy_process_group()


def report(rank, name, ratios, bound):
    """Rank 0 prints the median of its ratios."""
    median = statistics.median(ratios)
    if rank == 0:
        print(f"{name}: {median:.3f} (bound {bound}{', not kept' * (median > bound)})", flush=True)


def run_on(ranks, module):
    """Run `module` on so many ranks, print what they print, and exit: with 1 if a bound is not kept."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, "-m", module], env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    print(done.stdout, end="")
    sys.exit(done.returncode or "not kept" in done.stdout)


if __name__ == "__main__":
    on_a_rank() if "LOCAL_RANK" in os.environ else run_on(RANKS, "benchmarks.ddp_overhead")
