"""The recorded grid of batch sizes and learning rates as the explorers show it: short enough for a page, and in words.

`experiments/tuning.py` records the grid. What it has finished so far is enough: what is missing stays empty.
"""

import json
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from mgpu_lib.models import resnet18
from mgpu_lib.prediction import predict

from .base import HERE

RESULTS = HERE.parent.parent / "experiments" / "results"
GPU, COUNTS = "V100", (1, 2, 4, 8)  # what modelled times are for
BATCH_NORM = " with batch norm"
NAMES = {"lenet": "LeNet", "lenet_bn": "LeNet" + BATCH_NORM, "resnet18": "ResNet-18" + BATCH_NORM}
NEEDED = ("net", "batch_size", "seed", "lr", "step", "train_loss", "validation_accuracy")
ALL = 55_000  # images that the whole grid is trained on
TICK = 1e-8  # seconds: 10 ns, the unit of time in the page
TOP = 9999  # thousandths: a loss of 10 is as far as the picture goes


def read_grid():
    """The recorded grid, or the parts of it that are finished. FileNotFoundError without any."""
    whole, parts = RESULTS / "tuning.json", sorted((RESULTS / "tuning.unfinished").glob("*-*-*-*.json"))
    if whole.exists():
        return json.loads(whole.read_text(encoding="utf-8"))
    if not parts:
        raise FileNotFoundError(f"{whole.name} is missing: record it with `python -m experiments.tuning`")
    return join({path.stem: json.loads(path.read_text(encoding="utf-8")) for path in parts})


def read_grids():
    """All that is recorded: the grid, and the small one of ResNet-18 where it is there, or what is finished of it."""
    small = [path for path in (RESULTS / "resnet_grid.json", RESULTS / "resnet_grid.unfinished.json") if path.exists()]
    return [read_grid(), *(resnet_runs(json.loads(path.read_text(encoding="utf-8"))) for path in small[:1])]


def resnet_runs(stored):
    """The small grid of ResNet-18, as experiments/resnet_grid.py writes it, in the form of the grid."""
    runs = []
    for name, run in stored["runs"].items():
        batch_size, lr, seed = name.split("/")
        per_epoch = math.ceil(run["images"] / int(batch_size))
        marks = [per_epoch * (epoch + 1) for epoch in range(len(run["validation_accuracy"]))]
        runs.append(
            {**run, "net": "resnet18", "batch_size": int(batch_size), "lr": float(lr), "seed": int(seed), "step": marks}
        )
    return {"recipe": {"epochs": stored["recipe"]["epochs"]}, "trained_on": runs[0]["images"], "runs": runs}


def join(parts):
    """Finished parts {"NET-BATCH-SEED-RATE": what its file holds} in the form of the whole grid. ValueError if they
    differ.

    Parts of different recipes are no grid.
    """
    recipes = {json.dumps(part["recipe"], sort_keys=True) for part in parts.values()}
    if len(recipes) != 1:
        raise ValueError(
            f"{len(parts)} parts have {len(recipes)} recipes: run `python -m experiments.tuning`, which "
            "records anew what is out of date"
        )
    recipe, runs = json.loads(recipes.pop()), []
    for name, part in parts.items():
        net, batch_size, seed, _ = name.split("-")
        runs += [{"net": net, "batch_size": int(batch_size), "seed": int(seed), **run} for run in part["runs"]]
    return {"recipe": recipe, "trained_on": 60_000 - recipe["validation"], "runs": runs}


def explorer_data(*grids, nets=tuple(NAMES), budgets=("epochs", "steps"), strategy="ddp"):
    """What the explorers need of grids as `read_grid` returns them: {"gpu", "counts", "nets"}.

    `nets` maps the name of a network to what `net_data` returns. ValueError where a part of a grid is missing.
    """
    try:
        found = {
            name_of(net, grid): net_data(grid, net, [b for b in budgets if b in grid["recipe"]], strategy)
            for grid in grids
            for net in nets
            if any(run["net"] == net for run in grid["runs"])
        }
    except (KeyError, TypeError, AttributeError) as error:
        wanted = "experiments.tuning writes"
        raise ValueError(f"a grid isn't what {wanted} ({type(error).__name__}: {error})") from error
    if not found:
        raise ValueError(f"no grid has a run of {' or '.join(nets)}: record some with `python -m experiments.tuning`")
    return {"gpu": GPU, "counts": list(COUNTS), "nets": found}


def name_of(net, grid):
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


def length(images, budgets, batch_size, budget):
    """How many steps a run takes in a budget, "epochs" or "steps"."""
    return budgets["steps"] if budget == "steps" else budgets["epochs"] * math.ceil(images / batch_size)


def numbers(curve):
    """A curve of the whole grid, written as text, or of a part, which is a list."""
    return [float(word) for word in curve.split()] if isinstance(curve, str) else curve


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
    return predict(network(net), example, GPU, k, strategy).seconds


@cache
def network(net):
    """The network as a module without values."""
    with torch.device("meta"):
        if net == "resnet18":
            return resnet18()
        norms = [nn.BatchNorm2d(20), nn.BatchNorm2d(50)] if net == "lenet_bn" else [nn.Identity(), nn.Identity()]
        return nn.Sequential(
            nn.Conv2d(1, 20, 3),
            norms[0],
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(20, 50, 5),
            norms[1],
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


class Cell(NamedTuple):
    """One batch size and learning rate in one budget, over its seeds."""

    end: int  # steps
    finals: list  # accuracies at the end, in 0.01 %, of the seeds that didn't diverge, ascending
    diverged: list  # after how many steps each of the others had

    @property
    def seeds(self):
        return len(self.finals) + len(self.diverged)

    def rounded(self, digit):
        """The mean accuracy in whole units of `digit` times 0.01 %, halves upwards; as cells.js says it."""
        n = len(self.finals)
        return (2 * sum(self.finals) + digit * n) // (2 * digit * n)


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
