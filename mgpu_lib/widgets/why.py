"""Why is two slower than one? A training step on one GPU and on several, and what it waits for."""

import traitlets

from mgpu_lib.recorded import study
from mgpu_lib.widgets.base import HERE, InteractiveFigure, module
from mgpu_lib.widgets.timeline import STYLE

PARTS = ("links", "networks", "batch_sizes", "counts", "strategies", "bins", "cells")


class WhySlower(InteractiveFigure):
    """One training step on one GPU and on `num_gpus` (1, 2, 4 or 8), on one scale of time, from a recorded grid.

    `gpu` is a data sheet's key, `link` "nvlink" or "pcie" (a GPU without NVLink uses PCIe, whatever `link` says),
    `network` "LeNet", "ResNet-18" or "ResNet-50", `strategy` "manual", "data_parallel" or "ddp", and `batch_size` the
    size of the whole batch. `grid` is what `python -m experiments.why_slower` wrote, read from there if not given.
    Raises FileNotFoundError without it, ValueError when a part of it is missing, and TraitError for values that it
    doesn't have.
    """

    _esm = module("why.js")
    _css = STYLE + (HERE / "why.css").read_text(encoding="utf-8")
    controls = ("gpu", "link", "network", "strategy", "num_gpus", "batch_size")
    gpu = traitlets.Unicode("A100-80").tag(sync=True)
    link = traitlets.Enum(["nvlink", "pcie"], "nvlink").tag(sync=True)
    network = traitlets.Unicode("LeNet").tag(sync=True)
    strategy = traitlets.Unicode("manual").tag(sync=True)
    num_gpus = traitlets.Int(2).tag(sync=True)
    batch_size = traitlets.Int(256).tag(sync=True)
    caption = traitlets.Unicode(
        "One training step, the same batch on one GPU and on several. Make the batch larger until several GPUs are "
        "faster than one, and see which part of the step has not grown. Each row is a GPU. The filled part of a piece "
        "says for how much of its time the GPU is really busy; a strip below it, that gradients are sent meanwhile. "
        "Under the batch sizes: how many times as fast the GPUs together are as one (×: does not fit into the memory; "
        "●: nothing to compare with). All times are modelled, with host=1/2 and PyTorch's default precision; the batch "
        "is on the GPUs already."
    ).tag(sync=True)

    def __init__(self, grid=None, **values):
        super().__init__(data=checked_steps(study("why_slower") if grid is None else grid), **values)

    @traitlets.validate("gpu", "network", "strategy", "num_gpus", "batch_size")
    def _known(self, proposal):
        name, value, data = proposal["trait"].name, proposal["value"], self.data
        parts = {"gpu": "links", "network": "networks", "strategy": "strategies", "num_gpus": "counts"}
        known = data[parts.get(name, "batch_sizes")]
        if value not in known:
            raise traitlets.TraitError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")
        return value


def checked_steps(grid):
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
