"""Dry runs: a program of many processes, as one of its ranks sees it, with shapes and no values.

The program is the reader's own. It meets as many ranks as it asks for, none of which exists, and a clock that says what
its collectives would take on the links and the network that are named.
"""

import contextlib
import functools
import math
import os
import statistics
import sys
import traceback
from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mgpu_lib.virtual.collectives import GROUPS
from mgpu_lib.virtual.inheriting import environment
from mgpu_lib.virtual.machine import Machine
from mgpu_lib.virtual.meeting import Absent, Meeting
from mgpu_lib.virtual.memory import readable
from mgpu_lib.virtual.running import RUNNING
from mgpu_lib.virtual.specs import find_gpu
from mgpu_lib.virtual.timeline import Timeline
from mgpu_lib.virtual.topology import MACHINES, NETWORKS

STEPS = 8  # so many at most, until two are alike
ALIKE = 1e-9  # seconds of two such steps differ by less than this part


class Prediction(NamedTuple):
    """A step of a program that was run without values. All times are modelled.

    seconds      from when all GPUs had done the step before, to when they have done this one
    peak_memory  the most bytes that each of `ranks` has ever held
    timeline     of the step; its GPUs are the ranks
    ranks        those that were run; the others are taken to do the same at the same time
    """

    seconds: float
    peak_memory: list
    timeline: Timeline
    ranks: list

    @property
    def communication(self):
        """The part of the step in which a rank communicates, on average."""
        return self.mean(self.timeline.communication) / self.seconds

    @property
    def exposed(self):
        """The part of the step in which a rank communicates and runs no kernel, on average."""
        return self.communication - self.mean(self.timeline.hidden) / self.seconds

    @property
    def flops(self):
        """Floating-point operations of a rank in the step, on average, without what is computed once more."""
        return self.mean(lambda rank: sum(e.flops for e in self.timeline.on(rank) if e.phase != "recomputation"))

    @property
    def mfu(self):
        """Model FLOPs utilization: `flops` per second, as a part of what the GPU's data sheet says for 16-bit numbers
        (Chowdhery et al. 2022, arXiv:2204.02311), or for 32-bit numbers if it has no tensor cores."""
        spec = self.timeline.spec
        return self.flops / self.seconds / (spec.bf16 or spec.fp16 or spec.fp32)

    def mean(self, of_rank):
        return statistics.fmean(of_rank(rank) for rank in self.ranks)

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
                   `topology.MACHINES` that has such GPUs, and the network that it comes with
    rank           which of the processes this one is. Those that it sends messages to, or gets them from, as the stages
                   of a pipeline do, are run as well

    Steps are taken until two are alike, and the last one counts. Nothing is allocated but what the program puts on the
    CPU. Raises ValueError for a machine that there can't be and for steps that never are alike, TypeError if there is
    no step, torch.OutOfMemoryError, which says where, if a GPU is too small, and what the program raises.
    """
    if not callable(program):
        raise TypeError(f"program is a {type(program).__name__}: pass a function that returns a function, the step")
    machine = functools.partial(machine_of, n_gpus, gpu, per_node, link, network, host)
    machine()
    if not isinstance(rank, int) or not 0 <= rank < n_gpus:
        raise ValueError(f"rank={rank!r}: with n_gpus={n_gpus} it is one of 0 to {n_gpus - 1}")
    ranks = [rank]
    while True:
        try:
            with meeting_of(ranks, n_gpus, machine) as (meeting, machines):
                return predicted(program, meeting, machines)
        except Absent as absent:  # again, from the start, with all of them
            ranks = sorted({*ranks, *absent.ranks})


def machine_of(n_gpus, gpu, per_node, link, network, host):
    """A Machine that stands for a node of these, in a run on `n_gpus` of them; it is off. ValueError if it can't be."""
    per_node = MACHINES[link].gpus if per_node is None and link in MACHINES else per_node or n_gpus
    for name, number in (("n_gpus", n_gpus), ("per_node", per_node)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}={number!r}: the number of GPUs must be a whole number, at least 1")
    nodes = n_gpus / per_node
    if nodes > 1 and n_gpus % per_node:
        raise ValueError(f"n_gpus={n_gpus} with per_node={per_node}: {nodes:.2f} nodes; use whole ones")
    link = link or usual_type(find_gpu(gpu), per_node, nodes)
    if nodes > 1 and link not in MACHINES:
        raise ValueError(f"link={link!r} for {nodes:.0f} nodes: use a machine type, one of {', '.join(MACHINES)}")
    if link in MACHINES and per_node > MACHINES[link].gpus:
        raise ValueError(f"per_node={per_node}: a {link} has {MACHINES[link].gpus} GPUs")
    if nodes > 1 and network is None:
        network = MACHINES[link].network
        if network is None:
            raise ValueError(f"a {link} comes with no network: network= one of {', '.join(NETWORKS)}")
    return Machine(min(n_gpus, per_node), gpu, link, "meta", network, host)


