"""The communication under nn.parallel, between virtual GPUs: what torch.nn.parallel.comm answers.

Its Python stays PyTorch's own, with the checks of its arguments; replaced is the C++ underneath (torch/csrc/cuda/
comm.cpp), whose words the errors here repeat.
"""

import sys
import threading

import torch
from torch.cuda import comm as cuda_comm
from torch.nn.parallel import comm
from torch.nn.parameter import UninitializedTensorMixin

from virtual_gpus.clock import costs, nccl
from virtual_gpus.clock.host import ReplicaThread
from virtual_gpus.clock.rates import REPLICATE, UNPACK
from virtual_gpus.compat import C, canonicalize_dim, get_device_index, parallel_functions
from virtual_gpus.patches.patch import patch, replaces
from virtual_gpus.state import current
from virtual_gpus.tensors.copies import copy_into, transfer


class Torch:
    """The module torch, as nn.parallel's functions see it: for them device(1) is cuda:1 in every build of PyTorch."""

    device = staticmethod(lambda index: torch.device("cuda", index))

    def __getattr__(self, name):
        return getattr(torch, name)


class Threading:
    """The module threading, as parallel_apply sees it: its threads have a time on the clock."""

    Lock = threading.Lock

    def Thread(self, target, args):
        return ReplicaThread(current().clock.host(), target, args)


# Copies run in order, in no background stream.
patch(parallel_functions, {"_get_stream": lambda device: None, "torch": Torch()})
patch(sys.modules["torch.nn.parallel.parallel_apply"], {"threading": Threading()})
patch(torch.cuda.nccl, {"is_available": lambda tensors: False})  # reduce_add then copies, and adds one after the other


@replaces(torch.nn.Module)
def _replicate_for_data_parallel(original, self):
    current().clock.host().advance(REPLICATE, None)
    return original(self)


def gpu_named(device):
    """The virtual GPU that an index or device means (None: the current one); None for the CPU, also written -1."""
    index = get_device_index(device, optional=True, allow_cpu=True)
    return None if index == -1 else current().gpu(index)


def copy_to(tensor, gpu):
    """`tensor` on `gpu`: itself if it is there."""
    return tensor if getattr(tensor, "gpu", None) is gpu else transfer(tensor, gpu)


def check_on_gpus(tensors, what, where):
    for i, tensor in enumerate(tensors):
        if not tensor.is_cuda:
            raise RuntimeError(
                f"Expected all {what} tensors to be CUDA tensors, but {where} at index {i} has device '{tensor.device}'"
            )


@replaces(C)
def _broadcast(tensor, devices):
    for device in devices:
        if device < 0:
            raise RuntimeError(f"Expected non-negative device index, but got {device}")
    return [copy_to(tensor, gpu_named(device)) for device in devices]


@replaces(C)
def _broadcast_out(tensor, out_tensors):
    check_on_gpus(out_tensors, "output", "output tensor")
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
    gpus = [gpu_named(d) for d in devices]
    if any(getattr(t, "gpu", None) is not gpus[0] for t in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    book("broadcast", tensors, gpus)
    with current().clock.paused():
        return [[copy_to(t, gpu) for t in tensors] for gpu in gpus]


@replaces(comm)
@replaces(cuda_comm)
def reduce_add_coalesced(inputs, destination=None, buffer_size=10485760):
    with current().clock.paused():
        sums = tuple(comm.reduce_add(copies, destination) for copies in zip(*inputs, strict=True))
    book("reduce", inputs[0], [t.gpu for t, *_ in inputs])
    return sums


def book(name, tensors, gpus):
    """On the clock: NCCL's operation on all the `tensors` of one GPU, which are packed into one buffer first."""
    if len(gpus) > 1 and tensors:
        machine, nbytes = current(), sum(t.nbytes for t in tensors)
        machine.clock.host().advance(UNPACK * len(tensors) * len(gpus), gpus[0].index)
        packing, places = costs.packing_seconds(nbytes, machine.spec), [gpu.number for gpu in gpus]
        machine.clock.collective(
            name, gpus, nbytes, packing + nccl.collective_seconds(name, nbytes, places, machine.topology)
        )


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
    return [copy_to(chunk, gpu_named(device)) for chunk, device in zip(chunks, devices, strict=False)]


def check_streams(streams, devices):
    for i, (stream, device) in enumerate(zip(streams or (), devices, strict=False)):
        if stream is not None and stream.device_index != device:
            raise RuntimeError(
                f"Expected the device associated with the stream at index {i} (was {stream.device_index}) to match "
                f"the device supplied at that index (expected {device})"
            )


@replaces(C)
def _scatter_out(tensor, out_tensors, dim, streams):
    if not out_tensors:
        raise RuntimeError("Expected at least one output tensor to scatter to")
    check_on_gpus(out_tensors, "output", "output tensor")
    check_streams(streams, [out.get_device() for out in out_tensors])
    dim = canonicalize_dim(tensor.dim(), dim)
    for i, out in enumerate(out_tensors):
        if out.dim() != tensor.dim() or resized(out, dim, tensor.shape[dim]) != list(tensor.shape):
            raise RuntimeError(
                f"Output tensor at index {i} has incorrect shape: {list(out.shape)}. Expected same shape except for "
                f"scatter dim {dim} as the source tensor: {list(tensor.shape)}"
            )
    total = sum(out.shape[dim] for out in out_tensors)
    if total != tensor.shape[dim]:
        raise RuntimeError(
            f"Total size for output tensors along scatter dim {dim} does not match the source tensor size at dim "
            f"{dim}. Expected {tensor.shape[dim]}, but got total size {total}"
        )
    for out, chunk in zip(out_tensors, tensor.split([out.shape[dim] for out in out_tensors], dim), strict=True):
        copy_into(out, chunk)
    return out_tensors


def resized(tensor, dim, size):
    """The shape of `tensor`, with `size` for its size along `dim`."""
    return [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]


@replaces(C)
def _gather(tensors, dim, destination):
    gpu, shape = gpu_named(destination), gathered_shape(tensors, dim)
    last = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    layout = torch.channels_last if last else torch.contiguous_format
    device = "cpu" if gpu is None else gpu.device
    made = torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=layout)
    return _gather_out(tensors, made, dim)


@replaces(C)
def _gather_out(tensors, out_tensor, dim):
    shape = gathered_shape(tensors, dim)
    if list(out_tensor.shape) != shape:
        raise RuntimeError(f"Expected out tensor to have shape {shape}, but got {list(out_tensor.shape)}")
    for part, t in zip(out_tensor.split([t.shape[dim] for t in tensors], dim), tensors, strict=True):
        copy_into(part, t)
    return out_tensor


def gathered_shape(tensors, dim):
    """The shape of `tensors` one behind the other along `dim`; PyTorch's error if they don't fit together."""
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    check_on_gpus(tensors, "input", "tensor")
    first = tensors[0]
    dim = canonicalize_dim(first.dim(), dim)
    for i, t in enumerate(tensors):
        if t.dim() != first.dim():
            raise RuntimeError(
                f"Expected all input tensors to have the same number of dimensions, but tensor at index {i}has "
                f"{t.dim()} dimensions, (expected {first.dim()})"
            )
        expected = resized(first, dim, t.shape[dim])
        if list(t.shape) != expected:
            raise RuntimeError(f"Input tensor at index {i} has invalid shape {list(t.shape)}, but expected {expected}")
    return resized(first, dim, sum(t.shape[dim] for t in tensors))
