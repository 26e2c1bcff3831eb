"""DTensor, whose parts lie on the GPUs of many processes, and AsyncCollectiveTensor, of functional collectives.

To this process they are where the tensor is that it has in them.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import Base, make_wrapper_subclass
from virtual_gpus.ops.attention import EFFICIENT, MATH, backend, call_kernel
from virtual_gpus.patches.factories import WRAPPERS
from virtual_gpus.patches.functions import SHARDED_ATTENTION
from virtual_gpus.patches.patch import Method, Patch, after_import
from virtual_gpus.state import current, current_index
from virtual_gpus.tensors.tensor import VirtualTensor

MODULE = "torch.distributed.tensor"
MOVES = "to", "cuda", "cpu"  # methods that may move a tensor to another device
FLAG = "_propagate_use_strided_shard_flag"  # a function of torch.distributed.tensor._sharding_prop


def patches_of_wrapper(cls: type, inner: str) -> Iterator[Patch]:
    """Patches for a class whose tensors have another one as their attribute `inner`."""
    for name in ("device", "is_cuda", "is_cpu"):
        yield cls, name, property(lambda self, name=name: getattr(getattr(self, inner), name))
    yield cls, "get_device", lambda self: getattr(self, inner).get_device()


@after_import(MODULE)
def patch_dtensor(module):
    DTensor, tracker = module.DTensor, module._random.OffsetBasedRNGTracker
    yield from patches_of_wrapper(DTensor, "_local_tensor")
    # in a dry run a number that is unknown, as of other tensors
    yield DTensor, "item", lambda self: Base.item(self) if current().rendezvous is None else self.to_local().item()
    for name, value in vars(Tensor).items():
        if isinstance(value, Method) and name not in vars(DTensor):
            yield DTensor, name, on_local_tensor(value) if name in MOVES else value.original
    yield tracker, "_distribute_region", distribute_region
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):  # lists made before DTensor was imported
        if DTensor not in (types := sys.modules[name]._foreach_supported_types):
            types.append(DTensor)
    if hasattr(module._sharding_prop, FLAG):
        yield module._sharding_prop, FLAG, propagation_of_flag(module.placement_types._StridedShard)
    WRAPPERS[DTensor], SHARDED_ATTENTION[DTensor] = like_dtensor, attention_of_dtensors


@after_import("torch.distributed._functional_collectives")
def patch_functional_collectives(module):
    def new(original, cls, elem):
        """To C++, too, it is where what is inside seems to be."""
        if not isinstance(elem, VirtualTensor):
            return original(cls, elem)
        sizes = {"strides": elem.stride(), "storage_offset": elem.storage_offset(), "dtype": elem.dtype}
        made = make_wrapper_subclass(cls, elem.shape, **sizes, requires_grad=elem.requires_grad)
        made.elem, made.completed = elem, False
        return made

    AsyncCollectiveTensor = module.AsyncCollectiveTensor
    yield AsyncCollectiveTensor, "__new__", new
    yield from patches_of_wrapper(AsyncCollectiveTensor, "elem")
    yield AsyncCollectiveTensor, "item", lambda self: self.trigger_wait().item()  # in a dry run, one that is unknown
    for name in MOVES:
        yield AsyncCollectiveTensor, name, of_waited(name)


def of_waited(name: str) -> Callable:
    """The method `name` of a tensor that has been waited for."""
    return lambda self, *args, **kwargs: getattr(self.clone(), name)(*args, **kwargs)


def on_local_tensor(method: Callable) -> Callable:
    """A method of DTensor that calls `method` of its local tensor."""
    return lambda self, *args, **kwargs: like_dtensor(method, self, *args, **kwargs)


def like_dtensor(make: Callable, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A DTensor like `x`, with make(x's local tensor, …) as its own, wherever that is. (DTensor.from_local would move
    it to where the mesh is.)"""
    local, from_local = make(x.to_local(), *args, **kwargs), sys.modules[MODULE]._api._FromTorchTensor.apply
    return from_local(local, x.device_mesh, x.placements, False, x.shape, x.stride())


def attention_of_dtensors(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """F.scaled_dot_product_attention of DTensors, by a kernel of CUDA's: DTensor knows how to share it out."""
    kind = backend(query, key, value, mask, is_causal, False, current().spec.capability)
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return call_kernel(EFFICIENT if kind == MATH else kind, query, key, value, mask, 0.0, is_causal, scale)


@contextlib.contextmanager
def distribute_region(self, spec, generator=None):
    """For generators whose state is not one of Philox, with an offset to set: inside, ranks with the same part of a
    DTensor draw the same numbers, and others draw others. Afterwards the generators of all are where they would be had
    each drawn one number."""
    if not self.distribute_region_enabled:
        yield
        return
    generator = generator or current().gpu(current_index()).generator
    seed = int(Base.random_(Tensor(1).long(), generator=generator))
    after = generator.get_state()
    where = zip(spec.mesh.get_coordinate(), spec.placements, strict=True)
    part = tuple(index if placement.is_shard() else 0 for index, placement in where)  # of the DTensor, on this rank
    generator.manual_seed((seed + hash(part)) % 2**63)
    try:
        yield
    finally:
        generator.set_state(after)


def propagation_of_flag(strided: type) -> Callable:
    """For each tensor of a list, such as all gradients, PyTorch looks at the whole list, and mostly finds nothing to
    do. Here it is looked at once: that is a third of the time of a dry run of 70 billion parameters."""
    last = None, False  # an operation's arguments, whether any of them has a `strided` placement

    def propagate(original, op_strategy, op_schema):
        nonlocal last
        if last[0] is not op_schema:
            placements = (placement for spec in op_schema.args_spec for placement in spec.placements)
            last = op_schema, any(isinstance(placement, strided) for placement in placements)
        if last[1]:
            original(op_strategy, op_schema)

    return propagate
