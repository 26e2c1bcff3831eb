"""Functional collectives, and what DTensor does in C++: PyTorch's own, on tensors that it takes to be on the CPU.

Their kernels are in C++ and call operations of c10d with tensors that they have allocated. So they run inside of a mode
in which these are on the GPU.
"""

import contextlib
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import DispatchKey, TorchDispatchMode, functionalize_unsafe_set, tree_map_only
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.ops.table import NAMESPACE_HANDLERS, Op
from virtual_gpus.tensors.tensor import is_virtual, wrap
from virtual_gpus.tree import tensors_in

IN_FLIGHT: dict[int, Tensor] = {}  # {storage: result} of functional collectives that have not been waited for
KERNEL = DispatchKey.CompositeExplicitAutograd


class GPUAllocations(TorchDispatchMode):
    """Inside, each torch.empty that C++ calls for a CPU tensor of one of `dtypes` (None: of any) is on `gpu`, and so is
    what it communicates."""

    def __init__(self, gpu: VirtualGPU, dtypes: Container[torch.dtype] | None):
        super().__init__()
        self.gpu, self.dtypes = gpu, dtypes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if func is torch.ops.aten.empty.memory_format and (self.dtypes is None or dtype in self.dtypes):
            kwargs = kwargs | {"device": self.gpu.backing}
            captured = self.gpu.capturing() is not None
            return wrap(self.gpu.run(func, args, kwargs) if captured else func(*args, **kwargs), self.gpu)
        if func.namespace == "c10d":
            args = tree_map_only(Tensor, lambda x: x if is_virtual(x) else wrap(x, self.gpu), args)
        out = func(*args, **kwargs)
        if func.is_view and is_virtual(out):
            functionalize_unsafe_set(out, args[0])  # C++ compares storages, to see what is a view of what
        return out


def allocations_beside(
    tensors: Iterable[Tensor], dtypes: Container[torch.dtype] | None = ()
) -> contextlib.AbstractContextManager:
    """GPUAllocations on the GPU of these `tensors`, if they are on one."""
    gpu = next((tensor.gpu for tensor in tensors if is_virtual(tensor)), None)
    return contextlib.nullcontext() if gpu is None else GPUAllocations(gpu, dtypes)


def functional(op: Op, args: tuple, kwargs: dict) -> Any:
    """A functional collective. Views of a virtual tensor have storages of their own, and PyTorch finds the work by the
    storage that it writes to, so the original result is kept."""
    with allocations_beside(tensors_in(args), dtypes=None):
        if op.func.overloadpacket.__name__.startswith("wait_tensor"):
            for tensor in tensors_in(args):
                first = IN_FLIGHT.pop(tensor.untyped_storage()._cdata, None)
                if first is not None:
                    torch.ops._c10d_functional.wait_tensor.default._op_dk(KERNEL, first)
            return args[0]
        out = op.func._op_dk(KERNEL, *args, **kwargs)
    IN_FLIGHT.update({tensor.untyped_storage()._cdata: tensor for tensor in tensors_in([out]) if is_virtual(tensor)})
    return out


def dtensor(op: Op, args: tuple, kwargs: dict) -> Any:
    """A redistribution of DTensor's in C++, which waits for the collectives that it calls."""
    with allocations_beside(tensors_in(args), dtypes=None):
        return op.func._op_dk(KERNEL, *args, **kwargs)


NAMESPACE_HANDLERS.update({"_c10d_functional": functional, "_dtensor": dtensor})
