"""What virtual GPUs cost: training steps on them against the same code on plain CPU tensors, side by side in one run.

    python -m benchmarks.virtual_overhead    # prints the ratios and their bounds; exit code 1 if one is not kept

One ratio is the time of a step on virtual GPUs over that of the step before it on the CPU, because a busy machine
slows both. The median of many is quoted.
"""

import statistics
import subprocess
import sys
import time

import torch
from torch.nn import functional as F

import mgpu_lib as mgpu

IMPORT = "import time, torch; t = time.perf_counter(); import mgpu_lib; print(time.perf_counter() - t)"


def lenet_step(devices):
    """A step of LeNet from scratch, 256 images in all, on `devices`."""
    X, y = images(256)
    replicas = [mgpu.get_params(mgpu.lenet_params(), device) for device in devices]
    return lambda: mgpu.train_batch(X, y, replicas, devices, lr=0.1)


def resnet_step(devices):
    """A step of ResNet-18 for small images with momentum, 64 images."""
    X, y = images(64)
    net = mgpu.resnet18().to(devices[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(X.to(devices[0])), y.to(devices[0])).backward()
        optimizer.step()

    return step


def images(n):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 1, 28, 28, generator=generator), torch.randint(0, 10, (n,), generator=generator)


def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def ratios(make_step, num_gpus, pairs):
    """`pairs` ratios, virtual over plain, each of two steps taken one right after the other."""
    plain = make_step([torch.device("cpu")] * num_gpus)
    machine = mgpu.virtual_gpus(num_gpus)
    with machine:
        virtual = make_step(machine.devices)
        virtual()
    plain()
    found = []
    for _ in range(pairs):
        before = seconds(plain)
        with machine:
            found.append(seconds(virtual) / before)
    return found


def import_seconds():
    """What importing mgpu_lib adds to importing torch: the median of five fresh processes."""
    command = [sys.executable, "-c", IMPORT]
    runs = [subprocess.run(command, capture_output=True, text=True, timeout=120, check=True) for _ in range(5)]
    return statistics.median(float(run.stdout) for run in runs)


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratios: median (quartiles) [bound]")
    kept = True
    for name, make_step, num_gpus, pairs, bound in (
        ("LeNet, batch 256, 1 virtual GPU", lenet_step, 1, 200, 1.10),
        ("LeNet, batch 256, 4 virtual GPUs", lenet_step, 4, 200, 1.25),
        ("ResNet-18, batch 64, 1 virtual GPU", resnet_step, 1, 60, 1.05),
    ):
        low, median, high = statistics.quantiles(ratios(make_step, num_gpus, pairs), n=4)
        kept &= median <= bound
        print(f"{name:<36} {median:.3f} ({low:.3f} to {high:.3f}) [{bound:.2f}]")
    added = import_seconds()
    print(f"{'import mgpu_lib after torch':<36} {added:.3f} s [0.30 s]")
    return 0 if kept and added <= 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
