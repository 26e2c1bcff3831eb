"""When each kernel and each copy would have run.

Time is kept in queues. Every thread of the host has a time of its own: a call takes some microseconds of it and hands
a kernel over. Every stream of a GPU has one: a kernel starts when it has been handed over and all that lies before it
in its stream is done. A call that needs a result moves the host's time to the stream's. Nothing is measured, so the
same program takes the same time on every computer.
"""

import contextlib
import math
import threading
from threading import get_ident

import torch
from torch import Tensor

from virtual_gpus.clock import costs
from virtual_gpus.clock.rates import HOST, HOST_COPY, PYTHON, THREAD
from virtual_gpus.clock.timeline import Event, Timeline, Totals
from virtual_gpus.errors import check_waiting

NO_TF32 = False, False
PREFETCH = 2  # DataLoader's prefetch_factor
PYTHON_CALLS, CPP_CALLS = (costs.Price._fields.index(name) for name in ("forward", "backward"))
LIMIT = 200_000  # so many events are kept, and so many prices
SYNCHRONIZING = set(
    "nonzero masked_select _unique2 unique_dim unique_consecutive equal allclose bincount repeat_interleave".split()
)


class Host:
    """One thread of the program, and in a backward pass autograd's threads beside it, one for each GPU.

    `factor`: how long its calls take, 1 on the servers that the clock was fitted to. `slowdown`: how much longer that
    is because other threads hold Python's lock.
    """

    def __init__(self, name, now=0.0, factor=1.0, slowdown=1.0):
        self.thread, self.now, self.factor, self.slowdown = name, now, factor, slowdown
        self.engine = None  # in a backward pass: {a GPU's index: the time of the thread that serves it}
        self.ranges = []  # names of the NVTX ranges that are open
        self.recomputing = 0  # how many checkpointed parts are being computed once more, one inside the other
        self.caller = PYTHON_CALLS  # who calls operations: an index of Price
        self.off = False  # while True nothing is booked: somebody else says what it takes
        self.children = 0  # threads that share Python's lock, see ReplicaThread

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
        engine, seconds = self.engine, seconds * self.factor
        if engine is None:
            start = self.now
            self.now = end = start + seconds * self.slowdown
        else:
            start = engine.get(index, self.now)
            engine[index] = end = start + seconds
        return start, end

    @property
    def phase(self):
        if self.recomputing:
            return "recomputation"
        if self.ranges:
            return self.ranges[-1]
        return "backward" if self.engine is not None else "forward" if torch.is_grad_enabled() else ""


class PerThread(threading.local):
    """The host of a thread that has its own, as each ReplicaThread has, on whatever clock it books."""

    host = None


this_thread = PerThread()


@contextlib.contextmanager
def off_the_clock():
    """Inside, nothing that this thread does takes time on any machine's clock, and other threads' times stay theirs."""
    before, this_thread.host = this_thread.host, Host(threading.current_thread().name)
    this_thread.host.off = True
    try:
        yield
    finally:
        this_thread.host = before


