"""Saving and loading: a file written on virtual GPUs is the file that real ones would write."""

import functools

import torch
from torch import serialization

from virtual_gpus.compat import get_allowed_globals, package_registry, torch_utils
from virtual_gpus.compat import rebuild_tensor as _rebuild_tensor
from virtual_gpus.compat import rebuild_tensor_v3 as _rebuild_tensor_v3
from virtual_gpus.errors import no_addresses
from virtual_gpus.frames import called_by_torch_load
from virtual_gpus.state import current, find
from virtual_gpus.tensors.tensor import wrap

_storage_to = torch.UntypedStorage.to


def patches():
    """(owner, name, replacement), for patches.install."""
    yield torch_utils, "_rebuild_tensor", rebuild_tensor
    yield torch_utils, "_rebuild_tensor_v3", rebuild_tensor_v3
    yield torch.UntypedStorage, "to", storage_to


def register_checkpoints(stack):
    """Let torch.save and torch.load ask here first; `stack` undoes it."""
    before = list(package_registry)
    serialization.register_package(0, location_of, restore)
    stack.callback(package_registry.__setitem__, slice(None), before)
    forget = get_allowed_globals.cache_clear  # it holds functions that are replaced
    forget()
    stack.callback(forget)


def location_of(storage):
    """Tag of a storage that VirtualTensor.__reduce_ex__ hands to the pickler: 'cuda:1'."""
    return getattr(storage, "saved_from", None)


def restore(storage, location):
    """A storage that was saved on, or is mapped to, a GPU, marked with that GPU; PyTorch's own error if there is none.

    It is a copy, as on a real GPU: what is read from a file that `mmap=True` maps changes when the file does.
    """
    if not str(location).startswith("cuda") or current() is None:
        return None
    serialization.validate_cuda_device(location)
    gpu, held = find(location), storage
    gpu.ledger.check(storage.nbytes())
    if gpu.backing.type != "meta":
        held = torch.UntypedStorage(storage.nbytes(), device=gpu.backing)
        if not getattr(storage, "_torch_load_uninitialized", False):  # older files: their numbers are read later
            held.copy_(storage)
    held.loaded_to = gpu
    return held


def storage_to(self, *, device, non_blocking=False):
    """UntypedStorage.to, under its .cuda: what a map_location such as `lambda storage, _: storage.cuda(1)` calls."""
    if find(device) is None:
        return _storage_to(self, device=device, non_blocking=non_blocking)
    if not called_by_torch_load():
        raise no_addresses()
    return restore(self, device)


def rebuild_tensor(storage, offset, size, stride):
    """torch._utils._rebuild_tensor, for marked storages too."""
    if not hasattr(storage._untyped_storage, "loaded_to"):
        return _rebuild_tensor(storage, offset, size, stride)
    return tensor_in_storage(storage._untyped_storage, storage.dtype, offset, size, stride)


@functools.wraps(_rebuild_tensor_v3)
def rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
    """torch._utils._rebuild_tensor_v3, for types that came later, such as float8."""
    if not hasattr(storage._untyped_storage, "loaded_to"):
        return _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata)
    return tensor_in_storage(storage._untyped_storage, dtype, offset, size, stride).requires_grad_(requires_grad)


def tensor_in_storage(storage, dtype, offset, size, stride):
    """A tensor in the marked `storage`, on the GPU that it was loaded to."""
    gpu = storage.loaded_to
    if gpu.backing.type == "meta":  # one for each storage, so that tensors that share it in the file share it again
        if not hasattr(storage, "without_values"):
            storage.without_values = torch.UntypedStorage(storage.nbytes(), device="meta")
        storage = storage.without_values
    return wrap(torch.empty(0, dtype=dtype, device=gpu.backing).set_(storage, offset, size, stride), gpu)
