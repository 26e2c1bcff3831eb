"""What makes this process one rank of a dry run or another."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from virtual_gpus.compat import World, set_thread_isolation_mode
from virtual_gpus.dry_runs.process_state import ProcessState
from virtual_gpus.dry_runs.rendezvous import DryCommunicator, Rendezvous
from virtual_gpus.dry_runs.scheduler import Cancelled
from virtual_gpus.environment import torchrun_environment
from virtual_gpus.machine import Machine
from virtual_gpus.patches.factories import default_device
from virtual_gpus.ranks.process_groups import GROUPS, Group
from virtual_gpus.state import RUNNING
from virtual_gpus.unknown import Assumptions


@contextlib.contextmanager
def ranks_in_this_process(
    ranks: list[int], n_gpus: int, make_machine: Callable[[], Machine], assumptions: Assumptions
) -> Iterator[tuple[Rendezvous, dict[int, Machine]]]:
    """Inside, this process is each of `ranks`: (their Rendezvous, {rank: its machine}). Afterwards all is as it was.

    RuntimeError if this process is a rank of another program.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run sets up a process group: do it before yours, or destroy that first")
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(ProcessState())
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # which init_process_group replaces
        stack.callback(restore_default_device, default_device())
        machines = {rank: stack.enter_context(make_machine()) for rank in ranks}
        variables = {
            rank: torchrun_environment(rank, n_gpus, len(machine.gpus), 29500, "dry run")
            for rank, machine in machines.items()
        }
        os.environ.update({**variables[ranks[0]], "TORCH_FR_BUFFER_SIZE": "0"})  # nothing to record
        contexts = stack.enter_context(RankContexts(machines, variables, process)) if len(ranks) > 1 else None
        rendezvous = Rendezvous(n_gpus, ranks, None if contexts is None else contexts.switch_to, assumptions)
        stack.callback(end_ranks, rendezvous, machines)
        for machine in machines.values():
            machine.rendezvous, machine.communicator_class = rendezvous, DryCommunicator
        if contexts is None:
            stack.callback(destroy_groups)
        yield rendezvous, machines


def end_ranks(rendezvous: Rendezvous, machines: dict[int, Machine]) -> None:
    """After Ctrl-C one of them may be running: it ends with the next operation on its GPU."""
    for machine in machines.values():
        machine.unusable = Cancelled
    rendezvous.scheduler.close()


def restore_default_device(before: torch.device | None) -> None:
    if default_device() != before:  # the program has called torch.set_default_device
        torch.set_default_device(before)


def world_of_a_rank() -> World:
    """The process groups of one rank, in place of those that all of a process share."""
    names = "pg_map pg_names pg_group_ranks pg_backend_config tags_to_pg pg_to_tag".split()
    return type("World", (World,), {"group_count": 0, **{name: {} for name in names}})()


class RankContexts:
    """What each rank owns: a machine, process groups, and a state of the process."""

    def __init__(self, machines: dict[int, Machine], variables: dict[int, dict[str, str]], process: ProcessState):
        self.machines, self.process = machines, process
        self.rank: int | None = None  # the one that this process is
        self.worlds = {rank: world_of_a_rank() for rank in machines}
        self.groups: dict[int | None, dict[str, Group]] = {}
        first = process.snapshot()
        self.states = {rank: {**first, "environment": first["environment"] | variables[rank]} for rank in machines}

    def __enter__(self) -> "RankContexts":
        self.before = distributed_c10d._world
        set_thread_isolation_mode(True)  # each thread has names of its own for its groups
        return self

    def switch_to(self, rank: int) -> None:
        """This process becomes `rank`."""
        if rank == self.rank:
            return
        if self.rank is not None:
            self.states[self.rank] = self.process.snapshot()
        self.process.restore(self.states[rank])
        self.groups[self.rank] = dict(GROUPS)
        GROUPS.clear()
        GROUPS.update(self.groups.get(rank, {}))
        self.rank = rank
        distributed_c10d._world = self.worlds[rank]
        RUNNING.sort(key=lambda machine: machine is self.machines[rank])  # the last one answers

    def __exit__(self, *exc) -> None:
        GROUPS.clear()
        set_thread_isolation_mode(False)
        distributed_c10d._world = self.before


def destroy_groups() -> None:
    """Destroy all process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
