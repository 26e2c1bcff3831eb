"""Doing something as soon as a module has been imported, which may be later or never. Imports nothing of the library:
`startup/sitecustomize.py` takes it by its path."""

import sys
from collections.abc import Callable
from types import ModuleType


class AfterImport:
    """Calls `action(module)` when the module `name` has been imported; at once, if it has been. See also cancel()."""

    def __init__(self, name: str, action: Callable[[ModuleType], object]):
        self.name, self.action = name, action
        if name in sys.modules:
            action(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        """What Python asks before it looks for a module itself, be it only to say whether there is one."""
        if name != self.name:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.cancel()
                self.action(module)

            spec.loader.exec_module = exec_module
        return spec

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
