"""One network on several GPUs: some layers on each GPU, with micro-batches, or a part of each layer on every GPU."""

import copy
from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.parallel import allreduce


class Pair(nn.Module):
    """Two layers that are split together: `column` by its outputs, `row` by its inputs; `between` works per channel.

    `after` and the shortcut, if there is one, need the whole result of `row`.
    """

    def __init__(self, column, between, row, after, shortcut=None):
        super().__init__()
        self.column, self.between, self.row, self.after, self.shortcut = column, between, row, after, shortcut

    def forward(self, X):
        return self.finish(self.row(self.between(self.column(X))), X)

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


def summed(data):
    """The all-reduce of `data`, one tensor per device, as a tuple of new tensors."""
    data = [t.clone() for t in data]
    allreduce(data)
    return tuple(data)


class SumGradients(torch.autograd.Function):
    """Goes before a column-parallel layer: nothing on the way forward, an all-reduce of gradients on the way back."""

    @staticmethod
    def forward(ctx, *copies):
        return tuple(X.view_as(X) for X in copies)

    @staticmethod
    def backward(ctx, *grads):
        return summed(grads)


class SumOutputs(torch.autograd.Function):
    """Goes after a row-parallel layer: an all-reduce of outputs on the way forward, nothing on the way back."""

    @staticmethod
    def forward(ctx, *parts):
        return summed(parts)

    @staticmethod
    def backward(ctx, *grads):
        return grads


def split_layer(layer, devices, dim):
    """One part of `layer` per device. dim=0 cuts its outputs (column-parallel), dim=1 its inputs (row-parallel).

    With dim=1 each part computes a summand, and the first one keeps the bias. ValueError if the layer is too narrow.
    """
    parts = []
    for i, device in enumerate(devices):
        part = fresh(layer)
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if tensor.dim() > dim:
                if tensor.shape[dim] < len(devices):
                    raise ValueError(f"can't cut {tensor.shape[dim]} channels ({name}) into {len(devices)} parts")
                tensor.data = tensor.data.tensor_split(len(devices), dim)[i]
        if dim == 1 and i > 0:
            part.bias = None  # or the sum would hold it once per device
        parts.append(part.to(device))
    return parts


def split_block(block, devices):
    """One part of `block` per device: of a Pair a share of its two layers, of anything else a whole copy."""
    parts = [fresh(block) for _ in devices]
    if isinstance(block, Pair):
        for name, dim in (("column", 0), ("between", 0), ("row", 1)):
            for part, share in zip(parts, split_layer(getattr(block, name), devices, dim), strict=True):
                setattr(part, name, share)
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]


def in_layer(net, X, y, devices):
    """Forward and backward of one batch, with a share of every Pair of `net` on each device. `net` stays as it is.

    Returns each block's parts, with the gradients of the summed loss (Megatron-LM, Shoeybi et al., arXiv:1909.08053).
    """
    blocks = [split_block(block, devices) for block in net]
    Xs = [X.to(device) for device in devices]
    for parts in blocks:
        if isinstance(parts[0], Pair):
            Hs = SumGradients.apply(*Xs)
            Hs = SumOutputs.apply(*(p.row(p.between(p.column(H))) for p, H in zip(parts, Hs, strict=True)))
            Xs = [p.finish(H, X) for p, H, X in zip(parts, Hs, Xs, strict=True)]
        else:
            Xs = [part(X) for part, X in zip(parts, Xs, strict=True)]
    torch.autograd.backward([F.cross_entropy(H, y.to(H.device), reduction="sum") for H in Xs])
    return blocks
