"""What nn.Module does differently with parameters on a virtual GPU."""

import threading

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from virtual_gpus.compat import module_apply
from virtual_gpus.state import find
from virtual_gpus.tensors.copies import transfer
from virtual_gpus.tensors.identity import move_in_place, swap_impl
from virtual_gpus.tensors.tensor import Base, VirtualTensor, set_data

# The originals, taken before anything is patched.
_swap_tensors = torch.utils.swap_tensors
_swaps_parameters = torch.__future__.get_swap_module_params_on_conversion
_materialize = UninitializedTensorMixin.materialize

_moving = threading.local()


def patches():
    """(owner, name, replacement), for patches.install."""
    yield Tensor, "data", property(Base.data.__get__, assign_data)
    yield UninitializedTensorMixin, "materialize", materialize
    yield UninitializedTensorMixin, "device", property(device_of_lazy)
    yield torch.nn.Module, "_apply", apply_to_module
    yield torch.__future__, "get_swap_module_params_on_conversion", swaps_parameters
    yield torch.utils, "swap_tensors", swap_tensors


def assign_data(self, value):
    if isinstance(self, UninitializedTensorMixin) and hasattr(value, "device_to_be"):
        self.device_to_be = value.device_to_be  # a lazy module was moved: there is nothing to move yet
    elif isinstance(value, VirtualTensor):
        set_data(self, value)
    else:
        Base.data.__set__(self, value)


def device_of_lazy(self):
    return vars(self).get("device_to_be") or Base.device.__get__(self)


def materialize(self, shape, device=None, dtype=None):
    device = device or vars(self).pop("device_to_be", None)
    gpu = find(device)
    _materialize(self, shape, device if gpu is None else "cpu", dtype)
    if gpu is not None:
        set_data(self, transfer(self.detach(), gpu))


def apply_to_module(self, fn, recurse=True):
    """module.to(…): parameters are swapped in place, so that they keep their identity; lazy ones can't be yet."""
    before = getattr(_moving, "swap", None)
    _moving.swap = not any(isinstance(p, UninitializedTensorMixin) for p in self._parameters.values())
    try:
        return module_apply(self, fn, recurse)
    finally:
        _moving.swap = before


def swaps_parameters():
    """torch.__future__.get_swap_module_params_on_conversion: in a thread that is moving a module, what that needs."""
    swap = getattr(_moving, "swap", None)
    return _swaps_parameters() if swap is None else swap


def swap_tensors(a, b):
    """torch.utils.swap_tensors. A module that stays on its device only gets other data, and graphs stay good."""
    if getattr(_moving, "swap", None) and a.device == b.device:
        a.data = b.data
    elif getattr(_moving, "swap", None) and (isinstance(a, VirtualTensor) or isinstance(b, VirtualTensor)):
        move_in_place(a, b)
    elif isinstance(a, VirtualTensor) or isinstance(b, VirtualTensor):
        swap_impl(a, b)
    else:
        _swap_tensors(a, b)
