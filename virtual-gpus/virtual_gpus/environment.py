"""The environment of processes that are started: what says which virtual GPUs they have, see `inheriting`."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "VIRTUAL_GPUS"
STARTUP = Path(__file__).with_name("startup")


@contextlib.contextmanager
def naming(setup: dict) -> Iterator[None]:
    """Inside, a process that is started has the virtual GPUs of `setup`, the fields of a Setup."""
    path = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    with environment({VARIABLE: json.dumps(setup), "PYTHONPATH": path}):
        yield


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Inside, the environment has these `variables`; afterwards their values are what they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
