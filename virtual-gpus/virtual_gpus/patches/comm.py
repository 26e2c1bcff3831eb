"""The communication under nn.parallel, between virtual GPUs: what torch.nn.parallel.comm answers.

Its Python stays PyTorch's own, with the checks of its arguments; replaced is the C++ underneath (torch/csrc/cuda/
comm.cpp).
"""

import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.cuda import comm as cuda_comm
from torch.nn.parallel import comm
from torch.nn.parameter import UninitializedTensorMixin

from virtual_gpus.clock import costs, nccl
from virtual_gpus.clock.host import ReplicaThread
from virtual_gpus.clock.rates import REPLICATE, UNPACK
from virtual_gpus.compat import C, parallel_functions
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.patches.patch import patch, replaces
from virtual_gpus.state import current
from virtual_gpus.tensors.copies import copy_into, transfer


class Torch:
    """The module torch, as nn.parallel's functions see it: for them device(1) is cuda:1 in every build of PyTorch."""

    device = staticmethod(lambda index: torch.device("cuda", index))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def replica_thread(target: Any, args: Any) -> ReplicaThread:
    """A thread of parallel_apply, which has a time on the clock."""
    return ReplicaThread(current().clock.host(), target, args)


# Copies run in order, in no background stream.
patch(parallel_functions, {"_get_stream": lambda device: None, "torch": Torch()})
parallel_apply = sys.modules["torch.nn.parallel.parallel_apply"]
patch(parallel_apply, {"threading": SimpleNamespace(Lock=threading.Lock, Thread=replica_thread)})
patch(torch.cuda.nccl, {"is_available": lambda tensors: False})  # reduce_add then copies, and adds one after the other


@replaces(torch.nn.Module)
def _replicate_for_data_parallel(original, self):
    current().clock.host().advance(REPLICATE, None)
    return original(self)


def copy_to(tensor: Tensor, gpu: VirtualGPU) -> Tensor:
    """`tensor` on `gpu`: itself if it is there."""
    return tensor if getattr(tensor, "gpu", None) is gpu else transfer(tensor, gpu)


def check_on_gpus(tensors: Sequence[Tensor], name: str) -> None:
    """Each of `tensors` lies on a GPU; otherwise RuntimeError, which calls it `name`."""
    for i, tensor in enumerate(tensors):
        if not tensor.is_cuda:
            raise RuntimeError(f"Expected CUDA tensors, but {name} tensor at index {i} has device '{tensor.device}'")


@replaces(C)
def _broadcast(tensor, devices):
    return [copy_to(tensor, current().gpu(device)) for device in devices]


@replaces(C)
def _broadcast_out(tensor, out_tensors):
    check_on_gpus(out_tensors, "output")
    for i, out in enumerate(out_tensors):
        if out.shape != tensor.shape:
            raise RuntimeError(
                f"Expected all output tensors to have same shape as the source tensor {list(tensor.shape)}, but output "
                f"tensor at index {i} has shape {list(out.shape)}"
            )
        copy_into(out, tensor)
    return out_tensors


@replaces(C)
def _broadcast_coalesced(tensors, devices, buffer_size):
    if any(isinstance(t, UninitializedTensorMixin) for t in tensors):  # as nn.parallel.replicate would find out later
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules"
        )
    gpus = [current().gpu(device) for device in devices]
    if any(getattr(t, "gpu", None) is not gpus[0] for t in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    record_collective("broadcast", tensors, gpus)
    with current().clock.paused():
        return [[copy_to(t, gpu) for t in tensors] for gpu in gpus]


@replaces(comm)
@replaces(cuda_comm)
def reduce_add_coalesced(inputs, destination=None, buffer_size=10485760):
    with current().clock.paused():
        sums = tuple(comm.reduce_add(copies, destination) for copies in zip(*inputs, strict=True))
    record_collective("reduce", inputs[0], [t.gpu for t, *_ in inputs])
    return sums


def record_collective(name: str, tensors: Sequence[Tensor], gpus: Sequence[VirtualGPU]) -> None:
    """On the clock: NCCL's operation on all the `tensors` of one GPU, which are packed into one buffer first."""
    if len(gpus) > 1 and tensors:
        machine, nbytes = current(), sum(t.nbytes for t in tensors)
        machine.clock.host().advance(UNPACK * len(tensors) * len(gpus), gpus[0].index)
        seconds = costs.packing_seconds(nbytes, machine.spec)
        seconds += nccl.collective_seconds(name, nbytes, [gpu.number for gpu in gpus], machine.topology)
        machine.clock.collective(name, gpus, nbytes, seconds)


@replaces(C)
def _scatter(tensor, devices, chunk_sizes, dim, streams):
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    if chunk_sizes is not None and len(chunk_sizes) != len(devices):
        raise RuntimeError(
            "Expected devices and chunk_sizes to be of same length, but got "
            f"len(devices) = {len(devices)} and len(chunk_sizes) = {len(chunk_sizes)}"
        )
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    check_streams(streams, devices)
    return [copy_to(chunk, current().gpu(device)) for chunk, device in zip(chunks, devices, strict=False)]


def check_streams(streams: Sequence | None, devices: Sequence[int]) -> None:
    for i, (stream, device) in enumerate(zip(streams or (), devices, strict=False)):
        if stream is not None and stream.device_index != device:
            raise RuntimeError(f"Expected the stream at index {i} to be of device {device}, not {stream.device_index}")


@replaces(C)
def _scatter_out(tensor, out_tensors, dim, streams):
    if not out_tensors:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    check_on_gpus(out_tensors, "output")
    check_streams(streams, [out.get_device() for out in out_tensors])
    sizes, size = [out.shape[dim] for out in out_tensors], tensor.shape[dim]
    if sum(sizes) != size:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim "
            f"{dim}. Expected {size}, but got total size {sum(sizes)}"
        )
    for i, (out, chunk) in enumerate(zip(out_tensors, tensor.split(sizes, dim), strict=True)):
        if out.shape != chunk.shape:
            raise RuntimeError(
                f"Output tensor at index {i} has incorrect shape: {list(out.shape)}, expected {list(chunk.shape)}"
            )
        copy_into(out, chunk)
    return out_tensors


@replaces(C)
def _gather(tensors, dim, destination):
    last = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    layout = torch.channels_last if last else torch.contiguous_format
    device = "cpu" if destination == -1 else current().gpu(destination).device
    made = torch.empty(gathered_shape(tensors, dim), dtype=tensors[0].dtype, device=device, memory_format=layout)
    return _gather_out(tensors, made, dim)


@replaces(C)
def _gather_out(tensors, out_tensor, dim):
    shape = gathered_shape(tensors, dim)
    if out_tensor.shape != shape:
        raise RuntimeError(f"Expected out tensor to have shape {list(shape)}, but got {list(out_tensor.shape)}")
    for part, t in zip(out_tensor.split([t.shape[dim] for t in tensors], dim), tensors, strict=True):
        copy_into(part, t)
    return out_tensor


def gathered_shape(tensors: Sequence[Tensor], dim: int) -> torch.Size:
    """The shape of `tensors` one behind the other along `dim`; an error if they don't fit together."""
    check_on_gpus(tensors, "input")
    if len({t.dim() for t in tensors}) > 1:
        raise RuntimeError("Expected all input tensors to have the same number of dimensions")
    return torch.cat([torch.empty(t.shape, device="meta") for t in tensors], dim).shape
