"""A cache of results on meta tensors, for dry runs.

On tensors without values PyTorch infers the shapes of a result, for many operations in Python and slowly. A dry run
calls the same operations on the same shapes again and again, and so does another rank: FakeTensorMode has such a cache,
too. Keys are `key_of` the call. Time depends on the same, so the clock keeps its prices by them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.clock.work import is_view
from virtual_gpus.compat import Generator, OpOverload
from virtual_gpus.tree import tensors_in

Replay = Callable[[Callable, Sequence, dict], Any]  # replay(func, args, kwargs): the result of the next such call

CACHE_LIMIT = 200_000  # entries
CACHE: dict[tuple, Replay] = {}  # {(default dtype, key of a call): its replay}
aten = torch.ops.aten
_empty_strided = torch.empty_strided  # PyTorch's own, also while virtual GPUs are on


def cached_call(func: Callable, args: Sequence, kwargs: dict, key: tuple) -> Any:
    """func(*args, **kwargs) on meta tensors, by what such a call gave before if that is enough."""
    key = torch.get_default_dtype(), key  # of integers, a mean or a product with 0.5 has it
    replay = CACHE.get(key)
    if replay is not None:
        return replay(func, args, kwargs)
    target = kwargs.get("out")
    before = tensor_meta_of(target) if isinstance(target, Tensor) else None
    out = keep_channels_last(func, args, func(*args, **kwargs))
    if len(CACHE) >= CACHE_LIMIT:  # a program with ever new shapes
        CACHE.clear()
    fits = before is not None and out is target and tensor_meta_of(out) == before
    CACHE[key] = (lambda func, args, kwargs: kwargs["out"]) if fits else replay_of(func, args, kwargs, out)
    return out


def keep_channels_last(func: Callable, args: Sequence, out: Any) -> Any:
    """The result of a convolution is channels last if its input or weight is; on meta tensors PyTorch forgets it."""
    if func not in (aten.convolution.default, aten.convolution_backward.default):
        return out
    X, W = args[:2] if func is aten.convolution.default else args[1:3]
    last = {"memory_format": torch.channels_last}
    if X.dim() != 4 or not any(t.is_contiguous(**last) and not t.is_contiguous() for t in (X, W)):
        return out
    if isinstance(out, Tensor):
        return out.contiguous(**last)
    return tuple(t.contiguous(**last) if t is not None and t.dim() == 4 else t for t in out)


def call(func: Callable, args: Sequence, kwargs: dict) -> Any:
    """The replay of what can't be kept."""
    return func(*args, **kwargs)


def replay_of(func: Callable, args: Sequence, kwargs: dict, out: Any) -> Replay:
    if not hasattr(func, "overloadpacket") or is_view(func):
        return call
    if isinstance(func, OpOverload) and func._schema.is_mutable:
        if torch.Tag.pointwise in func.tags and out is args[0]:
            return lambda func, args, kwargs: args[0]  # without values there is nothing to write
        foreach = out is None and func.overloadpacket.__name__.startswith("_foreach")
        return (lambda *_: None) if foreach else call
    made = [out] if isinstance(out, Tensor) else out
    if not isinstance(made, (tuple, list)) or not all(t is None or isinstance(t, Tensor) for t in made):
        return call
    inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
    if any(t is not None and t.untyped_storage()._cdata in inputs for t in made):
        return call  # a view that doesn't say so
    return make_empty([None if t is None else tensor_meta_of(t) for t in made], type(out))


def make_empty(metas: list, kind: type) -> Replay:
    """Makes meta tensors with these shapes, strides and dtypes: one, or a tuple or list of them."""

    def make(*_):
        made = [None if meta is None else _empty_strided(*meta[:2], dtype=meta[2], device="meta") for meta in metas]
        return kind(made) if kind in (tuple, list) else made[0]

    return make


def tensor_meta_of(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """(shape, stride, dtype), as in DTensor's TensorMeta; a sparse tensor has a number of entries and no strides."""
    return tensor.shape, tensor._nnz() if tensor.is_sparse else tensor.stride(), tensor.dtype


def key_of(func: Callable, args: Sequence, kwargs: dict) -> tuple:
    """What the time of func(*args, **kwargs), on inner tensors, and the shapes of its result depend on.

    `tensors.arguments` puts together the same key while it unwraps virtual tensors.
    """
    return (id(func), key_part(args), *kwargs, key_part([*kwargs.values()])) if kwargs else (id(func), key_part(args))


def key_part(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor_meta_of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(key_part, value))
    if isinstance(value, bool):
        return "yes" if value else "no"  # True == 1
    if isinstance(value, float):
        return float  # a learning rate, say, may differ in every step
    return None if isinstance(value, Generator) else value
