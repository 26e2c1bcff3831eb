"""Streams and events: the order of things on a GPU. Values are there at once; on the clock they take their time."""

import contextlib
import threading
from collections import deque
from itertools import takewhile
from operator import attrgetter

import torch

from virtual_gpus.clock.rates import QUERY
from virtual_gpus.errors import check_waiting
from virtual_gpus.state import current, find, select

_Stream, _Event = torch.Stream, torch.Event


def gpu_of(device):
    """The virtual GPU that `device` names (None: the current one); PyTorch's error if it names none."""
    return current().gpu(torch.cuda._utils._get_device_index(device, optional=True))


class Chosen(threading.local):
    """The stream that a thread has made the current one of a GPU; None: the default one."""

    stream = None


class Stream:
    """torch.cuda.Stream: a place in the order of things, and a context manager."""

    device_type = 1  # CUDA's, in c10's list
    cuda_stream = property(lambda self: self.stream_id)  # no address: the default stream's is 0, as in CUDA
    device, device_index = property(attrgetter("gpu.device")), property(attrgetter("gpu.index"))

    def __init__(self, device=None, priority=0, gpu=None):
        self.gpu = gpu or gpu_of(device)
        self.priority = priority
        self.stream_id = len(self.gpu.streams)
        self.name = f"stream {self.stream_id}" if self.stream_id else "default"
        self.gpu.streams.append(self)
        self.free = 0.0  # when all that it was given is done
        self.recent = deque(maxlen=256)  # (start, end) of its last kernels
        self.entered = []  # what was current before each `with` that is open

    @staticmethod
    def priority_range():
        """(least, greatest) of the priorities that PyTorch supports."""
        return 0, -3

    def __repr__(self):
        return f"<torch.cuda.Stream device={self.device} (virtual)>"

    def __eq__(self, other):
        return isinstance(other, Stream) and (self.gpu, self.stream_id) == (other.gpu, other.stream_id)

    def __hash__(self):
        return hash((self.gpu, self.stream_id))

    def enqueue(self, launched, seconds):
        """A kernel of so many `seconds` that is handed over at `launched`: from when to when it runs."""
        start = self.free if self.free > launched else launched
        end = start + seconds
        if len(self.gpu.streams) > 1:
            end = self.shared_end(start, end)
        self.free = end
        self.recent.append((start, end))
        return start, end

    def shared_end(self, start, end):
        """When a kernel that alone would run from `start` to `end` ends beside those of the GPU's other streams.

        Those were given to the GPU before and keep their times, so that the work of all together takes as long as it
        would one after the other.
        """
        others = []
        for stream in self.gpu.streams:
            if stream is not self:  # from the last one, which ends last, back to the first that counts
                others += takewhile(lambda interval: interval[1] > start, reversed(stream.recent))
        for busy, until in sorted(others):
            if busy >= end:
                break
            end += min(until, end) - max(busy, start)
        return end

    def query(self):
        return done(self.gpu, self.free)

    def is_capturing(self):
        return False

    def synchronize(self):
        check_waiting(self.gpu.machine)
        self.gpu.clock.synchronize(self.gpu, [self])

    def wait_event(self, event):
        self.free = max(self.free, event.time or 0.0)

    def wait_stream(self, stream):
        if stream is not None:  # nn.parallel's scatter has no stream of its own here
            self.free = max(self.free, stream.free)

    def record_event(self, event=None):
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


class CudaEvent:
    """torch.cuda.Event: it happens when its stream has done what lies before it."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        if interprocess:
            raise RuntimeError("virtual GPUs: events shared between processes are not imitated")
        self.enable_timing, self.stream, self.time = enable_timing, None, None

    @property
    def device(self):
        """Where it was recorded last, or None."""
        return None if self.stream is None else self.stream.device

    def record(self, stream=None):
        self.stream = stream or current_stream()
        gpu = self.stream.gpu
        self.time = max(self.stream.free, gpu.clock.host().time(gpu.index))

    def query(self):
        return self.stream is None or done(self.stream.gpu, self.time)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        if self.stream is not None:
            self.stream.gpu.machine.report()
            self.stream.gpu.clock.wait(self.stream.gpu, self.time)

    def elapsed_time(self, end_event):
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


def done(gpu, time):
    """Whether `time` is over for the host; asking takes a moment of its own."""
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

    def __new__(cls, device=None, *, priority=0):
        if device is None or find(device) is not None:
            return Stream(device, priority)
        return _Stream(device, priority=priority)


class AnyEvent(metaclass=AnyDevice):
    kinds = CudaEvent, _Event

    def __new__(cls, device=None, **options):
        if device is None or find(device) is not None:
            return CudaEvent(**options)
        return _Event(device, **options)


def default_stream(device=None):
    return gpu_of(device).streams[0]


def current_stream(device=None):
    return current_stream_of(gpu_of(device))


def current_stream_of(gpu):
    return gpu.chosen.stream or gpu.streams[0]


def set_stream(stream):
    if stream is not None:
        stream.gpu.chosen.stream = stream


def stream_context(stream):
    """torch.cuda.stream: does nothing for None."""
    return contextlib.nullcontext() if stream is None else stream
