"""The steps of a dry run: taken until two are alike, so that the last one stands for all that would follow."""

import itertools
import math
from typing import NamedTuple

import torch

from virtual_gpus.machine import Machine

MAX_STEPS = 8
TOLERANCE = 1e-9  # relative, of the seconds of two steps that are alike


class NotConverged(ValueError):
    """There is no step that could stand for all."""


class StepBoundary(NamedTuple):
    """A rank has done a step."""

    seconds: float  # when, on its machine's clock
    allocated: int  # bytes on its GPUs

    @classmethod
    def now(cls, machine: Machine) -> "StepBoundary":
        """When all GPUs have done what they were given."""
        for device in machine.devices:
            torch.cuda.synchronize(device)
        return cls(machine.elapsed(), sum(ledger.allocated for ledger in machine.ledgers))


Boundaries = list[dict[int, StepBoundary]]  # by rank, one more than there are steps


def durations(boundaries: Boundaries) -> list[float]:
    """Seconds of each step: from when all ranks had done the one before to when all have done this one."""
    ends = [max(boundary.seconds for boundary in ranks.values()) for ranks in boundaries]
    return [end - start for start, end in itertools.pairwise(ends)]


def converged(boundaries: Boundaries) -> bool:
    """Whether the last two steps took as long and left as much memory allocated, on each rank."""
    if len(boundaries) < 3:
        return False
    first, second = durations(boundaries)[-2:]
    allocated = [[boundary.allocated for boundary in ranks.values()] for ranks in boundaries[-2:]]
    return allocated[0] == allocated[1] and math.isclose(first, second, rel_tol=TOLERANCE)


def check_steps(boundaries: Boundaries) -> None:
    """NotConverged after MAX_STEPS."""
    if len(boundaries) > MAX_STEPS:
        before, last = (sum(boundary.allocated for boundary in ranks.values()) for ranks in boundaries[-2:])
        milliseconds = 1e3 * durations(boundaries)[-1]
        raise NotConverged(
            f"no two of {MAX_STEPS} steps are alike: the last took {milliseconds:.3f} ms (modelled), and when it was "
            f"over the GPUs held {last - before:+,} bytes against the step before it. Is something kept of each step, "
            "such as a loss without .item() or .detach()? Do shapes change, as without padding?"
        )
