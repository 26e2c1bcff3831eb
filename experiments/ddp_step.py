"""Steps of DistributedDataParallel, for the figure of chapter 9: bucket sizes, links, GPUs, hosts; by mgpu.predict.

    python -m experiments.ddp_step

writes mgpu_lib/recorded/ddp_step.json, in some ten minutes on two cores. A run that was interrupted goes on where it
was, as long as the code that models the times is the same.
"""

from functools import cache
from itertools import chain

import numpy as np
import torch
import torchvision

import mgpu_lib as mgpu
from experiments import study
from virtual_gpus import find_gpu, find_link

GPU = "A100-80"
IMAGES = {"ResNet-18": 32, "ResNet-50": 32}  # on each GPU
LINKS = {"DGX A100": find_link("nvlink", find_gpu(GPU)).name, "PCIe tree": find_link("pcie", find_gpu(GPU)).name}
BETWEEN = ("InfiniBand HDR", "Ethernet 100", "Ethernet 25")
NODE, COUNTS = 8, (2, 4, 8, 16, 32)
HOSTS = {"fitted": 1.0, "fast": 1 / 3}
# In MiB. No two parameters fit into a bucket of one byte, and all of them into the largest.
BUCKETS = {"each": 1e-6, "1 MiB": 1, "4 MiB": 4, "10 MiB": 10, "25 MiB": 25, "50 MiB": 50, "all": 1000}
SHORT = 1 / 150  # of a step: a shorter gap is no gap in the figure, but part of something that is less than full
TICKS = 1e8  # that a second has: the unit of the figures' times is 10 ns
MICRO = 1e6  # µs that a second has: fine enough for what is drawn
FEW = {"buckets": ("each", "1 MiB")}
SAMPLE = {"ResNet-18/fast": {}, "ResNet-18/fitted/PCIe tree/2": {}, "ResNet-50/fast/DGX A100/Ethernet 25/16": FEW}


@cache
def networks():
    """{name: (network on the meta device, shape of one input)}."""
    nets = {
        "ResNet-18": (mgpu.resnet18(), (1, 28, 28)),
        "ResNet-50": (torchvision.models.resnet50(), (3, 224, 224)),
    }
    return {name: (net.to("meta"), shape) for name, (net, shape) in nets.items()}


def configurations():
    """Names of lists of cells, one cell for each bucket size: network/host/link/number of GPUs, with the network
    between nodes before the number where there are several; and network/host for one GPU, which has one cell.
    """
    for network in networks():
        for host in HOSTS:
            yield f"{network}/{host}"
            for link in LINKS:
                yield from (f"{network}/{host}/{link}/{k}" for k in COUNTS if k <= NODE)
                yield from (f"{network}/{host}/{link}/{joint}/{k}" for joint in BETWEEN for k in COUNTS if k > NODE)


def cases():
    return {name: (name,) for name in configurations()}


def recipe():
    return {"gpu": GPU, "images": IMAGES, "hosts": HOSTS, "buckets": BUCKETS}


def record(name, buckets=tuple(BUCKETS)):
    """{"cells": of one configuration, "bytes": of their all-reduces, as text}. See `cell`."""
    network, host, link, *between, k = name.split("/") if name.count("/") > 1 else [*name.split("/"), None, 1]
    net, shape = networks()[network]
    X = torch.empty(IMAGES[network] * int(k), *shape, device="meta")
    joint = {"link": link, "network": between[0] if between else None, "host": HOSTS[host]}
    steps = [
        mgpu.predict(net, X, gpu=GPU, n_gpus=int(k), strategy="ddp", bucket_cap_mb=BUCKETS[bucket], **joint)
        for bucket in (buckets if link else buckets[:1])
    ]
    return {
        "cells": [cell(step) for step in steps],
        "bytes": [" ".join(str(e.nbytes) for e in collectives(step, "all_reduce")) for step in steps],
    }


def collectives(step, name):
    """Those of this name that rank 0 takes part in, in order."""
    return [e for e in step.timeline.on(0) if e.kind == "collective" and e.name == name]


