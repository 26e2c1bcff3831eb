"""Why is two slower than one? A training step on one GPU and on several, and what it waits for."""

import json

import traitlets

from .base import HERE, InteractiveFigure, module, percent, rect, text
from .timeline import STYLE, duration

GRID = HERE.parent.parent / "experiments" / "results" / "why_slower.json"
PARTS = ("links", "networks", "batch_sizes", "counts", "strategies", "bins", "cells")
BOUND = 750  # thousandths of a step in which kernels run: from here on it is bound by them
TOO_SMALL = ", which smaller shards hardly shorten"
# As in why.js
HOST_IS_SLOW = {
    "one": "which launches kernels more slowly than the GPU runs them",
    "manual": "which launches the work of all GPUs, one after the other",
    "data_parallel": "where one process copies the network and launches the work of all GPUs",
    "ddp": "which launches kernels more slowly than the GPU runs them",
}
LENGTHS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLORS = {"f": "#0072b2", "b": "#d55e00", "u": "#009e73", "c": "#882255", "w": "#dcdcdc", "o": "#ead9e1"}
PALE = {"f": "#bfdcec", "b": "#f5d7bf", "u": "#bfe7dc", "c": "#e1c8d4"}


class WhySlower(InteractiveFigure):
    """One training step on one GPU and on `num_gpus` (1, 2, 4 or 8), on one scale of time, from a recorded grid.

    `gpu` is a data sheet's key, `link` "nvlink" or "pcie" (a GPU without NVLink uses PCIe, whatever `link` says),
    `network` "LeNet", "ResNet-18" or "ResNet-50", `strategy` "manual", "data_parallel" or "ddp", and `batch_size` the
    size of the whole batch. `grid` is what `python -m experiments.why_slower` wrote, read from there if not given.
    Raises FileNotFoundError without it, ValueError when a part of it is missing, and TraitError for values that it
    doesn't have.
    """

    _esm = module("time.js", "why.js")
    _css = STYLE + (HERE / "why.css").read_text(encoding="utf-8")
    controls = ("gpu", "link", "network", "strategy", "num_gpus", "batch_size")
    gpu = traitlets.Unicode("V100").tag(sync=True)
    link = traitlets.Enum(["nvlink", "pcie"], "nvlink").tag(sync=True)
    network = traitlets.Unicode("LeNet").tag(sync=True)
    strategy = traitlets.Unicode("manual").tag(sync=True)
    num_gpus = traitlets.Int(2).tag(sync=True)
    batch_size = traitlets.Int(256).tag(sync=True)
    caption = traitlets.Unicode(
        "One training step, the same batch on one GPU and on several. Each row is a GPU. The filled part of a piece "
        "says for how much of its time the GPU is really busy; a strip below it, that gradients are sent meanwhile. "
        "Under the batch sizes: how many times as fast the GPUs together are as one (×: does not fit into the memory; "
        "●: nothing to compare with). All times are modelled, in FP32, with the batch on the GPUs already."
    ).tag(sync=True)

    def __init__(self, grid=None, **values):
        super().__init__(data=checked(read_grid() if grid is None else grid), **values)

    @traitlets.validate("gpu", "network", "strategy", "num_gpus", "batch_size")
    def _known(self, proposal):
        name, value, data = proposal["trait"].name, proposal["value"], self.data
        parts = {"gpu": "links", "network": "networks", "strategy": "strategies", "num_gpus": "counts"}
        known = data[parts.get(name, "batch_sizes")]
        if value not in known:
            raise traitlets.TraitError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")
        return value

    def link_name(self):
        links = self.data["links"][self.gpu]
        return links.get(self.link, links["pcie"])

    def cell(self, num_gpus=None):
        """The step on that many GPUs: (ticks of 10 ns, [shares of kernels, communication, host in ‰], rows), or None.

        None: it does not fit into the memory.
        """
        k = self.num_gpus if num_gpus is None else num_gpus
        link = self.link if self.link in self.data["links"][self.gpu] else "pcie"
        parts = (self.gpu, self.network) if k == 1 else (self.gpu, link, self.network, self.strategy, str(k))
        words = self.data["cells"]["/".join(parts)][self.data["batch_sizes"].index(self.batch_size)].split()
        if not words:
            return None
        ticks, *shares = map(int, words[:4])
        return ticks, shares, words[4:] * (k if len(words) == 5 else 1)

    def speedup(self):
        """How many times as fast `num_gpus` GPUs are as one, in hundredths; None unless both fit."""
        one, many = self.cell(1), self.cell()
        return (200 * one[0] + many[0]) // (2 * many[0]) if one and many else None

    def sentence(self):
        k, one, many = self.num_gpus, self.cell(1), self.cell()
        where = f"one {self.gpu}" if k == 1 else f"{k} {self.gpu} ({self.link_name()})"
        start = f"{self.network} at batch {self.batch_size}, modelled on {where}"
        if many is None:
            return f"{start}, does not fit into the memory."
        result = ""
        if k > 1 and one is None:
            result = ", and does not fit into the memory of one"
        elif k > 1:
            slower = "slower, " if self.speedup() < 100 else ""
            result = f", one takes {duration(one[0])}: {slower}{self.speedup() / 100:.2f} times as fast"
        return f"{start}: {duration(many[0])} per step{result}. {self.bottleneck()}"

    def bottleneck(self):
        """The sentence that names what most of the step goes to; for a step that fits."""
        _, (kernels, communication, host), _ = self.cell()
        if kernels >= BOUND:
            pays = f", so {self.num_gpus} GPUs pay" if (self.speedup() or 0) > 100 else TOO_SMALL
            more = pays if self.num_gpus > 1 and self.speedup() is not None else ""
            return f"Compute bound: kernels run for {percent(kernels, 1000)} of the step{more}."
        if host >= communication:
            reason = HOST_IS_SLOW["one" if self.num_gpus == 1 else self.strategy]
            return f"The bottleneck is launching: a GPU waits {percent(host, 1000)} of the step for the host, {reason}."
        part = percent(communication, 1000)
        return (
            f"The bottleneck is communication: for {part} of the step a GPU only sends, receives, or waits for another."
        )

    def picture(self):
        steps = {k: self.cell(k) for k in sorted({1, self.num_gpus})}
        longest = max([step[0] for step in steps.values() if step], default=1)
        elements, y = [], 24
        for k, step in steps.items():
            words = f"{duration(step[0])} per step" if step else "does not fit into the memory"
            elements.append(text(8, y, f"{k} {'GPU' if k == 1 else 'GPUs'} ({self.gpu}): {words}", weight=600))
            for gpu, runs in enumerate(step[2] if step else []):
                elements.append(text(8, y + 24, f"cuda:{gpu}"))
                elements += pieces(runs, 62, y + 10, 290 * step[0] / longest / self.data["bins"])
                y += 24
            y += 34
        return [*elements, text(8, y - 8, f"{self.network} at batch {self.batch_size} (modelled)")], y


