"""A process that is a rank of many, or several of them in turn: what tells ranks apart, and who they meet."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mgpu_lib.virtual.collectives import GROUPS
from mgpu_lib.virtual.inheriting import environment
from mgpu_lib.virtual.meeting import Meeting
from mgpu_lib.virtual.running import RUNNING


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
            stack.callback(leave_groups)
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


def leave_groups():
    """Destroy what process groups there are."""
    if dist.is_initialized():
        dist.destroy_process_group()