class Clock:
    """The times of one machine's hosts and streams, and what happened when."""

    def __init__(self, factor=1.0):
        self.tf32 = None  # whether convolutions, and matrix products, use TF32; None: as PyTorch's switches say
        self.prices = {}  # what `price` says, by the operation and the shapes it is called with
        self.ports = {}  # what a copy occupies at an end, see Topology.way -> when that is free
        self.shared = Host("host", factor=factor)
        self.reproducible = True  # False once something depends on what only real time decides
        self.user, self.user_ident = None, None  # the thread that used the shared host last
        self.dropping = threading.Lock()
        self.forget()

    def host(self):
        """This thread's host. All but the ReplicaThreads share one, as if Python's lock let only one of them work."""
        return this_thread.host or self.shared

    def used_host(self):
        """The same, for what takes its time: when threads share it, real time decides whose call comes first."""
        host = this_thread.host
        if host is None:
            host = self.shared
            if get_ident() != self.user_ident:
                if self.user is not None and self.user.is_alive():
                    self.reproducible = False
                self.user, self.user_ident = threading.current_thread(), get_ident()
        return host

    def forget(self):
        """What was called until now is nobody's concern any more."""
        self.start = self.host().now
        self.events, self.limit = [], LIMIT  # tuples, each to make an Event of: most are never looked at
        self.dropped, self.dropped_until = 0, -math.inf  # how many aren't kept, and when the last of them was called
        self.totals = {}  # {a GPU's index: Totals of those}
        self.pending = {}  # in a dry run, {a collective's work: its start at the earliest}, until it is recorded

    def book(self, gpu, func, args, kwargs, out, key):
        """The operation `func` was called for `gpu` with these (inner) arguments and gave `out`.

        `key` is what its time depends on, as something that a dictionary takes.
        """
        host = self.used_host()
        if host.off:
            return
        price, waits, tf32 = self.prices.get(key) or self.price(gpu, func, args, kwargs, out, key)
        if tf32 is not None and tf32 != (self.tf32 or costs.tf32_allowed()):  # a switch was turned
            price, waits, tf32 = self.price(gpu, func, args, kwargs, out, key)
        called, launched = host.spend(price[host.caller], gpu.index)
        if price.seconds:
            streams, work = gpu.streams, price.work
            stream = streams[0] if len(streams) == 1 else current_stream_of(gpu)
            start, end = stream.enqueue(launched, price.seconds)
            self.record(
                name=work.name,
                kind=work.kind,
                gpu=gpu.index,
                row=stream.name,
                times=(start, end, called, launched),
                thread=host.thread,
                phase=host.phase,
                bound=price.bound,
                nbytes=work.nbytes,
                flops=work.flops,
            )
        if waits:
            self.read(gpu)

    def record(self, name, kind, gpu, row, times, thread, phase, bound, nbytes=0, flops=0):
        """Something has happened, see Event. `times`: its start, end, called and launched."""
        self.events.append((name, kind, gpu, row, *times, thread, phase, nbytes, flops, bound))
        if len(self.events) > self.limit:
            self.drop()

    def drop(self):
        """Keep the newer half of the events, and of the older half what the GPUs did.

        An older one that ends after a newer one has begun is kept, too: what overlaps is added up together. (But of a
        collective of real processes that is waited for so much later what hides it may have been added up before.)
        """
        with self.dropping:
            if len(self.events) <= self.limit:  # another thread was here
                return
            half = len(self.events) // 2
            events = [Event(*values) for values in self.events]
            older, begun = events[:half], min([e.start for e in events[half:]] + list(self.pending.values()))
            done = Timeline([e for e in older if e.end <= begun and e.called >= self.start], None, None)
            self.events[:half] = [e for e in older if e.end > begun]
            for gpu in done.gpus:
                self.totals[gpu] = self.totals.get(gpu, Totals()) + done.totals(gpu)
            self.dropped += len(done)
            self.dropped_until = max([self.dropped_until, *(e.called for e in done)])
            self.limit = len(self.events) + LIMIT // 2

    def since(self, start):
        """The events that were asked for at `start` or later, with times counted from there."""
        events = (Event(*values) for values in self.events[:])
        return [
            e._replace(start=e.start - start, end=e.end - start, called=e.called - start, launched=e.launched - start)
            for e in events
            if e.called >= start
        ]

    def price(self, gpu, func, args, kwargs, out, key):
        """The cost of an operation, whether the host waits for its result, and the TF32 switches that this holds for,
        or None if they don't matter; entered under `key`."""
        spec = gpu.machine.spec
        tf32 = NO_TF32 if spec.tf32 is None else self.tf32 or costs.tf32_allowed()
        price = costs.price(costs.work(func, args, kwargs, out, tf32), spec)
        if len(self.prices) > LIMIT:  # a program with ever new shapes
            self.prices.clear()
        switched = spec.tf32 is not None and price.work.kind in costs.TENSOR
        self.prices[key] = price, waits_for(price.work.name, args), tf32 if switched else None
        return self.prices[key]

    def synchronize(self, gpu, waited_for, latency=0.0):
        """The host waits until these streams of `gpu` have done what they were given."""
        gpu.machine.report()
        until = max((stream.free for stream in waited_for), default=0.0)
        self.wait(gpu, max(until, self.host().time(gpu.index)) + latency)

    def read(self, gpu):
        """The host waits for a value: all that was asked of `gpu` in the current stream, and a short copy."""
        check_waiting(gpu.machine)
        self.synchronize(gpu, [current_stream_of(gpu)], gpu.machine.pcie.latency)

    def wait(self, gpu, time):
        self.used_host().wait(gpu.index, time)

    def copy(self, source, target, nbytes, memory="pageable", non_blocking=False):
        """A copy of `nbytes` from GPU `source` to GPU `target`; None: the host, with a kind of `memory`.

        It runs in the streams of both ends. The host waits for it when one end is its own memory, unless that is
        "pinned" and the caller said `non_blocking`.
        """
        host = self.used_host()
        if host.off:
            return
        gpus, first = [gpu for gpu in (source, target) if gpu is not None], source or target
        streams, peer = [current_stream_of(gpu) for gpu in gpus], len(gpus) == 2
        link, ports = first.machine.topology.way(source and source.number, target and target.number)
        called, launched = host.spend(HOST_COPY, first.index)
        start = max(launched, *(stream.free for stream in streams), *(self.ports.get(port, 0.0) for port in ports))
        end = start + costs.link_seconds(nbytes, link, "peer" if peer else memory)
        for stream in streams:
            stream.free = end
        name, phase = f"copy {name_of(source)} to {name_of(target)}", host.phase
        for gpu, port in zip(gpus, ports, strict=True):
            self.ports[port] = end
            times = start, end, called, launched
            self.record(name, "copy", gpu.index, port[1], times, host.thread, phase, "link", nbytes)
        if not peer and not (memory == "pinned" and non_blocking):
            host.wait(first.index, end)
        elif peer and host.engine is not None:  # the thread that serves the target hears of it now
            host.wait(target.index, launched)

    def kernel(self, gpu, name, seconds):
        """A kernel of so many `seconds` in the current stream of `gpu`, which no operation of PyTorch stands for."""
        host = self.used_host()
        called, launched = host.spend(HOST["pointwise"][0], gpu.index)
        stream = current_stream_of(gpu)
        times = *stream.enqueue(launched, seconds), called, launched
        self.record(name, "pointwise", gpu.index, stream.name, times, host.thread, host.phase, "fixed")

    def collective(self, name, gpus, nbytes, seconds):
        """An operation of all `gpus`, in their current streams: it starts when all are ready and ends at once."""
        host = self.used_host()
        called, launched = host.spend(HOST_COPY * len(gpus), gpus[0].index)
        on = [current_stream_of(gpu) for gpu in gpus]
        start = max(launched, *(stream.free for stream in on))
        times, row = (start, start + seconds, called, launched), "collective"
        for gpu, stream in zip(gpus, on, strict=True):
            stream.free = start + seconds
            self.record(name, row, gpu.index, row, times, host.thread, host.phase, "link", nbytes)
            host.wait(gpu.index, launched)

    def work(self, seconds, name="work"):
        """The host itself does something for so long."""
        host = self.used_host()
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
        self.record(name, "host", None, thread, (start, end, start, end), thread, self.host().phase, "host")

    def off(self):
        """Inside, this thread books nothing."""
        return temporarily(self.host(), off=True)

    @contextlib.contextmanager
    def backward(self):
        """Inside, autograd's engine calls the operations: a thread for each GPU, all waited for at the end."""
        host = self.host()
        if host.engine is not None:  # a backward pass inside another, as that of a part that was computed once more
            with temporarily(host, recomputing=0):
                yield
            return
        host.engine, thread, host.thread = {}, host.thread, f"{host.thread}, backward"
        try:
            with self.in_cpp():
                yield
        finally:
            host.now, host.engine, host.thread = max([host.now, *host.engine.values()]), None, thread

    def in_cpp(self):
        """Inside, C++ calls the operations, which takes less of the host's time than a call from Python."""
        return temporarily(self.host(), caller=CPP_CALLS)


