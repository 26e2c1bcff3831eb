"""Dry runs: a program of many processes, as one of its ranks sees it, with shapes and no values.

The program is the reader's own. It meets as many ranks as it asks for, none of which exists, and a clock that says what
its collectives would take on the links and the network that are named.
"""

import contextlib
import functools
import itertools
import math
import os
import statistics
import traceback
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from virtual_gpus.clock.timeline import Timeline
from virtual_gpus.dry_runs.cluster import Cluster
from virtual_gpus.dry_runs.rank_contexts import leave_groups, ranks_in_this_process
from virtual_gpus.dry_runs.rendezvous import MissingRanks
from virtual_gpus.memory.ledger import readable
from virtual_gpus.state import current

STEPS = 8  # so many at most, until two are alike
ALIKE = 1e-9  # seconds of two such steps differ by less than this part


class NotConverged(ValueError):
    """There is no step that could stand for all."""


class Prediction(NamedTuple):
    """A step of a program that was run without values. All times are modelled.

    seconds      from when all GPUs had done the step before, to when they have done this one
    peak_memory  the most bytes that each of `ranks` has ever held
    timeline     of the step; its GPUs are the ranks
    ranks        those that were run; the others are taken to do the same at the same time
    totals       what each of `ranks` did in the step, a `events.Totals`, also where the timeline lacks events
    """

    seconds: float
    peak_memory: list
    timeline: Timeline
    ranks: list
    totals: list

    @property
    def communication(self):
        """The part of the step in which a rank communicates, on average."""
        return self.mean("communication") / self.seconds

    @property
    def exposed(self):
        """The part of the step in which a rank communicates and runs no kernel, on average."""
        return self.communication - self.mean("hidden") / self.seconds

    @property
    def flops(self):
        """Floating-point operations of a rank in the step, on average, without what is computed once more."""
        return self.mean("flops")

    @property
    def mfu(self):
        """Model FLOPs utilization: `flops` per second, as a part of what the GPU's data sheet says for 16-bit numbers
        (Chowdhery et al. 2022, arXiv:2204.02311), or for 32-bit numbers if it has no tensor cores."""
        spec = self.timeline.spec
        return self.flops / self.seconds / (spec.bf16 or spec.fp16 or spec.fp32)

    def words(self, cluster):
        """The same in words, as lines, for a run on this Cluster."""
        spec, node = self.timeline.spec, cluster.node()
        gpus = f"{cluster.n_gpus} {spec.key}, {node.topology.name}"
        yield f"{gpus}: a dry run, all times are modelled{self.timeline.caveat}"
        step = f"{1e3 * self.seconds:.3f} ms from one optimizer step to the next"
        yield f"{step}, {self.mfu:.0%} MFU, {self.exposed:.0%} in communication alone"
        for rank, peak in zip(self.ranks, self.peak_memory, strict=True):
            yield f"rank {rank}: at most {readable(peak)} of {readable(spec.memory)}"

    def mean(self, name):
        return statistics.fmean(getattr(totals, name) for totals in self.totals)

    def __repr__(self):
        return (
            f"<{1e3 * self.seconds:.2f} ms per step, {self.mfu:.0%} MFU, {self.exposed:.0%} in communication alone, at "
            f"most {max(self.peak_memory) / 2**30:.2f} GiB on a GPU (modelled, {self.timeline.spec.key})>"
        )


def dry_run(program, n_gpus=64, gpu="H100", per_node=8, link=None, network=None, host=1.0, rank=0):
    """A step of `program` in `n_gpus` processes with a GPU each, without any of them: a Prediction.

    program        what each process runs: it sets up network, sharding and optimizer, all anew, and returns a function
                   without arguments that takes a step. RANK, LOCAL_RANK and WORLD_SIZE are as torchrun sets them. There
                   is a process group for "nccl"; it may also make its own. Where it prints a number it prints "?"
    gpu, host      as `virtual_gpus` takes them
    per_node       how many GPUs a node has; None: as many as its machine type, or all of them
    link, network  a machine type and a network, as `virtual_gpus` takes them; None: the first type in
                   `machine_types.MACHINES` that has such GPUs, and the network that it comes with
    rank           which of the processes this one is. Those that it sends messages to, or gets them from, as the stages
                   of a pipeline do, are run as well. Each has its own environment, random numbers, and copies of the
                   modules that the program imports and that aren't installed; what was imported before is shared

    Steps are taken until two are alike, and the last one counts. Nothing is allocated but what the program puts on the
    CPU. Raises ValueError for a machine that there can't be and for steps that never are alike, TypeError if there is
    no step, torch.OutOfMemoryError, which says where, if a GPU is too small, and what the program raises.
    """
    if not callable(program):
        raise TypeError(f"program is a {type(program).__name__}: pass a function that returns a function, the step")
    cluster = Cluster(n_gpus, gpu, per_node, link, network, host)
    return in_ranks(functools.partial(predicted, program), cluster, rank)


