"""Methods of torch.Tensor, replaced: tensors that have a __torch_function__ of their own are asked first, as by
PyTorch's own methods, and can have a class of their own on a virtual GPU, too."""

import functools
from types import MethodType

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin
from torch.overrides import handle_torch_function, has_torch_function

from virtual_gpus.compat import DisableTorchFunctionSubclass
from virtual_gpus.ops.table import Base
from virtual_gpus.tensors.subclasses import virtual_class
from virtual_gpus.tensors.tensor import VirtualTensor, cpu_class


class Method:
    """`function` in the place of `original`, a method of torch.Tensor.

    It equals the original: libraries keep methods in sets and tables, as torchvision does for its tv_tensors.
    """

    def __init__(self, original, function, asks=True):
        functools.update_wrapper(self, original)
        self.original, self.function, self.asks = original, function, asks

    def __call__(self, *args, **kwargs):
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        if self.asks and has_torch_function(tensors):
            return handle_torch_function(self, tensors, *args, **kwargs)
        return self.function(*args, **kwargs)

    def __get__(self, tensor, kind=None):
        return self if tensor is None else MethodType(self, tensor)

    def __eq__(self, other):
        return self is other or self.original == other

    def __hash__(self):
        return hash(self.original)


def patches():
    """(owner, name, replacement), for patches.install."""
    # PyTorch's asks no __torch_function__: that would put the class back.
    yield Tensor, "as_subclass", Method(Tensor.as_subclass, as_subclass, asks=False)
    yield Tensor, "_make_subclass", staticmethod(make_subclass)


def as_subclass(self, cls):
    """Tensor.as_subclass: the same values, as a tensor of class `cls`."""
    cls = cpu_class(cls)
    if not isinstance(self, VirtualTensor):
        return Base.as_subclass(self, cls)
    with DisableTorchFunctionSubclass():
        made = torch.ops.aten.alias.default(self)
    made.__class__ = virtual_class(cls)
    return made


def make_subclass(cls, data, requires_grad=False, **kwargs):
    """Tensor._make_subclass: detached, as a tensor of class `cls`; a lazy one says where it will be."""
    if not isinstance(data, VirtualTensor):
        return Base._make_subclass(cls, data, requires_grad, **kwargs)
    if issubclass(cls, UninitializedTensorMixin):
        lazy = Base._make_subclass(cls, torch.empty(0, dtype=data.dtype, device="cpu"), requires_grad)
        lazy.device_to_be = data.device
        return lazy
    made = data.detach()
    made.__class__ = virtual_class(cpu_class(cls))
    return made.requires_grad_(requires_grad)