@contextlib.contextmanager
def temporarily(owner, **values):
    """Inside, attributes of `owner` have these values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


class ReplicaThread(threading.Thread):
    """A thread of parallel_apply. Its time branches off from that of the thread that makes it, and joins it again."""

    def __init__(self, clock, target, args):
        super().__init__(target=target, args=args)
        self.clock, self.parent, self.number = clock, clock.host(), args[0]
        self.parent.children += 1

    def start(self):
        self.parent.spend(THREAD, None)
        slowdown = max(1.0, self.parent.children * PYTHON)
        self.host = Host(f"replica {self.number}", self.parent.now, self.parent.factor, slowdown)
        self.host.ranges = list(self.parent.ranges)
        super().start()

    def run(self):
        this_thread.host = self.host
        super().run()

    def join(self, timeout=None):
        super().join(timeout)
        self.parent.now = max(self.parent.now, self.host.now)
        self.parent.children -= 1


def waits_for(name, args):
    """Whether the host needs the result: the size of what comes out depends on values."""
    if name in ("index", "index_put_"):  # a mask is turned into a list of places
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in SYNCHRONIZING


def name_of(gpu):
    return "cpu" if gpu is None else gpu.name


def current_stream_of(gpu):
    return gpu.chosen.stream or gpu.streams[0]
