"""The communication under nn.parallel, between virtual GPUs: what torch.nn.parallel.comm answers."""

import sys
import threading

import torch
from torch.cuda import comm as cuda_comm
from torch.nn.parallel import _functions, comm

from mgpu_lib.virtual import costs
from mgpu_lib.virtual.clock import ReplicaThread
from mgpu_lib.virtual.rates import REPLICATE, UNPACK
from mgpu_lib.virtual.running import current
from mgpu_lib.virtual.tensor import copy_into, transfer


def patches():
    """(owner, name, replacement), for patches.install."""
    for function in (broadcast, broadcast_coalesced, reduce_add, reduce_add_coalesced, scatter, gather):
        yield comm, function.__name__, function
        yield cuda_comm, function.__name__, function
    yield _functions, "_get_stream", lambda device: None  # copies run in order, in no background stream
    yield _functions, "torch", Torch()
    yield sys.modules["torch.nn.parallel.parallel_apply"], "threading", Threading()
    yield torch.nn.Module, "_replicate_for_data_parallel", replicate_module


class Torch:
    """The module torch, as nn.parallel's functions see it: for them device(1) is cuda:1 in every build of PyTorch."""

    device = staticmethod(lambda index: torch.device("cuda", index))

    def __getattr__(self, name):
        return getattr(torch, name)


class Threading:
    """The module threading, as parallel_apply sees it: its threads have a time on the clock."""

    Lock = threading.Lock

    def Thread(self, target, args):
        return ReplicaThread(current().clock, target, args)


_replicate_module = torch.nn.Module._replicate_for_data_parallel


def replicate_module(self):
    current().clock.host().spend(REPLICATE, None)
    return _replicate_module(self)


def gpu_named(device):
    """The virtual GPU that an index or device means (None: the current one); None for the CPU, also written -1."""
    index = torch.cuda._utils._get_device_index(device, optional=True, allow_cpu=True)
    return None if index == -1 else current().gpu(index)


def copy_to(tensor, gpu):
    """`tensor` on `gpu`: itself if it is there."""
    return tensor if getattr(tensor, "gpu", None) is gpu else transfer(tensor, gpu)


def no_out(out):
    if out is not None:
        raise RuntimeError("virtual GPUs: torch.nn.parallel.comm with out= is not imitated; pass devices instead")


def broadcast(tensor, devices=None, *, out=None):
    no_out(out)
    return tuple(copy_to(tensor, gpu_named(d)) for d in devices)


def broadcast_coalesced(tensors, devices, buffer_size=10485760):
    gpus = [gpu_named(d) for d in devices]
    if any(getattr(t, "gpu", None) is not gpus[0] for t in tensors):
        raise RuntimeError(f"all tensors must be on devices[0]: {devices[0]}")
    book("broadcast", tensors, gpus)
    with current().clock.off():
        return [[copy_to(t, gpu) for t in tensors] for gpu in gpus]


def check_summands(inputs):
    for i, t in enumerate(inputs):
        if t.device.type == "cpu":
            raise AssertionError(f"reduce_add expects all inputs to be on GPUs, but input {i} is on CPU")
        if t.shape != inputs[0].shape:
            got, expected = ("x".join(map(str, x.shape)) for x in (t, inputs[0]))
            raise ValueError(f"input {i} has invalid size: got {got}, but expected {expected}")


def reduce_add(inputs, destination=None):
    check_summands(inputs)
    gpu = gpu_named(destination)
    root = next((i for i, t in enumerate(inputs) if t.gpu is gpu), None)
    if root is None:
        raise RuntimeError("reduce_add expects destination to be on the same GPU with one of the tensors")
    if len(inputs) == 1:
        return inputs[0]
    others = [t for i, t in enumerate(inputs) if i != root]
    total = inputs[root] + copy_to(others[0], gpu)
    for other in others[1:]:
        total += copy_to(other, gpu)
    return total


def reduce_add_coalesced(inputs, destination=None, buffer_size=10485760):
    for summands in zip(*inputs, strict=True):
        check_summands(summands)
    book("reduce", inputs[0], [t.gpu for t, *_ in inputs])
    with current().clock.off():
        return tuple(reduce_add(copies, destination) for copies in zip(*inputs, strict=True))


def book(name, tensors, gpus):
    """On the clock: NCCL's operation on all the `tensors` of one GPU, which are packed into one buffer first."""
    if len(gpus) > 1 and tensors:
        machine, nbytes = current(), sum(t.nbytes for t in tensors)
        machine.clock.host().spend(UNPACK * len(tensors) * len(gpus), gpus[0].index)
        packing = costs.packing_seconds(nbytes, machine.spec)
        machine.clock.collective(name, gpus, nbytes, packing + costs.pipeline_seconds(nbytes, len(gpus), machine.link))


def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
    no_out(out)
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return tuple(copy_to(part, gpu_named(d)) for part, d in zip(parts, devices, strict=False))


def gather(tensors, dim=0, destination=None, *, out=None):
    no_out(out)
    gpu = gpu_named(destination)
    first = tensors[0]
    shape = list(first.shape)
    for i, t in enumerate(tensors):
        shape[dim] = t.shape[dim] if t.dim() == first.dim() else None
        if list(t.shape) != shape:
            raise RuntimeError(
                f"Input tensor at index {i} has invalid shape {list(t.shape)}, but expected {list(first.shape)}"
            )
    shape[dim] = sum(t.shape[dim] for t in tensors)
    total = torch.empty(shape, dtype=first.dtype, device="cpu" if gpu is None else gpu.device)
    for part, t in zip(total.split([t.shape[dim] for t in tensors], dim), tensors, strict=True):
        copy_into(part, t)
    return total
