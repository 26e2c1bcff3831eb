"""Checks for "Tensors on devices": which tensors share memory, and a whole batch that moves."""

import torch

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
