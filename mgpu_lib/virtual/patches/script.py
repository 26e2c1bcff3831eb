"""torch.jit.script and torch.jit.trace: functions of the CPU are compiled as if no virtual GPUs were on."""

from torch.jit import _builtins, _recursive

ORIGINALS = {}  # {id of a replacement: (it, what it replaces)}, while virtual GPUs are on

# The originals, taken before anything is patched.
_find_builtin, _try_compile_fn = _builtins._find_builtin, _recursive.try_compile_fn


def patches():
    """(owner, name, replacement), for patches.install."""
    _builtins._get_builtin_table()  # made once, of PyTorch's own functions
    yield _builtins, "_find_builtin", lambda fn: _find_builtin(original_of(fn))
    yield _recursive, "try_compile_fn", lambda fn, loc: _try_compile_fn(original_of(fn), loc)


def original_of(fn):
    """What `fn` replaces in PyTorch, or `fn` itself."""
    return ORIGINALS.get(id(fn), (fn, fn))[1]
