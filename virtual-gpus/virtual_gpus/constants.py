"""Constant propagation for dry runs.

A dry run has shapes and no values, but programs branch on tensors that they create themselves: masks of ones,
positions, lengths of texts, counters, votes on whether to stop. The values of whole numbers and bools, and what follows
from them, are tracked on the CPU, as FakeTensor does with `.constant`, and dropped as soon as anything without a value
is written to them. All else is data-dependent (see `unknown`), but that numbers are finite is assumed, and said.

A storage's `constant` has its values, in the order of its memory; or the one that all of them are, without dimensions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import Generator, tree_map_only
from virtual_gpus.state import current
from virtual_gpus.tree import tensors_in

LIMIT = 1 << 20  # numbers in a tensor whose values are tracked, unless they are all the same
FEW = 16  # floating-point numbers that are tracked though they don't follow from others: counters, flags
FILLED = {  # operations that fill a tensor, and with what; None: with their last argument
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("full", "full_like", "new_full", "fill_")),
}
COUNTED = {"arange", "eye", "tril_indices", "triu_indices", "scalar_tensor"}
FINITE = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}  # what tests give
OF_ALL = {"any", "all", "max", "min"}  # of numbers that are all the same: that one


def is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def constant_of(tensor: Tensor) -> Tensor | None:
    """The values of the meta tensor `tensor`, as a view on the CPU, or None if they are unknown."""
    constant = getattr(tensor.untyped_storage(), "constant", None)  # of the storage, so that views share it
    if constant is None or constant.dtype is not tensor.dtype:
        return None
    if constant.dim() == 0:
        return constant.expand(tensor.shape)
    return constant.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def set_constant(tensor: Tensor, values: Tensor, follows: bool = False) -> None:
    """The meta tensor `tensor` has these values from now on; both have the same shape.

    follows: they follow from others that are tracked, and are tracked, too, if they aren't whole numbers.
    """
    if current().rendezvous is None:  # virtual_gpus(backing="meta"), where nobody follows what becomes of them
        return
    storage, whole = tensor.untyped_storage(), tensor.untyped_storage().nbytes() == tensor.nbytes
    n, known = storage.nbytes() // tensor.element_size(), constant_of(tensor) is not None
    if not known and not (whole and (follows or is_whole(values))):  # a part of what is unknown, for one
        storage.constant = None
    elif whole and all_same(values):
        storage.constant = first(values).clone()
    elif n > LIMIT:
        storage.constant = None
    else:
        if not known or storage.constant.dim() == 0:
            storage.constant = (storage.constant if known else values.new_empty(())).expand(n).clone()
        constant_of(tensor).copy_(values)


def all_same(values: Tensor) -> bool:
    """Whether all numbers are the same, of which there is at least one."""
    if values.numel() == 0 or (values[(-1,) * values.dim()] != first(values)):  # the last one tells most of the time
        return False
    return bool((values == first(values)).all())


def first(values: Tensor) -> Tensor:
    return values[(0,) * values.dim()]


def invalidate_constants(tensors: Iterable[Tensor]) -> None:
    """Something without a value has been written to these meta tensors."""
    for tensor in tensors:
        tensor.untyped_storage().constant = None


def propagate_constants(func: Callable, args: Sequence, kwargs: dict, out: Any) -> None:
    """After func(*args, **kwargs) on meta tensors gave `out`: track its values if those of all inputs are known."""
    inputs = list(tensors_in((*args, *kwargs.values())))
    constants = {id(tensor): constant_of(tensor) for tensor in inputs}
    name = getattr(func, "overloadpacket", func).__name__
    known = all(constant is not None for constant in constants.values())
    value = FILLED.get(name)
    if value is None and name in FILLED:
        value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
    if known and not any(isinstance(each, Generator) for each in kwargs.values()) and (inputs or name in COUNTED):
        track(func, name, args, kwargs, constants, list(tensors_in((out,))))
    elif name in FILLED and (is_whole(out) or out.numel() <= FEW) and not isinstance(value, Tensor):
        set_constant(out, torch.tensor(value, dtype=out.dtype, device="cpu").expand(out.shape), follows=True)
    elif (finite := if_finite(name, args)) is not None:
        current().rendezvous.assumptions.finite()
        set_constant(out, torch.tensor(finite, device="cpu").expand(out.shape))
    else:
        invalidate_constants(written(func, args, kwargs))


def track(
    func: Callable, name: str, args: Sequence, kwargs: dict, constants: dict[int, Tensor], outputs: list[Tensor]
) -> None:
    """`outputs`, and what func writes to, have the values that it gives of `constants`, of its inputs by their ids."""
    targets = written(func, args, kwargs)
    if any(constant.numel() > LIMIT for constant in constants.values()):
        elementwise = torch.Tag.pointwise in getattr(func, "tags", ()) or (name in OF_ALL and len(args) == 1)
        if not (elementwise and all(values.numel() == 1 or not any(values.stride()) for values in constants.values())):
            return invalidate_constants(targets)
        constants = {key: first(constant) for key, constant in constants.items()}
    constants = {key: constant.clone() for key, constant in constants.items()}  # which func may write to
    args, kwargs = tree_map_only(Tensor, lambda tensor: constants[id(tensor)], (args, kwargs))
    results = func(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))
    for tensor in targets:
        set_constant(tensor, constants[id(tensor)].expand(tensor.shape), follows=True)
    for tensor, values in zip(outputs, tensors_in((results,)), strict=True):
        if constant_of(tensor) is None:  # it is neither a view nor an input
            set_constant(tensor, values.to(tensor.dtype).expand(tensor.shape), follows=True)


def written(func: Callable, args: Sequence, kwargs: dict) -> list[Tensor]:
    """The tensors that func(*args, **kwargs) writes to."""
    if not (hasattr(func, "_schema") and func._schema.is_mutable):
        return []
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    writes = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return list(tensors_in([given[name] for name in writes if name in given]))


def call_by_values(func: Callable, args: Sequence, kwargs: dict) -> Any:
    """func(*args, **kwargs), the shape of whose result depends on values, if all are known; or None."""
    if any(constant_of(tensor) is None for tensor in tensors_in((*args, *kwargs.values()))):
        return None
    args, kwargs = tree_map_only(Tensor, constant_of, (tuple(args), kwargs))
    return tree_map_only(Tensor, lambda values: values.to("meta"), func(*args, **kwargs))


def if_finite(name: str, args: Sequence) -> bool | None:
    """What a test for infinity or NaN gives of each number that is neither; None: the operation is no such test."""
    if name in ("eq", "ne") and (args[0] is args[1] or (isinstance(args[1], float) and math.isinf(args[1]))):
        return (name == "eq") == (args[0] is args[1])  # x != x asks for NaN
    return FINITE.get(name)


def all_reduce_constants(op: str, size: int, constants: dict[int, Tensor | None]) -> Tensor | None:
    """The result of an all-reduce over `size` ranks, if it follows from the `constants` of the ranks that are run.

    `op` is the name of a ReduceOp. The other ranks are taken to hold the same values as those that are run.
    """
    if any(constant is None for constant in constants.values()):
        return None
    stacked = torch.stack(list(constants.values()))
    if op in ("MIN", "MAX"):
        return getattr(stacked, f"a{op.lower()}")(0)
    if op == "SUM" and size % len(constants) == 0:
        return stacked.sum(0, dtype=stacked.dtype) * (size // len(constants))
    return None


def constants_now(tensor: Tensor) -> Tensor | None:
    """The values of the meta tensor `tensor`, to keep, if it has whole numbers and they are known."""
    values = constant_of(tensor) if is_whole(tensor) and tensor.numel() <= LIMIT else None
    return None if values is None else values.clone()


def given_by(rank: int, given: dict[int, Sequence[Tensor | None]], i: int) -> Tensor | None:
    """What `rank` has `given` to a gather, its i-th input. One that isn't run is taken to give what all others do."""
    if rank in given:
        return given[rank][i]
    known = [each[i] for each in given.values()]
    same = known[0] is not None and all(each is not None and torch.equal(each, known[0]) for each in known)
    return known[0] if same else None


def gathered_constants(
    shape: torch.Size, ranks: Sequence[int], given: dict[int, Sequence[Tensor | None]], i: int
) -> Tensor | None:
    """The i-th inputs of these `ranks`, one behind the other in a tensor of this shape, if they fit into it."""
    parts = [given_by(rank, given, i) for rank in ranks]
    known = [part.flatten() for part in parts if part is not None]
    if len(known) < len(ranks) or sum(map(len, known)) != shape.numel():
        return None
    return torch.cat(known).view(shape)
