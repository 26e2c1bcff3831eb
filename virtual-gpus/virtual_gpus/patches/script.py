"""torch.jit.script and torch.jit.trace: functions of the CPU are compiled as if no virtual GPUs were on.

What lies on a virtual GPU can't be saved with TorchScript: C++ would write it, and knows no virtual GPU.
"""

from typing import Any

import torch
from torch.jit import RecursiveScriptModule, ScriptModule

from virtual_gpus.compat import get_builtin_table, jit_builtins, jit_recursive, jit_serialization
from virtual_gpus.patches.patch import replaces
from virtual_gpus.state import find
from virtual_gpus.tensors.tensor import is_virtual

ORIGINALS: dict[int, tuple[Any, Any]] = {}  # {id of a replacement: (it, what it replaces)}, while virtual GPUs are on


get_builtin_table()  # is kept


@replaces(jit_builtins, "_find_builtin")
@replaces(jit_recursive, "try_compile_fn")
def ask_of_original(original, fn, *args):
    """Asked about a function: they hear of what it replaces in PyTorch, if it is one of ours."""
    return original(ORIGINALS.get(id(fn), (fn, fn))[1], *args)


@replaces(ScriptModule, "save save_to_buffer")  # torch.jit.save calls one of them
@replaces(RecursiveScriptModule, "save save_to_buffer")  # what traced modules are not: they have methods of their own
def save(original, module, *args, **kwargs):
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_virtual(tensor):
            raise RuntimeError(
                f"TorchScript can't save {name!r}, which is on {tensor.device}, a virtual GPU: script or trace the "
                "module on the CPU, and save that"
            )
    return original(module, *args, **kwargs)


@replaces(jit_serialization)
def validate_map_location(original, map_location=None):
    """Where torch.jit.load is to load to."""
    if isinstance(map_location, str | torch.device) and find(map_location) is not None:
        raise RuntimeError(f"TorchScript can't load to {map_location}, a virtual GPU: load to the CPU")
    return original(map_location)
