"""How much of the communication hides? One step of DistributedDataParallel, and what buckets, links and hosts do."""

import traitlets

from mgpu_lib.recorded import study
from mgpu_lib.widgets.base import HERE, InteractiveFigure, module
from mgpu_lib.widgets.timeline import STYLE

GRID = ("gpu", "images", "networks", "links", "between", "node", "counts", "hosts", "buckets", "bytes", "cells")


class OverlapExplorer(InteractiveFigure):
    """One step of DistributedDataParallel on one of `num_gpus` GPUs (2, 4, 8, 16 or 32), and the same step on one GPU.

    `network` is "ResNet-18" or "ResNet-50"; `link`, "DGX A100" or "PCIe tree", joins the 8 GPUs of a node; `between`,
    "InfiniBand HDR", "Ethernet 100" or "Ethernet 25", joins the nodes where there are several. `host` (1 or 1/3) and
    `bucket_cap_mb` are those of `predict`: 1e-6 MiB is a bucket for each parameter, 1000 MiB one for all of them.
    `grid` is what `python -m experiments.ddp_step` wrote, read from there if not given. Raises FileNotFoundError
    without it, ValueError when a part of it is missing, and TraitError for values that it doesn't have.
    """

    _esm = module("overlap.js")
    _css = STYLE + "".join((HERE / name).read_text(encoding="utf-8") for name in ("why.css", "overlap.css"))
    controls = ("network", "num_gpus", "link", "between", "host", "bucket_cap_mb")
    network = traitlets.Unicode("ResNet-50").tag(sync=True)
    num_gpus = traitlets.Int(16).tag(sync=True)
    link = traitlets.Unicode("DGX A100").tag(sync=True)
    between = traitlets.Unicode("Ethernet 25").tag(sync=True)
    host = traitlets.Float(1.0).tag(sync=True)
    bucket_cap_mb = traitlets.Float(25.0).tag(sync=True)
    caption = traitlets.Unicode(
        "One training step with DistributedDataParallel, as one of the GPUs sees it: kernels above, and below them the "
        "all-reduce of each bucket, in the order in which they travel. Choose a slower link, and then the bucket size "
        "that hides most. What is filled costs time. Of kernels it is the part of the time in which one runs; of an "
        "all-reduce the part that is not hidden behind kernels. The small blocks at the start broadcast the buffers of "
        "batch norm; short kernels at the end copy the gradients out of the buckets. Under the bucket sizes: "
        "milliseconds per step. All times are modelled, in FP32, with the batch on the GPUs already."
    ).tag(sync=True)

    def __init__(self, grid=None, **values):
        super().__init__(data=checked_grid(study("ddp_step") if grid is None else grid), **values)

    @traitlets.validate(*controls)
    def _known(self, proposal):
        name, value, data = proposal["trait"].name, proposal["value"], self.data
        known = {
            "network": data["networks"],
            "num_gpus": data["counts"],
            "link": list(data["links"]),
            "between": data["between"],
            "host": list(data["hosts"].values()),
            "bucket_cap_mb": list(data["buckets"].values()),
        }[name]
        if value not in known:
            raise traitlets.TraitError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")
        return value


def checked_grid(grid):
    """What the page needs of a grid; ValueError that says what is missing."""
    try:
        data = {part: grid[part] for part in GRID}
        counts = {len(cells) for name, cells in data["cells"].items() if name.count("/") > 1}
        counts |= {len(lists) for lists in data["bytes"].values()}
    except (KeyError, TypeError, AttributeError) as error:
        wanted = "experiments.ddp_step writes"
        raise ValueError(f"grid isn't what {wanted} ({type(error).__name__}: {error})") from error
    if counts != {len(data["buckets"])}:
        raise ValueError(f"grid has {len(data['buckets'])} bucket sizes, and lists of {sorted(counts)} cells")
    return data
