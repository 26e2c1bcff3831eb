"""Checks for "Where the time goes": a timeline, a trace, a stopwatch, what launching costs, a loop to mend."""

import statistics
import warnings
import weakref
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torchvision
from torch.nn import functional as F

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.models import lenet_module
from mgpu_lib.prediction import predict
from mgpu_lib.recorded import study
from virtual_gpus import virtual_gpus


@exercise
def check_bottleneck(answer):
    """bottleneck(timeline): what costs GPU 0 most of the time, "host", "link", "compute" or "memory"."""
    for program in (products, sums, tiny, copies, hidden, mixed, half, waited):
        timeline = timeline_of(program)
        got, costs = filled(answer(timeline)), costs_of(timeline)
        right, hint = max(costs, key=costs.get), program.__doc__
        expect(isinstance(got, str) and got in costs, f"{hint}: {got!r} is none of {', '.join(costs)}")
        expect(
            program not in (hidden, waited) or got != "link",
            f"{hint}: 'link', but kernels run beside the copies. Only the "
            "communication that overlap() doesn't hide costs time",
        )
        expect(
            program is not half or got == right,
            f"{hint}: {got!r}, but kernels hide only {timeline.overlap()[0]:.0%} of the copies. The rest costs time",
        )
        table = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in costs.items())
        expect(got == right, f"{hint}: {got!r}, and the times are {table}")
    return "eight programs, and each has its bottleneck named"


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


def half(medium, wide, small):
    """two copies of 64 MiB in a second stream, and products and sums beside half of them"""
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        wide.to("cuda:1")
        wide.to("cuda:1")
    for _ in range(12):
        medium @ medium
    for _ in range(9):
        wide + wide


def waited(medium, wide, small):
    """two copies of 64 MiB in a second stream, products beside them, and products that wait for the copies"""
    with torch.cuda.stream(side := torch.cuda.Stream("cuda:0")):
        wide.to("cuda:1")
        wide.to("cuda:1")
    for _ in range(17):
        medium @ medium
    torch.cuda.current_stream("cuda:0").wait_stream(side)
    for _ in range(16):
        medium @ medium


@exercise
def check_first_to_fix(answer):
    """first_to_fix(events): the name of the host's range during which the GPU idles longest; some have no name."""
    real = [(f"{trace['workers']} workers", trace["traceEvents"]) for trace in study("trace_cut")["traces"]]
    for case, events in [("a made-up trace", made_up()), *real]:
        got = filled(answer([dict(event) for event in events]))
        host = {event["name"]: event for event in events if event["cat"] == "Operator"}
        steps = [name for name in host if name.startswith("ProfilerStep")]
        parts = {name: event for name, event in host.items() if name not in steps}
        expect(isinstance(got, str) and got in host, f"{case}: {got!r} is no range of the host: {', '.join(parts)}")
        expect(got not in steps, f"{case}: {got} is the whole step. Which part of it is to blame?")
        idle = {name: idle_in(event, events) for name, event in parts.items()}
        longest, right = max(parts, key=lambda name: parts[name]["dur"]), max(idle, key=idle.get)
        expect(
            got == right or got != longest,
            f"{case}: {got} takes the host longest, but the GPU works in {1 - idle[got] / parts[got]['dur']:.0%} of it",
        )
        expect(
            got == right,
            f"{case}: during {got} the GPU idles {idle[got] / 1e3:.1f} ms, during {right} {idle[right] / 1e3:.1f} ms. "
            "A gap may reach beyond a range, and a range may hold many",
        )
    return "a loader without workers, and then zeros that are written one tensor at a time"


def made_up():
    """A trace of ten events. The GPU works through the longest range, and the longest gap begins in yet another."""
    host = [("ProfilerStep#1", 0, 100), ("load", 0, 12), ("forward", 12, 20), ("backward", 40, 60)]
    gpu = [("early", 0, 5), *(("small", start, 1) for start in (15, 19, 23, 27)), ("long", 31, 66)]
    return [
        {"ph": "X", "cat": cat, "name": name, "pid": cat, "tid": 1, "ts": 1000 * start, "dur": 1000 * length}
        for cat, rows in (("Operator", host), ("Kernel", gpu))
        for name, start, length in rows
    ]


def idle_in(part, events):
    """Microseconds of an event of the host in which no kernel runs; kernels don't overlap."""
    start, end = part["ts"], part["ts"] + part["dur"]
    kernels = [event for event in events if event["cat"] == "Kernel"]
    return part["dur"] - sum(max(0, min(end, k["ts"] + k["dur"]) - max(start, k["ts"])) for k in kernels)


