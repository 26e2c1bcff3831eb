"""Copies between devices: the only operations that may have tensors on two of them."""

import torch
from torch import Tensor

from virtual_gpus.clock.clock import name_of
from virtual_gpus.constants import constant_of, invalidate_constants, set_constant
from virtual_gpus.errors import no_values
from virtual_gpus.gpu import VirtualGPU, record_copy
from virtual_gpus.ops.conversions import saturate
from virtual_gpus.ops.table import Base
from virtual_gpus.tensors.tensor import VirtualTensor, check_dense, inner_of, wrap


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """target.copy_(source), on one device or across two."""
    if isinstance(source, VirtualTensor) and source.inner.is_meta and not isinstance(target, VirtualTensor):
        raise no_values("copying to the CPU")
    from_gpu, to_gpu = (getattr(t, "gpu", None) for t in (source, target))
    record_copy(source.nbytes, from_gpu, to_gpu, host_memory(source, target), non_blocking)
    inner = inner_of(target), inner_of(source)
    if from_gpu is to_gpu:
        to_gpu.run(torch.ops.aten.copy_.default, inner, {})
        saturate(*inner)
    elif not inner[0].is_meta:
        Base.copy_(*inner)
    elif inner[1].is_meta:
        invalidate_constants(inner[:1])
    else:
        set_constant(*inner)  # also x[1] = 7, which is a copy before PyTorch 2.14
    return target


class Move(torch.autograd.Function):
    """A copy between devices; its gradient travels the same way back."""

    @staticmethod
    def forward(ctx, x, gpu, non_blocking, memory):
        ctx.source = getattr(x, "gpu", None)
        return transfer(x, gpu, non_blocking, memory)

    @staticmethod
    def backward(ctx, grad):
        return move(grad, ctx.source), None, None, None


def move(x: Tensor, gpu: VirtualGPU | None, non_blocking: bool = False, memory: str | None = None) -> Tensor:
    """A copy of x on `gpu` (None: the CPU), recorded by autograd if x requires a gradient.

    On the CPU it is pinned if it is `non_blocking`, as in PyTorch; unless the caller will put it into other `memory`,
    see `host_memory`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return Move.apply(x, gpu, non_blocking, memory)
    return transfer(x, gpu, non_blocking, memory)


def transfer(x: Tensor, gpu: VirtualGPU | None, non_blocking: bool = False, memory: str | None = None) -> Tensor:
    """What `move` does, without autograd. torch.OutOfMemoryError if the GPU has no room."""
    source = getattr(x, "gpu", None)
    inner = x.detach() if source is None else x.inner
    backing = torch.device("cpu") if gpu is None else gpu.backing
    values = constant_of(inner) if inner.is_meta and backing.type != "meta" else inner
    if values is None:
        if source is None:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        raise no_values(f"copying from {x.device} to {name_of(gpu)}")
    if gpu is not None:
        check_dense(inner)
        gpu.ledger.check(inner.nbytes)
    pin = non_blocking and gpu is None and memory is None
    record_copy(inner.nbytes, source, gpu, "pinned" if pin else memory or host_memory(x), non_blocking)
    data = pinned(Base.to(values, backing, copy=True), pin)
    if data.is_meta and not inner.is_meta:
        set_constant(data, inner)
    return data if gpu is None else wrap(data, gpu)


def pinned(tensor: Tensor, pin: bool | None = True) -> Tensor:
    """`tensor`, whose `is_pinned()` is true from now on if `pin` is."""
    if pin:
        tensor.untyped_storage().pinned = True
    return tensor


def host_memory(*ends: Tensor) -> str:
    """The kind of host memory at one of these ends of a copy: "pinned", "shared" or "pageable"."""
    storages = [x.untyped_storage() for x in ends if not isinstance(x, VirtualTensor) and not x.is_meta]
    if any(getattr(storage, "pinned", False) for storage in storages):
        return "pinned"
    return "shared" if any(storage.is_shared() for storage in storages) else "pageable"
