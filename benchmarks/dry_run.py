"""What a dry run costs: predicting a step of ResNet-50 on eight GPUs, against one real step on this computer.

    python -m benchmarks.dry_run    # prints the ratios and their bound; exit code 1 if one is not kept

The reference is a training step of ResNet-50 on 4 images on the CPU, taken right before each prediction. The median of
several pairs is quoted.
"""

import statistics
import sys
import time

import torch
import torchvision
from torch.nn import functional as F

import mgpu_lib as mgpu

PAIRS = 5
BOUND = 3.0  # a prediction may take as long as so many real steps


def real_step():
    net, X, y = torchvision.models.resnet50(), torch.rand(4, 3, 224, 224), torch.zeros(4, dtype=torch.long)
    return lambda: F.cross_entropy(net(X), y).backward()


def dry_step(strategy):
    with torch.device("meta"):
        net, X = torchvision.models.resnet50(), torch.empty(512, 3, 224, 224)
    return lambda: mgpu.predict(net, X, gpu="A100-80", n_gpus=8, strategy=strategy, precision="amp")


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
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
