"""What a dry run finds out: a step of the program."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from virtual_gpus.clock.events import Totals
from virtual_gpus.clock.timeline import Timeline
from virtual_gpus.dry_runs.step_memory import Change, at_the_peak
from virtual_gpus.dry_runs.steps import Boundaries, durations
from virtual_gpus.machine import Machine


class Prediction(NamedTuple):
    """A step of a program that was run without values. All times are modelled.

    seconds      from when all GPUs had done the step before, to when they have done this one
    peak_memory  the most bytes that each of `ranks` has ever held
    timeline     of the step; its GPUs are the ranks
    ranks        those that were run; the others are taken to do the same at the same time
    totals       what each of `ranks` did in the step, also where the timeline lacks events
    changes      of the memory of each of `ranks` in the step, from what it held when that began, see `step_memory`
    assumed      what unknown numbers were taken for, in words: what `assume` told, that numbers are finite; and
                 what the program would compile
    """

    seconds: float
    peak_memory: list[int]
    timeline: Timeline
    ranks: list[int]
    totals: list[Totals]
    changes: Sequence[list[Change]] = ()
    assumed: Sequence[str] = ()

    @property
    def memory(self) -> list[dict[str, int]]:
        """What each of `ranks` held in the step when it held most, {kind: bytes}; empty where that is unknown."""
        return [at_the_peak(changes) for changes in self.changes]

    @property
    def communication(self) -> float:
        """The part of the step in which a rank communicates, on average."""
        return self.mean("communication") / self.seconds

    @property
    def exposed(self) -> float:
        """The part of the step in which a rank communicates and runs no kernel, on average."""
        return self.communication - self.mean("hidden") / self.seconds

    @property
    def flops(self) -> float:
        """Floating-point operations of a rank in the step, on average, without what checkpointing computes once more.
        The product that attention's backward kernel repeats counts, as in torch.utils.flop_counter."""
        return self.mean("flops")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `flops` per second, as a part of what the GPU's data sheet says for 16-bit numbers
        (Chowdhery et al. 2022, arXiv:2204.02311), or for 32-bit numbers if it has no tensor cores."""
        spec = self.timeline.spec
        return self.flops / self.seconds / (spec.bf16 or spec.fp16 or spec.fp32)

    def mean(self, name: str) -> float:
        return statistics.fmean(getattr(totals, name) for totals in self.totals)

    def __repr__(self) -> str:
        return (
            f"<{1e3 * self.seconds:.2f} ms per step, {self.mfu:.0%} MFU, {self.exposed:.0%} in communication alone, at "
            f"most {max(self.peak_memory) / 2**30:.2f} GiB on a GPU (modelled, {self.timeline.spec.key})>"
        )


def prediction_of(machines: dict[int, Machine], boundaries: Boundaries) -> Prediction:
    """The Prediction for the last step, by the machine of each rank that was run."""
    seconds = durations(boundaries)[-1]
    if seconds == 0:
        raise ValueError("the step runs nothing on a GPU, so there is nothing to time")
    peaks = [max(ledger.most for ledger in machine.ledgers) for machine in machines.values()]
    start = {rank: boundary.seconds for rank, boundary in boundaries[-2].items()}
    timeline = merged_timeline(machines, start)
    totals = [sum(machine.clock.log.totals.values(), timeline.totals(rank)) for rank, machine in machines.items()]
    changes = [
        machine.step_memory.changes(min(start.values()), boundaries[-1][rank].seconds)
        for rank, machine in machines.items()
    ]
    return Prediction(seconds, peaks, timeline, list(machines), totals, changes)


def merged_timeline(machines: dict[int, Machine], start: dict[int, float]) -> Timeline:
    """The Timeline of all ranks from when each began a step, as if it were one machine with a GPU for each."""
    clocks, events, origin = [machine.clock for machine in machines.values()], [], min(start.values())
    for rank, machine in machines.items():
        for e in machine.timeline.since(start[rank]):
            gpu, row = (None, f"rank {rank} {e.row}") if e.gpu is None else (rank, e.row)
            events.append(e.counted_from(origin)._replace(gpu=gpu, row=row, thread=f"rank {rank} {e.thread}"))
    first = next(iter(machines.values()))
    dropped = sum(clock.log.dropped for clock in clocks), max(clock.log.dropped_until for clock in clocks) - origin
    return Timeline(events, first.spec, first.link, all(clock.reproducible for clock in clocks), *dropped)
