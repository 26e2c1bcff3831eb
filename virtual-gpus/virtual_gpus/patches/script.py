"""torch.jit.script and torch.jit.trace: functions of the CPU are compiled as if no virtual GPUs were on.

What lies on a virtual GPU can't be saved with TorchScript: C++ would write it, and knows no virtual GPU.
"""

import torch
from torch.jit import RecursiveScriptModule, ScriptModule

from virtual_gpus.compat import (
    find_builtin,
    get_builtin_table,
    jit_builtins,
    jit_recursive,
    jit_serialization,
    try_compile_fn,
)
from virtual_gpus.compat import validate_map_location as _validate_map_location
from virtual_gpus.state import find
from virtual_gpus.tensors.tensor import is_virtual

ORIGINALS = {}  # {id of a replacement: (it, what it replaces)}, while virtual GPUs are on


def patches():
    """(owner, name, replacement), for patches.install."""
    get_builtin_table()  # made once, of PyTorch's own functions
    yield jit_builtins, "_find_builtin", lambda fn: find_builtin(original_of(fn))
    yield jit_recursive, "try_compile_fn", lambda fn, loc: try_compile_fn(original_of(fn), loc)
    yield jit_serialization, "validate_map_location", validate_map_location
    for kind in (ScriptModule, RecursiveScriptModule):  # the first, what traced modules are, has methods of its own
        for name in ("save", "save_to_buffer"):  # torch.jit.save calls one of them
            yield kind, name, only_from_the_cpu(getattr(kind, name))


def original_of(fn):
    """What `fn` replaces in PyTorch, or `fn` itself."""
    return ORIGINALS.get(id(fn), (fn, fn))[1]


def only_from_the_cpu(save):
    def checked(module, *args, **kwargs):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_virtual(tensor):
                raise RuntimeError(
                    f"TorchScript can't save {name!r}, which is on {tensor.device}, a virtual GPU: script or trace the "
                    "module on the CPU, and save that"
                )
        return save(module, *args, **kwargs)

    return checked


def validate_map_location(map_location=None):
    """Where torch.jit.load is to load to."""
    if isinstance(map_location, str | torch.device) and find(map_location) is not None:
        raise RuntimeError(f"TorchScript can't load to {map_location}, a virtual GPU: load to the CPU")
    return _validate_map_location(map_location)
