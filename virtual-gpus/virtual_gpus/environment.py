"""The environment of processes that are started: what says which virtual GPUs they have, see `children`."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "VIRTUAL_GPUS"
STARTUP = Path(__file__).with_name("startup")


@contextlib.contextmanager
def naming_gpus(config: dict) -> Iterator[None]:
    """Inside, a process that is started has the virtual GPUs of `config`, the fields of a LaunchConfig."""
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    os.environ.update({VARIABLE: json.dumps(config), "PYTHONPATH": path})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def torchrun_environment(rank: int, n: int, per_node: int, port: int, run: str) -> dict[str, str]:
    """What torchrun tells rank `rank` of `n`, of which it starts `per_node` on each node, in the environment."""
    node, local = divmod(rank, per_node)
    numbers = {
        **{"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "ROLE_RANK": rank},
        **{"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": per_node, "GROUP_WORLD_SIZE": n // per_node, "ROLE_WORLD_SIZE": n},
        **{"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "MASTER_PORT": port},
    }
    words = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": run, "ROLE_NAME": "default"}
    return words | {name: str(number) for name, number in numbers.items()}
