"""Kernels beside a collective operation take longer, for NCCL takes multiprocessors from them.

A collective is beside kernels from when its rank's own stream has come to it: NCCL's kernel runs then, and waits for
the other ranks'. When it ends, they decide. So it is taken to end as if no other rank were late, until the program
waits for it, and knows.
"""

from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from virtual_gpus.clock.costs import Beside
from virtual_gpus.clock.host import Launch

if TYPE_CHECKING:
    from virtual_gpus.gpu import VirtualGPU


class Window(NamedTuple):
    """From when to when, in seconds, a collective runs, and multiprocessors that it takes for each that it leaves."""

    start: float
    end: float
    taken: float


class Occupancy:
    """What one communicator's collectives take from a GPU: they run one after the other, on `channels`
    multiprocessors each."""

    def __init__(self, gpu: "VirtualGPU", channels: int):
        self.gpu, self.taken = gpu, channels / (gpu.spec.sm_count - channels)
        self.windows: deque[Window] = deque(maxlen=1024)
        self.until = 0.0  # when the last one ends, as far as is known
        gpu.occupancies.append(self)

    def begin(self, call: Launch, name: str, ready: float, seconds: float) -> None:
        """A collective begins that takes so many `seconds`: when this rank is `ready` and the one before it done."""
        start = max(ready, self.until)
        self.add(call, name, start, start + seconds)

    def end(self, call: Launch, name: str, time: float) -> None:
        """The collective ends at this time, as the program knows now; it may have waited for other ranks."""
        if time > self.until:
            self.add(call, name, self.until, time)

    def add(self, call: Launch, name: str, start: float, end: float) -> None:
        """What kernels that have been enqueued lose by a collective from `start` to `end`, streams make up for here."""
        window = Window(start, end, self.taken)
        self.windows.append(window)
        self.until = end
        for stream in self.gpu.streams:
            begin = stream.done_at
            stream.make_room(window)
            if stream.done_at > begin:
                event = f"beside {name}", "contention", self.gpu.index, stream.name, begin, stream.done_at, "compute"
                self.gpu.clock.log.record(call, *event)

    def after(self, time: float) -> list[Window]:
        """The windows that aren't over at `time`, the first one first."""
        return [*takewhile(lambda window: window.end > time, reversed(self.windows))][::-1]


def slowed_end(start: float, end: float, beside: Beside, windows: list[Window]) -> float:
    """When a kernel that alone would run from `start` to `end` ends beside the collectives in `windows`."""
    for window in windows:
        if window.start >= end:
            break
        slowed = max(beside.waiting, beside.part * window.taken)
        first = max(start, window.start)
        end += slowed * max(0.0, min(end - first, (window.end - first) / (1 + slowed)))
    return end
