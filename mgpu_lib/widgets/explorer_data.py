"""The recorded grid of batch sizes and learning rates as the explorers show it: short enough for a page."""

from functools import cache
from typing import NamedTuple

import torch

from mgpu_lib.models import lenet_module, resnet8
from mgpu_lib.prediction import predict
from mgpu_lib.recorded import length, numbers
from mgpu_lib.widgets.base import TICK

MODELLED, COUNTS = "A100-80", (1, 2, 4, 8)  # what modelled times are for
BATCH_NORM = " with batch norm"
NAMES = {"lenet": "LeNet", "lenet_bn": "LeNet" + BATCH_NORM, "resnet8": "ResNet-8" + BATCH_NORM}
NEEDED = ("net", "batch_size", "seed", "lr", "step", "train_loss", "validation_accuracy")
ALL = 55_000  # images that the whole grid is trained on
TOP = 9999  # thousandths: a loss of 10 is as far as the picture goes


def explorer_data(*grids, nets=tuple(NAMES), budgets=("epochs", "steps"), strategy="ddp"):
    """What the explorers need of grids as they are recorded: {"gpu", "counts", "nets"}.

    `nets` maps the name of a network to what `net_data` returns. ValueError where a part of a grid is missing.
    """
    try:
        found = {
            title_of(net, grid): net_data(grid, net, [b for b in budgets if b in grid["recipe"]], strategy)
            for grid in grids
            for net in nets
            if any(run["net"] == net for run in grid["runs"])
        }
    except (KeyError, TypeError, AttributeError) as error:
        wanted = "experiments.tuning writes"
        raise ValueError(f"a grid isn't what {wanted} ({type(error).__name__}: {error})") from error
    if not found:
        raise ValueError(f"no grid has a run of {' or '.join(nets)}: record some with `python -m experiments.tuning`")
    return {"gpu": MODELLED, "counts": list(COUNTS), "nets": found}


def title_of(net, grid):
    """A network's name; it says so where only a part of the images was trained on."""
    images = grid["trained_on"]
    return NAMES[net] if images >= ALL else NAMES[net].replace(BATCH_NORM, f" on {images:,} images{BATCH_NORM}")


def net_data(grid, net, budgets, strategy):
    """One network's runs, in whole numbers.

    images       trained on          budgets      {"epochs": 4, "steps": 215}
    batch_sizes  ascending           rates        ascending, for each batch size
    marks        for each batch size: the steps after which there was a measurement
    runs         for each batch size, rate and seed "accuracies|losses|step at which it diverged": 0.01 % of the
                 validation images, thousandths, and "" for a run that didn't diverge
    times        modelled, for each batch size: ticks of 10 ns per step and per epoch, on each number of GPUs
    """
    runs = [run for run in grid["runs"] if run["net"] == net]
    if any(missing := [name for name in NEEDED if name not in run] for run in runs):
        raise KeyError(missing[0])
    images, recipe = grid["trained_on"], grid["recipe"]
    sizes = sorted({run["batch_size"] for run in runs})
    lengths = {b: max(length(images, recipe, b, budget) for budget in budgets) for b in sizes}
    marks = {b: max((numbers(run["step"]) for run in runs if run["batch_size"] == b), key=len) for b in sizes}
    cells = {}
    for run in sorted(runs, key=lambda run: (run["batch_size"], run["lr"], run["seed"])):
        cells.setdefault((run["batch_size"], run["lr"]), []).append(packed(run, lengths[run["batch_size"]]))
    rates = [[lr for size, lr in cells if size == b] for b in sizes]
    return {
        "images": images,
        "budgets": {budget: recipe[budget] for budget in budgets},
        "batch_sizes": sizes,
        "rates": rates,
        "marks": [[int(mark) for mark in marks[b] if mark <= lengths[b]] for b in sizes],
        "runs": [[cells[b, lr] for lr in row] for b, row in zip(sizes, rates)],
        "times": [modelled(net, b, images, strategy) for b in sizes],
    }


def packed(run, last):
    """A run as text, without what comes after step `last`."""
    marks = [mark for mark in numbers(run["step"]) if mark <= last]
    accuracies = " ".join(str(round(10_000 * a)) for a in numbers(run["validation_accuracy"])[: len(marks)])
    losses = " ".join(str(min(round(1000 * a), TOP)) for a in numbers(run["train_loss"])[: len(marks)])
    ended = run.get("diverged_at_step") or run.get("dead_at_step")
    return f"{accuracies}|{losses}|{ended if ended and ended <= last else ''}"


def modelled(net, batch_size, images, strategy):
    """[ticks per step, ticks per epoch], each for every number of GPUs. More GPUs than images: the others are idle."""
    steps, rest = divmod(images, batch_size)

    def ticks(size, k):
        return round(step_seconds(net, size, min(k, size), strategy) / TICK) if size else 0

    full = [ticks(batch_size, k) for k in COUNTS]
    return [full, [steps * step + ticks(rest, k) for step, k in zip(full, COUNTS)]]


@cache
def step_seconds(net, batch_size, k, strategy):
    example = torch.empty(batch_size, 1, 28, 28, device="meta")
    return predict(network(net), example, MODELLED, k, strategy, precision="default", host=1 / 2).seconds


@cache
def network(net):
    """The network as a module without values."""
    with torch.device("meta"):
        return resnet8() if net == "resnet8" else lenet_module(batch_norm=net == "lenet_bn")


class Cell(NamedTuple):
    """One batch size and learning rate in one budget, over its seeds."""

    end: int  # steps
    finals: list  # accuracies at the end, in 0.01 %, of the seeds that didn't diverge, ascending
    diverged: list  # after how many steps each of the others had

    @property
    def seeds(self):
        return len(self.finals) + len(self.diverged)


def cell(net, batch_size, lr, budget):
    """The Cell of a network as `net_data` returns it. ValueError where nothing was recorded."""
    row = net["batch_sizes"].index(batch_size)
    end = length(net["images"], net["budgets"], batch_size, budget)
    finals, diverged = [], []
    for run in net["runs"][row][net["rates"][row].index(lr)]:
        accuracies, _, ended = run.split("|")
        if ended and int(ended) <= end:
            diverged.append(int(ended))
        else:
            finals.append(int(accuracies.split()[net["marks"][row].index(end)]))
    return Cell(end, sorted(finals), diverged)


def best(net, budget, batch_size=None):
    """(batch size, learning rate) of the highest mean accuracy, of all batch sizes or of one; None if all diverged.

    A cell of which a seed diverged is out.
    """
    found = [(b, lr) for b, rates in zip(net["batch_sizes"], net["rates"]) for lr in rates if batch_size in (None, b)]
    sound = {at: there for at in found if not (there := cell(net, *at, budget)).diverged}
    return max(sound, key=lambda at: sum(sound[at].finals) / sound[at].seeds) if sound else None
