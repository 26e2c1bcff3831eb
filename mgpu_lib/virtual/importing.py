"""Doing something as soon as a module has been imported, which may be later or never."""

import importlib.util
import sys


class AfterImport:
    """Calls `action(module)` when the module `name` has been imported; at once, if it has been. See also cancel()."""

    def __init__(self, name, action):
        self.name, self.action = name, action
        if name in sys.modules:
            action(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        """What Python asks before it looks for a module itself."""
        if name != self.name:
            return None
        self.cancel()
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.action(module)

            spec.loader.exec_module = exec_module
        return spec

    def cancel(self):
        if self in sys.meta_path:
            sys.meta_path.remove(self)
