"""When each kernel and each copy would have run.

Time is kept in queues. Every thread of the host has a time of its own: a call takes some microseconds of it and hands
a kernel over. Every stream of a GPU has one: a kernel starts when it has been handed over and all that lies before it
in its stream is done. A call that needs a result moves the host's time to the stream's. Nothing is measured, so the
same program takes the same time on every computer.
"""
import contextlib
import threading
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from . import costs, streams
from .rates import HOST_COPY, PYTHON, THREAD

NO_TF32 = False, False
PREFETCH = 2  # DataLoader's prefetch_factor
LIMIT = 200_000  # events that are kept; older ones are forgotten
SYNCHRONIZING = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "allclose",
                 "bincount", "repeat_interleave"}


class Event(NamedTuple):
    """One kernel, copy or collective operation on one GPU, or work of the host. Times in seconds."""

    name: str
    kind: str        # a key of rates.HOST, or "copy", "collective", "host"
    gpu: int | None  # None: the host
    row: str         # "default", "stream 1", ..., "copy in", "copy out", "collective", or the host's thread
    start: float
    end: float
    called: float    # when the host began to hand it over
    launched: float  # when it was handed over
    thread: str      # the host's thread that did so
    phase: str       # the innermost NVTX range; without one "backward", "forward" (autograd records), or ""
    nbytes: int
    flops: int
    bound: str       # what it spends most of its time on: "compute", "memory", "fixed", or "link"


class Host:
    """One thread of the program, and in a backward pass autograd's threads beside it, one for each GPU.

    `slowdown`: how much longer its calls take, because other threads hold Python's lock.
    """

    def __init__(self, name, now=0.0, slowdown=1.0):
        self.thread, self.now, self.slowdown = name, now, slowdown
        self.engine = None  # in a backward pass: {a GPU's index: the time of the thread that serves it}
        self.ranges = []    # names of the NVTX ranges that are open
        self.off = False    # while True nothing is booked: somebody else says what it takes
        self.children = 0   # threads that share Python's lock, see ReplicaThread

    def time(self, index):
        """What this host's clock says, seen from GPU `index`."""
        return self.now if self.engine is None else self.engine.get(index, self.now)

    def wait(self, index, time):
        if self.engine is None:
            self.now = max(self.now, time)
        else:
            self.engine[index] = max(self.time(index), time)

    def spend(self, seconds, index):
        """Work for `seconds` on behalf of GPU `index`: from when to when."""
        engine = self.engine
        if engine is None:
            start = self.now
            self.now = end = start + seconds * self.slowdown
        else:
            start = engine.get(index, self.now)
            engine[index] = end = start + seconds
        return start, end

    @property
    def phase(self):
        if self.ranges:
            return self.ranges[-1]
        return "backward" if self.engine is not None else "forward" if torch.is_grad_enabled() else ""


class PerThread(threading.local):
    """The host of a thread that has its own, as each ReplicaThread has, on whatever clock it books."""

    host = None


this_thread = PerThread()


