"""Steps on one GPU and on several, for the figure "Why is two slower than one?": all modelled, by mgpu.predict.

    python -m experiments.why_slower

writes mgpu_lib/recorded/why_slower.json, in some ten minutes on two cores. A run that was interrupted goes on where
it was, as long as the code that models the times is the same.
"""

import string
from functools import cache
from itertools import chain

import torch
import torchvision

import mgpu_lib as mgpu
from experiments import study
from virtual_gpus import find_gpu, find_link

GPUS, LINKS = ("T4", "V100", "A100-80", "H100"), ("nvlink", "pcie")
BATCH_SIZES, COUNTS = [2**i for i in range(5, 13)], (2, 4, 8)
STRATEGIES = ("manual", "data_parallel", "ddp")
PRECISION, HOST = "default", 0.5  # what a program has that says nothing, and the middle of chapter 6's band
BINS = 50  # a row of the figure says what a GPU does in each fiftieth of the step
LENGTHS = string.digits + string.ascii_letters  # a run's length as one character
PHASES = {"forward": "f", "backward": "b", "all-reduce": "c"}  # other kernels: "u", for update
SAMPLE = {"T4/pcie/LeNet/data_parallel/2": {}, "H100/nvlink/ResNet-18/manual/2": {}, "V100/ResNet-50": {}}


@cache
def networks():
    """{name: (network on the meta device, shape of one input)}."""
    nets = {
        "LeNet": (mgpu.lenet_module(), (1, 28, 28)),
        "ResNet-18": (mgpu.resnet18(), (1, 28, 28)),
        "ResNet-50": (torchvision.models.resnet50(), (3, 224, 224)),
    }
    return {name: (net.to("meta"), shape) for name, (net, shape) in nets.items()}


def links_of(gpu):
    return LINKS if find_gpu(gpu).nvlink else ("pcie",)


def configurations():
    """Names of lists of cells, one cell for each batch size: GPU/network, or GPU/link/network/strategy/number."""
    for gpu in GPUS:
        for network in networks():
            yield f"{gpu}/{network}"
            for link in links_of(gpu):
                yield from (f"{gpu}/{link}/{network}/{strategy}/{k}" for strategy in STRATEGIES for k in COUNTS)


def cases():
    return {name: (name,) for name in configurations()}


def recipe():
    return {"batch_sizes": BATCH_SIZES, "bins": BINS, "precision": PRECISION, "host": HOST}


def record(name, batch_sizes=BATCH_SIZES):
    """The cells of one configuration."""
    gpu, *link, network = name.split("/")[: 3 if name.count("/") > 1 else 2]
    strategy, k = name.split("/")[3:] or ("ddp", 1)
    net, shape = networks()[network]
    return [cell(net, torch.empty(n, *shape, device="meta"), gpu, int(k), strategy, *link) for n in batch_sizes]


def cell(net, X, gpu, k, strategy, link=None):
    """One step as text, "" if it doesn't fit the memory: seconds in ticks of 10 ns; the shares of it, in thousandths
    and as means over the GPUs, in which kernels run, GPUs communicate, and GPUs wait for the host; a row for each GPU,
    or a single one where all are alike. See `row`.
    """
    try:
        step = mgpu.predict(net, X, gpu, k, strategy, PRECISION, link, host=HOST)
    except torch.OutOfMemoryError:
        return ""
    found = [list(states(step.timeline, gpu, step.seconds)) for gpu in step.timeline.gpus]
    shares = (
        sum(end - start for start, end, state, _ in chain(*found) if state in kind) / step.seconds / k
        for kind in ("fbu", "co", "w")
    )
    rows = [row(spans, step.seconds) for spans in found]
    numbers = [round(1e8 * step.seconds), *(round(1000 * share) for share in shares)]
    return " ".join(map(str, numbers + (rows[:1] if len(set(rows)) == 1 else rows)))


def states(timeline, gpu, seconds):
    """What a GPU does from the beginning of a step to its end: (start, end, state, whether it communicates beside).

    The state is "f", "b" or "u" while a kernel of the forward or backward pass or of the update runs, else "c" in
    communication, "w" while it waits for the host, and "o" when it has been given work that waits for another GPU.
    """
    events, changes, launches = timeline.on(gpu), [], {}
    for e in events:
        state = "c" if e.part == "communication" else PHASES.get(e.phase, "u")
        changes += [(e.start, 1, state), (e.end, -1, state)]
        launches[e.start] = min(e.launched, launches.get(e.start, e.launched))
    running, now, end = dict.fromkeys("fbuc", 0), timeline.start, timeline.start + seconds
    for time, change, state in [*sorted(changes), (end, 0, "c")]:
        busy = next((name for name, n in running.items() if n), None)
        if busy and time > now:
            yield now, time, busy, running["c"] > 0 and busy != "c"
        elif time > now:
            launched = min(max(launches.get(time, time), now), time)  # nothing comes after the last event
            yield now, launched, "w", False
            yield launched, time, "o", False
        running[state] += change
        now = max(now, time)


def row(spans, seconds):
    """States as runs of three characters: what is done most (in capitals with communication beside it), for how many
    fiftieths of the step ("a" is 10), and in how many ninths of that time it is really done.
    """
    start, each = spans[0][0], seconds / BINS
    bins = [dict.fromkeys("fbucwo+", 0.0) for _ in range(BINS)]
    for begin, end, state, beside in spans:
        for i in range(int((begin - start) / each), min(int((end - start) / each) + 1, BINS)):
            part = max(0.0, min(end - start, (i + 1) * each) - max(begin - start, i * each))
            bins[i][state] += part
            bins[i]["+"] += part * beside
    runs = []
    for times in bins:
        most = max("fbuc", key=times.get)
        letter = most if times[most] > 0.02 * each else max("wo", key=times.get)
        name = letter.upper() if letter in "fbu" and times["+"] > 0.25 * each else letter
        if not runs or runs[-1][0] != name:
            runs.append([name, 0, 0.0])
        runs[-1][1] += 1
        runs[-1][2] += times[letter] / each
    return "".join(f"{name}{LENGTHS[n]}{round(9 * busy / n)}" for name, n, busy in joined(runs))


def joined(runs):
    """Without short waits in the middle of something: that is then done in a smaller part of its time."""
    whole = []
    for name, n, busy in runs:
        if len(whole) > 1 and whole[-1][0] in "wo" and whole[-1][1] <= 3 and whole[-2][0] == name:
            n, busy = n + whole[-1][1] + whole[-2][1], busy + whole[-2][2]
            del whole[-2:]
        whole.append([name, n, busy])
    return whole


def main():
    cells = study.modelled("why_slower", list(configurations()), record, recipe())
    if cells is None:
        return
    written = {
        "links": {gpu: {link: find_link(link, find_gpu(gpu)).name for link in links_of(gpu)} for gpu in GPUS},
        "networks": list(networks()),
        "batch_sizes": BATCH_SIZES,
        "counts": [1, *COUNTS],
        "strategies": STRATEGIES,
        "bins": BINS,
        "cells": cells,
    }
    study.finish("why_slower", recipe(), written)


if __name__ == "__main__":
    main()
