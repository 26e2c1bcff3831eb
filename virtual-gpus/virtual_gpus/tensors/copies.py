"""Copies between devices: the only operations that may have tensors on two of them."""

from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import Base
from virtual_gpus.constants import constant_of, invalidate_constants, set_constant
from virtual_gpus.errors import no_values
from virtual_gpus.gpu import VirtualGPU, check_copy, record_copy
from virtual_gpus.ops.conversions import saturate
from virtual_gpus.tensors.sparse import nbytes_of
from virtual_gpus.tensors.tensor import VirtualTensor, check_dense, inner_of, wrap
from virtual_gpus.unknown import UnknownTensor, forget, unknown_tensor

CPU = torch.device("cpu")


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """target.copy_(source), on one device or across two."""
    from_gpu, to_gpu = (getattr(t, "gpu", None) for t in (source, target))
    memory = host_memory(source, target)
    if from_gpu is not to_gpu and (capture := check_copy(from_gpu, to_gpu, memory, non_blocking)) is not None:
        capture.call(copy_pinned, inner_of(target), inner_of(source), from_gpu, to_gpu)
        return target
    record_copy(nbytes_of(source), from_gpu, to_gpu, memory, non_blocking)
    inner = inner_of(target), values_for(source, getattr(to_gpu, "backing", CPU))
    if from_gpu is to_gpu:
        to_gpu.run(torch.ops.aten.copy_.default, inner, {})
        to_gpu.call(saturate, *inner)
    elif not inner[0].is_meta:
        Base.copy_(*inner)
        if isinstance(inner[1], UnknownTensor):
            forget(target)
    elif inner[1].is_meta or isinstance(source, UnknownTensor):
        invalidate_constants(inner[:1])
    else:
        set_constant(*inner)  # also x[1] = 7, which is a copy before PyTorch 2.14
    return target


def copy_pinned(target: Tensor, source: Tensor, from_gpu: VirtualGPU | None, to_gpu: VirtualGPU | None) -> None:
    """What a replay does of target.copy_(source, non_blocking=True), with the tensors inside."""
    if source.is_meta and not target.is_meta:
        raise no_values(f"copying from {from_gpu.device} to the CPU in a CUDA graph")
    record_copy(source.nbytes, from_gpu, to_gpu, "pinned", non_blocking=True)
    Base.copy_(target, source)
    if target.is_meta:
        invalidate_constants([target])


class Move(torch.autograd.Function):
    """A copy between devices; its gradient travels the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gpu: VirtualGPU | None, non_blocking: bool, memory: str | None) -> Tensor:
        ctx.source = getattr(x, "gpu", None)
        return transfer(x, gpu, non_blocking, memory)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
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
    backing = CPU if gpu is None else gpu.backing
    values = values_for(x, backing)
    if gpu is not None:
        check_dense(inner)
        gpu.ledger.check(nbytes_of(inner))
    if check_copy(source, gpu, host_memory(x), non_blocking) is not None:
        raise RuntimeError(
            "virtual GPUs can't capture a tensor that moves: make one where it goes, and copy it into that"
        )
    pin = non_blocking and gpu is None and memory is None
    record_copy(nbytes_of(inner), source, gpu, "pinned" if pin else memory or host_memory(x), non_blocking)
    data = values if isinstance(values, UnknownTensor) and gpu is None else Base.to(values, backing, copy=True)
    if data.is_meta and not inner.is_meta and not isinstance(x, UnknownTensor):
        set_constant(data, inner)
    return pinned(data, pin) if gpu is None else wrap(data, gpu)


def values_for(x: Tensor, backing: torch.device) -> Tensor:
    """What is copied of x to `backing`: the tensor inside of a virtual one, or the values that it is known to have. An
    UnknownTensor in a dry run where it has none."""
    inner = inner_of(x)
    if not inner.is_meta or backing.type == "meta":
        return inner
    values = constant_of(inner)
    if values is None and not isinstance(x, VirtualTensor):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if values is None and x.gpu.machine.rendezvous is None:
        raise no_values(f"copying from {x.device} to the CPU")
    return unknown_tensor(x.shape, x.dtype) if values is None else values


def pinned(tensor: Tensor, pin: bool | None = True) -> Tensor:
    """`tensor`, whose `is_pinned()` is true from now on if `pin` is."""
    if pin:
        tensor.untyped_storage().pinned = True
    return tensor


def host_memory(*ends: Tensor) -> str:
    """The kind of host memory at one of these ends of a copy: "pinned", "shared" or "pageable"."""
    on_cpu = (x for x in ends if not isinstance(x, VirtualTensor) and not x.is_meta and not x.is_sparse)
    storages = [x.untyped_storage() for x in on_cpu]
    if any(getattr(storage, "pinned", False) for storage in storages):
        return "pinned"
    return "shared" if any(storage.is_shared() for storage in storages) else "pageable"
