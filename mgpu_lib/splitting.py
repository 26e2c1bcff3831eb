"""Pipeline parallelism in one process: a run of layers on each device, and the batch in micro-batches."""

import copy
from itertools import islice

from torch import nn
from torch.nn import functional as F


class Pair(nn.Module):
    """Two layers that are split together: `column` by its outputs, `row` by its inputs; `between` works per channel.

    `after` and the shortcut, if there is one, need the whole result of `row`.
    """

    def __init__(self, column, between, row, after, shortcut=None):
        super().__init__()
        self.column, self.between, self.row, self.after, self.shortcut = column, between, row, after, shortcut

    def forward(self, X):
        return self.finish(self.inner(X), X)

    def inner(self, X):
        return self.row(self.between(self.column(X)))

    def finish(self, H, X):
        H = self.after(H)
        return H if self.shortcut is None else F.relu(H + self.shortcut(X))


def fresh(module):
    """A copy of `module` without gradients, to which those of the next step would be added."""
    module = copy.deepcopy(module)
    module.zero_grad()
    return module


def layers(net):
    """The pieces that `net`, an nn.Sequential, can be cut into. A Pair comes apart unless it has a shortcut."""
    pieces = []
    for block in net:
        if isinstance(block, Pair) and block.shortcut is None:
            pieces += [nn.Sequential(block.column, block.between), nn.Sequential(block.row, block.after)]
        else:
            pieces += [block]
    return pieces


def stages(net, num_stages):
    """`num_stages` runs of neighboring layers, numbers as equal as can be. ValueError if there are too few layers."""
    pieces = layers(net)
    if not 1 <= num_stages <= len(pieces):
        raise ValueError(f"{len(pieces)} layers can't be cut into {num_stages} stages: 1 to {len(pieces)} will do")
    (size, longer), rest = divmod(len(pieces), num_stages), iter(pieces)
    return [nn.Sequential(*islice(rest, size + (i < longer))) for i in range(num_stages)]


def layer_wise(net, X, y, devices, micro_batches=1):
    """Forward and backward of one batch, with a stage of `net` on each device. `net` stays as it is.

    Returns the stages, with the gradients of the summed loss. With several micro-batches a device can work on one while
    the next device works on the one before (GPipe, Huang et al. 2019, arXiv:1811.06965).
    """
    parts = [stage.to(device) for stage, device in zip(stages(fresh(net), len(devices)), devices, strict=True)]
    losses = []
    for H, labels in zip(X.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True):
        for stage, device in zip(parts, devices, strict=True):
            H = stage(H.to(device))
        losses.append(F.cross_entropy(H, labels.to(devices[-1]), reduction="sum"))
    for loss in losses:  # only now: the forward passes of all micro-batches come first
        loss.backward()
    return parts