def usual_type(spec, per_node, nodes):
    """The name of the first machine type with such GPUs, so many if there is one; None for one node without a type."""
    fitting = [kind for kind in MACHINES.values() if kind.link == spec.nvlink and kind.gpus >= per_node]
    if not fitting and nodes > 1:
        raise ValueError(f"no machine type has {per_node} {spec.key}: link= one of {', '.join(MACHINES)}")
    return min(fitting, key=lambda kind: kind.gpus).key if fitting else None


# A process that is several ranks


@contextlib.contextmanager
def meeting_of(ranks, n_gpus, machine):
    """Inside, this process is each of `ranks`: a Meeting of them, and their machines, by rank. Afterwards all is as it
    was. RuntimeError if it is a rank of another program."""
    if dist.is_initialized():
        raise RuntimeError("a dry run sets up a process group: do it before yours, or destroy that first")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # which init_process_group replaces
        machines = {rank: stack.enter_context(machine()) for rank in ranks}
        variables = {rank: variables_of(rank, n_gpus, len(machine.gpus)) for rank, machine in machines.items()}
        stack.enter_context(environment(variables[ranks[0]]))
        places = stack.enter_context(Places(machines, variables)) if len(ranks) > 1 else None
        meeting = Meeting(n_gpus, ranks, places and places.enter)
        stack.callback(meeting.close)
        for made in machines.values():
            made.meeting = meeting
        if places is None:
            stack.callback(leave)
        yield meeting, machines


