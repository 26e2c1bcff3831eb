"""The explorers of batch size and learning rate: a map of recorded runs, their curves, and a button that trains."""

import math

import traitlets

from mgpu_lib.recorded import resnet_grid, study
from mgpu_lib.widgets.base import CSS, HERE, InteractiveFigure, module
from mgpu_lib.widgets.explorer_data import BATCH_NORM, best, explorer_data
from mgpu_lib.widgets.train import TrainButton


class Explorer(TrainButton, InteractiveFigure):
    """What the two explorers share: recorded runs for a batch size and a learning rate, and training one more.

    `num_gpus` changes the modelled time and what Train runs on; `batch_size` is that of all GPUs together. Where a
    network or a batch size has no run with the chosen `lr`, `lr` becomes the nearest there is. Raises
    FileNotFoundError where nothing is recorded, ValueError when a part of it is missing, and TraitError for values
    that it doesn't have.
    """

    _esm = module("explorer.js")
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


def nearest(value, known):
    """The nearest of `known` by ratio: rates and batch sizes act by it."""
    return min(known, key=lambda other: abs(math.log(other / value))) if value > 0 else known[0]


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
        if data is None:
            data = explorer_data(study("tuning"), resnet_grid("batch"))
        super().__init__({**data, "map": True}, **values)


class LoopExplorer(Explorer):
    """The training loop of chapter 4 with the reader's `batch_size`, `lr` and `num_gpus`: curves, without a map.

    `data` is what `explorer_data` returns for LeNet and epochs, by default that of the recorded grid.
    """

    caption = traitlets.Unicode(
        "LeNet, trained with the chosen batch size and learning rate. Raise the rate until the curve jumps, and then "
        "until it ends. Accuracy is measured on images that are kept out of the training. The batch is that of all "
        "GPUs together, so the number of GPUs does not change the curves. It changes the time of an epoch, which is "
        "modelled."
    ).tag(sync=True)

    def __init__(self, data=None, **values):
        if data is None:
            data = explorer_data(study("tuning"), nets=("lenet",), budgets=("epochs",), strategy="manual")
        super().__init__({**data, "map": False}, **values)
