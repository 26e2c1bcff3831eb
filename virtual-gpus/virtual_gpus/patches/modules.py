"""Modules with parameters on a virtual GPU, and the class of a tensor there."""

import threading

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from virtual_gpus.compat import Base, DisableTorchFunctionSubclass
from virtual_gpus.patches.patch import Method, patch, replaces
from virtual_gpus.state import current, find
from virtual_gpus.tensors.copies import transfer
from virtual_gpus.tensors.identity import move_in_place, swap_impl
from virtual_gpus.tensors.subclasses import virtual_class
from virtual_gpus.tensors.tensor import VirtualTensor, cpu_class, set_data

_moving = threading.local()  # .swap: whether the module that this thread is moving has its parameters swapped


def assign_data(self, value):
    if isinstance(self, UninitializedTensorMixin) and hasattr(value, "device_to_be"):
        self.device_to_be = value.device_to_be  # a lazy module was moved: there is nothing to move yet
    elif isinstance(value, VirtualTensor):
        set_data(self, value)
    else:
        Base.data.__set__(self, value)


def device_of_lazy(self: UninitializedTensorMixin) -> torch.device:
    return vars(self).get("device_to_be") or Base.device.__get__(self)


patch(Tensor, {"data": property(Base.data.__get__, assign_data)})
patch(UninitializedTensorMixin, {"device": property(device_of_lazy)})


@replaces(UninitializedTensorMixin)
def materialize(original, self, shape, device=None, dtype=None):
    device = device or vars(self).pop("device_to_be", None)
    gpu = find(device)
    original(self, shape, device if gpu is None else "cpu", dtype)
    if gpu is not None:
        set_data(self, transfer(self.detach(), gpu))


@replaces(torch.nn.Module)
def _apply(original, self, fn, recurse=True):
    """module.to(…): parameters are swapped in place, so that they keep their identity; lazy ones can't be yet."""
    before = getattr(_moving, "swap", None)
    _moving.swap = not any(isinstance(p, UninitializedTensorMixin) for p in self._parameters.values())
    try:
        return original(self, fn, recurse)
    finally:
        _moving.swap = before


@replaces(torch.nn.init)
def _no_grad_trunc_normal_(original, tensor, mean, std, a, b, generator=None):
    """In a dry run numbers are drawn once; PyTorch draws again and again, until all lie between the bounds."""
    if current() is None or current().rendezvous is None:
        return original(tensor, mean, std, a, b, generator)
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


@replaces(torch.__future__)
def get_swap_module_params_on_conversion(original):
    """In a thread that is moving a module, what that needs."""
    swap = getattr(_moving, "swap", None)
    return original() if swap is None else swap


@replaces(torch.utils)
def swap_tensors(original, a, b):
    """A module that stays on its device only gets other data, and graphs stay good."""
    moving = getattr(_moving, "swap", None)
    if moving and a.device == b.device:
        a.data = b.data
    elif isinstance(a, VirtualTensor) or isinstance(b, VirtualTensor):
        (move_in_place if moving else swap_impl)(a, b)
    else:
        original(a, b)


def as_subclass(self, cls):
    """Tensor.as_subclass: the same values, as a tensor of class `cls`."""
    cls = cpu_class(cls)
    if not isinstance(self, VirtualTensor):
        return Base.as_subclass(self, cls)
    with DisableTorchFunctionSubclass():
        made = torch.ops.aten.alias.default(self)
    made.__class__ = virtual_class(cls)
    return made


# PyTorch's asks no __torch_function__: that would put the class back.
patch(Tensor, {"as_subclass": Method(Tensor.as_subclass, as_subclass, asks=False)})


def make_subclass(cls, data, requires_grad=False, **kwargs):
    """Under Parameter(…): detached, as a tensor of class `cls`; a lazy one says where it will be."""
    if not isinstance(data, VirtualTensor):
        return Base._make_subclass(cls, data, requires_grad, **kwargs)
    if issubclass(cls, UninitializedTensorMixin):
        lazy = Base._make_subclass(cls, torch.empty(0, dtype=data.dtype, device="cpu"), requires_grad)
        lazy.device_to_be = data.device
        return lazy
    made = data.detach()
    made.__class__ = virtual_class(cpu_class(cls))
    return made.requires_grad_(requires_grad)


patch(Tensor, {"_make_subclass": staticmethod(make_subclass)})
