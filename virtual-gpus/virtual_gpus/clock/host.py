"""The threads of the program, each with a time of its own: a call takes some microseconds of it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from virtual_gpus.clock.rates import GIL, THREAD


class Launch(NamedTuple):
    """The part of an Event that is about the host: when it called, and had launched, in which thread and phase."""

    called: float
    launched: float
    thread: str
    phase: str


class Host:
    """One thread of the program, and in a backward pass autograd's threads beside it, one for each GPU.

    thread    its name in a timeline
    now       seconds on its clock
    factor    how long its calls take, 1 on the servers that the clock was fitted to
    slowdown  how much longer that is because other threads hold the GIL
    """

    def __init__(self, thread: str, now: float = 0.0, factor: float = 1.0, slowdown: float = 1.0):
        self.thread, self.now, self.factor, self.slowdown = thread, now, factor, slowdown
        self.engine: dict[int, float] | None = None  # in a backward pass: {a GPU's index: its autograd thread's time}
        self.ranges: list[str] = []  # names of the NVTX ranges that are open
        self.recomputing = 0  # how many checkpointed parts are being recomputed, one inside the other
        self.in_cpp = False  # whether C++ calls operations, and not Python
        self.paused = False  # while True nothing is recorded: somebody else says how long it takes
        self.children = 0  # ReplicaThreads that share the GIL

    def time(self, index: int) -> float:
        """Seconds on the clock of the thread that serves GPU `index`."""
        return self.now if self.engine is None else self.engine.get(index, self.now)

    def wait(self, index: int, time: float) -> None:
        """The thread that serves GPU `index` waits until `time`."""
        if self.engine is None:
            self.now = max(self.now, time)
        else:
            self.engine[index] = max(self.time(index), time)

    def advance(self, seconds: float, index: int | None) -> tuple[float, float]:
        """Work for `seconds` on behalf of GPU `index` (None: of none): when that begins and ends."""
        engine, seconds = self.engine, seconds * self.factor
        if engine is None:
            start = self.now
            self.now = end = start + seconds * self.slowdown
        else:
            start = engine.get(index, self.now)
            engine[index] = end = start + seconds
        return start, end

    def launch(self, seconds: float, index: int) -> Launch:
        """Launch something on GPU `index`, which takes `seconds`."""
        called, launched = self.advance(seconds, index)
        return Launch(called, launched, self.thread, self.phase)

    @property
    def phase(self) -> str:
        """See Event.phase."""
        if self.recomputing:
            return "recomputation"
        if self.ranges:
            return self.ranges[-1]
        return "backward" if self.engine is not None else "forward" if torch.is_grad_enabled() else ""


class PerThread(threading.local):
    """The host of a thread that has its own, as each ReplicaThread has, on the clock of whatever machine."""

    host: Host | None = None


this_thread = PerThread()


@contextlib.contextmanager
def off_the_clock() -> Iterator[None]:
    """Inside, nothing that this thread does takes time on any machine's clock, and other threads' times stay theirs."""
    host = Host(threading.current_thread().name)
    host.paused = True
    with temporarily(this_thread, host=host):
        yield


@contextlib.contextmanager
def temporarily(owner: object, **values: object) -> Iterator[None]:
    """Inside, attributes of `owner` have these values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


class ReplicaThread(threading.Thread):
    """A thread of parallel_apply. Its time branches off from that of the thread that makes it, and joins it again."""

    def __init__(self, parent: Host, target, args: tuple):
        super().__init__(target=target, args=args)
        self.parent, self.number = parent, args[0]
        self.parent.children += 1

    def start(self) -> None:
        self.parent.advance(THREAD, None)
        slowdown = max(1.0, self.parent.children * GIL)
        self.host = Host(f"replica {self.number}", self.parent.now, self.parent.factor, slowdown)
        self.host.ranges = list(self.parent.ranges)
        super().start()

    def run(self) -> None:
        this_thread.host = self.host
        super().run()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self.parent.now = max(self.parent.now, self.host.now)
        self.parent.children -= 1
