"""What happened on a machine: an event for each kernel, copy and collective operation, and a log of the newest ones.

All times are modelled, in seconds.
"""

import math
import operator
import threading
from collections.abc import Hashable, Iterable
from typing import NamedTuple

MAX_EVENTS = 200_000  # that a log keeps


class Event(NamedTuple):
    """One kernel, copy or collective operation on one GPU, or work of the host. Times in seconds."""

    name: str
    kind: str  # a key of rates.HOST, or "copy", "collective", "contention", "host"
    gpu: int | None  # None: the host
    row: str  # "default", "stream 1", ..., "copy in", "copy out", "collective", or the host's thread
    start: float
    end: float
    called: float  # when the host began to launch it
    launched: float  # when the host had launched it
    thread: str  # the host's thread that did so
    phase: str  # "recomputation"; or the innermost NVTX range; or "backward", "forward" (autograd records), or ""
    nbytes: int
    flops: int
    bound: str  # what it spends most of its time on: "compute", "memory", "fixed", or "link"

    @property
    def part(self) -> str:
        """What it is part of: "forward", "backward", "communication", "host", or "other"."""
        if self.kind in ("copy", "collective"):
            return "communication"
        if self.phase == "recomputation":  # of the forward pass, in the middle of the backward pass
            return "forward"
        return "host" if self.kind == "host" else self.phase if self.phase in ("forward", "backward") else "other"

    def counted_from(self, origin: float) -> "Event":
        """The same with times that count from `origin`."""
        times = {name: getattr(self, name) - origin for name in ("start", "end", "called", "launched")}
        return self._replace(**times)


class Totals(NamedTuple):
    """What a GPU did, in all."""

    flops: int = 0  # floating-point operations, without those of recomputation
    busy: float = 0.0  # seconds in which at least one kernel ran on it; copies don't count
    communication: float = 0.0  # seconds in which it took part in a copy or a collective operation
    hidden: float = 0.0  # seconds in which it did both

    def __add__(self, other: "Totals") -> "Totals":  # type: ignore[override]
        return Totals(*map(operator.add, self, other))


def totals(events: Iterable[Event]) -> Totals:
    """The Totals of one GPU's `events`."""
    events = list(events)
    flops = sum(e.flops for e in events if e.phase != "recomputation")
    busy = covered((e.start, e.end) for e in events if e.part != "communication")
    communication = covered((e.start, e.end) for e in events if e.part == "communication")
    return Totals(flops, busy, communication, busy + communication - covered((e.start, e.end) for e in events))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of `intervals`, pairs (start, end)."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(end - start for start, end in merged)


class EventLog:
    """The newest events of a machine, and the Totals of those before them, which are dropped.

    start          seconds on the host's clock when it began
    dropped        how many events are not kept, and `dropped_until` when the last of them was called
    totals         {a GPU's index: Totals of the dropped ones}
    pending        in a dry run, {a collective's work: its earliest start}, until that is recorded
    """

    def __init__(self, start: float):
        self.start = start
        self.events: list[tuple] = []  # the fields of an Event each
        self.limit = MAX_EVENTS
        self.dropped, self.dropped_until = 0, -math.inf
        self.totals: dict[int, Totals] = {}
        self.pending: dict[Hashable, float] = {}
        self.dropping = threading.Lock()

    def record(self, launch: tuple, name, kind, gpu, row, start, end, bound, nbytes=0, flops=0) -> None:
        """Something has happened: the fields of an Event, those of its Launch (`host.Launch`) first."""
        # A plain tuple, and the only place that makes one: called for every operation, this takes 0.3 µs where
        # Event(...) takes 0.9, and Python's garbage collector doesn't track tuples of numbers and strings.
        self.events.append((name, kind, gpu, row, start, end, *launch, nbytes, flops, bound))
        if len(self.events) > self.limit:
            self.drop()

    def drop(self) -> None:
        """Keep the newer half of the events, and of the older half what the GPUs did in all.

        An older one that ends after a newer one has begun is kept, too: what overlaps is added up together. (But of a
        collective of real processes that is waited for so much later what hides it may have been added up before.)
        """
        with self.dropping:
            if len(self.events) <= self.limit:  # another thread was here
                return
            half = len(self.events) // 2
            events = [Event(*values) for values in self.events]
            older, begun = events[:half], min([e.start for e in events[half:]] + list(self.pending.values()))
            done = [e for e in older if e.end <= begun and e.called >= self.start]
            self.events[:half] = [e for e in older if e.end > begun]
            for gpu in {e.gpu for e in done} - {None}:
                self.totals[gpu] = self.totals.get(gpu, Totals()) + totals(e for e in done if e.gpu == gpu)
            self.dropped += len(done)
            self.dropped_until = max([self.dropped_until, *(e.called for e in done)])
            self.limit = len(self.events) + MAX_EVENTS // 2

    def since(self, start: float) -> list[Event]:
        """The events that were called at `start` or later, with times counted from there."""
        events = (Event(*values) for values in self.events[:])
        return [e.counted_from(start) for e in events if e.called >= start]
