"""What a dry run costs: predicting a step of ResNet-50 on eight GPUs, against one real step on this computer.

    python -m benchmarks.dry_run    # prints the ratios and their bound; exit code 1 if one is not kept

The reference is a training step of ResNet-50 on 4 images on the CPU, taken right before each prediction. The median of
several pairs is quoted. Then Llama 3 with 70 billion parameters, sharded by fully_shard, on 64 H100 and on 1,024, each
in a process of its own: seconds from its start to its end, and the memory that it took of this computer.
"""

import resource
import statistics
import subprocess
import sys
import time

import torch
import torchvision
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import mgpu_lib as mgpu

PAIRS = 5
BOUND = 3.0  # a prediction may take as long as so many real steps
SECONDS, BYTES = 20, 2e9  # of a dry run of Llama with 70 billion parameters
SLOWER = 1.2  # so many times as long it may take with 1,024 ranks


def real_step():
    net, X, y = torchvision.models.resnet50(), torch.rand(4, 3, 224, 224), torch.zeros(4, dtype=torch.long)
    return lambda: F.cross_entropy(net(X), y).backward()


def dry_step(strategy):
    with torch.device("meta"):
        net, X = torchvision.models.resnet50(), torch.empty(512, 3, 224, 224)
    return lambda: mgpu.predict(net, X, gpu="A100-80", n_gpus=8, strategy=strategy, precision="amp")


def llama():
    """A program that trains Llama 3 70B, as each rank runs it."""
    with torch.device("meta"):
        net = mgpu.Transformer(**mgpu.LLAMA["70B"])
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for i, layer in enumerate(net.layers):
        net.layers[i] = fully_shard(checkpoint_wrapper(layer), **options)
    fully_shard(net, **options).to_empty(device="cuda")
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.zeros(1, 4096, dtype=torch.long, device="cuda")

    def step():
        F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def large(n_gpus):
    """(seconds, bytes) that a process takes for a dry run of `llama`."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.dry_run", str(n_gpus)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return time.perf_counter() - started, int(done.stdout.split()[-1])


def check_large():
    """Print what the large runs take; whether the bounds are kept."""
    taken = {n: large(n) for n in (64, 1024)}
    for n, (wall, memory) in taken.items():
        print(f"{f'Llama 3 70B, {n:,} GPUs':<24} {wall:.0f} s [{SECONDS}], {memory / 1e9:.2f} GB [{BYTES / 1e9:.0f}]")
    ratio = taken[1024][0] / taken[64][0]
    print(f"{'1,024 GPUs to 64':<24} {ratio:.2f} [{SLOWER}]")
    return ratio <= SLOWER and all(wall <= SECONDS and memory <= BYTES for wall, memory in taken.values())


def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratios: median (lowest to highest) [bound]")
    kept, real = True, real_step()
    real()
    for strategy in ("manual", "data_parallel", "ddp"):
        predict = dry_step(strategy)
        found = []
        for _ in range(PAIRS):
            reference = seconds(real)
            found.append(seconds(predict) / reference)
        kept &= statistics.median(found) <= BOUND
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{f'8 GPUs, {strategy}':<24} {statistics.median(found):.2f} ({spread}) [{BOUND:.1f}]")
    return 0 if check_large() and kept else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(mgpu.dry_run(llama, int(sys.argv[1])))
        print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    else:
        sys.exit(main())
