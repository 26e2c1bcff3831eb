"""Everything that a real GPU should be asked as soon as one is at hand, most valuable first.

    python -m experiments.on_a_gpu --out FOLDER --data FOLDER

writes measured_PART.json into the folder --out for each part: what a call costs the host, training steps, the memory of
one, layers of Llama 3, copies, the training and inference of LeNet and torchvision's ResNet-18, and the small grid of
ResNet-18. --data is the folder of Fashion-MNIST, which is fetched if it isn't there. A call takes at most 8 minutes,
and the next one goes on where it ended.

    python -m experiments.on_a_gpu --out FOLDER --modelled H200

asks a virtual GPU in place of the real one, and writes modelled_PART.json for the parts in MODELLED. From
mgpu_lib/recorded the book reads both, see `mgpu_lib.recorded.measured`.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import mgpu_lib as mgpu
from experiments import resnet_grid, study
from experiments.record import provenance, write

LIMIT = 8 * 60  # seconds that a call takes at most
RESERVE = 90  # no row is begun when less is left
CALLS = 200  # of an operation, between two readings of the time
DEVICE = torch.device("cuda", 0)


def timed(step, calls=1):
    """Median and quartiles of the seconds that each of the `calls` in `step` takes."""
    timing = mgpu.Timer([DEVICE]).measure(step)
    return {name: value / calls for name, value in zip(("median", "low", "high"), (timing.median, *timing.spread))}


# What a call costs the host: so small that the GPU waits for the host

# Kind of operation, as in virtual_gpus.clock.rates: (function, shapes of what it is called with)
SMALL = {
    "pointwise": (torch.add, [(8,), (8,)]),
    "view": (lambda X: X.view(2, 4), [(8,)]),
    "reduce": (torch.sum, [(8, 8)]),
    "matmul": (torch.mm, [(8, 8), (8, 8)]),
    "conv3x3": (F.conv2d, [(1, 8, 8, 8), (8, 8, 3, 3)]),
    "norm": (lambda X, W, b: F.batch_norm(X, None, None, W, b, training=True), [(2, 8, 4, 4), (8,), (8,)]),
    "pool": (lambda X: F.avg_pool2d(X, 2), [(1, 8, 8, 8)]),
}


def host_cases():
    return {f"{name}/{way}": (name, way) for name in SMALL for way in ("called", "by the engine")}


def host(name, way):
    """Seconds of a call of a small operation by Python, or of its backward pass, with the gradients it adds to."""
    function, shapes = SMALL[name]
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=way != "called") for shape in shapes]
    if way == "called":
        return timed(lambda: [function(*inputs) for _ in range(CALLS)], CALLS)
    results = [function(*inputs) for _ in range(CALLS)]
    gradients = [torch.ones_like(result) for result in results]
    return timed(lambda: torch.autograd.backward(results, gradients, retain_graph=True), CALLS)


# Training steps of the book's networks


def step_cases():
    steps = itertools.product(("LeNet", "ResNet-18"), (16, 64, 256, 1024), ("fp32", "amp"))
    return {"/".join(map(str, step)): step for step in steps}


def step(network, batch, precision):
    """Seconds of a training step, with SGD and momentum, as `mgpu.predict` models it."""
    net = (mgpu.lenet_module() if network == "LeNet" else mgpu.resnet18()).to(DEVICE)
    X, y = torch.randn(batch, 1, 28, 28, device=DEVICE), torch.zeros(batch, dtype=torch.long, device=DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def train():
        with torch.autocast("cuda", torch.float16, enabled=precision == "amp"):
            loss = nn.functional.cross_entropy(net(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return timed(train)


# What a training step keeps in memory


def memory_cases():
    steps = itertools.product(("LeNet", "ResNet-18", "Transformer"), ("SGD", "Adam"), ("fp32", "bf16"))
    return {"/".join(step): step for step in steps}


def memory(network, optimizer, precision):
    """Bytes, as `mgpu.footprint` counts them, of a step with 64 images, or with 8 sequences of 256 tokens."""
    if network == "Transformer":
        net = nn.Sequential(mgpu.Transformer(4096, 512, 4, 8, 4), nn.Flatten(0, 1)).to(DEVICE)
        X = torch.zeros(8, 256, dtype=torch.long, device=DEVICE)
        y = X.flatten()
    else:
        net = (mgpu.lenet_module() if network == "LeNet" else mgpu.resnet18()).to(DEVICE)
        X, y = torch.randn(64, 1, 28, 28, device=DEVICE), torch.zeros(64, dtype=torch.long, device=DEVICE)
    optimizer = getattr(torch.optim, optimizer)(net.parameters(), lr=0.001)
    return mgpu.footprint(net, X, y, optimizer, dtype=torch.bfloat16 if precision == "bf16" else None)


# Two layers of Llama 3 8B, in BF16


def llama_cases():
    return {f"{tokens}/{mode}": (tokens, mode) for tokens in (512, 2048, 8192) for mode in ("train", "infer")}


def llama(tokens, mode):
    """Seconds of a step with one sequence, by AdamW's fused kernel, and the most bytes it held."""
    with DEVICE:
        net = mgpu.Transformer(**mgpu.LLAMA["8B"] | {"layers": 2}).bfloat16().train(mode == "train")
        X = torch.zeros(1, tokens, dtype=torch.long)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, fused=True)

    def step():
        with torch.set_grad_enabled(net.training):
            loss = F.cross_entropy(net(X).flatten(0, 1), X.flatten())
        if net.training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    torch.cuda.reset_peak_memory_stats(DEVICE)
    return {**timed(step), "peak": torch.cuda.max_memory_allocated(DEVICE)}


