"""Tensor parallelism in one process: a part of each layer on every device (Shoeybi et al. 2019, arXiv:1909.08053).

The convention. A list with a tensor per device holds *copies* of one whole tensor, or *parts* of it: columns, or
summands. Each of k devices computes the same loss from its copies, so the loss is there k times, and it counts once:
the gradient of each copy is that of the whole tensor. `SumGradients` and `SumOutputs` keep to this if all k losses go
backward together. To autograd, k copies are k tensors and k losses are added up, so by themselves both operators fail
torch.autograd.gradcheck; from one tensor that goes in to one that comes out, they pass.
"""

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.parallel import allreduce
from mgpu_lib.splitting import Pair, fresh
from mgpu_lib.transformer import Attention, FeedForward


def summed(data):
    """The all-reduce of `data`, one tensor per device, as a tuple of new tensors."""
    data = [t.clone() for t in data]
    allreduce(data)
    return tuple(data)


class SumGradients(torch.autograd.Function):
    """Goes before a column-parallel layer: nothing on the way forward, an all-reduce of gradients on the way back.

    Copies → copies. Each device's gradient is a summand, as its part of the layer has seen only its share of the loss.
    """

    @staticmethod
    def forward(ctx, *copies):
        return tuple(X.view_as(X) for X in copies)

    @staticmethod
    def backward(ctx, *grads):
        return summed(grads)


class SumOutputs(torch.autograd.Function):
    """Goes after a row-parallel layer: an all-reduce of outputs on the way forward, nothing on the way back.

    Summands → copies of their sum. The gradient of the sum is that of each summand, and every device has it whole.
    """

    @staticmethod
    def forward(ctx, *parts):
        return summed(parts)

    @staticmethod
    def backward(ctx, *grads):
        return grads


def together(parts, Xs, *others):
    """What the `parts` of a split block compute from the copies `Xs`: copies of the sum. One all-reduce each way.

    `others` are lists of what the parts take beside Xs and what needs no gradient, with one entry per device.
    """
    Hs = SumGradients.apply(*Xs)
    return SumOutputs.apply(*(part(H, *own) for part, H, *own in zip(parts, Hs, *others, strict=True)))


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


PLANS = {  # which layers of a block are cut, and along which dimension
    Pair: {"column": 0, "between": 0, "row": 1},
    Attention: {"query": 0, "key": 0, "value": 0, "out": 1},
    FeedForward: {"gate": 0, "up": 0, "down": 1},
}


def split_block(block, devices):
    """One part of `block` per device: its layers are cut as PLANS says, and what isn't in there is whole.

    ValueError for an Attention whose heads can't be shared out, or a layer that is too narrow.
    """
    if isinstance(block, Attention):
        check_heads(block, len(devices))
    parts = [fresh(block) for _ in devices]
    for name, dim in PLANS.get(type(block), {}).items():
        for part, share in zip(parts, split_layer(getattr(block, name), devices, dim), strict=True):
            setattr(part, name, share)
    return [part.to(device) for part, device in zip(parts, devices, strict=True)]


def check_heads(attention, num_parts):
    """ValueError unless so many devices can have equally many heads, and the keys and values that belong to them."""
    heads, kv_heads = (layer.out_features // attention.head_width for layer in (attention.query, attention.key))
    if heads % num_parts or kv_heads % num_parts:
        raise ValueError(
            f"{heads} heads with {kv_heads} key-value heads can't be split over {num_parts} devices: "
            f"both numbers must be multiples of {num_parts}"
        )


class VocabularyPart(nn.Module):
    """Some rows of an embedding, from row `first` on: tokens (...) → (..., width), zeros for tokens of other parts."""

    def __init__(self, weight, first):
        super().__init__()
        self.weight, self.first = nn.Parameter(weight), first

    def forward(self, tokens):
        rows = tokens - self.first
        others = (rows < 0) | (rows >= len(self.weight))
        found = F.embedding(rows.masked_fill(others, 0), self.weight)
        return found.masked_fill(others.unsqueeze(-1), 0)


def split_embedding(embedding, devices):
    """A VocabularyPart of `embedding` per device, as equal as can be: SumOutputs makes the whole of what they give.

    ValueError for fewer rows than devices.
    """
    if embedding.num_embeddings < len(devices):
        raise ValueError(f"an embedding of {embedding.num_embeddings} tokens can't be cut into {len(devices)} parts")
    parts, first = [], 0
    for rows, device in zip(embedding.weight.detach().tensor_split(len(devices)), devices):
        parts.append(VocabularyPart(rows.to(device, copy=True), first))
        first += len(rows)
    return parts


def in_layer(net, X, y, devices):
    """Forward and backward of one batch, with a part of every Pair of `net` on each device. `net` stays as it is.

    Returns each block's parts, with the gradients of the summed loss.
    """
    blocks = [split_block(block, devices) for block in net]
    Xs = [X.to(device) for device in devices]
    for parts in blocks:
        if isinstance(parts[0], Pair):
            Hs = together([part.inner for part in parts], Xs)
            Xs = [part.finish(H, X) for part, H, X in zip(parts, Hs, Xs, strict=True)]
        else:
            Xs = [part(X) for part, X in zip(parts, Xs, strict=True)]
    losses = [F.cross_entropy(H, y.to(H.device), reduction="sum") for H in Xs]
    torch.autograd.backward(losses)  # all together: the loss counts once
    return blocks
