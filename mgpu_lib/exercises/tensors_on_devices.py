"""Checks for "Tensors on devices": which tensors share memory, a batch that moves, a step to mend, an estimate."""

import warnings

import torch
from torch import nn

from mgpu_lib.exercises.framework import exercise, expect, filled
from virtual_gpus import tensors_in, virtual_gpus


@exercise
def check_aliases(answer):
    """The names of what changes with X, as a set: a tensor with X's memory, or X itself."""
    right = {"X[:2]", "X.detach()", "X.to(devices[0])"}
    names = right | {"X.clone()", "X.cpu()", "X.to(torch.float64)"}
    if answer == set():
        filled(None)
    answer = set(answer)
    expect(answer <= names, f"{sorted(map(str, answer - names))[:1]} isn't among the six names")
    why = {
        "X[:2]": "a slice is a view: it has X's memory",
        "X.detach()": "detach leaves the graph, not the memory",
        "X.to(devices[0])": "X is on that GPU already, and there .to returns X itself",
        "X.clone()": "clone always copies",
        "X.cpu()": "the values had to go to another device, so they were copied",
        "X.to(torch.float64)": "another type needs other memory",
    }
    for name in sorted(answer ^ right):
        expect(False, f"look again at {name}: {why[name]}")
    return "all six"


@exercise
def check_to_device(answer):
    """to_device(nest, device): lists, tuples and dicts of tensors, moved; everything else as it is."""
    with virtual_gpus(1):
        device = torch.device("cuda", 0)
        X, there = torch.ones(2), torch.ones(2, device=device)
        expect(filled(answer(X, device)).device == device, "a single tensor was not moved")
        expect(answer(there, device) is there, "what is on the device already needs no copy: .to returns it as it is")
        for other in ("text", 3, None):
            expect(answer([other], device) == [other], f"what is no tensor, such as {other!r}, must come back as it is")
        for nest in ([X], (X, X), {"X": X}, {"a": [X, (X, "text")], "b": 3}):
            moved = answer(nest, device)
            expect(type(moved) is type(nest), f"a {type(nest).__name__} came back as {type(moved).__name__}")
            expect(moved is not nest, "the caller's list or dict was changed: make a new one")
            expect(shape(moved) == shape(nest), f"{shape(nest)} came back as {shape(moved)}")
            expect(all(t.device == device for t in tensors_in([moved])), f"a tensor in {shape(nest)} was not moved")
            expect(all(t is X for t in tensors_in([nest])), "the caller's list or dict was changed: make a new one")
    return "every tensor on the GPU, everything else as it was"


def shape(nest):
    """`nest` with X in place of each tensor."""
    if isinstance(nest, dict):
        return {key: shape(value) for key, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(shape(value) for value in nest)
    return "X" if isinstance(nest, torch.Tensor) else nest


@exercise
def check_weighted_step(answer):
    """weighted_step(net, X, y, total): mended, it works on any GPU and makes Python wait for nothing."""
    with virtual_gpus(2):
        device = torch.device("cuda", 1)
        net = nn.Linear(5, 3).to(device)
        X, y = torch.linspace(-1, 1, 40).view(8, 5).pin_memory(), torch.arange(8).remainder(3).pin_memory()
        weights = torch.linspace(0, 1, 8, device=device)
        losses = nn.functional.cross_entropy(net(X.to(device)), y.to(device), reduction="none")
        right = (weights * losses).mean()
        right.backward()
        grad, total = net.weight.grad.cpu(), torch.ones((), device=device)
        net.zero_grad()
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                got = filled(answer(net, X, y, total))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        expect(isinstance(got, torch.Tensor), f"it returns {type(got).__name__}, no tensor: keep the sum on the GPU")
        expect(got.device == device, f"the sum is on {got.device}, and the network on {device}")
        count = sum("synchroniz" in str(one.message) for one in waits)
        times = "once" if count == 1 else f"{count} times"
        expect(not count, f"Python waits {times}: what reads a value, or copies without non_blocking?")
        expect(net.weight.grad is not None, "no gradient reached the network: call backward")
        expect(torch.allclose(net.weight.grad.cpu(), grad, atol=1e-6), "the gradient has changed")
        expect(not got.requires_grad, "the sum keeps the graph of every step in memory: add loss.detach()")
        expect(
            torch.allclose(got.cpu(), 1 + right.detach().cpu()), "expected total plus the weighted mean of the losses"
        )
    return "it runs on any GPU, and Python never waits"


@exercise
def check_copy_ms(answer):
    """copy_ms(images, pixels, channels, itemsize, gbps): milliseconds that a batch of square images takes."""
    for images, pixels, channels, itemsize, gbps in ((512, 224, 3, 4, 8.3), (256, 28, 1, 1, 12.0)):
        right = 1e-6 * images * pixels**2 * channels * itemsize / gbps
        got = float(filled(answer(images, pixels, channels, itemsize, gbps)))
        case = f"{images} images of {pixels} x {pixels} x {channels} numbers, {itemsize} bytes each, at {gbps} GB/s"
        for factor, slip in (
            (1e-3, "that is in seconds"),
            (8, "GB are gigabytes, not gigabits"),
            (1 / itemsize, "each number has itemsize bytes"),
            (1 / pixels, "an image is pixels high and pixels wide"),
            (1 / channels, "each pixel has a number for every channel"),
            (1 / images, "the batch has many images"),
            ((1e9 / 2**30), "here a GB has 10**9 bytes"),
        ):
            expect(factor == 1 or abs(got - factor * right) > 1e-6 * right, f"{case}: {got:.3g} ms; {slip}")
        expect(abs(got - right) < 1e-6 * right, f"{case}: {got:.3g} ms, where it takes {right:.3g}")
    return "about 37, 9.3 and 6.4 ms: sending bytes saves more than pinning"
