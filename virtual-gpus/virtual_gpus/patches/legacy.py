"""torch.FloatTensor, torch.cuda.FloatTensor and their like: types from before tensors had a dtype and a device."""

from types import ModuleType

import torch
from torch import Tensor

from virtual_gpus.compat import C
from virtual_gpus.patches.patch import StandIn, patch, replaces
from virtual_gpus.state import current

LEGACY = "Float Double Half BFloat16 Long Int Short Char Byte Bool".split()


class LegacyType(StandIn, type):
    """The type of tensors of one dtype, on the CPU or on a GPU. Called, it makes one; isinstance asks for both."""

    def __instancecheck__(cls, value):
        return isinstance(value, Tensor) and value.type() == str(cls)

    def __call__(cls, *args, device=None):
        made = cls.on_the_cpu(*args)
        return made.cuda(device) if cls.is_cuda else made

    def __str__(cls):
        return f"{cls.__module__}.{cls.__name__}"


def legacy_type(module: ModuleType, name: str) -> LegacyType:
    """What takes the place of `module`.`name`, where module is torch or torch.cuda."""
    on_the_cpu = getattr(torch, name)
    original = getattr(module, name, on_the_cpu)  # a PyTorch built without CUDA has those of torch only
    names = {"__module__": module.__name__, "on_the_cpu": on_the_cpu, "original": original}
    names |= {"dtype": on_the_cpu.dtype, "is_cuda": module is torch.cuda, "is_sparse": False, "layout": torch.strided}
    return LegacyType(name, (), names)


for module in (torch, torch.cuda):
    patch(module, {f"{name}Tensor": legacy_type(module, f"{name}Tensor") for name in LEGACY})


@replaces(C)
def _set_default_tensor_type(original, kind):
    """Under torch.set_default_tensor_type."""
    on_gpu = isinstance(kind, LegacyType) and kind.is_cuda
    if on_gpu:
        torch.set_default_dtype(kind.dtype)
    else:
        original(getattr(kind, "on_the_cpu", kind))
    current().default_device = "cuda" if on_gpu else None
