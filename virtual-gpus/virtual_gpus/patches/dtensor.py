"""DTensor: a tensor whose parts lie on the GPUs of many processes. To this one it is where its own part is."""

import contextlib
import sys

import torch
from torch import Tensor

from virtual_gpus.ops.attention import EFFICIENT, MATH, backend, dispatched
from virtual_gpus.ops.table import Base
from virtual_gpus.patches.factories import WRAPPERS
from virtual_gpus.patches.functions import SHARED_OUT
from virtual_gpus.patches.methods import Method
from virtual_gpus.state import current, current_index

MODULE = "torch.distributed.tensor"  # imported by the programs that need it: it takes its time


def patches(module):
    """(owner, name, replacement), for patches.install, as soon as the module has been imported."""
    DTensor = module.DTensor
    for name in ("device", "is_cuda", "is_cpu"):
        yield DTensor, name, property(lambda self, name=name: getattr(self._local_tensor, name))
    yield DTensor, "get_device", lambda self: self._local_tensor.get_device()
    yield DTensor, "item", item
    for name, value in vars(Tensor).items():
        if isinstance(value, Method) and name not in vars(DTensor):
            yield DTensor, name, of_parts(value) if name in ("to", "cuda", "cpu") else value.original
    WRAPPERS[DTensor], SHARED_OUT[DTensor] = make_of_parts, attention_of_parts
    yield module._random, "OffsetBasedRNGTracker", tracker(module._random.OffsetBasedRNGTracker)


def item(self):
    """In a dry run a number that is unknown, as of other tensors."""
    return Base.item(self) if current().rendezvous is None else self.to_local().item()


def of_parts(method):
    """A method of DTensor that may move it to another device."""

    def move(self, *args, **kwargs):
        return make_of_parts(method, self, *args, **kwargs)

    return move


def make_of_parts(make, x, *args, **kwargs):
    """A DTensor like `x`, with make(the local part of x, …) as its own, wherever that is. (DTensor.from_local would
    move it to where the mesh is.)"""
    local, from_local = make(x.to_local(), *args, **kwargs), sys.modules[MODULE]._api._FromTorchTensor.apply
    return from_local(local, x.device_mesh, x.placements, False, x.shape, x.stride())


def attention_of_parts(query, key, value, mask, is_causal, scale):
    """F.scaled_dot_product_attention of DTensors, by a kernel of CUDA's: DTensor knows how to share it out."""
    kind = backend(query, key, value, mask, is_causal, False, current().spec.capability)
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return dispatched(EFFICIENT if kind == MATH else kind, query, key, value, mask, 0.0, is_causal, scale)


def tracker(original):
    """PyTorch's tracker of random numbers, for generators whose state is not one of Philox, with an offset to set."""

    class Tracker(original):
        @contextlib.contextmanager
        def _distribute_region(self, spec, generator=None):
            """Inside, ranks with the same part of a DTensor draw the same numbers, and others draw others. Afterwards
            the generators of all are where they would be had each drawn one number."""
            if not self.distribute_region_enabled:
                yield
                return
            generator = generator or current().gpu(current_index()).generator
            seed = int(Base.random_(Tensor(1).long(), generator=generator))
            after = generator.get_state()
            generator.manual_seed((seed + hash(part_of(spec))) % 2**63)
            try:
                yield
            finally:
                generator.set_state(after)

    return Tracker


def part_of(spec):
    """Which part of a DTensor this rank has: a number for each dimension of the mesh."""
    where = zip(spec.mesh.get_coordinate(), spec.placements, strict=True)
    return tuple(number if placement.is_shard() else 0 for number, placement in where)
