"""How the modules of this folder say what they replace in PyTorch; `patches.install` puts it in place."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeAlias

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

Patch: TypeAlias = tuple[Any, Any, Any]  # (module, class or dict; name or key there; replacement)
PATCHES: list[Patch] = []
AFTER_IMPORT: dict[str, Callable[[Any], Iterator[Patch]]] = {}  # {module: what yields its patches}


def patch(owner: Any, values: dict) -> None:
    """Replace attributes of `owner`, or entries if it is a dict, by `values`."""
    PATCHES.extend((owner, name, value) for name, value in values.items())


def replaces(owner: Any, names: str = "") -> Callable:
    """Decorates the function that takes the place of `names` in `owner`: of its own name if none is given.

    If its first parameter is called `original`, calls hand it what is replaced.
    """

    def register(function: Callable) -> Callable:
        patch(owner, dict.fromkeys(names.split() or [function.__name__], function))
        return function

    return register


def after_import(module: str) -> Callable:
    """Decorates a generator of Patches for a module that not every program imports: it is called with it then."""
    return lambda patches: AFTER_IMPORT.setdefault(module, patches)


def put(stack: contextlib.ExitStack, owner: Any, name: Any, value: Any) -> None:
    """Set an attribute, or an entry of a dict; `stack` puts back what was there, or nothing if nothing was."""
    is_dict = isinstance(owner, dict)
    there = owner if is_dict else vars(owner)
    assign, delete = (dict.__setitem__, dict.__delitem__) if is_dict else (setattr, delattr)
    stack.callback(*((assign, owner, name, there[name]) if name in there else (delete, owner, name)))
    assign(owner, name, value)


def replacement(original: Any, owner: Any, name: str, value: Any) -> Any:
    """What takes the place of `original`, which is `owner`.`name`."""
    if not isinstance(value, FunctionType) or isinstance(owner, dict):
        return value
    if value.__code__.co_argcount and value.__code__.co_varnames[0] == "original":
        value = with_original(value, original)
    value.__name__ = name  # by which PyTorch finds it, to replace it once more
    if owner is Tensor:
        return Method(original, value)
    return staticmethod(value) if isinstance(vars(owner).get(name), staticmethod) else value


def with_original(function: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call


class StandIn:
    """It equals its `original`: libraries keep functions and types in sets and tables, as torchvision does methods of
    tensors for its tv_tensors."""

    original: Any

    def __eq__(self, other):
        return self is other or self.original == other

    def __hash__(self):
        return hash(self.original)


class Method(StandIn):
    """`function` in the place of `original`, a method of torch.Tensor.

    Tensors that have a __torch_function__ of their own are asked first, as by PyTorch's own methods.
    """

    def __init__(self, original: Callable, function: Callable, asks: bool = True):
        functools.update_wrapper(self, original)
        self.original, self.function, self.asks = original, function, asks

    def __call__(self, *args, **kwargs):
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if self.asks and has_torch_function(tensors):
            return handle_torch_function(self, tensors, *args, **kwargs)
        return self.function(*args, **kwargs)

    def __get__(self, tensor, kind=None):
        return self if tensor is None else MethodType(self, tensor)
