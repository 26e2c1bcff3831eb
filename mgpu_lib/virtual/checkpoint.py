"""Saving and loading: a file written on virtual GPUs is the file that real ones would write."""
import torch
from torch import serialization

from .machine import current, find
from .tensor import Base, wrap

_rebuild_tensor = torch._utils._rebuild_tensor


def patches():
    """(owner, name, replacement), for machine.patch_everything."""
    yield torch._utils, "_rebuild_tensor", rebuild_tensor


def register(stack):
    """Let torch.save and torch.load ask here first; `stack` undoes it."""
    before = list(serialization._package_registry)
    serialization.register_package(0, location_of, restore)
    stack.callback(serialization._package_registry.__setitem__, slice(None), before)


def location_of(storage):
    """Tag of a storage that VirtualTensor.__reduce_ex__ hands to the pickler: 'cuda:1'."""
    return getattr(storage, "saved_from", None)


def restore(storage, location):
    """Mark a storage that was saved on, or is mapped to, a GPU; PyTorch's own error if there is no such GPU."""
    if not str(location).startswith("cuda") or current() is None:
        return None
    serialization.validate_cuda_device(location)
    storage.loaded_to = find(location)
    return storage


def rebuild_tensor(storage, offset, size, stride):
    """torch._utils._rebuild_tensor, for marked storages too."""
    untyped = storage._untyped_storage
    gpu = getattr(untyped, "loaded_to", None)
    if gpu is None:
        return _rebuild_tensor(storage, offset, size, stride)
    if not hasattr(untyped, "on_backing"):  # once, so that tensors that share a storage in the file share it again
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(untyped)
        gpu.ledger.check(whole.nbytes)
        untyped.on_backing = Base.to(whole, gpu.backing)
    whole = untyped.on_backing
    return wrap(whole.new_empty(0, dtype=storage.dtype).set_(whole.untyped_storage(), offset, size, stride), gpu)
