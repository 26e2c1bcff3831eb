"""How far a rank of a dry run has come: what its errors say beside PyTorch's words."""

import contextlib
import os
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch

from virtual_gpus.compat import module_call_impl
from virtual_gpus.dry_runs.step_memory import StepMemory
from virtual_gpus.dry_runs.steps import Boundaries, StepBoundary, check_steps, converged
from virtual_gpus.machine import Machine
from virtual_gpus.memory.ledger import readable

OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep
ADVICE = {
    "the set-up": "more GPUs to shard the parameters over, and to shard each layer as soon as it is made",
    "the forward pass": "a smaller micro-batch, activation checkpointing, or splitting the layers",
    "the backward pass": "a smaller micro-batch, activation checkpointing, or sharded gradients",
    "the optimizer's step": "sharding its state over more GPUs, or one that keeps less",
}


class Progress:
    """What lies between the steps that `rank` has done on `machine`: `boundaries` are those of all ranks that are run,
    and the same on each of them. There are as many as steps have begun."""

    def __init__(self, rank: int, machine: Machine):
        self.rank, self.machine = rank, machine
        self.memory, self.boundaries = StepMemory(machine), Boundaries()

    def end_step(self) -> bool:
        """The rank is between two steps: whether no more are needed. If they are, the next one begins, and the clock
        counts from here on: only the last step's events are looked at. NotConverged after too many."""
        ranks = self.machine.rendezvous.ranks
        here = StepBoundary.now(self.machine)
        everywhere = self.machine.rendezvous.all_gather("steps", self.rank, ranks, here, "has done its step")
        self.boundaries.append(dict(zip(ranks, everywhere, strict=True)))
        if converged(self.boundaries):
            return True
        check_steps(self.boundaries)
        self.memory.begin()
        self.machine.clock.reset()
        return False

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, torch.OutOfMemoryError says what the rank was doing, what it held before, and what would help; and
        the error of a group that refuses everything says why."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            doing = self.activity(error.__traceback__)
            place, before = doing, ""
            if self.boundaries:
                place = f"{doing} of step {len(self.boundaries)}"
                before = f" It held {readable(self.boundaries[-1][self.rank].allocated)} when that began."
            advice = f"What would help: {ADVICE[doing]}"
            raise torch.OutOfMemoryError(f"rank {self.rank}, in {place}: {error}{before} {advice}") from error
        except RuntimeError as error:
            if "error_on_collective" not in str(error):
                raise
            raise RuntimeError(
                f"rank {self.rank}: a collective operation on tensors of the CPU, with gloo. In a dry run they hold "
                "this rank's values, and there are no others to combine them with. Communicate tensors on the GPU"
            ) from error

    def activity(self, frames: TracebackType | None) -> str:
        """What the rank was doing when an error was raised, a key of ADVICE, by the functions that were running. (A
        script's first step isn't counted: nobody knows where it begins.)"""
        codes = [frame.f_code for frame, _ in traceback.walk_tb(frames)]
        if any(code.co_filename.startswith(OPTIMIZERS) for code in codes):
            return "the optimizer's step"
        if any(code.co_name == "run_backward" for code in codes):
            return "the backward pass"
        return "the forward pass" if self.boundaries or module_call_impl.__code__ in codes else "the set-up"
