"""One run with a batch size and a learning rate, step by step: what the Train button of the explorers runs.

LeNet, or LeNet with batch norm, on any number of GPUs. Start, shuffling, held-out images and moments of measuring are
those of the recorded grid (experiments/tuning_runs.py), so that the new curve lies over the recorded ones.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from mgpu_lib.data import batches, data_folder, fetch_if_damaged, load_digits, read_fashion_mnist
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import allreduce, get_params, sgd, split_batch, train_batch
from mgpu_lib.tuning import check_count, check_rate

POWERS = [2**i for i in range(1, 8)]  # early steps after which there is a measurement: 2, 4, … 128
CHANNELS = (20, 50)  # of LeNet's two convolutions, whose results are normalized


class Progress(NamedTuple):
    """Where a trial is after a step. The last three change only where it was measured, see `marks`."""

    step: int                   # from 1
    images: int                 # seen so far
    train_loss: float | None    # mean over the images since the last measurement
    accuracy: float | None      # on the held-out images, in [0, 1]
    diverged: bool              # the loss isn't finite, or all held-out images get the very same logits: the end


def whole_data(check=lambda: None):
    """All of Fashion-MNIST, whatever MGPU_FULL says; or the digits, where `load_fashion_mnist` would take those.

    `check` is called again and again during a download; what it raises ends that.
    """
    folder = data_folder()
    if str(folder) == "digits":
        return load_digits()
    try:
        fetch_if_damaged(folder, check)
        return read_fashion_mnist(folder, full=True)
    except OSError:
        return load_digits()


def hold_out(data):
    """(X, y, X_validation, y_validation): the last twelfth of the training images validates, 5,000 of 60,000."""
    kept = len(data.X_train) - len(data.X_train) // 12
    return data.X_train[:kept], data.y_train[:kept], data.X_train[kept:], data.y_train[kept:]


def marks(per_epoch, steps):
    """After which steps to measure: 2, 4, … 128, every half epoch of `per_epoch` steps, and `steps`, the last."""
    halves = {math.ceil(i * per_epoch / 2) for i in range(1, 2 * steps // per_epoch + 1)}
    return sorted(mark for mark in {*POWERS, *halves, steps} if mark <= steps)


def trial(data, batch_size, lr, steps, devices, batch_norm=False, seed=0):
    """Train for `steps` steps of `batch_size` images, over all `devices`, and yield a Progress after each.

    Raises ValueError, naming what was passed, for numbers that make no sense.
    """
    check_count("steps", check_count("batch_size", batch_size) and steps)
    check_rate("lr", lr)
    X, y, X_validation, y_validation = hold_out(data)
    step, logits = program(batch_norm, devices, seed)
    due, generator = set(marks(math.ceil(len(X) / batch_size), steps)), torch.Generator().manual_seed(seed)
    shuffled = itertools.chain.from_iterable(batches(X, y, batch_size, generator) for _ in itertools.count())
    total = since = images = 0
    for number, (X_batch, y_batch) in enumerate(itertools.islice(shuffled, steps), 1):
        loss, rows = step(X_batch, y_batch, lr=lr), len(X_batch)
        total, since, images = total + loss * rows, since + rows, images + rows
        if not math.isfinite(loss):
            yield Progress(number, images, None, None, True)
            return
        if number not in due:
            yield Progress(number, images, None, None, False)
            continue
        accuracy, dead = measure(logits, X_validation, y_validation, devices[0])
        yield Progress(number, images, total / since, accuracy, dead)
        if dead:
            return
        total = since = 0


def program(batch_norm, devices, seed):
    """(step(X, y, lr), which returns the mean loss; logits(X), by replica 0), with a replica on each device."""
    if not batch_norm:
        device_params = [get_params(lenet_params(seed), device) for device in devices]
        return (partial(train_batch, device_params=device_params, devices=devices),
                partial(lenet, params=device_params[0]))
    params, statistics = lenet_bn_params(seed)
    device_params = [get_params(params, device) for device in devices]
    device_statistics = [[s.to(device, copy=True) for s in statistics] for device in devices]
    step = partial(train_batch_bn, device_params=device_params, device_statistics=device_statistics, devices=devices)
    return step, partial(lenet_bn, params=device_params[0], statistics=device_statistics[0], training=False)


@torch.no_grad()
def measure(logits, X, y, device):
    """(accuracy in [0, 1], whether all images X get the very same logits: the network is dead)."""
    found = torch.cat([logits(part.to(device)).cpu() for part in X.split(1000)])
    return (found.argmax(dim=1) == y).sum().item() / len(y), bool((found == found[0]).all())


def lenet_bn_params(seed=0):
    """(parameters, statistics) of LeNet with batch norm: LeNet's eight, then scale and shift of each norm; and the
    mean and variance of each norm, which evaluation uses."""
    norms = [fill(channels) for channels in CHANNELS for fill in (torch.ones, torch.zeros)]
    return lenet_params(seed) + norms, [fill(channels) for channels in CHANNELS for fill in (torch.zeros, torch.ones)]


def lenet_bn(X, params, statistics, training):
    """Logits (N, 10) of the images X (N, 1, 28, 28), N at least 1: LeNet with batch norm after each convolution.

    In training the batch's own mean and variance normalize, and `statistics` follow them, in place; else `statistics`
    normalize. Source: Ioffe & Szegedy 2015 (arXiv:1502.03167); momentum 0.1 and epsilon 1e-5 as in nn.BatchNorm2d.
    """
    W1, b1, W2, b2, W3, b3, W4, b4, *norms = params
    H = F.batch_norm(F.conv2d(X, W1, b1), *statistics[:2], *norms[:2], training=training)
    H = F.avg_pool2d(F.relu(H), 2)
    H = F.batch_norm(F.conv2d(H, W2, b2), *statistics[2:], *norms[2:], training=training)
    H = F.avg_pool2d(F.relu(H), 2)
    return F.relu(H.flatten(1) @ W3 + b3) @ W4 + b4


def train_batch_bn(X, y, device_params, device_statistics, devices, lr):
    """`parallel.train_batch` for LeNet with batch norm: the mean loss, a float.

    Each GPU normalizes with the mean and variance of its own shard, as nn.DataParallel's replicas do. So on several
    GPUs the step is not that of one: the statistics come from fewer images. A GPU without images only updates.
    """
    X_shards, y_shards = split_batch(X, y, devices)
    losses = [F.cross_entropy(lenet_bn(X_shard, params, statistics, training=True), y_shard, reduction="sum")
              for X_shard, y_shard, params, statistics in zip(X_shards, y_shards, device_params, device_statistics)
              if len(y_shard)]
    for loss in losses:
        loss.backward()
    for params in device_params:
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
    for params in device_params:
        sgd(params, lr, batch_size=len(X))
    return sum(loss.item() for loss in losses) / len(X)