def in_ranks(predict, cluster, rank):
    """predict(rendezvous, machines), where `rank` and those that it exchanges messages with meet."""
    cluster.node()
    if not isinstance(rank, int) or not 0 <= rank < cluster.n_gpus:
        raise ValueError(f"rank={rank!r}: with n_gpus={cluster.n_gpus} it is one of 0 to {cluster.n_gpus - 1}")
    ranks = [rank]
    while True:
        try:
            with ranks_in_this_process(ranks, cluster.n_gpus, cluster.node) as (rendezvous, machines):
                return predict(rendezvous, machines)
        except MissingRanks as absent:  # again, from the start, with all of them
            ranks = sorted({*ranks, *absent.ranks})


# Steps


def predicted(program, rendezvous, machines):
    """The Prediction for the `program` of ranks that meet, each on its machine."""
    steps, counts = {}, {rank: Counts() for rank in machines}

    def set_up(rank):
        with explained(rank, counts[rank]):
            dist.init_process_group("nccl")
            rendezvous.default_groups[rank] = dist.GroupMember.WORLD
            steps[rank] = program()
        if not callable(steps[rank]):
            raise TypeError(f"program() returned a {type(steps[rank]).__name__}: return a function that takes a step")

    def step(rank):
        counts[rank].begin(machines[rank])
        with explained(rank, counts[rank]):
            steps[rank]()

    rendezvous.run(set_up)
    marks = [rendezvous.run(lambda rank: mark(machines[rank]))]
    while not alike(marks):
        check_that_they_settle(marks)
        rendezvous.run(step)
        marks.append(rendezvous.run(lambda rank: mark(machines[rank])))
    made = prediction(machines, marks)
    rendezvous.run(lambda rank: leave_groups())
    return made


class StepBoundary(NamedTuple):
    """When a rank had done a step, and the bytes that it held then."""

    seconds: float
    held: int


def mark(machine):
    """The StepBoundary of now, when all GPUs have done what they were given."""
    for device in machine.devices:
        torch.cuda.synchronize(device)
    return StepBoundary(machine.elapsed(), sum(ledger.allocated for ledger in machine.ledgers))


def alike(marks):
    """Whether the last two of the steps between `marks`, each {rank: StepBoundary}, took and left the same."""
    if len(marks) < 3:
        return False
    first, second = durations(marks)[-2:]
    held = [[there.held for there in those.values()] for those in marks[-2:]]
    return held[0] == held[1] and math.isclose(first, second, rel_tol=ALIKE)


def durations(marks):
    """Seconds of each step: from when all ranks had done the one before to when all have done this one."""
    ends = [max(there.seconds for there in those.values()) for those in marks]
    return [end - start for start, end in itertools.pairwise(ends)]


def check_that_they_settle(marks):
    """NotConverged when so many steps have been taken that they will never be alike."""
    if len(marks) > STEPS:
        before, last = (sum(there.held for there in those.values()) for those in marks[-2:])
        raise NotConverged(
            f"no two of {STEPS} steps are alike: the last took {1e3 * durations(marks)[-1]:.3f} ms (modelled), and "
            f"when it was over the GPUs held {last - before:+,} bytes against the step before it"
        )


def prediction(machines, marks):
    """The Prediction for the last of the steps between `marks`."""
    seconds = durations(marks)[-1]
    if seconds == 0:
        raise ValueError("the step runs nothing on a GPU, so there is nothing to time")
    peaks = [max(ledger.peak for ledger in machine.ledgers) for machine in machines.values()]
    start = {rank: there.seconds for rank, there in marks[-2].items()}
    timeline = of_all_ranks(machines, start)
    totals = [sum(machine.clock.log.totals.values(), timeline.totals(rank)) for rank, machine in machines.items()]
    return Prediction(seconds, peaks, timeline, list(machines), totals)