def cell(step):
    """One step of rank 0 as text. Five whole numbers: ticks of 10 ns that it takes; thousandths of it in which kernels
    run, in which it communicates and no kernel runs, and in which there is neither; thousandths of communication that
    are hidden behind kernels. Then what runs when, as `packed` writes it: kernels of the forward pass, of the backward
    pass, of the update; communication that is not hidden; broadcasts of the buffers; all-reduces of the gradients.
    """
    timeline, seconds = step.timeline, step.seconds
    events = timeline.on(0)
    kernels = [e for e in events if e.part != "communication"]
    sent = spans(e for e in events if e.part == "communication")
    alone = without(sent, spans(kernels))
    shares = (timeline.busy(0) / seconds, length(alone) / seconds)
    hidden = timeline.overlap()[0]
    numbers = [round(TICKS * seconds), *(round(1000 * part) for part in (*shares, max(0.0, 1 - sum(shares)), hidden))]
    phases = [[e for e in kernels if phase_of(e) == phase] for phase in ("forward", "backward", "update")]
    drawn = [runs(found, SHORT * seconds) for found in (*map(spans, phases), alone)]
    calls = [[(e.start, e.end) for e in collectives(step, name)] for name in ("broadcast", "all_reduce")]
    return " ".join([*map(str, numbers), *(packed(each, timeline.start) for each in (*drawn, *calls))])


def phase_of(event):
    return event.phase if event.phase in ("forward", "backward") else "update"


def spans(events):
    """Times (start, end) in which at least one of them runs, in order and apart."""
    found = []
    for start, end in sorted((e.start, e.end) for e in events):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(found):
    return sum(end - start for start, end in found)


def without(some, others):
    """What the spans `some` cover and the spans `others` don't."""
    edges = sorted({time for span in chain(some, others) for time in span})
    starts, ends = np.array(edges[:-1]), np.array(edges[1:])
    middles = (starts + ends) / 2
    left = covers(some, middles) & ~covers(others, middles)
    return list(zip(starts[left].tolist(), ends[left].tolist()))


def covers(found, times):
    """Which of the times lie in one of the spans, as booleans."""
    if not found:
        return np.zeros(len(times), dtype=bool)
    starts, ends = np.array(found).T
    place = np.searchsorted(starts, times, side="right") - 1
    return (place >= 0) & (times < ends[np.maximum(place, 0)])


def runs(found, least):
    """Spans less than `least` seconds apart as one run (start, end, seconds of it that they cover)."""
    joined = []
    for start, end in found:
        if joined and start - joined[-1][1] < least:
            joined[-1] = joined[-1][0], end, joined[-1][2] + end - start
        else:
            joined.append((start, end, end - start))
    return joined


def packed(times, begin):
    """Times in order, (start, end) or (start, end, seconds covered), as text: "gap.length.covered" for each, in µs and
    base 36, with commas between; "-" for none. The gap, since the end of the one before, is left out where it is 0, and
    so is what is covered where that is all.
    """
    words, last = [], 0
    for start, end, *covered in times:
        start, end = round(MICRO * (start - begin)), round(MICRO * (end - begin))
        numbers = [start - last, end - start, *(round(MICRO * seconds) for seconds in covered)]
        word = ".".join(np.base_repr(n, 36).lower() for n in numbers[: 2 if numbers[-1] >= numbers[1] else 3])
        words.append(word.removeprefix("0") if start == last else word)
        last = end
    return ",".join(words) or "-"


def sizes(found):
    """{network: [bytes of each all-reduce as text, for each bucket size]}; ValueError if links differ in that."""
    lists = {}
    for name, runs_of in found.items():
        if name.count("/") > 1:
            network = name.split("/")[0]
            if lists.setdefault(network, runs_of["bytes"]) != runs_of["bytes"]:
                raise ValueError(f"{name} has other buckets than the first configuration with {network}")
    return lists


def main():
    found = study.modelled("ddp_step", list(configurations()), record, recipe())
    if found is None:
        return
    written = {
        "gpu": GPU,
        "images": IMAGES,
        "networks": list(networks()),
        "links": LINKS,
        "between": BETWEEN,
        "node": NODE,
        "counts": COUNTS,
        "hosts": HOSTS,
        "buckets": BUCKETS,
        "bytes": sizes(found),
        "cells": {name: each["cells"] for name, each in found.items()},
    }
    study.finish("ddp_step", recipe(), written)


if __name__ == "__main__":
    main()
