"""Replacing what PyTorch answers, and putting it back."""

import contextlib
import functools
import sys
import types

from torch import Tensor

from virtual_gpus.compat import check_bf16_tensor_supported
from virtual_gpus.import_hook import AfterImport
from virtual_gpus.patches import (
    autocast,
    checkpoint,
    comm,
    cuda,
    distributed,
    dtensor,
    factories,
    functional,
    functions,
    gradients,
    legacy,
    memory,
    methods,
    modules,
    objects,
    recomputation,
    script,
    sharing,
    staging,
)

PACKAGE = __package__.rpartition(".")[0]
REPLACING = (
    factories,
    functions,
    methods,
    modules,
    gradients,
    cuda,
    memory,
    distributed,
    objects,
    recomputation,
    legacy,
    autocast,
    comm,
    checkpoint,
    script,
    sharing,
)
_patches = contextlib.ExitStack()


def install():
    """Put the replacements that the other modules name in place."""
    with contextlib.ExitStack() as stack:  # undone if one of them fails
        replacements = {}
        stack.callback(script.ORIGINALS.clear)
        for module in REPLACING:
            for owner, name, value in module.patches():
                original = getattr(owner, name, None)
                if isinstance(value, types.FunctionType):
                    value.__name__ = name  # by which PyTorch finds it, to replace it once more
                    value = methods.Method(original, value) if owner is Tensor else value
                if callable(original):
                    replacements[id(original)] = original, value  # kept, so that nothing else gets its id
                    script.ORIGINALS[id(value)] = value, original
                patch(stack, owner, name, value)
        for module, name, value in imported_before(replacements):
            patch(stack, module, name, value)
        for module in (dtensor, functional, staging):
            stack.callback(AfterImport(module.MODULE, functools.partial(patch_imported, module)).cancel)
        autocast.register_autocast(stack)
        checkpoint.register_checkpoints(stack)
        sharing.register_collate(stack)
        distributed.register_backends(stack)
        forget = check_bf16_tensor_supported.cache_clear  # asked of the GPUs that were there
        forget()
        stack.callback(forget)
        _patches.push(stack.pop_all())


def patch_imported(patches, module):
    """What the module `patches` names is put in place when a program has imported PyTorch's `module`."""
    for owner, name, value in patches.patches(module):
        patch(_patches, owner, name, value)


def imported_before(replacements):
    """(module, name, replacement) for what modules imported from PyTorch before, as in `from torch import zeros`.

    `replacements` is {id of the original: (original, replacement)}. PyTorch's own modules keep theirs, and so does
    this package.
    """
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if isinstance(module, types.ModuleType) and not name.startswith(("torch", PACKAGE)):
            for key, value in list(vars(module).items()):
                if id(value) in replacements:
                    yield module, key, replacements[id(value)][1]


def patch(stack, owner, name, value):
    """Set an attribute of a module or class; `stack` puts back what was there, or nothing if nothing was."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def remove():
    _patches.close()