def of_all_ranks(machines, start):
    """The Timeline of all ranks from when each began a step, as if it were one machine with a GPU for each."""
    clocks, events, origin = [machine.clock for machine in machines.values()], [], min(start.values())
    for rank, machine in machines.items():
        for e in machine.timeline.since(start[rank]):
            times = {name: getattr(e, name) - origin for name in ("start", "end", "called", "launched")}
            gpu, row = (None, f"rank {rank} {e.row}") if e.gpu is None else (rank, e.row)
            events.append(e._replace(gpu=gpu, row=row, thread=f"rank {rank} {e.thread}", **times))
    first = next(iter(machines.values()))
    dropped = sum(clock.log.dropped for clock in clocks), max(clock.log.dropped_until for clock in clocks) - origin
    return Timeline(events, first.spec, first.link, all(clock.reproducible for clock in clocks), *dropped)


# A script


class Converged(BaseException):
    """Ends a script when its steps have become alike. No script that catches Exception holds it up."""


def dry_script(run, cluster, rank=0):
    """The same for a script, which run() runs: it is ended when the times between steps of its first optimizer have
    become alike, in all ranks that are run. NotConverged if it ends before."""
    return in_ranks(functools.partial(of_script, run), cluster, rank)


def of_script(run, rendezvous, machines):
    marks, counts = {rank: [] for rank in machines}, {rank: Counts() for rank in machines}
    for machine in machines.values():
        machine.found = True

    def stepped(rank, optimizers, optimizer):
        optimizers.append(optimizer)
        if optimizer is not optimizers[0]:
            return
        here = mark(machines[rank])
        everywhere = rendezvous.exchange(("steps",), rank, rendezvous.ranks, here)
        marks[rank].append(dict(zip(rendezvous.ranks, everywhere, strict=True)))
        if alike(marks[rank]):
            raise Converged
        check_that_they_settle(marks[rank])
        counts[rank].begin(machines[rank])

    def task(rank):
        optimizers, machine = [], machines[rank]
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: stepped(rank, optimizers, optimizer) if current() is machine else None
        )
        try:
            with explained(rank, counts[rank]):
                run()
        except Converged:
            return True
        finally:
            hook.remove()
            leave_groups()

    if not all(rendezvous.run(task).values()):
        steps = min(map(len, marks.values()))
        raise NotConverged(f"the program ended after {steps} steps of its optimizer, and no two were alike")
    return prediction(machines, next(iter(marks.values())))


# Out of memory


class Counts:
    """How many steps a rank has begun, and the bytes that it held when the last one began: only that one counts."""

    def __init__(self):
        self.steps = self.held = 0

    def begin(self, machine):
        self.steps, self.held = self.steps + 1, sum(ledger.allocated for ledger in machine.ledgers)
        machine.clock.reset()


@contextlib.contextmanager
def explained(rank, counts):
    """Inside, torch.OutOfMemoryError says what a rank was doing, what it held before, and what would help; and the
    error of a group that can do nothing says why."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        doing = doing_what(error.__traceback__, counts.steps)
        place = f"{doing} of step {counts.steps}" if counts.steps else doing
        before = f" It held {readable(counts.held)} when that began." if counts.steps else ""
        advice = f"What would help: {ADVICE[doing]}"
        raise torch.OutOfMemoryError(f"rank {rank}, in {place}: {error}{before} {advice}") from error
    except RuntimeError as error:
        if "error_on_collective" not in str(error):
            raise
        raise RuntimeError(
            f"rank {rank}: a collective operation on tensors of the CPU, with gloo. In a dry run they hold this rank's "
            "values, and there are no others to combine them with. Communicate tensors on the GPU"
        ) from error


OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep
ADVICE = {
    "the set-up": "more GPUs to shard the parameters over, and to shard each layer as soon as it is made",
    "the forward pass": "a smaller micro-batch, activation checkpointing, or splitting the layers",
    "the backward pass": "a smaller micro-batch, activation checkpointing, or sharded gradients",
    "the optimizer's step": "sharding its state over more GPUs, or one that keeps less",
}


def doing_what(frames, steps):
    """What a rank that has begun so many `steps` was doing when an error was raised, a key of ADVICE, by the functions
    that were at work. (A script's first step isn't counted: nobody knows where it begins.)"""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(frames)]
    if any(code.co_filename.startswith(OPTIMIZERS) for code in codes):
        return "the optimizer's step"
    if any(code.co_name == "_engine_run_backward" for code in codes):
        return "the backward pass"
    return "the forward pass" if steps or nn.Module._call_impl.__code__ in codes else "the set-up"