# Training and inference, with images as large as each network's


def validation_cases():
    images = {"lenet": (1, 28, 28), "resnet18": (3, 224, 224)}
    steps = itertools.product(images.items(), (1, 16, 64, 256), ("train", "infer"))
    return {f"{name}/{batch}/{mode}": (name, image, batch, mode) for (name, image), batch, mode in steps}


def validation(name, image, batch, mode):
    """Seconds of one of these steps."""
    net = torchvision.models.resnet18() if name == "resnet18" else mgpu.lenet_module()
    net.to(DEVICE).train(mode == "train")
    X, y = torch.randn(batch, *image, device=DEVICE), torch.zeros(batch, dtype=torch.long, device=DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step():
        with torch.set_grad_enabled(net.training):
            loss = nn.functional.cross_entropy(net(X), y)
        if net.training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return {"model": name, "batch": batch, "mode": mode, **timed(step)}


# Copies between the host and the GPU


def copy_cases():
    copies = itertools.product(("pinned", "pageable"), ("in", "out"), (4 * 2**10, 2**18, 2**22, 2**26, 2**28))
    return {"/".join(map(str, copy)): copy for copy in copies}


def copy(memory, way, nbytes):
    """Seconds to copy so many bytes to the GPU or from it; the host's memory is pinned or pageable."""
    here = torch.zeros(nbytes, dtype=torch.uint8)
    here, there = here.pin_memory() if memory == "pinned" else here, torch.zeros_like(here, device=DEVICE)
    source, target = (here, there) if way == "in" else (there, here)
    return timed(lambda: target.copy_(source, non_blocking=memory == "pinned"))


# The parts, most valuable first: {name: (cases, what one of them gives)}
PARTS = {
    "host": (host_cases, host),
    "steps": (step_cases, step),
    "memory": (memory_cases, memory),
    "llama": (llama_cases, llama),
    "copies": (copy_cases, copy),
    "validation": (validation_cases, validation),
    "resnet_grid": (resnet_grid.cases, resnet_grid.record),
}

MODELLED = "host", "steps", "memory", "llama", "validation"  # parts that need no values


def about():
    """The GPU and the software that decide what is measured."""
    return {
        "gpu": torch.cuda.get_device_name(DEVICE),
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn(),
        "precision": "PyTorch's defaults",
        "modelled": mgpu.current_machine() is not None,
    }


def cudnn():
    """The version of cuDNN, or None where PyTorch's is none for this GPU, which raises an error when it is asked."""
    with contextlib.suppress(RuntimeError):
        return torch.backends.cudnn.version()


def driver():
    """The version of NVIDIA's driver, or None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0]


def measure(part, out, deadline=float("inf")):
    """Measure what is missing of a part, each row kept when it is done; whether all of it was there before `deadline`.

    Raises ValueError where `out` holds what was measured with another GPU or other software.
    """
    (cases, row), here = PARTS[part], about()
    path = Path(out, f"{'modelled' if here['modelled'] else 'measured'}_{part}.json")
    found = {"provenance": provenance("experiments.on_a_gpu"), **here, "rows": {}}
    if path.exists():
        found = json.loads(path.read_text())
    others = [f"{name} {found[name]}, not {here[name]}" for name in here if found[name] != here[name]]
    if others:
        raise ValueError(f"{path} holds measurements with {'; '.join(others)}: name another folder")
    longest = RESERVE
    for key, arguments in cases().items():
        if key in found["rows"]:
            continue
        began = time.monotonic()
        if began + longest > deadline:
            return False
        found["rows"][key] = row(*arguments)
        write(path, study.plain(found))
        longest = max(longest, 1.5 * (time.monotonic() - began))
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder of Fashion-MNIST")
    source.add_argument("--modelled", metavar="GPU", help="ask a virtual GPU of this kind")
    arguments = parser.parse_args()
    if arguments.modelled:
        with mgpu.virtual_gpus(1, arguments.modelled, backing="meta"):
            for part in MODELLED:
                measure(part, arguments.out)
        return
    if mgpu.current_machine() is not None or not torch.cuda.is_available():
        sys.exit("PyTorch sees no real GPU here, and others are only modelled")
    os.environ["MGPU_DATA"] = str(arguments.data.resolve())
    deadline = time.monotonic() + LIMIT
    for part in PARTS:
        if not measure(part, arguments.out, deadline):
            print(f"{part} is to go on: the same command once more")
            return
        print(f"{part} is there")


if __name__ == "__main__":
    main()
