"""A process that is a rank of many, or several of them in turn: what tells ranks apart, and who they meet."""

import contextlib
import importlib
import os
import random
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from virtual_gpus.dry_runs.communicator import DryCommunicator
from virtual_gpus.dry_runs.rendezvous import Rendezvous
from virtual_gpus.ranks.process_groups import GROUPS
from virtual_gpus.state import RUNNING


@contextlib.contextmanager
def ranks_in_this_process(ranks, n_gpus, machine):
    """Inside, this process is each of `ranks`: (their Rendezvous, {rank: its machine}). Afterwards all is as
    it was. RuntimeError if it is a rank of another program."""
    if dist.is_initialized():
        raise RuntimeError("a dry run sets up a process group: do it before yours, or destroy that first")
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(ProcessState())
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # which init_process_group replaces
        machines = {rank: stack.enter_context(machine()) for rank in ranks}
        variables = {rank: variables_of(rank, n_gpus, len(machine.gpus)) for rank, machine in machines.items()}
        os.environ.update(variables[ranks[0]])
        places = stack.enter_context(RankContexts(machines, variables, process)) if len(ranks) > 1 else None
        rendezvous = Rendezvous(n_gpus, ranks, places and places.enter)
        stack.callback(rendezvous.close)
        for made in machines.values():
            made.rendezvous, made.communicator_class = rendezvous, DryCommunicator
        if places is None:
            stack.callback(leave_groups)
        yield rendezvous, machines


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


LIBRARIES = (  # folders of what is installed
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(torch.__file__)),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)


class ProcessState:
    """What Python and PyTorch keep once in a process, and a program may change: the modules that it imports, the
    environment, the arguments, random numbers and the default type. On leaving, all is as it was on entering.

    Only the program's own modules count. Those that are installed are imported once, whatever rank asks for them first.
    """

    def __enter__(self):
        self.shared = set(sys.modules) - {"__main__"}  # names of modules that all ranks have in common
        self.before = self.read()
        return self

    def __exit__(self, *exc):
        self.write(self.before)

    def read(self):
        """All of it as it is now, for `write`."""
        numpy = sys.modules.get("numpy")
        return {
            "modules": {name: sys.modules[name] for name in self.own_modules()},
            "environment": dict(os.environ),
            "arguments": sys.argv,
            "dtype": torch.get_default_dtype(),
            "random": random.getstate(),
            "torch": torch.get_rng_state(),
            "numpy": numpy and numpy.random.get_state(),
        }

    def write(self, state):
        for name in self.own_modules():
            del sys.modules[name]
            importlib._bootstrap._module_locks.pop(name, None)  # another rank may be in the middle of importing it
        sys.modules.update(state["modules"])
        for name in os.environ.keys() - state["environment"].keys():
            del os.environ[name]
        os.environ.update(state["environment"])
        sys.argv = state["arguments"]
        torch.set_default_dtype(state["dtype"])
        random.setstate(state["random"])
        torch.set_rng_state(state["torch"])
        if state["numpy"] is not None:
            sys.modules["numpy"].random.set_state(state["numpy"])

    def own_modules(self):
        """The names of the modules that the program has imported and that are its own."""
        new = sys.modules.keys() - self.shared
        self.shared |= {name for name in new if is_installed(sys.modules[name])}
        return new - self.shared


def is_installed(module):
    """Whether a module is a library's, or of a kind that a process can have only once."""
    if getattr(module, "__name__", "") == "__main__":
        return False
    compiled = isinstance(getattr(getattr(module, "__spec__", None), "loader", None), ExtensionFileLoader)
    file = getattr(module, "__file__", None)
    paths = [file] if file else list(getattr(module, "__path__", []))  # a package without a file of its own has folders
    return (
        compiled
        or not paths
        or any(os.path.abspath(path).startswith(f"{folder}{os.sep}") for path in paths for folder in LIBRARIES)
    )


class RankContexts:
    """What makes this process one rank or another: its machine, its process groups, and a ProcessState."""

    def __init__(self, machines, variables, process):
        self.machines, self.process, self.inside = machines, process, None
        self.worlds, self.groups = {rank: World() for rank in machines}, {}
        first = process.read()
        self.states = {rank: {**first, "environment": first["environment"] | variables[rank]} for rank in machines}

    def __enter__(self):
        self.before = distributed_c10d._world
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # each thread has names of its own for its groups
        return self

    def enter(self, rank):
        if rank == self.inside:
            return
        if self.inside is not None:
            self.states[self.inside] = self.process.read()
        self.process.write(self.states[rank])
        self.groups[self.inside] = dict(GROUPS)
        GROUPS.clear()
        GROUPS.update(self.groups.get(rank, {}))
        self.inside = rank
        distributed_c10d._world = self.worlds[rank]
        RUNNING.sort(key=lambda machine: machine is self.machines[rank])  # the last one answers

    def __exit__(self, *exc):
        GROUPS.clear()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        distributed_c10d._world = self.before


def leave_groups():
    """Destroy what process groups there are."""
    if dist.is_initialized():
        dist.destroy_process_group()