@exercise
def check_step_seconds(answer):
    """step_seconds(step, devices, now): the median of five timed calls, after two that warm up."""
    got, calls = timed(answer)
    times, _ = timed(five)
    right = statistics.median(times)
    seen = f"{1e3 * filled(got):.3f} ms instead of {1e3 * right:.3f} ms"
    expect(calls == 7, f"the step was called {calls} times; two calls warm up, and five are timed")
    for waiting, late in (("nobody", "a GPU"), ("first", "GPU 1"), ("last", "GPU 0")):
        short, _ = timed(partial(five, waiting=waiting))
        expect(
            not near(got, statistics.median(short), statistics.mean(short), sum(short)),
            f"{seen}: {late} is still at work when you look at the clock. Wait for every device, before each reading",
        )
    left, _ = timed(partial(five, before=False))
    expect(
        not near(got, statistics.median(left)),
        f"{seen}: the first call that you time pays for what is left of the warm-up. Wait before that reading, too",
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
    """Two GPUs with unequal work. The first two calls are slow, and so is the fifth, when the host is disturbed.

    The timed calls take unequal times, and only in the last of them GPU 0 is busy for longer than GPU 1. So the median
    moves if a stopwatch leaves out one of the GPUs, or counts what is left of the warm-up.
    """

    WORK = ((1, 8), (1, 8), (1, 2), (1, 4), (1, 1), (1, 5), (6, 3))  # large products of each call, on each GPU

    def __init__(self, machine):
        self.machine, self.calls = machine, 0
        self.matrices = [torch.empty(2048, 2048, device=device) for device in machine.devices]

    def __call__(self):
        if self.calls in (0, 1, 4):
            self.machine.clock.host_work(0.02, "disturbed")
        for matrix, products in zip(self.matrices, self.WORK[self.calls % 7]):
            for _ in range(products):
                matrix @ matrix
        self.calls += 1


def five(step, devices, now, waiting="all", before=True):
    """The seconds of five calls, when `waiting` for all GPUs, the first, the last, or nobody, also `before` a call."""
    synchronized = {"all": devices, "first": devices[:1], "last": devices[-1:], "nobody": []}[waiting]
    seconds = []
    for _ in range(7):
        for device in synchronized if before else []:
            torch.cuda.synchronize(device)
        start = now()
        step()
        for device in synchronized if before or len(seconds) > 1 else []:
            torch.cuda.synchronize(device)
        seconds.append(now() - start)
    return seconds[2:]


def near(got, *others):
    return any(abs(got - other) < 0.01 * other for other in others)


def step_that_waits_for_a_copy(host):
    """GPU 0 adds what GPU 1 computes, then a hundred small tensors."""
    with virtual_gpus(2, "H100", backing="meta", host=host) as machine:
        here, there, small = (torch.empty(n, n, device=f"cuda:{gpu}") for n, gpu in ((2048, 0), (2048, 1), (32, 0)))
        start = machine.elapsed()
        here + (there @ there).to("cuda:0")
        torch.cuda.synchronize("cuda:0")
        for _ in range(100):
            small + small
        torch.cuda.synchronize("cuda:0")
        return SimpleNamespace(seconds=machine.elapsed() - start, timeline=machine.timeline.since(start))


@exercise
def check_gain_without_host(answer):
    """gain_without_host(step): how many times as fast a step gets when launching costs nothing."""
    lenet, images = lenet_module(), torch.empty(256, 1, 28, 28, device="meta")
    resnet, photos = torchvision.models.resnet50().to("meta"), torch.empty(64, 3, 224, 224, device="meta")
    gains = []
    for name, run in [
        ("LeNet", partial(predict, lenet, images, "H100", precision="default")),
        ("LeNet in bf16", partial(predict, lenet, images, "H100", precision="bf16")),
        ("ResNet-50", partial(predict, resnet, photos, "H100", precision="default")),
        ("a step that waits for another GPU's copy", step_that_waits_for_a_copy),
    ]:
        step, bare = run(host=0.5), run(host=1e-6)
        right, got = step.seconds / bare.seconds, filled(answer(step))
        seen = f"{name}: you predict {got:.2f} times as fast, the clock without the host says {right:.2f}"
        waits = step.timeline.waiting_for_host(0) / step.seconds
        expect(got >= 0.99, f"{seen}. Which of the two times is longer?")
        expect(right < 1.05 or abs(got - 1 - waits) > 0.005, f"{seen}. The gain is a ratio of two times, not a share")
        expect(abs(got / right - 1) < 0.05, f"{seen}. The GPU's work stays; only its waiting for the host goes")
        gains.append(f"{right:.1f}")
    return f"{', '.join(gains[:-1])} and {gains[-1]} times as fast: graphs pay where the GPU waits for launches"


@exercise
def check_epoch_loss(answer):
    """epoch_loss(net, optimizer, batches, device): trains on all batches, returns the mean of their losses."""
    right, got = (mended_run(program) for program in (right_epoch, answer))
    loss = filled(got.loss)
    expect(isinstance(loss, float), f"return a float, not a {type(loss).__name__}: read it once, at the end")
    expect(abs(loss - right.loss) < 1e-4, f"the mean loss is {loss:.4f}; the program as it was has {right.loss:.4f}")
    expect(
        got.kept <= 1,
        f"the graphs of {got.kept} steps are kept: a sum of losses has them all as its history. Add up loss.detach()",
    )
    same = all(abs(a - b) < 1e-5 for a, b in zip(got.weight, right.weight))
    expect(same, "the network ends with other weights: train as before")
    expect(
        not got.synchronized, f"synchronize() is called {got.synchronized} times: the queue is empty after each of them"
    )
    expect(
        got.waits_on_gpu <= 1, f"the host reads a value from the GPU {got.waits_on_gpu} times. Add up there, read once"
    )
    expect(
        got.waits <= 1,
        f"the host waits for {got.waits - got.waits_on_gpu} copies to the GPU. The memory is pinned: non_blocking=True",
    )
    gain = mended_run(broken_epoch).seconds / got.seconds
    return f"{gain:.2f} times as fast, and the same loss up to rounding"


class Run(NamedTuple):
    """What became of an epoch, how often the host waited, with batches in pinned memory and on the GPU, and for how
    many steps autograd kept the graph at once."""

    loss: float
    weight: list
    seconds: float
    synchronized: int
    waits: int
    waits_on_gpu: int
    kept: int


def mended_run(program):
    """The Run of `program(net, optimizer, batches, device)` with LeNet, six batches of 64, on an A100."""
    found = []
    for where in ("pinned", "on the GPU"):
        with virtual_gpus(1, "A100-80", host=0.5) as machine, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            net, graphs = lenet_module().to("cuda"), Graphs()
            net.register_forward_hook(graphs)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            batches = [(torch.rand(64, 1, 28, 28), torch.randint(10, (64,))) for _ in range(6)]
            place = torch.Tensor.pin_memory if where == "pinned" else torch.Tensor.cuda
            batches = [(place(X), place(y)) for X, y in batches]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
            start, synchronize = machine.elapsed(), torch.cuda.synchronize
            with mock.patch.object(torch.cuda, "synchronize", side_effect=synchronize) as called:
                loss = program(net, optimizer, batches, machine.devices[0])
            waits = sum("synchronizing" in str(w.message) for w in warned)
            torch.cuda.set_sync_debug_mode("default")
            synchronize()
            seconds = machine.elapsed() - start
            weight = list(net.parameters())[-1].detach().cpu().tolist()
        found.append((loss, weight, seconds, called.call_count, waits))
    return Run(*found[0], found[1][-1], graphs.most)


class Graphs:
    """A forward hook that counts the graphs of earlier calls that are still alive; `most` is the largest number."""

    def __init__(self):
        self.alive, self.most = weakref.WeakSet(), 0

    def __call__(self, module, args, output):
        self.most = max(self.most, len(self.alive))
        return Mark.apply(output, self.alive)


class Mark(torch.autograd.Function):
    """Changes nothing, and puts into `alive` what lives as long as its node of the graph."""

    @staticmethod
    def forward(ctx, X, alive):
        ctx.node = Node()
        alive.add(ctx.node)
        return X.view_as(X)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Node:
    """Something that a weak reference can refer to."""


def broken_epoch(net, optimizer, batches, device):
    """The chapter's program: it waits three times a step, and for copies."""
    total = 0.0
    for X, y in batches:
        loss = F.cross_entropy(net(X.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        total += loss.item()
    return total / len(batches)


def right_epoch(net, optimizer, batches, device):
    """The same without waiting."""
    total = torch.zeros((), device=device)
    for X, y in batches:
        X, y = X.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = F.cross_entropy(net(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total.item() / len(batches)
