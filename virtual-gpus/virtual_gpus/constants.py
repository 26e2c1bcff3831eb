"""Whole numbers that stay known in a dry run: those few that a program writes into a small tensor by itself.

A rank's vote on whether to stop, a counter, a flag: such tensors come from Python and steer the program. As long as
operations combine only them, their values are kept on the CPU, beside the tensors without values; whatever anything
else is written to is unknown from then on.
"""

import torch
from torch.utils._pytree import tree_map_only

from virtual_gpus.tree import tensors_in

FEW = 16  # numbers of a tensor
MADE_OF_NUMBERS = "zeros ones full scalar_tensor zeros_like ones_like full_like new_zeros new_ones new_full".split()


def remember(tensor, values):
    """`tensor`, which has no values, has these: those of a tensor on the CPU, as small."""
    there, storage = known(tensor), tensor.untyped_storage()
    if there is not None:
        there.copy_(values)
    elif is_small(values) and storage.nbytes() == values.nbytes:  # not a part of what is unknown
        flat = torch.empty(values.numel(), dtype=values.dtype, device="cpu")
        flat.as_strided(tensor.shape, tensor.stride()).copy_(values)
        storage.known = flat


def is_small(tensor):
    return tensor.numel() <= FEW and not (tensor.is_floating_point() or tensor.is_complex())


def known(tensor):
    """The values of a `tensor` that has none, as a view on the CPU, or None if they are unknown."""
    if not is_small(tensor):
        return None
    flat = getattr(tensor.untyped_storage(), "known", None)
    if flat is None or flat.dtype is not tensor.dtype:
        return None
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def forget(tensors):
    """Something unknown has been written to them."""
    for tensor in tensors:
        if is_small(tensor):
            tensor.untyped_storage().known = None


def carry(func, args, kwargs, out):
    """`func` has given `out`, without values: if all that it takes is known, so is what it gives, or writes to."""
    given, made = list(tensors_in((*args, *kwargs.values()))), list(tensors_in((out,)))
    if not any(map(is_small, (*given, *made))):
        return
    values = [known(tensor) for tensor in given]
    name = getattr(func, "overloadpacket", func).__name__
    random = any(isinstance(value, torch._C.Generator) for value in kwargs.values())
    if random or any(value is None for value in values) or not (given or name in MADE_OF_NUMBERS):
        if hasattr(func, "_schema") and func._schema.is_mutable:
            forget(given)
        return
    by_tensor = {id(tensor): value for tensor, value in zip(given, values, strict=True)}
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: by_tensor[id(tensor)], (args, kwargs))
    if "device" in kwargs:
        kwargs = kwargs | {"device": "cpu"}
    for tensor, result in zip(made, tensors_in((func(*args, **kwargs),)), strict=True):
        if id(tensor) not in by_tensor:
            remember(tensor, result)


def reduced(op, size, said):
    """What `size` ranks get from an all-reduce, by what those say that are run, {rank: values}; the others are taken to
    say the same. None if that can't be said. op: the name of a ReduceOp."""
    if any(values is None for values in said.values()):
        return None
    stacked = torch.stack(list(said.values()))
    if op in ("MIN", "MAX"):
        return getattr(stacked, f"a{op.lower()}")(0)
    if op == "SUM" and size % len(said) == 0:
        return stacked.sum(0, dtype=stacked.dtype) * (size // len(said))
    return None
