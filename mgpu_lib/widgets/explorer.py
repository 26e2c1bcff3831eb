"""The explorers of batch size and learning rate: a map of recorded runs, their curves, and a button that trains."""

import math

import traitlets

from .base import CSS, HERE, InteractiveFigure, module
from .explorer_pictures import curves, heat_map
from .recorded import BATCH_NORM, best, cell, explorer_data, read_grid, read_grids
from .timeline import duration
from .train import TrainButton


class Explorer(TrainButton, InteractiveFigure):
    """What the two explorers share: recorded runs for a batch size and a learning rate, and training one more.

    `num_gpus` changes the modelled time and what Train runs on; `batch_size` is that of all GPUs together. Where a
    network or a batch size has no run with the chosen `lr`, `lr` becomes the nearest there is. Raises
    FileNotFoundError where nothing is recorded, ValueError when a part of it is missing, and TraitError for values
    that it doesn't have.
    """

    _esm = module("time.js", "cells.js", "heatmap.js", "curves.js", "trainbutton.js", "explorer.js")
    _css = CSS + (HERE / "explorer.css").read_text(encoding="utf-8")
    controls = ("network", "batch_norm", "budget", "num_gpus", "batch_size", "lr")
    network = traitlets.Unicode("LeNet").tag(sync=True)
    batch_norm = traitlets.Bool(False).tag(sync=True)
    budget = traitlets.Unicode("epochs").tag(sync=True)
    num_gpus = traitlets.Int(1).tag(sync=True)
    batch_size = traitlets.Int(256).tag(sync=True)
    lr = traitlets.Float().tag(sync=True)

    def __init__(self, data, **values):
        nets = data["nets"]
        network = values.setdefault("network", next(iter(nets)).removesuffix(BATCH_NORM))
        names = [network, network + BATCH_NORM]
        wanted = names[::-1] if values.get("batch_norm") else names
        net = next((nets[name] for name in wanted if name in nets), next(iter(nets.values())))
        sizes = net["batch_sizes"]
        batch_size = values.setdefault("batch_size", 256 if 256 in sizes else sizes[len(sizes) // 2])
        if batch_size in sizes and "lr" not in values:
            budget = values.get("budget", "epochs")
            at = best(net, budget, batch_size) if budget in net["budgets"] else None
            values["lr"] = at[1] if at else net["rates"][sizes.index(batch_size)][0]
        super().__init__(data=data, **values)

    def known(self, name):
        """The values that the trait `name` may have now."""
        net, nets = self.net(), self.data["nets"]
        return {
            "network": [*dict.fromkeys(key.removesuffix(BATCH_NORM) for key in nets)],
            "budget": list(net["budgets"]),
            "num_gpus": self.data["counts"],
            "batch_size": net["batch_sizes"],
            "lr": self.rates(),
        }[name]

    @traitlets.validate("network", "budget", "num_gpus", "batch_size", "lr")
    def _known(self, proposal):
        name, value = proposal["trait"].name, proposal["value"]
        known = self.known(name)
        if value not in known:
            where = f" at batch size {self.batch_size}" if name == "lr" else ""
            raise traitlets.TraitError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}{where}")
        return value

    @traitlets.observe("network", "batch_norm", "batch_size")
    def _nearest(self, change):
        sizes = self.net()["batch_sizes"]
        if self.batch_size not in sizes:
            self.batch_size = nearest(self.batch_size, sizes)
        if self.budget not in self.net()["budgets"]:
            self.budget = "epochs"
        if self.lr not in self.rates():
            self.lr = nearest(self.lr, self.rates())

    def net_name(self):
        """The chosen network among those that were recorded: without or with batch norm, where there is one only."""
        nets, names = self.data["nets"], [self.network, self.network + BATCH_NORM]
        wanted = names[self.batch_norm]
        return wanted if wanted in nets else next((name for name in names if name in nets), next(iter(nets)))

    def net(self):
        return self.data["nets"][self.net_name()]

    def rates(self):
        net = self.net()
        return net["rates"][net["batch_sizes"].index(self.batch_size)] if self.batch_size in net["batch_sizes"] else []

    def cell(self):
        return cell(self.net(), self.batch_size, self.lr, self.budget)

    def ticks(self, batch_size):
        """Ticks that a run of this batch size takes, modelled."""
        net = self.net()
        step, epoch = (
            row[self.data["counts"].index(self.num_gpus)] for row in net["times"][net["batch_sizes"].index(batch_size)]
        )
        return net["budgets"][self.budget] * (epoch if self.budget == "epochs" else step)

    def sentence(self):
        where = f"{self.net_name()} at batch {self.batch_size}, learning rate {self.lr:g}: "
        return where + self.result() + self.comparison() + self.time()

    def result(self):
        """How far the runs of this cell got."""
        there = self.cell()
        finals, diverged = there.finals, there.diverged
        within = f"within {many(max(diverged), 'step')}" if diverged else ""
        if not finals:
            return f"diverged {within} ({f'all {there.seeds} seeds' if there.seeds > 1 else 'one seed'})."
        span = f"{percent(finals[0])} to {percent(finals[-1])} over {len(finals)} seeds"
        guessed = " (no better than guessing)" if finals[-1] < 1200 else ""
        words = f"accuracy {percent(there.rounded(10), 10)}{guessed} after {self.amount(there.end)}, "
        words += f"{span if len(finals) > 1 else 'one seed'}."
        return words + (f" {len(diverged)} of {there.seeds} seeds diverged, {within}." if diverged else "")

    def amount(self, end):
        """The budget in words."""
        if self.budget == "epochs":
            return f"{many(self.net()['budgets']['epochs'], 'epoch')} ({many(end, 'step')})"
        return f"{many(end, 'step')} ({end * self.batch_size:,} images)"

    def comparison(self):
        """The cell against the best one; "" for explorers without a map."""
        return ""

    def time(self):
        net, k = self.net(), self.num_gpus
        epoch = net["times"][net["batch_sizes"].index(self.batch_size)][1][self.data["counts"].index(k)]
        where = f"one {self.data['gpu']}" if k == 1 else f"{k} {self.data['gpu']}s"
        if k > self.batch_size:
            where += f", {k - self.batch_size} of them without an image"
        elif k > 1:
            where += f" with {many(self.batch_size // k, 'image')} each"
        return f" An epoch takes {duration(epoch)} on {where} (modelled)."


def nearest(value, known):
    """The nearest of `known` by ratio: rates and batch sizes act by it."""
    return min(known, key=lambda other: abs(math.log(other / value))) if value > 0 else known[0]


def percent(accuracy, unit=1):
    """An accuracy in `unit` times 0.01 % as percent with one decimal, halves upwards."""
    tenths = (2 * accuracy * unit + 10) // 20
    return f"{tenths // 10}.{tenths % 10}%"


def many(n, noun):
    return f"{n:,} {noun}{'s' * (n != 1)}"


class TuningExplorer(Explorer):
    """A map of final accuracy over `batch_size` and `lr`, with the scaling rules, and the curves of the chosen cell.

    `network` "LeNet" (or another that was recorded), `batch_norm` True or False, `budget` "epochs" or "steps": what is
    equal for all cells. `data` is what `explorer_data` returns, by default that of the recorded grid.
    """

    caption = traitlets.Unicode(
        "Each cell of the map is one learning rate and one batch size, and its number the accuracy at the end, on "
        "held-out images, the mean over the seeds. Click a cell, or walk through the map with the arrow keys. The "
        "lines go through the chosen cell: they say what the linear and the square-root rule make of its learning "
        "rate at other batch sizes. Do they stay on the best cells? The number of GPUs changes only the time of an "
        "epoch, which is modelled, for DistributedDataParallel. The accuracy is that of the batch of all GPUs together."
    ).tag(sync=True)

    def __init__(self, data=None, **values):
        super().__init__({**(explorer_data(*read_grids()) if data is None else data), "map": True}, **values)

    def comparison(self):
        there, top = self.cell(), best(self.net(), self.budget)
        if top is None:
            return ""
        if there.diverged:
            sound = [lr for lr in self.rates() if not cell(self.net(), self.batch_size, lr, self.budget).diverged]
            return f" At this batch size {max(sound):g} is the largest rate at which none did." if sound else ""
        if top == (self.batch_size, self.lr):
            return " No cell of this map is better."
        other = cell(self.net(), *top, self.budget)
        name = f"the best cell (batch {top[0]}, rate {top[1]:g})"
        if there.finals[-1] >= other.finals[0]:
            return f" As good as {name} within the spread of the seeds{self.pace(top[0])}."
        tenths = other.rounded(10) - there.rounded(10)
        return f" That is {tenths // 10}.{tenths % 10} points below {name}{self.pace(top[0])}."

    def pace(self, batch_size):
        """How many times as long a run takes as one of another batch size; "" where they differ by less than 5 %."""
        own, other = self.ticks(self.batch_size), self.ticks(batch_size)
        if 20 * abs(own - other) < own:
            return ""
        tenths = (20 * max(own, other) + min(own, other)) // (2 * min(own, other))
        times = f"{tenths // 10}.{tenths % 10}" if tenths < 100 else f"{(tenths + 5) // 10:,}"
        return f", and {times} times as {'slow' if own > other else 'fast'}"

    def picture(self):
        return heat_map(self)


class LoopExplorer(Explorer):
    """The training loop of chapter 4 with the reader's `batch_size`, `lr` and `num_gpus`: curves, without a map.

    `data` is what `explorer_data` returns for LeNet and epochs, by default that of the recorded grid.
    """

    caption = traitlets.Unicode(
        "LeNet, trained with the chosen batch size and learning rate. Accuracy is measured on images that are kept "
        "out of the training. The batch is that of all GPUs together, so the number of GPUs does not change the "
        "curves. It changes the time of an epoch, which is modelled."
    ).tag(sync=True)

    def __init__(self, data=None, **values):
        if data is None:
            data = explorer_data(read_grid(), nets=("lenet",), budgets=("epochs",), strategy="manual")
        super().__init__({**data, "map": False}, **values)

    def picture(self):
        return curves(self)
