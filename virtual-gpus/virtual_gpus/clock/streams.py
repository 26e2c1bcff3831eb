"""torch.cuda.Stream and torch.cuda.Event: the order of kernels on a GPU.

Values are computed at once; a stream keeps the times, in seconds on the clock.
"""

import contextlib
import threading
from collections import deque
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from virtual_gpus.clock.contention import Window, slowed_end
from virtual_gpus.clock.costs import ALL, Beside
from virtual_gpus.clock.rates import QUERY
from virtual_gpus.compat import get_device_index
from virtual_gpus.errors import check_waiting
from virtual_gpus.state import current, find, select

if TYPE_CHECKING:
    from virtual_gpus.gpu import VirtualGPU

_Stream, _Event = torch.Stream, torch.Event


def gpu_of(device: Any) -> "VirtualGPU":
    """The virtual GPU that `device` names (None: the current one); PyTorch's error if it names none."""
    return current().gpu(get_device_index(device, optional=True))


def stream_of(gpu: "VirtualGPU", stream_id: int) -> "Stream":
    if not 0 <= stream_id < len(gpu.streams):
        raise RuntimeError(
            f"{gpu.device} has no stream {stream_id}: virtual GPUs know those of torch.cuda.Stream and of "
            "torch.cuda.cudart().cudaStreamCreate"
        )
    return gpu.streams[stream_id]


class CurrentStream(threading.local):
    """The stream that a thread has made the current one of a GPU; None: the default one."""

    stream: "Stream | None" = None


