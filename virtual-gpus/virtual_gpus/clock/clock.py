"""When each kernel and each copy would have run.

Time is kept in queues. Every thread of the host has a time of its own (see `host`): a call takes some microseconds of
it and launches a kernel. Every stream of a GPU has one (see `streams`): a kernel starts when it has been launched and
all that was enqueued in its stream before is done. A call that needs a result moves the host's time to the stream's.
Nothing is measured, so the same program takes the same time on every computer.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from virtual_gpus.clock import costs
from virtual_gpus.clock.events import EventLog
from virtual_gpus.clock.host import Host, Launch, temporarily, this_thread
from virtual_gpus.clock.rates import HOST, HOST_COPY, NEWEST, TENSOR
from virtual_gpus.clock.streams import Stream, current_stream_of
from virtual_gpus.clock.work import tf32_allowed, work_of
from virtual_gpus.compat import OpOverload
from virtual_gpus.errors import check_waiting

if TYPE_CHECKING:
    from virtual_gpus.gpu import VirtualGPU

PREFETCH = 2  # DataLoader's prefetch_factor
MAX_COSTS = 200_000  # that are kept
SYNCHRONIZING = set(
    "nonzero masked_select _unique2 unique_dim unique_consecutive equal allclose bincount repeat_interleave".split()
)


class Clock:
    """The times of one machine's hosts and streams, and what happened when.

    tf32          (convolutions, matrix products): whether they use TF32; None: as PyTorch's switches say
    software      the year of the software whose kernels run, a key of rates.SOFTWARE
    shared        the Host of all threads but ReplicaThreads
    log           the EventLog since the last `reset`
    reproducible  False once something depends on what only real time decides
    """

    def __init__(self, factor: float = 1.0, software: str = NEWEST):
        self.software = software
        self.tf32: tuple[bool, bool] | None = None
        self.costs: dict[Hashable, tuple[costs.Cost, bool, tuple[bool, bool] | None]] = {}  # see `cost_of`
        self.ports: dict[tuple, float] = {}  # what a copy occupies at an end, see Topology.path: until when
        self.shared = Host("host", factor=factor)
        self.reproducible = True
        self.user: threading.Thread | None = None  # that used the shared host last
        self.user_ident: int | None = None
        self.reset()

    def host(self) -> Host:
        """This thread's host. All but the ReplicaThreads share one, as if the GIL let only one of them work."""
        return this_thread.host or self.shared

    def host_in_use(self) -> Host:
        """The same, for what takes its time: when threads share it, real time decides whose call comes first."""
        host = this_thread.host
        if host is None:
            host = self.shared
            if get_ident() != self.user_ident:
                if self.user is not None and self.user.is_alive():
                    self.reproducible = False
                self.user, self.user_ident = threading.current_thread(), get_ident()
        return host

    def reset(self) -> None:
        """Forget the events until now; times go on."""
        self.log = EventLog(self.host().now)

    def record_op(
        self, gpu: "VirtualGPU", func: OpOverload, args: Sequence, kwargs: dict | None, out: Any, key: Hashable
    ) -> None:
        """The operation `func` was called for `gpu` with these (inner) arguments and gave `out`.

        `key` is what its time depends on: the operation and the shapes that it is called with.
        """
        host = self.host_in_use()
        if host.paused:
            return
        cost, waits, tf32 = self.costs.get(key) or self.cost_of(gpu, func, args, kwargs, out, key)
        if tf32 is not None and tf32 != (self.tf32 or tf32_allowed()):  # a switch was turned
            cost, waits, tf32 = self.cost_of(gpu, func, args, kwargs, out, key)
        called, launched = host.advance(cost.from_cpp if host.in_cpp else cost.from_python, gpu.index)
        if cost.seconds and (gpu.machine.capture is None or gpu.capturing() is None):  # what is captured runs later
            streams, work = gpu.streams, cost.work
            stream = streams[0] if len(streams) == 1 else current_stream_of(gpu)
            start, end = stream.enqueue(launched, cost.seconds, cost.beside)
            launch = called, launched, host.thread, host.phase
            self.log.record(
                launch, work.name, work.kind, gpu.index, stream.name, start, end, cost.bound, work.nbytes, work.flops
            )
        if waits:
            self.wait_for_value(gpu)

    def cost_of(
        self, gpu: "VirtualGPU", func: OpOverload, args: Sequence, kwargs: dict | None, out: Any, key: Hashable
    ) -> tuple[costs.Cost, bool, tuple[bool, bool] | None]:
        """The Cost of an operation, whether the host waits for its result, and the TF32 switches that this holds for,
        or None if they don't matter; kept under `key`."""
        spec = gpu.machine.spec
        tf32 = (False, False) if spec.tf32 is None else self.tf32 or tf32_allowed()
        cost = costs.cost(work_of(func, args, kwargs, out, tf32), spec, self.software)
        if len(self.costs) > MAX_COSTS:  # a program with ever new shapes
            self.costs.clear()
        switched = spec.tf32 is not None and cost.work.kind in TENSOR
        self.costs[key] = cost, waits_for(cost.work.name, args), tf32 if switched else None
        return self.costs[key]

    def synchronize(self, gpu: "VirtualGPU", streams: Iterable[Stream], latency: float = 0.0) -> None:
        """The host waits until these `streams` of `gpu` are done, and `latency` seconds more."""
        if gpu.machine.capture is not None:
            gpu.machine.capture.check_waiting(streams)
        gpu.machine.raise_assert()
        until = max((stream.done_at for stream in streams), default=0.0)
        self.wait(gpu, max(until, self.host().time(gpu.index)) + latency)

    def wait_for_value(self, gpu: "VirtualGPU") -> None:
        """The host waits for a value: all that was enqueued in the current stream of `gpu`, and a short copy."""
        check_waiting(gpu.machine)
        self.synchronize(gpu, [current_stream_of(gpu)], gpu.machine.pcie.latency)

    def wait(self, gpu: "VirtualGPU", time: float) -> None:
        """The host waits until `time`, for `gpu`."""
        self.host_in_use().wait(gpu.index, time)

    def copy(
        self, source: "VirtualGPU | None", target: "VirtualGPU | None", nbytes: int, memory: str, non_blocking: bool
    ) -> None:
        """A copy of `nbytes` from GPU `source` to GPU `target`; None: the host, with a kind of `memory`.

        It runs in the streams of both ends. The host waits for it when one end is its own memory, unless that is
        "pinned" and the caller said `non_blocking`.
        """
        host = self.host_in_use()
        if host.paused:
            return
        first, peer = source or target, source is not None and target is not None
        streams = [current_stream_of(gpu) for gpu in (source, target) if gpu is not None]
        numbers = None if source is None else source.number, None if target is None else target.number
        link, ports, rows = first.machine.topology.path(*numbers)
        call = host.launch(HOST_COPY, first.index)
        start = call.launched
        for stream, port in zip(streams, ports, strict=True):
            start = max(start, stream.done_at, self.ports.get(port, 0.0))
        end = start + costs.link_seconds(nbytes, link, "peer" if peer else memory)
        for port in ports:
            self.ports[port] = end
        name = f"copy {name_of(source)} to {name_of(target)}"
        self.occupy(streams, rows, call, name=name, kind="copy", start=start, end=end, nbytes=nbytes)
        if not peer and not (memory == "pinned" and non_blocking):
            host.wait(first.index, end)
        elif peer and host.engine is not None:  # the thread that serves the target hears of it now
            host.wait(target.index, call.launched)

    def launch(self, gpu: "VirtualGPU", name: str, seconds: float) -> None:
        """A kernel of so many `seconds` in the current stream of `gpu`, which no operation of PyTorch stands for."""
        host, stream = self.host_in_use(), current_stream_of(gpu)
        call = host.launch(HOST["pointwise"][0], gpu.index)
        start, end = stream.enqueue(call.launched, seconds)
        self.log.record(call, name, "pointwise", gpu.index, stream.name, start, end, "fixed")

    def collective(self, name: str, gpus: list["VirtualGPU"], nbytes: int, seconds: float) -> None:
        """An operation of all `gpus`, in their current streams: it starts when all are ready and ends at once."""
        host, streams = self.host_in_use(), [current_stream_of(gpu) for gpu in gpus]
        call = host.launch(HOST_COPY * len(gpus), gpus[0].index)
        start = max(call.launched, *(stream.done_at for stream in streams))
        event = {"name": name, "kind": "collective", "start": start, "end": start + seconds, "nbytes": nbytes}
        self.occupy(streams, ["collective"] * len(gpus), call, **event)
        for gpu in gpus:
            host.wait(gpu.index, call.launched)

    def occupy(self, streams: list[Stream], rows: list[str], call: Launch, **event: Any) -> None:
        """An `event` that is in all these `streams` at once, in a row of each stream's GPU."""
        for stream, row in zip(streams, rows, strict=True):
            stream.done_at = event["end"]
            self.log.record(call, gpu=stream.gpu.index, row=row, bound="link", **event)

    def host_work(self, seconds: float, name: str = "work") -> None:
        """The host itself does something for so long."""
        host = self.host_in_use()
        start, host.now = host.now, host.now + seconds
        self.record_host(name, host.thread, start, host.now)

    def load(self, batches: Iterable, seconds: float, workers: int) -> Iterator:
        """Yield `batches`. Each takes `seconds` of this thread, or of one of `workers` processes in turn.

        As in a DataLoader every worker is at most two batches ahead.
        """
        done_at = [self.host().now] * workers
        asked_for = done_at * PREFETCH  # when the i-th batch was asked for
        for i, batch in enumerate(batches):
            if workers == 0:
                self.host_work(seconds, "load a batch")
            else:
                start = max(done_at[i % workers], asked_for[i])
                done_at[i % workers] = start + seconds
                self.record_host("load a batch", f"worker {i % workers}", start, start + seconds)
                self.host().now = max(self.host().now, start + seconds)
                asked_for.append(self.host().now)
            yield batch

    def record_host(self, name: str, thread: str, start: float, end: float) -> None:
        """A `thread` of the host, or a DataLoader's worker, did something."""
        call = Launch(start, end, thread, self.host().phase)
        self.log.record(call, name, "host", None, thread, start, end, "host")

    def paused(self) -> contextlib.AbstractContextManager:
        """Inside, nothing that this thread does is recorded, or takes time."""
        return temporarily(self.host(), paused=True)

    def in_cpp(self) -> contextlib.AbstractContextManager:
        """Inside, C++ calls the operations, which takes less of the host's time than a call from Python."""
        return temporarily(self.host(), in_cpp=True)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, autograd's engine calls the operations: a thread for each GPU, all waited for at the end."""
        host = self.host()
        if host.engine is not None:  # a backward pass inside another, as that of a part that is recomputed
            with temporarily(host, recomputing=0):
                yield
            return
        host.engine, thread, host.thread = {}, host.thread, f"{host.thread}, backward"
        try:
            with self.in_cpp():
                yield
        finally:
            host.now, host.engine, host.thread = max([host.now, *host.engine.values()]), None, thread


def waits_for(name: str, args: Sequence) -> bool:
    """Whether the host waits for the result of an operation: its size depends on values."""
    if name in ("index", "index_put_"):  # a mask is turned into a list of places
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in SYNCHRONIZING


def name_of(gpu: "VirtualGPU | None") -> str:
    return "cpu" if gpu is None else gpu.name
