"""Streams and events. What virtual GPUs are told to do is done at once: there is nothing to wait for."""
import contextlib
import itertools

from . import machine

_numbers = itertools.count(1)


class Stream:
    """torch.cuda.Stream, and torch.Stream for a GPU: a place in the order of things, and a context manager."""

    def __init__(self, device=None, priority=0, **kwargs):
        self.gpu = machine.find("cuda" if device is None else device)
        self.device, self.device_index, self.priority = self.gpu.device, self.gpu.index, priority
        self.stream_id = next(_numbers)
        self.entered = []  # what was current before each `with` that is open

    def __repr__(self):
        return f"<torch.cuda.Stream device={self.device} (virtual)>"

    def __eq__(self, other):
        return isinstance(other, Stream) and (self.gpu, self.stream_id) == (other.gpu, other.stream_id)

    def __hash__(self):
        return hash((self.gpu, self.stream_id))

    def query(self):
        return True

    def is_capturing(self):
        return False

    def synchronize(self):
        pass

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self):
        self.entered.append((machine.select(self.gpu.index), current_stream(self.gpu.index)))
        set_stream(self)
        return self

    def __exit__(self, *exc):
        index, stream = self.entered.pop()
        set_stream(stream)
        machine.select(index)


class Event:
    """torch.cuda.Event; it will carry times when virtual GPUs have a clock."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        if interprocess:
            raise RuntimeError("virtual GPUs: events shared between processes are not imitated")
        self.enable_timing, self.stream = enable_timing, None

    def record(self, stream=None):
        self.stream = stream or current_stream()

    def query(self):
        return True

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end_event):
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.stream is None or end_event.stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        raise RuntimeError("virtual GPUs have no clock yet: elapsed_time would be this computer's time, not a GPU's")


def default_stream(device=None):
    gpu = machine.find("cuda" if device is None else device)
    if gpu.default_stream is None:
        gpu.default_stream = Stream(gpu.device)
    return gpu.default_stream


def current_stream(device=None):
    gpu = machine.find("cuda" if device is None else device)
    return getattr(gpu.chosen, "stream", None) or default_stream(gpu.device)


def set_stream(stream):
    if stream is not None:
        stream.gpu.chosen.stream = stream


def stream_context(stream):
    """torch.cuda.stream: does nothing for None."""
    return contextlib.nullcontext() if stream is None else stream
