"""LeNet, with batch norm or without, at several learning rates at once: what the grid of `tuning.py` is made of.

Runs that differ in their learning rate alone see the same batches. `torch.func.vmap` stacks their parameters and makes
one grouped convolution of their many; `torch.compile` joins what lies between. Without a C++ compiler, and where a test
is too short to compile, TORCHDYNAMO_DISABLE=1 runs the same program uncompiled.
"""

import itertools
import math
import time
from functools import cache

import torch
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from mgpu_lib.data import batches, endless
from mgpu_lib.models import lenet, lenet_bn, lenet_bn_params, lenet_params

MOMENTUM, EPSILON = 0.1, 1e-5  # of batch norm: PyTorch's defaults
EVALUATED = 250  # images at a time


def plain(X, params, running=None):
    """LeNet in the form of `normalized`: (logits, no statistics)."""
    return lenet(X, params), []


def normalized(X, params, running=None):
    """LeNet with batch norm after each convolution: (logits, the four statistics of this batch).

    `running` are the four statistics to evaluate with, mean and variance of each norm; None in training, which uses the
    batch's own. Nothing is changed in place, as `vmap` demands. There is no norm in the linear layers: where a batch of
    one image has many pixels after a convolution, it has a single row there, and that has no variance.
    """
    seen = []

    def normalize(H, scale, shift):
        H, statistics = batch_norm(H, scale, shift, running and running[len(seen) : len(seen) + 2])
        seen.extend(statistics)
        return H

    return lenet_bn(X, params, normalize), seen


def batch_norm(H, gamma, beta, running=None):
    """H normalized per channel, and [mean, variance] to keep: the unbiased variance, as nn.BatchNorm2d does."""
    var, mean = torch.var_mean(H, dim=(0, 2, 3), correction=0) if running is None else reversed(running)
    scale = gamma * torch.rsqrt(var + EPSILON)
    rows = H.numel() // H.shape[1]
    return H * scale[:, None, None] + (beta - mean * scale)[:, None, None], [mean, var * (rows / (rows - 1))]


NETS = {"lenet": plain, "lenet_bn": normalized}


def start(net, seed):
    """(parameters, running statistics) of `net` before the first step, as `training.train` starts LeNet."""
    params = lenet_bn_params(seed) if net == "lenet_bn" else lenet_params(seed)
    return params, [fill for scale in params[8::2] for fill in (torch.zeros_like(scale), torch.ones_like(scale))]


@cache
def stepper(net):
    """step(params, running, X, y, lr) -> (params, running, loss), for all runs of a stack at once.

    Every tensor but X and y has one row per run.
    """

    def step(params, running, X, y, lr):
        def loss(params):
            logits, seen = NETS[net](X, params)
            return F.cross_entropy(logits, y), seen

        grads, (value, seen) = grad_and_value(loss, has_aux=True)(params)
        running = [(1 - MOMENTUM) * old + MOMENTUM * new for old, new in zip(running, seen)]
        return [p - lr * grad for p, grad in zip(params, grads)], running, value

    return torch.compile(vmap(step, in_dims=(0, 0, None, None, 0)), dynamic=False)


@cache
def counter(net):
    """correct(params, running, X, y): how many images each run of a stack gets right, and how far its logits vary."""

    def correct(params, running, X, y):
        logits = NETS[net](X, params, running)[0]
        return (logits.argmax(dim=1) == y).sum(), (logits - logits[0]).abs().max()

    return torch.compile(vmap(correct, in_dims=(0, 0, None, None)), dynamic=False)


@torch.no_grad()
def accuracies(net, params, running, X, y):
    """The accuracy of each run, and whether it is dead: two lists.

    A dead run gives all images the very same logits. Its ReLUs let nothing through any more, and no gradient either.
    """
    correct, spread = zip(*(counter(net)(params, running, *part) for part in batches(X, y, EVALUATED)))
    dead = torch.stack(spread).amax(dim=0) == 0
    return [round(number / len(X), 5) for number in sum(correct).tolist()], dead.tolist()