def variables_of(rank, n_gpus, here):
    """What torchrun would put into the environment of a rank, on nodes with so many of them `here`."""
    numbers = {
        **{"RANK": rank, "LOCAL_RANK": rank % here, "GROUP_RANK": rank // here, "ROLE_RANK": rank},
        **{"WORLD_SIZE": n_gpus, "LOCAL_WORLD_SIZE": here, "GROUP_WORLD_SIZE": n_gpus // here},
        **{"ROLE_WORLD_SIZE": n_gpus, "MASTER_PORT": 29500, "TORCH_FR_BUFFER_SIZE": 0},  # nothing to record
    }
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


class World(distributed_c10d._World):
    """The process groups of one rank, where PyTorch reckons with one rank in a process."""

    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = None  # not what all share
    group_count = 0

    def __init__(self):
        super().__init__()
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            setattr(self, name, {})


class Places:
    """What makes this process one rank or another: its machine, its environment, its process groups."""

    def __init__(self, machines, variables):
        self.machines, self.variables = machines, variables
        self.worlds, self.groups, self.inside = {rank: World() for rank in machines}, {}, None

    def __enter__(self):
        self.before = distributed_c10d._world
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # each thread has names of its own for its groups
        return self

    def enter(self, rank):
        self.groups[self.inside] = dict(GROUPS)
        GROUPS.clear()
        GROUPS.update(self.groups.get(rank, {}))
        self.inside = rank
        distributed_c10d._world = self.worlds[rank]
        RUNNING.sort(key=lambda machine: machine is self.machines[rank])  # the last one answers
        os.environ.update(self.variables[rank])

    def __exit__(self, *exc):
        GROUPS.clear()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        distributed_c10d._world = self.before


def leave():
    """Destroy what process groups there are."""
    if dist.is_initialized():
        dist.destroy_process_group()


# Steps


def predicted(program, meeting, machines):
    """The Prediction for the `program` of ranks that meet, each on its machine."""
    steps, held = {}, {rank: Counter() for rank in machines}

    def set_up(rank):
        with explained(rank, machines[rank], "set-up", held[rank]):
            dist.init_process_group("nccl")
            meeting.provided[rank] = dist.GroupMember.WORLD
            steps[rank] = program()
        if not callable(steps[rank]):
            raise TypeError(f"program() returned a {type(steps[rank]).__name__}: return a function that takes a step")

    def step(rank):
        with explained(rank, machines[rank], "step", held[rank]):
            steps[rank]()

    meeting.run(set_up)
    seconds, start = settled(meeting, machines, step)
    peaks = [machine.ledgers[local(machine)].peak for machine in machines.values()]
    ended = Prediction(seconds, peaks, timeline_of(machines, start), list(machines))
    meeting.run(lambda rank: leave())
    return ended


def local(machine):
    """The number of the GPU that a rank uses, in its node."""
    return max(range(len(machine.gpus)), key=lambda index: machine.ledgers[index].peak)


def settled(meeting, machines, step):
    """Take steps until two are alike: the seconds of the last one, and when each rank began it, by rank."""
    ends, before = meeting.run(lambda rank: synchronized(machines[rank])), None
    for _ in range(STEPS):
        start = ends
        meeting.run(step)
        ends = meeting.run(lambda rank: synchronized(machines[rank]))
        seconds = max(ends.values()) - max(start.values())
        held = [ledger.allocated for machine in machines.values() for ledger in machine.ledgers]
        if before and before[1] == held and math.isclose(before[0], seconds, rel_tol=ALIKE):
            if seconds == 0:
                raise ValueError("the step runs nothing on a GPU, so there is nothing to time")
            return seconds, start
        grown = sum(held) - sum(before[1]) if before else 0
        before = seconds, held
    raise ValueError(
        f"no two of {STEPS} steps are alike: the last took {1e3 * seconds:.3f} ms (modelled), and when it was over the "
        f"GPUs held {grown:+,} bytes against the step before it"
    )


def synchronized(machine):
    """The time when all GPUs have done what they were given."""
    for device in machine.devices:
        torch.cuda.synchronize(device)
    return machine.elapsed()


def timeline_of(machines, start):
    """The Timeline of all ranks from when each began a step, as if it were one machine with a GPU for each."""
    events, origin = [], min(start.values())
    for rank, machine in machines.items():
        for e in machine.timeline.since(start[rank]):
            gpu = None if e.gpu is None else rank
            row, thread = f"rank {rank} {e.row}" if gpu is None else e.row, f"rank {rank} {e.thread}"
            events.append(e._replace(gpu=gpu, row=row, thread=thread))
    first = next(iter(machines.values()))
    return Timeline(shifted(events, origin), first.spec, first.link)


def shifted(events, origin):
    """`events`, with times that count from `origin`."""
    for e in events:
        times = {name: getattr(e, name) - origin for name in ("start", "end", "called", "launched")}
        yield e._replace(**times)


# Out of memory


@contextlib.contextmanager
def explained(rank, machine, what, held):
    """Inside, torch.OutOfMemoryError says what a rank was doing, what it held before, and what would help.

    what: "set-up" or "step"; `held` counts them, and the bytes that the last one left.
    """
    held[what] += 1
    try:
        yield
    except torch.OutOfMemoryError as error:
        doing, advice = doing_what(error.__traceback__) if what == "step" else ("the set-up", ADVICE["the set-up"])
        place = f"{doing} of step {held['step']}" if what == "step" else doing
        before = f" It held {readable(held['bytes'])} when that began." if what == "step" else ""
        raise torch.OutOfMemoryError(f"rank {rank}, in {place}: {error}{before} What would help: {advice}") from error
    held["bytes"] = sum(ledger.allocated for ledger in machine.ledgers)


ADVICE = {
    "the set-up": "more GPUs to shard the parameters over, and to shard each layer as soon as it is made",
    "the forward pass": "a smaller micro-batch, activation checkpointing, or splitting the layers",
    "the backward pass": "a smaller micro-batch, activation checkpointing, or sharded gradients",
    "the optimizer's step": "sharding its state over more GPUs, or one that keeps less",
}


def doing_what(frames):
    """(what a step was doing, what would help) when an error was raised, by the functions that were at work."""
    names = {(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(frames)}
    if any(f"{os.sep}optim{os.sep}" in path for path, _ in names):
        doing = "the optimizer's step"
    else:
        doing = "the backward pass" if "_engine_run_backward" in {name for _, name in names} else "the forward pass"
    return doing, ADVICE[doing]
