"""Constant propagation for dry runs.

A dry run has shapes and no values, but programs branch on small integer tensors that they create themselves (votes on
whether to stop, counters, flags). Their values are tracked on the CPU, as FakeTensor does with `.constant`, and dropped
as soon as anything without a value is written to them. All that stays is data-dependent: `.item()` is an UnknownScalar.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from virtual_gpus.compat import Generator, tree_map_only
from virtual_gpus.frames import program_line
from virtual_gpus.tree import tensors_in

CONSTANT_NUMEL_LIMIT = 16
CONSTRUCTORS = "zeros ones full scalar_tensor zeros_like ones_like full_like new_zeros new_ones new_full".split()


def may_be_constant(tensor: Tensor) -> bool:
    return tensor.numel() <= CONSTANT_NUMEL_LIMIT and not (tensor.is_floating_point() or tensor.is_complex())


def constant_of(tensor: Tensor) -> Tensor | None:
    """The values of the meta tensor `tensor`, as a view on the CPU, or None if they are unknown."""
    if not may_be_constant(tensor):
        return None
    flat = getattr(tensor.untyped_storage(), "constant", None)  # of the storage, so that views share it
    if flat is None or flat.dtype is not tensor.dtype:
        return None
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def set_constant(tensor: Tensor, values: Tensor) -> None:
    """The meta tensor `tensor` has these values from now on; both have the same shape."""
    constant, storage = constant_of(tensor), tensor.untyped_storage()
    if constant is not None:
        constant.copy_(values)
    elif may_be_constant(values) and storage.nbytes() == values.nbytes:  # not a part of what is unknown
        flat = torch.empty(values.numel(), dtype=values.dtype, device="cpu")
        flat.as_strided(tensor.shape, tensor.stride()).copy_(values)
        storage.constant = flat


def invalidate_constants(tensors: Iterable[Tensor]) -> None:
    """Something without a value has been written to these meta tensors."""
    for tensor in tensors:
        if may_be_constant(tensor):
            tensor.untyped_storage().constant = None


def propagate_constants(func, args: Sequence, kwargs: dict, out: Any) -> None:
    """After func(*args, **kwargs) on meta tensors gave `out`: track its values if those of all inputs are known."""
    inputs, outputs = list(tensors_in((*args, *kwargs.values()))), list(tensors_in((out,)))
    if not any(map(may_be_constant, (*inputs, *outputs))):
        return
    constants = [constant_of(tensor) for tensor in inputs]
    name = getattr(func, "overloadpacket", func).__name__
    random = any(isinstance(value, Generator) for value in kwargs.values())
    if random or any(constant is None for constant in constants) or not (inputs or name in CONSTRUCTORS):
        if hasattr(func, "_schema") and func._schema.is_mutable:
            invalidate_constants(inputs)
        return
    by_tensor = {id(tensor): constant for tensor, constant in zip(inputs, constants, strict=True)}
    args, kwargs = tree_map_only(Tensor, lambda tensor: by_tensor[id(tensor)], (args, kwargs))
    if "device" in kwargs:
        kwargs = kwargs | {"device": "cpu"}
    for tensor, values in zip(outputs, tensors_in((func(*args, **kwargs),)), strict=True):
        if id(tensor) not in by_tensor:
            set_constant(tensor, values)


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


class UnknownScalar:
    """What .item() returns where a dry run has no value: it prints as "?", and arithmetic with it stays unknown.

    Where the program's control flow depends on it, it raises RuntimeError, and says where it was read (`program_line`).
    """

    def __init__(self, program_line: str):
        self.program_line = program_line

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"

    def _result(self, *others) -> "UnknownScalar":
        return self

    def _decide(self, *others) -> NoReturn:
        raise RuntimeError(
            f"a dry run has shapes and no values: the number that was read at {self.program_line} is unknown, and what "
            "the program does next depends on it. Print it, or leave it out of the step"
        )

    __hash__ = _decide


_RESULTS = "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs round"
_DECISIONS = "bool float int index eq ne lt le gt ge complex floor ceil trunc"
for _names, _method in ((_RESULTS, UnknownScalar._result), (_DECISIONS, UnknownScalar._decide)):
    for _name in _names.split():
        setattr(UnknownScalar, f"__{_name}__", _method)


def unknown_scalars(shape: tuple[int, ...]) -> UnknownScalar | list:
    """What .tolist() returns, nested as `shape` says; one UnknownScalar for a shape without dimensions."""
    return [unknown_scalars(shape[1:]) for _ in range(shape[0])] if shape else UnknownScalar(program_line())
