"""What our own DistributedDataParallel costs: training steps with `mgpu_lib.ddp.DDP` against PyTorch's, side by side in
one run of two processes with a thread each, on the CPU with gloo.

    python -m benchmarks.ddp_from_scratch    # prints the ratios and their bound; exit code 1 if it is not kept

One ratio is the time of a step with ours over that of the step with PyTorch's before it. The median of many is quoted.
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mgpu_lib as mgpu
from benchmarks.ddp_overhead import report, resnet, run_on, seconds

RANKS, BOUND = 2, 1.10


def lenet():
    """LeNet, 64 images on each rank."""
    return mgpu.lenet_module(), torch.rand(64, 1, 28, 28), torch.randint(10, (64,))


def step_with(wrap, make):
    net, X, y = make()
    net = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()

    return step


def ratios(make, pairs):
    """`pairs` ratios, ours over PyTorch's, each of two steps taken one right after the other."""
    theirs, ours = step_with(DistributedDataParallel, make), step_with(mgpu.ddp.DDP, make)
    found = []
    for step in range(pairs + 3):  # the first make the optimizer's state, and PyTorch's buckets anew
        before = seconds(theirs)
        after = seconds(ours)
        found += [after / before] if step >= 3 else []
    return found


def on_a_rank():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, make, pairs in (
        ("LeNet, 64 images a rank", lenet, 100),
        ("ResNet-18, 64 images a rank", resnet, 15),
    ):
        report(dist.get_rank(), name, ratios(make, pairs), BOUND)
    dist.destroy_process_group()


if __name__ == "__main__":
    on_a_rank() if "LOCAL_RANK" in os.environ else run_on(RANKS, "benchmarks.ddp_from_scratch")