class Stream:
    """torch.cuda.Stream: kernels run one after the other."""

    device_type = 1  # CUDA's, in c10's list
    cuda_stream = property(lambda self: self.stream_id)  # no address: the default stream's is 0, as in CUDA
    device, device_index = property(attrgetter("gpu.device")), property(attrgetter("gpu.index"))

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        gpu: "VirtualGPU | None" = None,
        *,
        stream_id: int | None = None,
        device_index: int = 0,
        device_type: int = 1,
    ):
        """A new one; with a `stream_id` the one that has it, under another object."""
        if stream_id is not None:
            self.__dict__ = stream_of(current().gpu(device_index), stream_id).__dict__
            return
        self.gpu = gpu or gpu_of(device)
        self.priority = priority
        self.stream_id = len(self.gpu.streams)
        self.name = f"stream {self.stream_id}" if self.stream_id else "default"
        self.gpu.streams.append(self)
        self.done_at = 0.0  # when all that was enqueued is done
        # (start, end, *Cost.beside) of its last kernels, as many as may run beside a collective before a wait for it:
        # numbers alone, for such tuples Python's garbage collector doesn't track
        self.recent: deque[tuple[float, float, float, float]] = deque(maxlen=8192)
        self.enqueued = 0  # how many kernels it was given, ever
        self.capture: Any = None  # the graphs.Capture that it takes part in
        self.entered: list[tuple[int, Stream]] = []  # what was current before each `with` that is open

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(least, greatest) of the priorities that PyTorch supports."""
        return 0, -3

    def __repr__(self):
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __eq__(self, other):
        return isinstance(other, Stream) and (self.gpu, self.stream_id) == (other.gpu, other.stream_id)

    def __hash__(self):
        return hash((self.gpu, self.stream_id))

    def enqueue(self, launched: float, seconds: float, beside: Beside = ALL) -> tuple[float, float]:
        """A kernel that alone takes `seconds` is launched: when it starts and ends; `beside`: see costs.Cost."""
        start = self.done_at if self.done_at > launched else launched
        end = start + seconds
        if len(self.gpu.streams) > 1:
            end = self.shared_end(start, end)
        for occupancy in self.gpu.occupancies:
            if occupancy.until > start:
                end = slowed_end(start, end, beside, occupancy.after(start))
        self.done_at = end
        self.recent.append((start, end, *beside))
        self.enqueued += 1
        return start, end

    def make_room(self, window: Window) -> None:
        """Kernels that were enqueued before take longer, and begin later, for a collective that runs in this window."""
        kernels = []
        while self.recent and self.recent[-1][1] > window.start:
            kernels.append(self.recent.pop())
        until = 0.0
        for start, end, part, waiting in reversed(kernels):
            begin = max(start, until)
            until = slowed_end(begin, begin + end - start, Beside(part, waiting), [window])
            self.recent.append((begin, until, part, waiting))
        self.done_at = max(self.done_at, until)

    def end_of(self, number: int) -> float:
        """When the `number`-th kernel that it was given ends, as is known now; 0 if that was long ago."""
        older = self.enqueued - number  # those after it
        return self.recent[-1 - older][1] if number and older < len(self.recent) else 0.0

    def shared_end(self, start: float, end: float) -> float:
        """When a kernel that alone would run from `start` to `end` ends beside those of the GPU's other streams.

        Those were launched before and keep their times, so that the work of all together takes as long as it
        would one after the other.
        """
        others: list[tuple[float, float, float, float]] = []
        for stream in self.gpu.streams:
            if stream != self:  # from the last one, which ends last, back to the first that counts
                others += takewhile(lambda interval: interval[1] > start, reversed(stream.recent))
        for busy, until, *_ in sorted(others):
            if busy >= end:
                break
            end += min(until, end) - max(busy, start)
        return end

    def query(self) -> bool:
        if self.capture is not None:
            raise self.capture.refusal()
        return done(self.gpu, self.done_at)

    def is_capturing(self) -> bool:
        return self.capture is not None

    def synchronize(self) -> None:
        check_waiting(self.gpu.machine)
        self.gpu.clock.synchronize(self.gpu, [self])

    def wait_event(self, event: "CudaEvent") -> None:
        capture = self.capture or event.capture
        if capture is not None and event.stream is not None:
            capture.wait(self, event.mark)
        self.done_at = max(self.done_at, event.time)

    def wait_stream(self, stream: "Stream | None") -> None:
        if stream is None:  # nn.parallel's scatter has no stream of its own here
            return
        if self.capture is not None or stream.capture is not None:
            self.wait_event(stream.record_event())
        else:
            self.done_at = max(self.done_at, stream.done_at)

    def record_event(self, event: "CudaEvent | None" = None) -> "CudaEvent":
        event = event or CudaEvent()
        event.record(self)
        return event

    def __enter__(self):
        self.entered.append((select(self.gpu.index), current_stream(self.gpu.index)))
        set_stream(self)
        return self

    def __exit__(self, *exc):
        index, stream = self.entered.pop()
        set_stream(stream)
        select(index)


class ExternalStream(Stream):
    """torch.cuda.ExternalStream: a stream of `device` that another library knows by its cudaStream_t."""

    def __init__(self, stream_ptr: int, device: Any = None):
        super().__init__(stream_id=stream_ptr, device_index=gpu_of(device).index)


class CudaEvent:
    """torch.cuda.Event: it is complete when its stream has done what was enqueued before it."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ):
        if interprocess:
            raise RuntimeError("virtual GPUs: events shared between processes are not imitated")
        self.enable_timing = enable_timing
        self.stream: Stream | None = None  # where it was recorded last
        self.earliest = 0.0  # when it is complete, as was known when it was recorded
        self.after = 0  # how many kernels its stream had been given then
        self.mark: Any = None  # the graphs.Mark of its place in a capture, if it was recorded in one

    @property
    def capture(self) -> Any:
        """The capture that goes on, if it was recorded there."""
        return None if self.mark is None else self.mark.stream.capture

    @property
    def time(self) -> float:
        """When it is complete, in seconds; a collective that runs beside its kernels may have delayed it."""
        return 0.0 if self.stream is None else max(self.earliest, self.stream.end_of(self.after))

    @property
    def device(self) -> torch.device | None:
        """Where it was recorded last, or None."""
        return None if self.stream is None else self.stream.device

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        gpu, capture = self.stream.gpu, self.stream.capture
        self.mark = None if capture is None else capture.mark(self.stream)
        self.earliest = max(self.stream.done_at, gpu.clock.host().time(gpu.index))
        self.after = self.stream.enqueued

    def query(self) -> bool:
        self.check_capture()
        return self.stream is None or done(self.stream.gpu, self.time)

    def check_capture(self) -> None:
        if self.capture is not None:
            raise self.capture.refusal(907)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.check_capture()
        if self.stream is not None:
            self.stream.gpu.machine.raise_assert()
            self.stream.gpu.clock.wait(self.stream.gpu, self.time)

    def elapsed_time(self, end_event: "CudaEvent") -> float:
        """Milliseconds."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.stream is None or end_event.stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise ValueError("Both events must be completed before calculating elapsed time.")
        if self.device != end_event.device:
            raise torch.AcceleratorError(
                f"CUDA error: invalid resource handle\nThe events were recorded on {self.device} and "
                f"{end_event.device}; only those of one GPU can be compared."
            )
        return 1e3 * (end_event.time - self.time)


def done(gpu: "VirtualGPU", time: float) -> bool:
    """Whether `time` is over for the host; asking takes a moment of its own."""
    if gpu.machine.capture is not None:
        gpu.machine.capture.check_asking()
    gpu.machine.raise_assert()
    host = gpu.clock.host()
    host.advance(QUERY, gpu.index)
    return host.time(gpu.index) >= time


class AnyDevice(type):
    """torch.Stream and torch.Event: of a virtual GPU unless they are made for another kind of device."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.kinds)

    def __subclasscheck__(cls, subclass):
        return subclass is cls or issubclass(subclass, cls.kinds)


class AnyStream(metaclass=AnyDevice):
    kinds = Stream, _Stream

    def __new__(cls, device: Any = None, *, priority: int = 0) -> Any:
        if device is None or find(device) is not None:
            return Stream(device, priority)
        return _Stream(device, priority=priority)


class AnyEvent(metaclass=AnyDevice):
    kinds = CudaEvent, _Event

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is None or find(device) is not None:
            return CudaEvent(**options)
        return _Event(device, **options)


def default_stream(device: Any = None) -> Stream:
    return gpu_of(device).streams[0]


def current_stream(device: Any = None) -> Stream:
    return current_stream_of(gpu_of(device))


def current_stream_of(gpu: "VirtualGPU") -> Stream:
    return gpu.current_stream.stream or gpu.streams[0]


def set_stream(stream: Stream | None) -> None:
    """The current stream of its GPU, which becomes the current GPU."""
    if stream is not None:
        select(stream.gpu.index)
        stream.gpu.current_stream.stream = stream


def stream_context(stream: Stream | None) -> contextlib.AbstractContextManager:
    """torch.cuda.stream: does nothing for None."""
    return contextlib.nullcontext() if stream is None else stream