def marks(per_epoch, epochs, steps):
    """After which steps to evaluate: {step: budgets that end there}; the last one is the end of the longer budget.

    Twice an epoch, after 2, 4, 8 … of the `steps` in which batch sizes are compared, and at the end of both budgets.
    """
    last = max(epochs * per_epoch, steps)
    halves = (math.ceil(i * per_epoch / 2) for i in itertools.count(1))
    found = {
        *itertools.takewhile(lambda step: step <= epochs * per_epoch, halves),
        *range(per_epoch, last, per_epoch),
        *(2**i for i in range(1, steps.bit_length())),
        steps,
        last,
    }
    ends = {"epochs": epochs * per_epoch, "steps": steps}
    return {step: [name for name, end in ends.items() if end == step] for step in sorted(found)}


def train_runs(net, batch_size, lrs, seed, data, validation, epochs, steps):
    """Train `net` once with each of `lrs`: a list of plain records, one per learning rate.

    The last `validation` training images are kept out and measured with. A record has lr; lists with an entry for each
    of `marks`: step, train_loss (mean over the images since the entry before) and validation_accuracy; test_accuracy
    after `epochs` epochs and after `steps` steps; seconds, its share of the processor's time for training and
    compiling. A run ends early at diverged_at_step, the first step (from 1) whose loss isn't finite, or at
    dead_at_step, the first entry at which it is dead (see `accuracies`); both are None otherwise.
    """
    X, X_validation = data.X_train.split([len(data.X_train) - validation, validation])
    y, y_validation = data.y_train.split([len(X), validation])
    due = marks(math.ceil(len(X) / batch_size), epochs, steps)
    records = [{**new_run(lr), "test_accuracy": {}, "seconds": 0.0} for lr in lrs]
    params, running = (stacked(tensors, len(lrs)) for tensors in start(net, seed))
    alive, rates = records, torch.tensor(lrs)
    shuffled = enumerate(endless(X, y, batch_size, seed), 1)
    for mark, budgets in due.items():
        begin = time.process_time()
        params, running, losses = train_until(mark, shuffled, stepper(net), params, running, rates, alive)
        seconds = (time.process_time() - begin) / len(alive)
        for record in alive:
            record["seconds"] = round(record["seconds"] + seconds, 3)
        measured, dead = accuracies(net, params, running, X_validation, y_validation)
        tests, _ = accuracies(net, params, running, data.X_test, data.y_test) if budgets else (losses, None)
        for record, loss, accuracy, is_dead, test in zip(alive, losses, measured, dead, tests):
            if record["diverged_at_step"] is None:
                note(record, mark, loss, accuracy, is_dead)
                record["test_accuracy"].update(dict.fromkeys(budgets, test))
        keep = [i for i, record in enumerate(alive) if not (record["diverged_at_step"] or record["dead_at_step"])]
        if not keep:
            break
        if len(keep) < len(alive):
            params, running = ([tensor[keep] for tensor in tensors] for tensors in (params, running))
            alive, rates = [alive[i] for i in keep], rates[keep]
    return records


def new_run(lr):
    """A run before its first step, see `train_runs`."""
    ended = {"diverged_at_step": None, "dead_at_step": None}
    return {"lr": lr, **ended, "step": [], "train_loss": [], "validation_accuracy": []}


def note(run, step, loss, accuracy, dead):
    """Add a measurement to a run."""
    run["step"].append(step)
    run["train_loss"].append(round(loss, 5))
    run["validation_accuracy"].append(accuracy)
    run["dead_at_step"] = step if dead else None


def stacked(tensors, runs):
    return [torch.stack([tensor] * runs) for tensor in tensors]


def train_until(mark, shuffled, step, params, running, rates, records):
    """Go on to step `mark`, noting who diverges: (parameters, running statistics, mean loss of each run since then)."""
    total, rows = torch.zeros(len(records), dtype=torch.double), 0
    for number, (X, y) in shuffled:
        params, running, loss = step(params, running, X, y, rates)
        total, rows = total + loss.double() * len(X), rows + len(X)
        for record, value in zip(records, loss.tolist()):
            if not math.isfinite(value) and record["diverged_at_step"] is None:
                record["diverged_at_step"] = number
        if number == mark or all(record["diverged_at_step"] for record in records):
            break
    return params, running, (total / rows).tolist()
