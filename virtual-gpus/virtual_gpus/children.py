"""The processes that a program starts have virtual GPUs, too: those of mp.spawn, of launchers, of a DataLoader.

They find them in one environment variable, VIRTUAL_GPUS, which `child_environment` sets, together with the folder
`startup`, first on PYTHONPATH. Python, as it starts, runs the `sitecustomize` in there, and that calls `inherit` as
soon as the process has imported torch. Without the variable it does nothing: whoever takes it from the environment of
a process keeps the virtual GPUs from it. (Nor do they reach a Python that ignores its environment, -E or -I.)

GPUs that a program has made itself reach only the processes that multiprocessing spawns: see `patches.sharing`.
"""

import atexit
import contextlib
import json
import os
from typing import NamedTuple

from virtual_gpus.environment import VARIABLE, naming_gpus
from virtual_gpus.machine import Machine
from virtual_gpus.report import reporting


class LaunchConfig(NamedTuple):
    """What the processes of a run have in common."""

    gpus: int | None  # how many GPUs each sees; None: as many as torchrun's local ranks, or else 4
    machine: dict  # the other arguments of Machine
    trace: str | None = None  # the file that gets the timelines
    account: bool = False  # whether they say in words what the GPUs did
    run: str = ""  # tells this run from others
    reads_environment: bool = True  # see Machine

    def make(self) -> Machine:
        """The machine, which is off; ValueError if there can't be such a one."""
        gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 4)) if self.gpus is None else self.gpus
        machine = Machine(gpus, **self.machine)
        machine.reads_environment = self.reads_environment
        return machine


def child_environment(config: LaunchConfig) -> contextlib.AbstractContextManager[None]:
    """Inside, each process that is started has virtual GPUs as `config` says, unless it gets another environment."""
    return naming_gpus(config._asdict())


def inherit() -> None:
    """Turn on the GPUs that were handed down to this process, until it ends."""
    value = os.environ[VARIABLE]
    try:
        config = LaunchConfig(**json.loads(value))
        machine = config.make()
    except (ValueError, TypeError) as error:
        raise ValueError(f"the environment variable {VARIABLE}={value!r} names no virtual GPUs: {error}") from None
    machine.start()
    until_the_end = contextlib.ExitStack()
    until_the_end.enter_context(reporting(machine, config, inherited=True))
    atexit.register(until_the_end.close)
