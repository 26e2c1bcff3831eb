"""Interactive figures, one of each class, and what the tests that all of them share need to know.

Their data are what the book's figures show; only some small tables are made up.
"""

import json
from functools import cache, partial
from typing import NamedTuple

import take_pictures

from mgpu_lib.widgets import (
    AllReduceStepper,
    BatchSplitter,
    LoopExplorer,
    MemoryExplorer,
    OverlapExplorer,
    Planner,
    SplitExplorer,
    TimelineViewer,
    TuningExplorer,
    WhySlower,
)
from virtual_gpus.clock.events import Event
from virtual_gpus.clock.specs import find_gpu, find_link
from virtual_gpus.clock.timeline import Timeline

US = 1e-6
BATCH_SIZES = [2**i for i in range(13)]
PRECISIONS = ("fp32", "amp")


def planner(**values):
    """Other values than those of the book's figure, which has a picture."""
    return Planner(**({"tokens": 1e12} | values))


# Memory: in the shape of `memory_table`'s


def memory_network(parameters, activations):
    by_batch = {n: activations * n for n in BATCH_SIZES}
    optimizer = {"sgd": 0, "momentum": parameters, "adam": 2 * parameters}
    kept = {"fp32": by_batch, "amp": {n: 3 * b // 5 + parameters // 2 for n, b in by_batch.items()}}
    scratch = {p: {o: {n: b // 32 + 1000 for n, b in by_batch.items()} for o in optimizer} for p in PRECISIONS}
    same = {"parameters": parameters, "gradients": parameters}
    return same | {"optimizer": optimizer, "activations": kept, "scratch": scratch}


def memory_data():
    networks = {"LeNet": memory_network(1_725_440, 89_600), "ResNet-18": memory_network(44_700_160, 3_660_000)}
    return {"networks": networks, "gpus": {"T4": 15 * 2**30, "RTX4090": 24 * 2**30, "tiny": 2**27 + 2**17}}


def memory(**values):
    return MemoryExplorer(memory_data(), **{"network": "ResNet-18", "optimizer": "adam", "batch_size": 512, **values})


# Traffic: in the shape of `traffic_table`'s


def traffic_network(name, layers, per_cut, per_gpu, parameters):
    moved = {"tensor": [per_gpu * k for k in range(8)], "data": [8 * parameters * k for k in range(8)]}
    moved["pipeline"] = [per_cut * k if k < layers else None for k in range(8)]
    return {"name": name, "limits": {"pipeline": f"{layers} layers"}} | moved


def traffic_data():
    """Four networks. What moves least: it depends on the batch; a pipeline; data parallelism; never a pipeline."""
    return [
        traffic_network("LeNet", 4, 6400, 38880, 129068),
        traffic_network("huge", 10, 8, 160, 10**9),
        traffic_network("all activations", 8, 10**6, 10**7, 10),
        traffic_network("one layer", 1, 0, 4096, 2**20),
    ]


def splits(**values):
    return SplitExplorer(traffic_data(), **{"network": "LeNet", "num_gpus": 2, **values})


# Timelines


def kernel(name, start, end, gpu=0, **values):
    """An event on a GPU's default stream, in µs; its launch takes 5 and ends where it starts, or at `launched`."""
    launched = values.pop("launched", start)
    times = {"start": start, "end": end, "called": values.pop("called", launched - 5), "launched": launched}
    fields = dict(kind="conv", row="default", thread="host", phase="", nbytes=0, flops=0, bound="memory")
    return Event(name=name, gpu=gpu, **{at: us * US for at, us in times.items()}, **(fields | values))


def timeline(*events, gpu="V100"):
    spec = find_gpu(gpu)
    return Timeline(events, spec, find_link(None, spec))


def small_timeline():
    """Three kernels and a copy on two GPUs, and some work of the host, in 1005 µs."""
    return timeline(
        kernel("convolution", 0, 100, phase="forward", nbytes=2**20, flops=3 * 10**9, bound="compute"),
        kernel("addmm", 100, 200, phase="backward", launched=40),
        kernel("add_", 500, 600, bound="fixed", gpu=1),
        kernel("copy cuda:0 to cuda:1", 200, 400, kind="copy", row="copy out", bound="link", nbytes=3 * 2**20),
        kernel("collate", 700, 1000, kind="host", gpu=None, row="host", bound="host", called=700, launched=1000),
    )


def viewer(**values):
    return TimelineViewer(small_timeline(), **values)


def hostile_viewer(name):
    return TimelineViewer(timeline(kernel(name, 5, 100, phase=name, thread=name)), event=0)


# Grids


def packed_times(text):
    """What experiments/ddp_step.py packs: [(start, end, how much of it is covered)] in µs."""
    found, last = [], 0
    for word in [] if text == "-" else text.split(","):
        gap, length, *covered = (int(digits or "0", 36) for digits in word.split("."))
        last += gap + length
        found.append((last - length, last, *(covered or [length])))
    return found


@cache
def shown_by(name):
    """The data of the book's first figure of this class."""
    return next(state["data"] for figure, state in take_pictures.figures_shown() if figure == name)


def explorer(**values):
    return TuningExplorer(shown_by("TuningExplorer"), **values)


def loop(**values):
    return LoopExplorer(shown_by("LoopExplorer"), **values)


def renamed(data, **names):
    """`data` with other names in it."""
    text = json.dumps(data)
    for old, new in names.items():
        text = text.replace(old, json.dumps(new)[1:-1])
    return json.loads(text)


def hostile_memory(name):
    return MemoryExplorer(renamed(memory_data(), LeNet=name, tiny=name + "!"), network=name, gpu=name + "!")


def hostile_grid(kind, name):
    name = name.replace("/", "-")  # it parts the names of cells
    return kind(renamed(kind().data, **{"LeNet": name, "ResNet-50": f"{name}!"}), network=f"{name}!")


def hostile_explorer(name, kind=TuningExplorer):
    return kind(renamed(shown_by(kind.__name__), LeNet=name), network=name)


class Sample(NamedTuple):
    """One class of figure."""

    make: callable  # make(**values)
    other: dict  # values that make() doesn't have
    refused: dict  # {name: (a value that it can't have, words of the error)}
    hostile: callable = None  # a figure with a name in its data
    largest: int = 70_000  # bytes of its HTML


SAMPLES = {
    "BatchSplitter": Sample(
        BatchSplitter,
        {"batch_size": 9, "way": "scatter"},
        {"batch_size": (65, "64"), "num_gpus": (9, "8"), "way": ("randomly", "'split_batch', 'scatter'")},
    ),
    "MemoryExplorer": Sample(
        memory,
        {"batch_size": 64, "gpu": "tiny"},
        {
            "batch_size": (500, "256, 512"),
            "network": ("VGG", "'LeNet', 'ResNet-18'"),
            "gpu": ("H100", "'T4', 'RTX4090'"),
            "optimizer": ("lion", "'sgd', 'momentum', 'adam'"),
            "precision": ("int8", "'fp32', 'amp'"),
        },
        hostile_memory,
    ),
    "AllReduceStepper": Sample(
        lambda **values: AllReduceStepper(**{"step": 2, **values}),
        {"kind": "tree", "num_gpus": 2},
        {
            "kind": ("mesh", "'star', 'ring', 'tree'"),
            "num_gpus": (9, "8"),
            "step": (7, "a ring on 4 GPUs has 6 rounds; choose 0 to 6"),
        },
    ),
    "SplitExplorer": Sample(
        splits,
        {"network": "one layer", "num_gpus": 6},
        {"network": ("VGG", "'LeNet', 'huge'"), "batch_size": (100, "64, 128"), "num_gpus": (9, "7, 8")},
        lambda name: SplitExplorer([{**traffic_data()[0], "name": name}]),
    ),
    "TimelineViewer": Sample(
        viewer,
        {"zoom": 3, "start": 500 * US},
        {
            "zoom": (7, "zoom=7: choose 6 at most"),
            "start": (0.002, "start=0.002: choose 0.001005 at most"),
            "event": (10, "event=10: choose 9 at most"),
        },
        hostile_viewer,
    ),
    "WhySlower": Sample(
        lambda **values: WhySlower(**{"num_gpus": 4, **values}),
        {"gpu": "T4", "num_gpus": 2, "batch_size": 32},
        {
            "gpu": ("RTX4090", "'T4', 'V100'"),
            "link": ("token ring", "'nvlink', 'pcie'"),
            "network": ("VGG", "'LeNet', 'ResNet-18'"),
            "strategy": ("horovod", "'manual', 'data_parallel', 'ddp'"),
            "num_gpus": (3, "1, 2, 4"),
            "batch_size": (100, "32, 64, 128"),
        },
        partial(hostile_grid, WhySlower),
        300_000,
    ),
    "OverlapExplorer": Sample(
        lambda **values: OverlapExplorer(**{"bucket_cap_mb": 4, **values}),
        {"network": "ResNet-18", "num_gpus": 8, "link": "PCIe tree", "bucket_cap_mb": 1000},
        {
            "network": ("VGG", "'ResNet-18', 'ResNet-50'"),
            "num_gpus": (3, "2, 4, 8, 16"),
            "link": ("NVLink", "'DGX A100', 'PCIe tree'"),
            "between": ("token ring", "'InfiniBand HDR', 'Ethernet 100', 'Ethernet 25'"),
            "host": (0.5, "1.0, 0.3333"),
            "bucket_cap_mb": (5, "1e-06, 1, 4"),
        },
        partial(hostile_grid, OverlapExplorer),
        200_000,
    ),
    "Planner": Sample(
        planner,
        {"n_gpus": 2048, "pipeline": 8, "recompute": True},
        {
            "n_gpus": (100, "8, 16, 32"),
            "network": ("NVLink", "'InfiniBand HDR', 'InfiniBand NDR'"),
            "tokens": (2e12, "100000000000.0, 300000000000.0"),
            "recompute": ("yes", "recompute"),
        },
        largest=120_000,
    ),
    "TuningExplorer": Sample(
        lambda **values: explorer(**{"num_gpus": 2, **values}),
        {"batch_size": 4096, "lr": 1.0},
        {
            "batch_size": (128, "choose one of 1, 4, 16, 64, 256, 1024, 4096"),
            "lr": (0.2, r"choose one of 0\.004, .*6\.3 at batch size 256"),
            "network": ("VGG", "choose one of 'LeNet'"),
            "budget": ("hours", "choose one of 'epochs', 'steps'"),
            "num_gpus": (3, "choose one of 1, 2, 4, 8"),
            "batch_norm": ("yes", "batch_norm"),
        },
        hostile_explorer,
        130_000,
    ),
    "LoopExplorer": Sample(
        lambda **values: loop(**{"lr": 0.16, **values}),
        {"batch_size": 16, "lr": 0.063},
        {"num_gpus": (3, "choose one of 1, 2, 4, 8")},
        lambda name: hostile_explorer(name, LoopExplorer),
        130_000,
    ),
}
