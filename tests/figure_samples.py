"""Interactive figures with made-up data, one of each class, and what the tests that all of them share need to know."""

import itertools
import math
from functools import cache
from typing import NamedTuple

from experiments import ddp_step, tuning, tuning_runs
from mgpu_lib.virtual.clock import Event
from mgpu_lib.virtual.specs import find_gpu, find_link
from mgpu_lib.virtual.timeline import Timeline
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
    explorer_data,
)

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
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": optimizer,
        "activations": {"fp32": by_batch, "amp": {n: 3 * b // 5 + parameters // 2 for n, b in by_batch.items()}},
        "scratch": {p: {o: {n: b // 32 + 1000 for n, b in by_batch.items()} for o in optimizer} for p in PRECISIONS},
    }


def memory_data():
    networks = {"LeNet": memory_network(1_725_440, 89_600), "ResNet-18": memory_network(44_700_160, 3_660_000)}
    return {"networks": networks, "gpus": {"T4": 15 * 2**30, "RTX4090": 24 * 2**30, "tiny": 2**27 + 2**17}}


def memory(**values):
    return MemoryExplorer(memory_data(), **{"network": "ResNet-18", "optimizer": "adam", "batch_size": 512, **values})


def hostile_memory(name):
    return MemoryExplorer({"networks": {name: memory_network(1000, 1000)}, "gpus": {name: 2**30}})


# Traffic: in the shape of `traffic_table`'s


def traffic_network(name, layers, per_cut, per_gpu, parameters):
    return {
        "name": name,
        "parameters": parameters,
        "layers": layers,
        "layer_wise": [per_cut * k if k < layers else None for k in range(8)],
        "in_layer": [per_gpu * k for k in range(8)],
        "data_parallel": [8 * parameters * k for k in range(8)],
    }


def traffic_data():
    """Four networks. What moves least: it depends on the batch; by layers; data parallel; never by layers."""
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
    times = (start * US, end * US, (launched - 5) * US, launched * US)
    return Event(name, "conv", gpu, "default", *times, "host", "", 0, 0, "memory")._replace(**values)


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
        Event("collate", "host", None, "host", 700 * US, 1000 * US, 700 * US, 1000 * US, "host", "", 0, 0, "host"),
    )


def viewer(**values):
    return TimelineViewer(small_timeline(), **values)


def hostile_viewer(name):
    return TimelineViewer(timeline(kernel(name, 5, 100, phase=name, thread=name)), event=0)


# The grid of why two are slower than one: cells of every kind


def why_grid(networks=("LeNet", "net")):
    cells = {}
    for gpu, links in (("T4", ["pcie"]), ("V100", ["nvlink", "pcie"])):
        for i, name in enumerate(networks):
            cells[f"{gpu}/{name}"] = ["10007 999 0 1 fi9bw9", "20000 400 0 600 wa9fk4bk5", ""]
            for link, strategy, k in itertools.product(links, ("manual", "data_parallel", "ddp"), (2, 4)):
                n = len(link) + k + i
                ticks = {"manual": 9000 * n, "data_parallel": 12345, "ddp": 1990 + n}[strategy]
                rows = [f"w{j + 5}9fa{j}bc{9 - k}B85c{9 - j}3o49u21" for j in range(k)]
                cells[f"{gpu}/{link}/{name}/{strategy}/{k}"] = [
                    f"{ticks} 750 220 30 {rows[0]}",
                    f"{ticks + 1} 100 {460 if strategy == 'ddp' else 440} 450 {' '.join(rows)}",
                    "" if k == 2 else f"{n} 500 500 0 cE9ua0",
                ]
    links = {"T4": {"pcie": "PCIe 3.0 x16"}, "V100": {"nvlink": "NVLink 2, 6 links", "pcie": "PCIe 3.0 x16"}}
    return {
        "links": links,
        "networks": list(networks),
        "batch_sizes": [32, 64, 128],
        "counts": [1, 2, 4],
        "strategies": ["manual", "data_parallel", "ddp"],
        "bins": 50,
        "cells": cells,
    }


def why(**values):
    return WhySlower(why_grid(), **{"batch_size": 64, **values})


def hostile_why(name):
    name = name.replace("/", "-")  # it parts the names of cells
    return WhySlower(why_grid((name, "net")), network=name, batch_size=64)


# The grid of steps of DistributedDataParallel: bound by the GPU, by the host, by the link


def overlap_cell(micros, shares, sent=()):
    """A step of so many µs: its backward pass ends at 9000, its last 500 are the update. `sent`: its all-reduces."""
    last = micros - 500
    parts = [[(0, 3000, 1500)], [(3000, 9000, 6000)], [(last, micros, 500)]]
    parts += [[(9000, last, last - 9000)], [(0, 50), (50, 60)], sent] if sent else [[], [], []]
    words = [ddp_step.packed([tuple(US * time for time in span) for span in part], 0) for part in parts]
    return " ".join([str(100 * micros), *map(str, shares), *words])


def overlap_cells(link, host, k, i):
    """For three bucket sizes: four all-reduces, two, and one that begins when the backward pass is over."""
    far = {"DGX A100": 0, "PCIe tree": 1}[link] * (4000 if k < 16 else 16_000)
    shares = {"fitted": (800, 50, 150, 900), "fast": (600, 100, 300, 800)}[host] if not far else (450, 500, 50, 333)
    micros = [10_000 + far + 100 * k + 500 * i + more for more in (1000, 100, 600)]
    starts = ((4000, 5000, 7000, 8000), (5000, 8000), (9000,))
    calls = [[*zip(begin, (*begin[1:], end - 500))] for begin, end in zip(starts, micros)]
    return [overlap_cell(end, shares, sent) for end, sent in zip(micros, calls)]


def overlap_grid(networks=("ResNet-18", "net"), between=("InfiniBand HDR", "Ethernet 25")):
    links = {"DGX A100": "NVLink 3, 12 links", "PCIe tree": "PCIe 4.0 x16"}
    cells = {}
    for network, host in itertools.product(networks, ("fitted", "fast")):
        cells[f"{network}/{host}"] = [overlap_cell(9500 + 10 * len(host), (900, 0, 100, 0))]
        for link, k in itertools.product(links, (2, 8, 16)):
            for i, joint in enumerate(between if k > 8 else [None]):
                name = "/".join([network, host, link, *([joint] if joint else []), str(k)])
                cells[name] = overlap_cells(link, host, k, i)
    return {
        "gpu": "A100-80",
        "images": dict.fromkeys(networks, 32),
        "networks": list(networks),
        "links": links,
        "between": list(between),
        "node": 8,
        "counts": [2, 8, 16],
        "hosts": {"fitted": 1.0, "fast": 1 / 3},
        "buckets": {"each": 1e-6, "4 MiB": 4, "all": 1000},
        "bytes": {name: ["4000000 2000000 1000000 1000000", "5000000 3000000", "8000000"] for name in networks},
        "cells": cells,
    }


def overlap(**values):
    start = {"network": "ResNet-18", "num_gpus": 16, "bucket_cap_mb": 4, **values}
    return OverlapExplorer(overlap_grid(), **start)


def hostile_overlap(name):
    name = name.replace("/", "-")  # it parts the names of cells
    grid = overlap_grid((name, "net"), (f"{name}!", "Ethernet 25"))
    return OverlapExplorer(grid, network=name, between=f"{name}!", bucket_cap_mb=4)


# The grid of batch sizes and learning rates

SIZES = (1, 16, 256, 4096)
IMAGES = 55_000


def made_run(net, batch_size, lr, seed):
    """A run in the form in which the grid records it, from a formula: too slow, good, diverged."""
    per_epoch = math.ceil(IMAGES / batch_size)
    limit = {1: 0.1, 16: 0.7, 256: 1.5, 4096: 2.0}[batch_size] * (1 + 0.4 * seed) * (2 if net == "lenet_bn" else 1)
    run = {
        "net": net,
        "batch_size": batch_size,
        "seed": seed,
        "lr": lr,
        "step": [],
        "train_loss": [],
        "validation_accuracy": [],
        "test_accuracy": {},
        "diverged_at_step": None,
        "dead_at_step": None,
    }
    for step in tuning_runs.marks(per_epoch, 4, 215):
        if lr > 3 * limit and step > 4:  # not finite at step 5: no measurement any more
            run["diverged_at_step"] = 5
            return run
        learned = 1 - math.exp(-((step * lr / (3 + step * batch_size**-0.5 / 500)) ** 0.7))
        run["step"].append(step)
        run["train_loss"].append(round(2.4 - 2.1 * learned + 0.01 * seed, 5))
        run["validation_accuracy"].append(round((0.1 + 0.8 * learned + 0.004 * seed) * 5000) / 5000)
        if lr > limit and step >= 100:
            run["dead_at_step"] = step
            return run
    return run


@cache
def tuning_grid():
    nets, seeds = ("lenet", "lenet_bn"), (0, 1, 2)
    runs = [
        made_run(net, b, lr, seed)
        for net, b, seed in itertools.product(nets, SIZES, seeds)
        for lr in tuning.learning_rates(b)
    ]
    recipe = {"epochs": 4, "steps": 215, "validation": 5000}
    return {"recipe": recipe, "trained_on": IMAGES, "runs": runs}


@cache
def tuning_data():
    return explorer_data.explorer_data(tuning_grid())


@cache
def loop_data():
    return explorer_data.explorer_data(tuning_grid(), nets=("lenet",), budgets=("epochs",), strategy="manual")


def explorer(**values):
    return TuningExplorer(tuning_data(), **values)


def loop(**values):
    return LoopExplorer(loop_data(), **values)


def hostile_explorer(name, kind=TuningExplorer, data=tuning_data):
    nets = data()["nets"]
    return kind({**data(), "nets": {name: nets["LeNet"], **nets}}, network=name)


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
        lambda **values: why(**{"num_gpus": 4, **values}),
        {"gpu": "T4", "num_gpus": 2, "batch_size": 32},
        {
            "gpu": ("H100", "'T4', 'V100'"),
            "link": ("token ring", "'nvlink', 'pcie'"),
            "network": ("VGG", "'LeNet', 'net'"),
            "strategy": ("horovod", "'manual', 'data_parallel', 'ddp'"),
            "num_gpus": (3, "1, 2, 4"),
            "batch_size": (100, "32, 64, 128"),
        },
        hostile_why,
    ),
    "OverlapExplorer": Sample(
        overlap,
        {"network": "net", "num_gpus": 8, "link": "PCIe tree", "bucket_cap_mb": 1000},
        {
            "network": ("VGG", "'ResNet-18', 'net'"),
            "num_gpus": (3, "2, 8, 16"),
            "link": ("NVLink", "'DGX A100', 'PCIe tree'"),
            "between": ("token ring", "'InfiniBand HDR', 'Ethernet 25'"),
            "host": (0.5, "1.0, 0.3333"),
            "bucket_cap_mb": (25, "1e-06, 4, 1000"),
        },
        hostile_overlap,
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
        explorer,
        {"batch_size": 4096, "lr": 0.4},
        {
            "batch_size": (128, "choose one of 1, 16, 256, 4096"),
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
        loop,
        {"batch_size": 16, "lr": 0.063},
        {"num_gpus": (3, "choose one of 1, 2, 4, 8")},
        lambda name: hostile_explorer(name, LoopExplorer, loop_data),
        130_000,
    ),
}