class Clock:
    """The times of one machine's hosts and streams, and what happened when."""

    def __init__(self, spec, link, pcie):
        self.spec, self.link, self.pcie = spec, link, pcie
        self.events = deque(maxlen=LIMIT)  # what makes an Event, and its arguments: most are never looked at
        self.tf32 = None  # whether convolutions, and matrix products, use TF32; None: as PyTorch's switches say
        self.prices = {}  # what an operation costs, by the operation and the shapes it is called with
        self.ports = {}   # (a link's key, GPU, "copy in" or "copy out") -> when it is free
        self.shared = Host("host")

    def host(self):
        """This thread's host. All but the ReplicaThreads share one, as if Python's lock let only one of them work."""
        return this_thread.host or self.shared

    def book(self, gpu, func, args, kwargs, out, key):
        """The operation `func` was called for `gpu` with these (inner) arguments and gave `out`.

        `key` is what its time depends on, as something that a dictionary takes.
        """
        host = this_thread.host or self.shared
        if host.off:
            return
        if self.spec.tf32 is not None:
            key = key, self.tf32 or costs.tf32_allowed()
        price, waits = self.prices.get(key) or self.price(func, args, kwargs, out, key)
        called, launched = host.spend(price.forward if host.engine is None else price.backward, gpu.index)
        if price.seconds:
            stream = gpu.chosen.stream or gpu.streams[0]
            start = stream.free if stream.free > launched else launched
            end = start + price.seconds
            if len(gpu.streams) > 1:
                end = beside_others(gpu, stream, start, price.seconds)
            stream.free = end
            stream.recent.append((start, end))
            self.events.append((kernel_event, price, gpu.index, stream.name, start, end, called, launched, host.thread,
                                host.phase))
        if waits:
            self.read(gpu)

    def since(self, start):
        """The events that were asked for at `start` or later, with times counted from there."""
        events = (make(*values) for make, *values in list(self.events))
        return [e._replace(start=e.start - start, end=e.end - start, called=e.called - start,
                           launched=e.launched - start) for e in events if e.called >= start]

    def price(self, func, args, kwargs, out, key):
        """The cost of an operation, and whether the host waits for its result; entered under `key`."""
        tf32 = NO_TF32 if self.spec.tf32 is None else key[1]
        price = costs.price(costs.work(func, args, kwargs, out, tf32), self.spec)
        if len(self.prices) > LIMIT:  # a program with ever new shapes
            self.prices.clear()
        self.prices[key] = price, waits_for(price.work.name, args)
        return self.prices[key]

    def synchronize(self, gpu, waited_for, latency=0.0):
        """The host waits until these streams of `gpu` have done what they were given."""
        until = max((stream.free for stream in waited_for), default=0.0)
        self.wait(gpu, max(until, self.host().time(gpu.index)) + latency)

    def read(self, gpu):
        """The host waits for a value: all that was asked of `gpu` in the current stream, and a short copy."""
        self.synchronize(gpu, [streams.current_stream_of(gpu)], self.pcie.latency)

    def wait(self, gpu, time):
        self.host().wait(gpu.index, time)

    def copy(self, source, target, nbytes, pinned=False, non_blocking=False):
        """A copy of `nbytes` from GPU `source` to GPU `target`; None: the host, whose memory may be `pinned`.

        It runs in the streams of both ends. The host waits for it when one end is its own memory, unless that is pinned
        and the caller said `non_blocking`.
        """
        host = self.host()
        if host.off:
            return
        ends = [(gpu, row) for gpu, row in ((source, "copy out"), (target, "copy in")) if gpu is not None]
        called, start = host.spend(HOST_COPY, ends[0][0].index)
        launched = start
        link, way = (self.link, "peer") if len(ends) == 2 else (self.pcie, "pinned" if pinned else "pageable")
        for gpu, row in ends:
            start = max(start, streams.current_stream_of(gpu).free, self.ports.get((link.key, gpu.index, row), 0.0))
        end = start + costs.link_seconds(nbytes, link, way)
        name, phase = f"copy {name_of(source)} to {name_of(target)}", host.phase
        for gpu, row in ends:
            streams.current_stream_of(gpu).free = self.ports[link.key, gpu.index, row] = end
            self.events.append((Event, name, "copy", gpu.index, row, start, end, called, launched, host.thread, phase,
                                nbytes, 0, "link"))
        if len(ends) == 1 and not (pinned and non_blocking):
            host.wait(ends[0][0].index, end)
        elif len(ends) == 2 and host.engine is not None:  # the thread that serves the target hears of it now
            host.wait(target.index, launched)

    def collective(self, name, gpus, nbytes, seconds):
        """An operation of all `gpus`, in their current streams: it starts when all are ready and ends at once."""
        host = self.host()
        called, launched = host.spend(HOST_COPY * len(gpus), gpus[0].index)
        on = [streams.current_stream_of(gpu) for gpu in gpus]
        start = max(launched, *(stream.free for stream in on))
        for gpu, stream in zip(gpus, on, strict=True):
            stream.free = start + seconds
            self.events.append((Event, name, "collective", gpu.index, "collective", start, stream.free, called,
                                launched, host.thread, host.phase, nbytes, 0, "link"))
            host.wait(gpu.index, launched)

    def work(self, seconds, name="work"):
        """The host itself does something for so long."""
        host = self.host()
        start, host.now = host.now, host.now + seconds
        self.host_event(name, host.thread, start, host.now)

    def load(self, batches, seconds, workers):
        """Yield `batches`. Each takes `seconds` of this thread, or of one of `workers` processes in turn.

        As in a DataLoader every worker is at most two batches ahead.
        """
        free = [self.host().now] * workers
        asked_for = free * PREFETCH  # when the i-th batch was asked for
        for i, batch in enumerate(batches):
            if workers == 0:
                self.work(seconds, "load a batch")
            else:
                start = max(free[i % workers], asked_for[i])
                free[i % workers] = start + seconds
                self.host_event("load a batch", f"worker {i % workers}", start, start + seconds)
                self.host().now = max(self.host().now, start + seconds)
                asked_for.append(self.host().now)
            yield batch

    def host_event(self, name, thread, start, end):
        self.events.append((Event, name, "host", None, thread, start, end, start, end, thread, self.host().phase, 0, 0,
                            "host"))

    @contextlib.contextmanager
    def off(self):
        """Inside, this thread books nothing."""
        host = self.host()
        before, host.off = host.off, True
        try:
            yield
        finally:
            host.off = before

    @contextlib.contextmanager
    def backward(self):
        """Inside, autograd's engine calls the operations: a thread for each GPU, all waited for at the end."""
        host = self.host()
        if host.engine is not None:  # a backward pass inside another
            yield
            return
        host.engine, thread, host.thread = {}, host.thread, f"{host.thread}, backward"
        try:
            yield
        finally:
            host.now, host.engine, host.thread = max([host.now, *host.engine.values()]), None, thread


