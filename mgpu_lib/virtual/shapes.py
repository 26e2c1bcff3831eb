"""Calling operations, with values or without.

On tensors without values (backing="meta") PyTorch works out the shapes of a result, for many operations in Python and
slowly. A dry run calls the same operations on the same shapes again and again, so the answer is kept.
"""
import torch

from .costs import is_view
from .errors import tensors_in

aten = torch.ops.aten
_empty_strided = torch.empty_strided  # PyTorch's own, also while virtual GPUs are on


def call(func, args, kwargs):
    return func(*args, **kwargs)


class Shapes:
    """Calls operations on meta tensors; knows what came out for the same shapes before."""

    def __init__(self):
        self.known = {}  # an operation with its shapes, as `tensor.unwrap` gathers them -> what `recipe` says

    def __call__(self, func, args, kwargs, key):
        made = self.known.get(key)
        if made is None:
            out = laid_out(func, args, func(*args, **kwargs))
            self.known[key] = recipe(func, args, kwargs, out)
            return out
        return made(func, args, kwargs)


def laid_out(func, args, out):
    """Convolutions give channels last if their input or weight is; without values PyTorch forgets it."""
    if func not in (aten.convolution.default, aten.convolution_backward.default):
        return out
    X, W = args[:2] if func is aten.convolution.default else args[1:3]
    if X.dim() != 4 or not any(last(t) and not t.is_contiguous() for t in (X, W)):
        return out
    made = [t.contiguous(memory_format=torch.channels_last) if t is not None and t.dim() == 4 else t
            for t in listed(out)]
    return made[0] if isinstance(out, torch.Tensor) else tuple(made)


def last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last)


def listed(out):
    return [out] if isinstance(out, torch.Tensor) else out


def recipe(func, args, kwargs, out):
    """How to get a result like `out` from the next such call, without asking PyTorch if possible."""
    if not isinstance(func, torch._ops.OpOverload) or is_view(func):
        return call
    if func._schema.is_mutable:
        if torch.Tag.pointwise in func.tags and out is args[0]:
            return lambda func, args, kwargs: args[0]
        return (lambda *_: None) if out is None and func.overloadpacket.__name__.startswith("_foreach") else call
    if not isinstance(out, (torch.Tensor, tuple, list)) or not all(
            t is None or isinstance(t, torch.Tensor) for t in listed(out)):
        return call
    storages = {t.untyped_storage()._cdata for t in (*tensors_in(args), *tensors_in(kwargs.values()))}
    if any(t is not None and t.untyped_storage()._cdata in storages for t in listed(out)):
        return call  # a view that doesn't say so
    return maker([None if t is None else (t.shape, t.stride(), t.dtype) for t in listed(out)], type(out))


def maker(forms, kind):
    """A function that makes meta tensors of these shapes, strides and types: one of them, or a `kind` of them."""
    def make(*_):
        made = [None if form is None else _empty_strided(*form[:2], dtype=form[2], device="meta") for form in forms]
        return kind(made) if kind in (tuple, list) else made[0]
    return make
