"""What Python runs as it starts, in the processes that a program on virtual GPUs starts: see `children`.

It only waits for the process to import torch, and imports neither torch nor this library by itself.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)


def load(name, spec):
    """The module of a `spec`, known as `name`, unless there is one."""
    if name not in sys.modules:
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def spec_at(name, *path):
    return importlib.util.spec_from_file_location(name, os.path.join(*path))


def turn_on(torch):
    """Called when torch has been imported."""
    # This very one, wherever the process looks for it.
    load("virtual_gpus", spec_at("virtual_gpus", PACKAGE, "__init__.py"))
    from virtual_gpus.children import inherit

    inherit()


def run_next():
    """The sitecustomize of the environment, which this one stands before."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None:
        del sys.modules["sitecustomize"]
        load("sitecustomize", spec)


if os.environ.get("VIRTUAL_GPUS"):
    import_hook = load("virtual_gpus.import_hook", spec_at("virtual_gpus.import_hook", PACKAGE, "import_hook.py"))
    import_hook.AfterImport("torch", turn_on)
run_next()
