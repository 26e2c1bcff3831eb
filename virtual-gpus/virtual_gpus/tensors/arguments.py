"""The arguments of an operation on virtual tensors, unwrapped."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import Generator
from virtual_gpus.errors import check_devices, check_generator
from virtual_gpus.frames import called_from_cpp_autograd
from virtual_gpus.gpu import VirtualGPU, record_copy
from virtual_gpus.meta_cache import key_part, tensor_meta_of
from virtual_gpus.ops.table import MixedDevices, Op
from virtual_gpus.tensors.sparse import VirtualSparseTensor
from virtual_gpus.tensors.tensor import VirtualDenseTensor, VirtualTensor, wrap

DEVICE = torch.device  # what a program sees of it is replaced in a PyTorch built without CUDA
CONSTANTS = {int, str, type(None), torch.dtype}  # types whose values are parts of a key as they are


class Arguments:
    """What `args` and `kwargs` are inside.

    inner, inner_kwargs  the same with inner tensors
    gpu                  the virtual GPU of the first tensor on one
    elsewhere            tensors that are not on `gpu`
    key                  meta_cache.key_of(op.func, inner, inner_kwargs), put together on the way

    PyTorch's own error is raised for tensors that are elsewhere, unless this operation takes them.
    """

    __slots__ = ("elsewhere", "gpu", "inner", "inner_kwargs", "key")

    def __init__(self, op: Op, args: tuple, kwargs: dict):
        self.gpu: VirtualGPU | None = None
        self.elsewhere: tuple[Tensor, ...] = ()
        self.inner, key = self.unwrap(args)
        if kwargs:
            values, kwargs_key = self.unwrap(kwargs.values())
            self.inner_kwargs = dict(zip(kwargs, values, strict=True))
            self.key = (id(op.func), key, *kwargs, kwargs_key)
        else:
            self.inner_kwargs, self.key = kwargs, (id(op.func), key)
        if self.elsewhere:
            self.check_devices(op, args, kwargs)

    def unwrap(self, values: Iterable) -> tuple[list, tuple]:
        """(inner values, their part of the key). Every case but the last is there for speed."""
        inner, key = [], []
        for value in values:
            kind = type(value)
            if kind is VirtualDenseTensor:
                if value.gpu is not self.gpu:
                    if self.gpu is None:
                        self.gpu = value.gpu
                    else:
                        self.elsewhere += (value,)
                key.append(value.tensor_meta)
                value = value.inner
            elif kind in CONSTANTS:
                key.append(value)
            elif kind is float:
                key.append(float)
            elif kind is Tensor:
                key.append(tensor_meta_of(value))
                self.elsewhere += (value,)
            elif kind is list or kind is tuple:
                if value and type(value[0]) is int:  # sizes
                    key.append(tuple(value))
                else:
                    value, part = self.unwrap(value)
                    key.append(part)
            else:
                value, part = self.unwrap_other(value)
                key.append(part)
            inner.append(value)
        return inner, tuple(key)

    def unwrap_other(self, value: Any) -> tuple[Any, Any]:
        if type(value) is VirtualSparseTensor:
            self.gpu = self.gpu or value.gpu
            self.elsewhere += () if value.gpu is self.gpu else (value,)
            return value.inner, value.tensor_meta
        if isinstance(value, VirtualTensor):  # of a program's class, which an error need not name
            [value], [part] = self.unwrap([wrap(value.inner, value.gpu)])
            return value, part
        part = key_part(value)
        if isinstance(value, Tensor):
            self.elsewhere += (value,)
        elif isinstance(value, Generator):
            check_generator(value, self.gpu)
            value = None if self.gpu.backing.type == "meta" else value
        elif type(value) is DEVICE and self.gpu is not None:
            value = self.gpu.backing
        return value, part

    def check_devices(self, op: Op, args: tuple, kwargs: dict) -> None:
        scalars = all(type(t) is Tensor and t.dim() == 0 and t.is_cpu for t in self.elsewhere)
        if op.mixes_devices or (op.takes_cpu_scalars and scalars) or called_from_cpp_autograd(op.func):
            return
        if op.is_composite:
            raise MixedDevices
        for tensor in check_devices(op.func, args, kwargs, self.gpu, self.elsewhere):
            record_copy(tensor.nbytes, None, self.gpu)