class ReplicaThread(threading.Thread):
    """A thread of parallel_apply. Its time branches off from that of the thread that makes it, and joins it again."""

    def __init__(self, clock, target, args):
        super().__init__(target=target, args=args)
        self.clock, self.parent, self.number = clock, clock.host(), args[0]
        self.parent.children += 1

    def start(self):
        self.parent.spend(THREAD, None)
        self.host = Host(f"replica {self.number}", self.parent.now, max(1.0, self.parent.children * PYTHON))
        self.host.ranges = list(self.parent.ranges)
        super().start()

    def run(self):
        this_thread.host = self.host
        super().run()

    def join(self, timeout=None):
        super().join(timeout)
        self.parent.now = max(self.parent.now, self.host.now)
        self.parent.children -= 1


def kernel_event(price, gpu, row, start, end, called, launched, thread, phase):
    work = price.work
    return Event(work.name, work.kind, gpu, row, start, end, called, launched, thread, phase, work.nbytes, work.flops,
                 price.bound)


def waits_for(name, args):
    """Whether the host needs the result: the size of what comes out depends on values."""
    if name in ("index", "index_put_"):  # a mask is turned into a list of places
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in SYNCHRONIZING


def beside_others(gpu, stream, start, seconds):
    """When a kernel of `stream` that begins at `start` ends: other streams' kernels take from it what runs beside it.

    Those were given to the GPU before and keep their times, so that the work of all together takes as long as it would
    one after the other.
    """
    end = start + seconds
    for busy, until in sorted(i for other in gpu.streams if other is not stream for i in other.recent if i[1] > start):
        if busy >= end:
            break
        end += min(until, end) - max(busy, start)
    return end


def name_of(gpu):
    return "cpu" if gpu is None else gpu.name
