"""Saving and loading: a file written on virtual GPUs is the file that real ones would write."""

import contextlib
from typing import Any

import torch
from torch import Tensor, serialization

from virtual_gpus.compat import package_registry, torch_utils
from virtual_gpus.errors import no_addresses
from virtual_gpus.frames import called_by_serialization
from virtual_gpus.patches.patch import after_import, replaces
from virtual_gpus.state import current, find
from virtual_gpus.tensors.tensor import VirtualTensor, wrap


def register_locations(stack: contextlib.ExitStack) -> None:
    """Let torch.save and torch.load ask here first; `stack` undoes it."""
    before = list(package_registry)
    serialization.register_package(0, location_of, restore)
    stack.callback(package_registry.__setitem__, slice(None), before)


def location_of(storage: Any) -> str | None:
    """Tag of a storage that VirtualTensor.__reduce_ex__ hands to the pickler: 'cuda:1'."""
    return getattr(storage, "saved_from", None)


def restore(storage: torch.UntypedStorage, location: Any) -> torch.UntypedStorage | None:
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


@replaces(torch.UntypedStorage, "to")
def storage_to(original, self, *, device, non_blocking=False):
    """UntypedStorage.to, under its .cuda: what a map_location such as `lambda storage, _: storage.cuda(1)` calls."""
    if find(device) is None:
        return original(self, device=device, non_blocking=non_blocking)
    if not called_by_serialization():
        raise no_addresses()
    return restore(self, device)


@replaces(torch_utils)
def _rebuild_tensor(original, storage, offset, size, stride):
    """For marked storages too."""
    if not hasattr(storage._untyped_storage, "loaded_to"):
        return original(storage, offset, size, stride)
    return tensor_in_storage(storage._untyped_storage, storage.dtype, offset, size, stride)


@replaces(torch_utils)
def _rebuild_tensor_v3(original, storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
    """The same for types that came later, such as float8."""
    if not hasattr(storage._untyped_storage, "loaded_to"):
        return original(storage, offset, size, stride, requires_grad, hooks, dtype, metadata)
    return tensor_in_storage(storage._untyped_storage, dtype, offset, size, stride).requires_grad_(requires_grad)


def tensor_in_storage(storage: Any, dtype: torch.dtype, offset: int, size: tuple, stride: tuple) -> Tensor:
    """A tensor in the marked `storage`, on the GPU that it was loaded to."""
    gpu = storage.loaded_to
    if gpu.backing.type == "meta":  # one for each storage, so that tensors that share it in the file share it again
        if not hasattr(storage, "without_values"):
            storage.without_values = torch.UntypedStorage(storage.nbytes(), device="meta")
        storage = storage.without_values
    return wrap(torch.empty(0, dtype=dtype, device=gpu.backing).set_(storage, offset, size, stride), gpu)


@after_import("torch.distributed.checkpoint._state_dict_stager")
def patch_stager(module):
    def offload_tensor(original, self, x, memo, non_blocking=False):
        """Under async_save: a copy on the CPU; of a DTensor, PyTorch's own comes here for the part that is in it."""
        if not isinstance(x, VirtualTensor):
            return original(self, x, memo, non_blocking)
        pin = self.pin_memory and x.nbytes >= self.pin_memory_min_bytes
        memo[id(x)] = torch.empty_like(x, device="cpu", pin_memory=pin).copy_(x.detach(), non_blocking=non_blocking)
        return memo[id(x)]

    yield module.StateDictStager, "_offload_tensor", offload_tensor
