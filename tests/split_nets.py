"""Networks that are split, a batch for them, and how far their gradients are from those of one device."""

import copy

import torch
from torch.nn import functional as F

from mgpu_lib.traffic import networks


def small_networks():
    """In 64 bits: in 32, rounding can push a number across the corner of a ReLU, and gradients differ by a percent."""
    torch.manual_seed(0)
    return {name: net.double() for name, net in networks(width=50).items()}


def make_batch(rows):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(rows, 1, 28, 28, generator=generator).double(), torch.randint(10, (rows,), generator=generator)


def unsplit(net, X, y):
    """The oracle: the network with the gradients that plain PyTorch on the CPU finds."""
    net = copy.deepcopy(net)
    F.cross_entropy(net(X), y, reduction="sum").backward()
    return net


def largest_gap(found, wanted):
    """The largest |difference| of any gradient, against the largest of that tensor's gradients (at least 1)."""
    return max(
        (((p.cpu() - q).abs().max() / q.abs().max().clamp(min=1)).item() for p, q in zip(found, wanted, strict=True)),
        default=0.0,
    )


def gradients(modules):
    return [p.grad for module in modules for p in module.parameters()]
