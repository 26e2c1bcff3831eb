"""Data parallelism from scratch: one replica of LeNet per GPU, one shard of the batch each, one sum of gradients."""

import torch
from torch.nn import functional as F

from mgpu_lib.models import lenet


def get_params(params, device):
    """A replica: a copy of every tensor in `params` on `device`, each a leaf that collects its own gradient.

    Nothing is shared with `params`, also when they lie on `device` already.
    """
    return [p.detach().to(device, copy=True).requires_grad_() for p in params]


@torch.no_grad()
def allreduce(data):
    """Replace every tensor in `data` (one per GPU, all of one shape) by the sum of all, in place."""
    for i in range(1, len(data)):
        data[0].add_(data[i].to(data[0].device))
    for i in range(1, len(data)):
        data[i].copy_(data[0])  # into the tensor: `data[i] = ...` would change this list, not the GPU's tensor


def split_batch(X, y, devices):
    """Cut a batch into one shard per device and move each shard there: (X_shards, y_shards), two lists.

    Shard sizes differ by at most one row; with fewer rows than devices the last shards are empty.
    Raises ValueError when X and y differ in length, when the batch is empty, or when there are no devices.

    >>> X_shards, y_shards = split_batch(torch.zeros(5, 2), torch.arange(5), ["cpu", "cpu"])
    >>> y_shards
    [tensor([0, 1, 2]), tensor([3, 4])]
    """
    if len(X) != len(y):
        raise ValueError(f"X has {len(X)} rows and y has {len(y)}: each row needs one label")
    if len(X) == 0 or len(devices) == 0:
        raise ValueError(f"can't split {len(X)} rows between {len(devices)} devices: pass at least one of each")
    X_shards = [shard.to(device) for shard, device in zip(X.tensor_split(len(devices)), devices)]
    y_shards = [shard.to(device) for shard, device in zip(y.tensor_split(len(devices)), devices)]
    return X_shards, y_shards


@torch.no_grad()
def sgd(params, lr, batch_size):
    """One step of gradient descent on one GPU, in place. Gradients are sums over `batch_size` rows, and are zeroed."""
    for p in params:
        p -= lr * p.grad / batch_size
        p.grad.zero_()  # or the next backward would add to this step's gradient


def train_batch(X, y, device_params, devices, lr, net=lenet, reduce=allreduce, update=sgd):
    """One training step on all devices, with one replica in `device_params` per device: the mean loss, a float.

    The step equals that of one device on the whole batch. X (N, …) and y (N,) lie anywhere, their shards are moved.

    net     turns a shard and a replica into logits, net(X_shard, params): (rows, classes)
    reduce  sums one gradient over all devices, as `allreduce` does: in place, given a list with one tensor per device
    update  one replica's step from summed gradients, as `sgd` does; it zeroes them
    Raises ValueError as `split_batch` does, and where replicas and devices differ in number.
    """
    if len(device_params) != len(devices):
        raise ValueError(f"{len(device_params)} replicas for {len(devices)} devices: make one per device (get_params)")
    X_shards, y_shards = split_batch(X, y, devices)
    # Summed losses: shards may differ in size, and a sum of sums is the sum over the whole batch.
    losses = [
        F.cross_entropy(net(X_shard, params), y_shard, reduction="sum")
        for X_shard, y_shard, params in zip(X_shards, y_shards, device_params)
    ]
    for loss in losses:  # only now: every GPU has been given its forward pass and works while we go on
        loss.backward()
    for i in range(len(device_params[0])):
        reduce([params[i].grad for params in device_params])
    for params in device_params:
        update(params, lr, batch_size=len(X))
    return sum(loss.item() for loss in losses) / len(X)  # .item() waits for its GPU, so it comes last


@torch.no_grad()
def max_divergence(device_params):
    """How far the replicas have drifted apart: the largest |difference| of any number from replica 0's, a float.

    0.0 means that all are equal; NaN in any replica gives NaN.
    """
    gaps = [
        (p.cpu() - q.cpu()).abs().max()
        for params in device_params
        for p, q in zip(device_params[0], params, strict=True)
    ]
    return torch.stack(gaps).max().item()
