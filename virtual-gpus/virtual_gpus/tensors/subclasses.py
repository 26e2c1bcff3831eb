"""Subclasses of torch.Tensor on a virtual GPU.

A tensor of a program's class Image is, on a virtual GPU, an Image and a VirtualTensor: virtual_class(Image) makes a
class of the same name that inherits from both. Two rules of PyTorch decide how:

- A class with a __torch_dispatch__ and torch.Tensor's own __torch_function__ gets a disabled one (torch/csrc/autograd/
  python_variable.cpp, THPVariableMetaType_init). A program's subclasses work by __torch_function__, so it is put back
  when the class is there; and `super().__torch_function__` in it must be torch.Tensor's, which is why they inherit from
  VirtualSubclass and not from VirtualTensor itself.
- A wrapper gets its class when it is made, by _make_wrapper_subclass, and Tensor.as_subclass would make another one,
  without `inner`. So `patches.modules` assigns __class__.
"""

import functools
import inspect

from torch import Tensor

from virtual_gpus.tensors.tensor import VirtualDenseTensor, VirtualTensor


class VirtualSubclass(VirtualTensor):
    """The base of all virtual subclasses; super().__torch_function__ is torch.Tensor's here."""


VirtualSubclass.__torch_function__ = inspect.getattr_static(Tensor, "__torch_function__")


@functools.cache
def virtual_class(cls: type) -> type:
    """The class of tensors on virtual GPUs that are of class `cls`."""
    if cls is Tensor or issubclass(cls, VirtualTensor):
        return VirtualDenseTensor if cls is Tensor else cls
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    bases = [virtual_class(base) for base in cls.__bases__ if issubclass(base, Tensor) and base is not Tensor]
    subclass = type(cls)(cls.__name__, (cls, *(bases or [VirtualSubclass])), namespace)
    subclass.__torch_function__ = inspect.getattr_static(cls, "__torch_function__")  # afterwards: see above
    return subclass
