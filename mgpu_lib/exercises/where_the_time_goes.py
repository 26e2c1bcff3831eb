"""Checks for "Where the time goes": gaps and bottlenecks on a timeline, timing a step, where GPUs or workers pay."""

import math
import statistics
from functools import cache, partial
from typing import NamedTuple

import torch

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.prediction import predict
from mgpu_lib.timing import Timer
from mgpu_lib.traffic import networks
from virtual_gpus import virtual_gpus

SIZES = [2**n for n in range(5, 14)]  # 32, 64, ..., 8192


class Span(NamedTuple):
    """What counts of an event for a gap."""

    start: float
    end: float


@exercise
def check_longest_gap(answer):
    """longest_gap(events): the longest time between the first start and the last end in which none of them runs."""
    for times, right, why in [
        ([(0, 2), (3, 4), (6, 7)], 2, "from 4 to 6 nothing runs"),
        ([(5, 6), (8, 9)], 2, "the time before the first event is no gap"),
        ([(6, 7), (0, 2), (3, 4)], 2, "they come in no order: sort them by their start"),
        ([(0, 10), (1, 2), (12, 13)], 2, "an event may run inside a longer one: remember the latest end so far"),
        ([(0, 3), (1, 4), (4, 5)], 0, "something runs all the time"),
        ([(3, 9)], 0, "one event has no gap"),
    ]:
        gap = filled(answer([Span(float(start), float(end)) for start, end in times]))
        expect(abs(gap - right) < 1e-9, f"events {times}: {gap:g} instead of {right}; {why}")
    timeline = predict(networks()["LeNet"], torch.empty(256, 1, 28, 28, device="meta"), "V100", n_gpus=4).timeline
    gaps = [answer(timeline.on(gpu)) for gpu in timeline.gpus]
    return f"in LeNet's step on four V100 the longest gaps are {', '.join(f'{1e6 * gap:.0f}' for gap in gaps)} µs"


@exercise
def check_bottleneck(answer):
    """bottleneck(timeline): what costs GPU 0 most of the time, "host", "link", "compute" or "memory"."""
    for program in (products, sums, tiny, copies, hidden, mixed):
        timeline = timeline_of(program)
        got, costs = filled(answer(timeline)), costs_of(timeline)
        right, hint = max(costs, key=costs.get), program.__doc__
        expect(isinstance(got, str) and got in costs, f"{hint}: {got!r} is none of {', '.join(costs)}")
        expect(
            program is not hidden or got != "link",
            f"{hint}: 'link', but kernels run beside the copies. Only the "
            "communication that overlap() doesn't hide costs time",
        )
        table = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in costs.items())
        expect(got == right, f"{hint}: {got!r}, and the times are {table}")
    return "six programs, and each has its bottleneck named"


def costs_of(timeline):
    """Seconds that each of the four costs GPU 0."""
    bound, communication = timeline.bound_by(0), timeline.communication(0)
    return {
        "host": timeline.waiting_for_host(0) + bound.get("fixed", 0.0),
        "link": communication * (1 - timeline.overlap()[0]),
        "compute": bound.get("compute", 0.0),
        "memory": bound.get("memory", 0.0),
    }


def timeline_of(program):
    """What `program` does on two V100 with PCIe."""
    with virtual_gpus(2, "V100", "pcie", backing="meta") as machine:
        tensors = [torch.empty(n, n, device="cuda:0") for n in (1024, 4096, 32)]
        start = machine.elapsed()
        program(*tensors)
        return machine.timeline.since(start)


def products(medium, wide, small):
    """ten products of 1024 × 1024"""
    for _ in range(10):
        medium @ medium


def sums(medium, wide, small):
    """ten sums of 4096 × 4096"""
    for _ in range(10):
        wide + wide


def tiny(medium, wide, small):
    """fifty sums of 32 × 32"""
    for _ in range(50):
        small + small


def copies(medium, wide, small):
    """a copy of 64 MiB to GPU 1 and one sum"""
    wide.to("cuda:1")
    wide + wide


def mixed(medium, wide, small):
    """fifty sums of 32 × 32 and three of 4096 × 4096"""
    for _ in range(50):
        small + small
    for _ in range(3):
        wide + wide


def hidden(medium, wide, small):
    """two copies of 64 MiB in a second stream, beside products and sums"""
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        wide.to("cuda:1")
        wide.to("cuda:1")
    for _ in range(36):
        medium @ medium
    for _ in range(20):
        wide + wide


@exercise
def check_smallest_batch(answer):
    """smallest_batch(time): from which batch of 32, 64, ..., 8192 on two GPUs are 1.5 times as fast as one, or 0."""
    for costs in [(1e-3, 1e-4, 2.9e-3), (2e-3, 1e-5, 1e-3), (1e-3, 1e-4, 0.0), (1e-4, 1e-5, 1.0)]:
        time = partial(step_time, *costs)
        got, right = answer(time), pays_from(time)
        case = "host {:g} s per GPU, {:g} s per image, {:g} s to send".format(*costs)
        expect(got is not None or right, f"{case}: two GPUs are never 1.5 times as fast; return 0 then")
        case += f": {filled(got)!r} instead of {right}"
        if got != right:
            expect(got != faster_from(time), f"{case}: there two GPUs are faster, but not 1.5 times as fast")
            expect(
                got not in (right / 2, pays_weakly(time)),
                f"{case}: is that the shard of each GPU? Both times are "
                "for the same batch, the one of all GPUs together",
            )
            expect(False, case)
    lenet = networks()["LeNet"]

    @cache
    def modelled(k, batch):
        return predict(lenet, torch.empty(batch, 1, 28, 28, device="meta"), "V100", n_gpus=k).seconds

    got, right = answer(modelled), pays_from(modelled)
    expect(got == right, f"LeNet, by hand, on V100: {got!r} instead of {right}")
    return f"by hand, LeNet needs {right} images before a second V100 pays"


