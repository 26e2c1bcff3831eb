"""What several tests of the library need: devices, images, and one network from torch.nn with given parameters."""

import contextlib

import torch
from torch import nn

from mgpu_lib.data import Data, load_digits
from mgpu_lib.models import lenet_module
from virtual_gpus import virtual_gpus

CPU = torch.device("cpu")


@contextlib.contextmanager
def some_devices(kind, count):
    """`count` devices: all the same CPU, or virtual GPUs."""
    if kind == "cpu":
        yield [CPU] * count
    else:
        with virtual_gpus(count) as machine:
            yield list(machine.devices)


def images(rows, seed=0):
    """Random ones of 28 × 28 pixels, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 1, 28, 28, generator=generator), torch.randint(10, (rows,), generator=generator)


def some_digits(train, test=50):
    """The first of the handwritten digits: a hundred are enough to see that numbers are right, not to learn."""
    name, X_train, y_train, X_test, y_test = load_digits()
    return Data(name, X_train[:train], y_train[:train], X_test[:test], y_test[:test])


def in_order(net):
    """The parameters of a `lenet_module` in the order of `lenet_params`; weights of linear layers are transposed."""
    layers = sorted(net, key=lambda layer: isinstance(layer, nn.BatchNorm2d))  # norms last, else as they are
    return [p for layer in layers for p in layer.parameters()]


def lenet_of_modules(params):
    """LeNet from PyTorch's layers, which know nothing of the book's, starting from `params`: the oracle."""
    net = lenet_module(batch_norm=len(params) > 8)
    with torch.no_grad():
        for p, value in zip(in_order(net), params, strict=True):
            p.copy_(value.T if value.dim() == 2 else value)
    return net


def without_marks(text):
    """A traceback as Python 3.10 writes it, too."""
    return "\n".join(line for line in text.splitlines() if set(line) - set(" ^~"))
