"""One training loop, which every chapter uses: LeNet, data-parallel, any number of GPUs."""

import math
import os
from functools import partial
from numbers import Integral, Real

import torch

from mgpu_lib.data import batches, load_fashion_mnist
from mgpu_lib.devices import use_gpus
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import get_params, max_divergence, train_batch


def train(num_gpus, batch_size, lr, num_epochs=10, data=None, devices=None, on_epoch=None, seed=0, step=train_batch):
    """Train LeNet on `num_gpus` GPUs, `batch_size` images per step over all of them; returns the history.

    The history is a list with one dict per epoch: epoch (1, 2, …), train_loss (mean over the epoch), test_accuracy (of
    replica 0), max_divergence (between the replicas) and diverged. When the loss stops being finite, training stops,
    the last entry says diverged=True, and figures that aren't finite are None. The same `seed` gives the same run.

    data       what `load_fashion_mnist` returns, and the default
    devices    the torch.devices to use, `num_gpus` of them; default: `use_gpus(num_gpus)`
    on_epoch   called after each epoch with the history so far
    step       the training step, called as `parallel.train_batch` is
    Raises ValueError, naming what was passed, for numbers that make no sense.
    """
    check_numbers(num_gpus, batch_size, lr, num_epochs)
    devices = use_gpus(num_gpus) if devices is None else devices
    if len(devices) != num_gpus:
        raise ValueError(f"num_gpus is {num_gpus} but {len(devices)} devices were passed: {devices}")
    data = load_fashion_mnist() if data is None else data
    device_params = [get_params(lenet_params(seed), device) for device in devices]
    generator = torch.Generator().manual_seed(seed)
    history = []
    with progress_bar(num_epochs * math.ceil(len(data.X_train) / batch_size)) as bar:
        for epoch in range(1, num_epochs + 1):
            bar.set_description(f"epoch {epoch}/{num_epochs}")
            shuffled = batches(data.X_train, data.y_train, batch_size, generator)
            loss = train_epoch(shuffled, partial(step, device_params=device_params, devices=devices, lr=lr), bar)
            accuracy = evaluate(partial(lenet, params=device_params[0]), data.X_test, data.y_test, devices[0])
            history.append({"epoch": epoch, "train_loss": finite(loss), "test_accuracy": accuracy,
                            "max_divergence": finite(max_divergence(device_params)), "diverged": finite(loss) is None})
            if on_epoch is not None:
                on_epoch(history)
            if history[-1]["diverged"]:
                bar.write(f"Training diverged in epoch {epoch}: the loss is {loss}. Try a learning rate below {lr}.")
                break
    return history


def train_epoch(shuffled, step, bar):
    """Take one `step(X, y)` per batch: the mean loss over all rows, or the first loss that isn't finite, at once."""
    total = rows = 0
    for X, y in shuffled:
        loss = step(X, y)
        bar.update()
        if not math.isfinite(loss):
            return loss
        total, rows = total + loss * len(X), rows + len(X)
    return total / rows


@torch.no_grad()
def evaluate(net, X, y, device, batch_size=1000):
    """The accuracy in [0, 1] of `net`, which turns images on `device` into logits, on the images X with labels y.

    X and y may lie anywhere; they are moved batch by batch. A module with dropout or batch norm must be in eval mode.
    Raises ValueError when there are no images.
    """
    if len(X) == 0:
        raise ValueError("X has 0 rows: an accuracy needs at least one image")
    correct = torch.zeros((), dtype=torch.long, device=device)
    for X_batch, y_batch in batches(X, y, batch_size):
        correct += (net(X_batch.to(device)).argmax(dim=1) == y_batch.to(device)).sum()
    return correct.item() / len(X)  # the only wait for the GPU


def finite(number):
    return number if math.isfinite(number) else None  # JSON has no NaN


def progress_bar(total):
    """A progress bar for notebook and terminal; the environment variable TQDM_DISABLE=1 hides it."""
    from tqdm.auto import tqdm
    hidden = os.environ.get("TQDM_DISABLE") == "1"  # in a notebook tqdm doesn't look
    return tqdm(total=total, unit="step", leave=False, disable=hidden)


def check_numbers(num_gpus, batch_size, lr, num_epochs):
    for name, value in (("num_gpus", num_gpus), ("batch_size", batch_size), ("num_epochs", num_epochs)):
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} is {value!r}: pass a whole number, 1 or more")
    if not isinstance(lr, Real) or not 0 < lr < math.inf:
        raise ValueError(f"lr is {lr!r}: pass a positive, finite number")
