"""What happened when, on virtual GPUs: to read, to draw, and to open in a trace viewer. All times are modelled."""

import json
import math
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from virtual_gpus.clock.events import Event, Totals, totals
from virtual_gpus.clock.specs import GPU, Link
from virtual_gpus.files import replacing

COLORS = {  # by what an event is part of
    "forward": "#0072B2",
    "backward": "#D55E00",
    "communication": "#882255",
    "host": "#7F7F7F",
    "other": "#000000",  # kernels that belong to neither pass: the update of the parameters, for one
}


class Timeline:
    """Events (see `Event`), in order of their start. Plain data: iterate, index and take its length.

    spec, link     the data sheets that the times were modelled with
    dropped        how many earlier events are not here, the last of them called at `dropped_until`: a machine keeps its
                   last 100,000 to 200,000. What would have to look at all events raises a RuntimeError then;
                   `since(a later time)` has them all
    reproducible   whether another run gives the same times. It doesn't if the program asked whether a collective
                   operation of several processes is done already, or if several of its threads used GPUs at the same
                   time (those of DataParallel have times of their own): what only real time decides
    """

    def __init__(
        self,
        events: Iterable[Event],
        spec: GPU,
        link: Link,
        reproducible: bool = True,
        dropped: int = 0,
        dropped_until: float = -math.inf,
    ):
        self.events = sorted(events, key=lambda e: (e.start, e.end, -1 if e.gpu is None else e.gpu, e.row, e.name))
        self.spec, self.link, self.reproducible = spec, link, reproducible
        self.dropped, self.dropped_until = dropped, dropped_until

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __getitem__(self, index: Any) -> Any:
        return self.events[index]

    def __repr__(self) -> str:
        last = f"the last {len(self):,} of {len(self) + self.dropped:,}" if self.dropped else len(self)
        return (
            f"<Timeline: {last} events in {1e3 * (self.end - self.start):.3f} ms (modelled, {self.spec.key}, "
            f"{self.link.name}{self.caveat})>"
        )

    @property
    def caveat(self) -> str:
        """What to add where its times are printed."""
        return "" if self.reproducible else ", not the same in every run"

    @property
    def start(self) -> float:
        """When the first event was called, in seconds; 0.0 without events."""
        return min((e.called for e in self.events), default=0.0)

    @property
    def end(self) -> float:
        """When the last event was over, in seconds; 0.0 without events."""
        return max((e.end for e in self.events), default=0.0)

    @property
    def gpus(self) -> list[int]:
        """The indices of the GPUs that have events."""
        return sorted({e.gpu for e in self.events if e.gpu is not None})

    def since(self, start: float, end: float = math.inf) -> "Timeline":
        """The events asked for at `start` (seconds of machine.elapsed()) or later, and before `end`."""
        events = [e for e in self.events if start <= e.called < end]
        dropped = self.dropped if start <= self.dropped_until else 0
        return Timeline(events, self.spec, self.link, self.reproducible, dropped, self.dropped_until)

    def on(self, gpu: int | None) -> list[Event]:
        """The events on one GPU; None: those of the host."""
        if self.dropped:
            raise RuntimeError(
                f"the first {self.dropped:,} events of this timeline are not kept, so they can't be added up: use "
                f"timeline.since(start) with a start after {self.dropped_until:.6g} s"
            )
        return [e for e in self.events if e.gpu == gpu]

    def totals(self, gpu: int) -> Totals:
        """The Totals of `gpu`, of the events that are kept."""
        return totals(e for e in self.events if e.gpu == gpu)

    def busy(self, gpu: int) -> float:
        """Seconds in which at least one kernel ran on `gpu`; copies don't count."""
        return totals(self.on(gpu)).busy

    def communication(self, gpu: int) -> float:
        """Seconds in which `gpu` took part in a copy or a collective operation."""
        return totals(self.on(gpu)).communication

    def hidden(self, gpu: int) -> float:
        """Seconds of communication on `gpu` behind which a kernel ran."""
        return totals(self.on(gpu)).hidden

    def utilization(self) -> dict[int, float]:
        """{GPU: part of the timeline's time in which at least one kernel ran on it}."""
        whole = self.end - self.start
        return {gpu: self.busy(gpu) / whole if whole else 0.0 for gpu in self.gpus}

    def overlap(self) -> dict[int, float]:
        """{GPU: part of its communication's time in which a kernel ran on it, too}; 0.0 without communication."""
        of_gpus = {gpu: totals(self.on(gpu)) for gpu in self.gpus}
        return {gpu: each.hidden / each.communication if each.communication else 0.0 for gpu, each in of_gpus.items()}

    def bound_by(self, gpu: int) -> dict[str, float]:
        """{"compute", "memory", "fixed", "link": seconds of the events on `gpu` that are bound by it}."""
        seconds: dict[str, float] = {}
        for e in self.on(gpu):
            seconds[e.bound] = seconds.get(e.bound, 0.0) + e.end - e.start
        return seconds

    def waiting_for_host(self, gpu: int) -> float:
        """Seconds in which `gpu` had done all it was given, and waited for the host to launch the next kernel."""
        ends, idle = self.start, 0.0
        for e in self.on(gpu):
            idle += max(0.0, min(e.start, e.launched) - ends)
            ends = max(ends, e.end)
        return idle

    def rows(self) -> dict[str, list[Event]]:
        """The rows of a drawing, {label: events}: the host's threads, then each GPU's streams and copies.

        Events in one row don't overlap: what does, such as autograd's threads, has several rows, "... (2)" and so on.
        """
        # a copy between two GPUs is two events and one call
        calls = {(e.thread, e.called): e for e in self.events if e.launched > e.called and e.gpu is not None}
        launches = [
            e._replace(kind="host", gpu=None, row=e.thread, start=e.called, end=e.launched) for e in calls.values()
        ]
        by_row: dict[tuple[int, str], list[Event]] = {}
        for e in [*self.events, *launches]:
            row = (-1, e.row) if e.gpu is None else (e.gpu, f"cuda:{e.gpu} {e.row}")
            by_row.setdefault(row, []).append(e)
        rows = {}
        for (_, label), events in sorted(by_row.items(), key=lambda row: row[0]):
            for lane, lane_events in enumerate(lanes(events), start=1):
                rows[label if lane == 1 else f"{label} ({lane})"] = lane_events
        return rows

    def plot(self, ax: Any = None) -> Any:
        """Draw the rows as bars over time in milliseconds; returns the Axes. Needs matplotlib."""
        import matplotlib.pyplot as plt

        ax = plt.gca() if ax is None else ax
        rows = self.rows()
        for y, events in enumerate(rows.values()):
            ax.broken_barh(
                [(1e3 * (e.start - self.start), 1e3 * (e.end - e.start)) for e in events],
                (y - 0.4, 0.8),
                facecolors=[COLORS[e.part] for e in events],
            )
        ax.set(xlabel=f"milliseconds (modelled, {self.spec.key}, {self.link.name})", yticks=range(len(rows)))
        ax.set_yticklabels(rows)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        return ax

    def to_chrome_trace(self, path: str | PathLike) -> Path:
        """Write the events as JSON that https://ui.perfetto.dev and chrome://tracing open; the file is replaced."""
        with replacing(path) as new:
            new.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(self.trace_events())}))
        return Path(path)

    def trace_events(self, origin: float | None = None, owner: str = "", first: int = 0) -> Iterator[dict]:
        """Complete events ("ph": "X") in microseconds: a process for the host and each GPU, a thread for each row.

        The times count from `origin` (None: the first event), the processes from `first`; `owner`, such as "rank 0, ",
        stands before their names.
        """
        origin = self.start if origin is None else origin
        if self.dropped:
            lost = f"{owner}{self.dropped:,} events before this are not kept"
            yield {"ph": "i", "s": "g", "name": lost, "pid": first, "tid": 0, "ts": 1e6 * (self.start - origin)}
        for tid, (label, events) in enumerate(self.rows().items()):
            gpu = events[0].gpu
            pid = first + (0 if gpu is None else gpu + 1)
            process = owner + ("host" if gpu is None else f"cuda:{gpu} (virtual {self.spec.key})")
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}}
            for e in events:
                yield {
                    "ph": "X",
                    "name": e.name,
                    "cat": e.kind,
                    "pid": pid,
                    "tid": tid,
                    "ts": 1e6 * (e.start - origin),
                    "dur": 1e6 * (e.end - e.start),
                    "args": {"phase": e.phase, "bytes": e.nbytes, "flops": e.flops, "bound by": e.bound},
                }


def lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Lists of `events`, as few as possible, without overlap in each."""
    made: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start, e.end)):
        lane = next((lane for lane in made if lane[-1].end <= event.start + 1e-12), None)
        if lane is None:
            made.append(lane := [])
        lane.append(event)
    return made
