"""What Python and PyTorch keep once in a process, and each rank of a dry run must have for itself."""

import functools
import importlib
import os
import random
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

LIBRARIES = (  # folders of what is installed
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(torch.__file__)),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)


KEEP_GROUPS: set[str] = set()  # installed packages that have been seen to keep process groups in their modules


class ProcessState:
    """The modules that a program imports, the environment, the arguments, random numbers and the default dtype. On
    leaving, all is as it was on entering.

    Only the program's own modules count. Those that are installed are imported once, whatever rank asks for them first;
    but a package whose modules keep process groups, as Megatron-LM's do, is a rank's own from the next run on.
    """

    def __enter__(self) -> "ProcessState":
        self.loaded = set(sys.modules) - {"__main__"}
        self.shared = set(self.loaded)  # names of modules that all ranks have in common
        self.before = self.snapshot()
        return self

    def __exit__(self, *exc) -> None:
        new = sys.modules.keys() - self.loaded
        KEEP_GROUPS.update(name.partition(".")[0] for name in new if keeps_group(sys.modules[name]))
        self.shared = set(self.loaded)
        self.restore(self.before)

    def snapshot(self) -> dict[str, Any]:
        """All of it as it is now, for `restore`."""
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

    def restore(self, state: dict[str, Any]) -> None:
        for name in self.own_modules():
            del sys.modules[name]
            # another rank may be in the middle of importing it
            importlib._bootstrap._module_locks.pop(name, None)  # type: ignore[attr-defined]
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

    def own_modules(self) -> set[str]:
        """The names of the modules that the program has imported and that are its own."""
        new = sys.modules.keys() - self.shared
        self.shared |= {name for name in new if is_installed(sys.modules[name])}
        return new - self.shared


@functools.cache
def holds_packages(folder: str) -> bool:
    """Whether pip has installed into a folder, as `pip install --target` does into any."""
    return next(Path(folder).glob("*.dist-info"), None) is not None


def keeps_group(module: ModuleType) -> bool:
    """Whether a process group is among a module's variables."""
    return any(isinstance(value, dist.ProcessGroup) for value in list(vars(module).values()))


def is_installed(module: ModuleType) -> bool:
    """Whether a module is a library's, or of a kind that a process can have only once."""
    name = getattr(module, "__name__", "")
    if name == "__main__":
        return False
    folders = *LIBRARIES, *(os.path.abspath(folder) for folder in sys.path if folder and holds_packages(folder))
    inside = tuple(f"{folder}{os.sep}" for folder in folders)
    compiled = isinstance(getattr(getattr(module, "__spec__", None), "loader", None), ExtensionFileLoader)
    file = getattr(module, "__file__", None)
    paths = [file] if file else list(getattr(module, "__path__", []))  # a package without a file of its own has folders
    if name.partition(".")[0] in KEEP_GROUPS and not compiled:
        return False
    return compiled or not paths or any(os.path.abspath(path).startswith(inside) for path in paths)
