"""Training: one loop, which every chapter, figure and study uses, and LeNet trained with it on any number of GPUs."""

import math
import os
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from mgpu_lib.arguments import check_count, check_rate
from mgpu_lib.data import batches, endless, hold_out, load_fashion_mnist
from mgpu_lib.devices import use_gpus
from mgpu_lib.models import BatchNorm, lenet, lenet_bn, lenet_bn_params, lenet_params
from mgpu_lib.parallel import get_params, max_divergence, train_batch


class Progress(NamedTuple):
    """Where a training is after a step."""

    step: int  # from 1
    images: int  # seen so far
    loss: float  # of this step, the mean over its batch
    train_loss: float | None = None  # where a measurement is due: the mean over the images since the one before
    accuracy: float | None = None  # the same places, if `validated_steps` trains: on the held-out images, in [0, 1]
    diverged: bool = False  # the loss isn't finite, or the network is dead: the end


def run_steps(step, shuffled, due=()):
    """The loop of all trainings: call `step(X, y)` for each batch in `shuffled`, and yield a Progress after each.

    step   takes one training step, and returns the mean loss over the batch, a float
    due    the steps, counted from 1, at which somebody measures: there Progress has `train_loss`
    A loss that isn't finite ends it; the last Progress then says diverged=True.
    """
    total = rows = images = 0
    for number, (X, y) in enumerate(shuffled, 1):
        loss = step(X, y)
        total, rows, images = total + loss * len(X), rows + len(X), images + len(X)
        if not math.isfinite(loss):
            yield Progress(number, images, loss, diverged=True)
            return
        if number not in due:
            yield Progress(number, images, loss)
            continue
        yield Progress(number, images, loss, total / rows)
        total = rows = 0


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
    for name, value in {"num_gpus": num_gpus, "batch_size": batch_size, "num_epochs": num_epochs}.items():
        check_count(name, value)
    check_rate("lr", lr)
    devices = use_gpus(num_gpus) if devices is None else devices
    if len(devices) != num_gpus:
        raise ValueError(f"num_gpus is {num_gpus} but {len(devices)} devices were passed: {devices}")
    data = load_fashion_mnist() if data is None else data
    check_count("len(data.X_train)", len(data.X_train))
    device_params = [get_params(lenet_params(seed), device) for device in devices]
    step = partial(step, device_params=device_params, devices=devices, lr=lr)
    per_epoch, history = math.ceil(len(data.X_train) / batch_size), []
    last = num_epochs * per_epoch
    shuffled = islice(endless(data.X_train, data.y_train, batch_size, seed), last)
    with progress_bar(last) as bar:
        for at in run_steps(step, shuffled, due=range(per_epoch, last + 1, per_epoch)):
            bar.set_description(f"epoch {len(history) + 1}/{num_epochs}", refresh=False)
            bar.update()
            if at.train_loss is None and not at.diverged:
                continue
            history.append(history_entry(len(history) + 1, at, device_params, data, devices[0]))
            if on_epoch is not None:
                on_epoch(history)
    if history[-1]["diverged"]:
        print(f"Training diverged in epoch {len(history)}: the loss is {at.loss}. Try a learning rate below {lr}.")
    return history


def history_entry(epoch, at, device_params, data, device):
    """What `train` says of an epoch that ended with the Progress `at`; None where a number isn't finite."""
    divergence = max_divergence(device_params)
    return {
        "epoch": epoch,
        "train_loss": at.train_loss,
        "test_accuracy": evaluate(partial(lenet, params=device_params[0]), data.X_test, data.y_test, device),
        "max_divergence": divergence if math.isfinite(divergence) else None,  # JSON has no NaN
        "diverged": at.diverged,
    }


def validated_steps(data, batch_size, lr, steps, devices, batch_norm=False, seed=0):
    """Train LeNet for `steps` steps of `batch_size` images, over all `devices`, and yield a Progress after each.

    Start, shuffling, held-out images and the steps at which it is validated are those of the recorded grid
    (experiments/tuning_runs.py), so that the curve can be laid over the recorded ones. A network that is dead ends it,
    see `validate`. Raises ValueError, naming what was passed, for numbers that make no sense.
    """
    check_count("batch_size", batch_size)
    check_count("steps", steps)
    check_rate("lr", lr)
    X, y, X_validation, y_validation = hold_out(data)
    step, net = lenet_program(devices, batch_norm, seed)
    due = set(validation_steps(math.ceil(len(X) / batch_size), steps))
    for at in run_steps(partial(step, lr=lr), islice(endless(X, y, batch_size, seed), steps), due):
        if at.train_loss is not None:
            accuracy, dead = validate(net, X_validation, y_validation, devices[0])
            at = at._replace(accuracy=accuracy, diverged=dead)
        yield at
        if at.diverged:
            return


def validation_steps(per_epoch, steps):
    """After which steps to validate: 2, 4, … 128, every half epoch of `per_epoch` steps, and `steps`, the last."""
    halves = {math.ceil(i * per_epoch / 2) for i in range(1, 2 * steps // per_epoch + 1)}
    early = {2**i for i in range(1, 8)}
    return sorted(step for step in {*early, *halves, steps} if step <= steps)


def lenet_program(devices, batch_norm=False, seed=0):
    """A replica of LeNet on each of `devices`: (step(X, y, lr), which returns the mean loss; net(X), by replica 0).

    With `batch_norm` each GPU normalizes with the mean and variance of its own shard. So on several GPUs the step is
    not that of one: the statistics come from fewer images. net(X) evaluates with those of replica 0.
    """
    start, training, evaluating = lenet_params(seed), lenet, lenet
    if batch_norm:
        start, norm = lenet_bn_params(seed), BatchNorm()
        training = partial(lenet_bn, normalize=norm.by_batch)
        evaluating = partial(lenet_bn, normalize=norm.by_running_statistics)
    replicas = [get_params(start, device) for device in devices]
    step = partial(train_batch, device_params=replicas, devices=devices, net=training)
    return step, partial(evaluating, params=replicas[0])


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


@torch.no_grad()
def validate(net, X, y, device):
    """(accuracy as `evaluate` has it, whether the network is dead: it gives all images X the very same logits).

    In a dead network some layer's ReLUs let nothing through any more, and so no gradient either.
    """
    logits = torch.cat([net(X_batch.to(device)).cpu() for X_batch in X.split(1000)])
    return (logits.argmax(dim=1) == y).sum().item() / len(y), bool((logits == logits[0]).all())


def progress_bar(total):
    """A progress bar for notebook and terminal; the environment variable TQDM_DISABLE=1 hides it."""
    from tqdm.auto import tqdm

    hidden = os.environ.get("TQDM_DISABLE") == "1"  # in a notebook tqdm doesn't look
    return tqdm(total=total, unit="step", leave=False, disable=hidden)