def pieces(runs, x, y, each):
    """One GPU's step as rectangles; the filled part of a piece says for how much of its time."""
    for i in range(0, len(runs), 3):
        state, width = runs[i].lower(), LENGTHS.index(runs[i + 1]) * each
        if state in PALE:
            full = 18 * int(runs[i + 2]) / 9
            yield rect(x, y, width, 18, PALE[state])
            yield rect(x, y + 18 - full, width, full, COLORS[state])
        else:
            yield rect(x, y, width, 18, COLORS[state])
        x += width


def read_grid():
    if not GRID.exists():
        raise FileNotFoundError(f"{GRID.name} is missing: record it with `python -m experiments.why_slower`")
    return json.loads(GRID.read_text(encoding="utf-8"))


def checked(grid):
    """What the page needs of a grid; ValueError that says what is missing."""
    try:
        data = {part: grid[part] for part in PARTS}
        lengths = {len(cells) for cells in data["cells"].values()}
    except (KeyError, TypeError, AttributeError) as error:
        wanted = "experiments.why_slower writes"
        raise ValueError(f"grid isn't what {wanted} ({type(error).__name__}: {error})") from error
    if lengths != {len(data["batch_sizes"])}:
        raise ValueError(f"grid has {len(data['batch_sizes'])} batch sizes, and lists of {sorted(lengths)} cells")
    return data