def step_time(host, image, send, k, batch):
    """Seconds of a step of `k` GPUs, where the slower of host and GPUs decides."""
    return max(host * k, image * batch / k) + send * (k - 1)


def pays_from(time):
    return next((batch for batch in SIZES if time(1, batch) >= 1.5 * time(2, batch)), 0)


def pays_weakly(time):
    """The wrong answer of somebody who gives the second GPU a batch of its own."""
    return next((batch for batch in SIZES if 2 * time(1, batch) >= 1.5 * time(2, 2 * batch)), 0)


def faster_from(time):
    return next((batch for batch in SIZES if time(1, batch) > time(2, batch)), 0)


@exercise
def check_step_seconds(answer):
    """step_seconds(step, devices, now): the median of five timed calls, after two that warm up."""
    got, calls = timed(answer)
    times, _ = timed(five)
    right = statistics.median(times)
    seen = f"{1e3 * filled(got):.3f} ms instead of {1e3 * right:.3f} ms"
    expect(calls == 7, f"the step was called {calls} times; two calls warm up, and five are timed")
    for waiting in ("nobody", "current"):
        short, _ = timed(partial(five, waiting=waiting))
        expect(
            not near(got, statistics.median(short), statistics.mean(short), sum(short)),
            f"{seen}: GPU 1 is still at work when you look at the clock. Synchronize every device, before each reading",
        )
    expect(not near(got, sum(times)), f"{seen}: that is the time of all five calls")
    expect(not near(got, statistics.mean(times)), f"{seen}: that is the mean, and one call was disturbed")
    expect(not near(got, max(times)), f"{seen}: that is the slowest call: a cold one, or the disturbed one")
    expect(near(got, right), f"{seen}: read the clock before and after each of the five calls, and warm up before them")
    return f"{1e3 * right:.3f} ms, although the first two calls and one more take longer"


def timed(measure):
    """What `measure(step, devices, now)` returns, and how often it called the step."""
    with virtual_gpus(2, "V100", backing="meta") as machine:
        step = Step(machine)
        return measure(step, machine.devices, machine.elapsed), step.calls


class Step:
    """Two GPUs with unequal work. The first two calls are slow, and so is the fifth, when the host is disturbed."""

    def __init__(self, machine):
        self.machine, self.calls = machine, 0
        self.small, self.large = (torch.empty(n, n, device=device) for n, device in zip((64, 2048), machine.devices))

    def __call__(self):
        if self.calls in (0, 1, 4):
            self.machine.clock.host_work(0.02, "disturbed")
        self.calls += 1
        self.small @ self.small
        self.large @ self.large


def five(step, devices, now, waiting="all"):
    """The seconds of five calls, when `waiting` for all GPUs, the current one, or nobody."""
    synchronized = {"all": devices, "current": devices[:1], "nobody": []}[waiting]
    seconds = []
    for _ in range(7):
        for device in synchronized:
            torch.cuda.synchronize(device)
        start = now()
        step()
        for device in synchronized:
            torch.cuda.synchronize(device)
        seconds.append(now() - start)
    return seconds[2:]


def near(got, *others):
    return any(abs(got - other) < 0.01 * other for other in others)


@exercise
def check_workers_needed(answer):
    """workers_needed(loading, step): the least number of workers with which the GPUs never wait for a batch."""
    for loading, step in [(0.010, 0.003), (0.016, 0.004), (0.001, 0.005), (0.008, 0.008)]:
        got, right = filled(answer(loading, step)), max(1, math.ceil(loading / step))
        case = f"loading {1e3 * loading:g} ms, step {1e3 * step:g} ms: {got!r} instead of {right}"
        expect(got != 0, f"{case}; without a worker loading and step take turns")
        expect(got != right - 1, f"{case}; that many prepare less than one batch per step. Round up")
        expect(got != right + 1, f"{case}; a loader exactly as fast as the step is fast enough")
        expect(got == right, f"{case}; n workers have a batch ready every loading / n seconds")
    slow = per_batch(0.010, 0.003, workers=3)
    return f"with 10 ms to load, 4 workers keep up with a step of 3 ms, and 3 make it {1e3 * slow:.1f} ms"


def per_batch(loading, step, workers):
    """Modelled seconds per batch in the long run."""
    with virtual_gpus(1) as machine:
        times = []
        for _ in machine.loading(range(40), loading, workers):
            machine.clock.host_work(step)
            times.append(Timer(machine.devices).now())
    return (times[-1] - times[3]) / (len(times) - 4)
