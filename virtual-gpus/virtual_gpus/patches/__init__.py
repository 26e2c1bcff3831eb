"""Replacing what PyTorch answers, and putting it back: unittest.mock.patch, for a whole process.

Each module says what it replaces by `patch.replaces` and its like.
"""

import contextlib
import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from virtual_gpus.compat import check_bf16_tensor_supported, get_allowed_globals
from virtual_gpus.import_hook import AfterImport
from virtual_gpus.patches import autocast, script, serialization
from virtual_gpus.patches.patch import AFTER_IMPORT, PATCHES, Patch, put, replacement

PACKAGE = __package__.rpartition(".")[0]
CACHES = check_bf16_tensor_supported, get_allowed_globals  # of the GPUs that were there, of functions that are replaced
_patches = contextlib.ExitStack()

for module in pkgutil.iter_modules(__path__):  # each enters its own in PATCHES
    importlib.import_module(f"{__name__}.{module.name}")


def install() -> None:
    """Put all patches in place."""
    with contextlib.ExitStack() as stack:  # undone if one of them fails
        replaced = {}  # {id: (original, replacement)}; the original is kept, so that nothing else gets its id
        stack.callback(script.ORIGINALS.clear)
        for owner, name, value in PATCHES:
            original, value = replace(stack, owner, name, value)
            if callable(original):
                replaced[id(original)] = original, value
                script.ORIGINALS[id(value)] = value, original
        for module, name, value in imported_before(replaced):
            put(stack, module, name, value)
        for name, patches in AFTER_IMPORT.items():
            stack.callback(AfterImport(name, functools.partial(replace_all, patches)).cancel)
        autocast.register_autocast(stack)
        serialization.register_locations(stack)
        for cached in CACHES:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        _patches.push(stack.pop_all())


def replace_all(patches: Callable[[types.ModuleType], Iterator[Patch]], module: types.ModuleType) -> None:
    """For a module that a program has imported: put in place what patches(module) yields."""
    for patch in patches(module):
        replace(_patches, *patch)


def replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> tuple[Any, Any]:
    """Put a patch in place, until `stack` undoes it: what was there, and what is there now."""
    original = None if isinstance(owner, dict) else getattr(owner, name, None)
    value = replacement(original, owner, name, value)
    put(stack, owner, name, value)
    return original, value


def imported_before(replaced: dict[int, tuple[Any, Any]]) -> Iterator[tuple[types.ModuleType, str, Any]]:
    """(module, name, replacement) for what modules have imported from PyTorch, as in `from torch import zeros`.

    PyTorch's own modules keep theirs, and so does this package.
    """
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if isinstance(module, types.ModuleType) and not name.startswith(("torch", PACKAGE)):
            for key, value in list(vars(module).items()):
                if id(value) in replaced:
                    yield module, key, replaced[id(value)][1]


def remove() -> None:
    _patches.close()
