"""Numbers that a dry run doesn't know, and what a program may do with them.

They may be stored, printed, reckoned with, sent, and put into tensors: what comes of that is unknown, too. Where
control flow, a shape or an index depends on one, the program has to be told what to take it for: see `Assumptions`.
"""

import contextlib
import functools
import json
import linecache
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from virtual_gpus.compat import DisableTorchFunctionSubclass, tree_map_only
from virtual_gpus.constants import FINITE, invalidate_constants
from virtual_gpus.errors import no_values
from virtual_gpus.frames import called_by_formatting, called_by_serialization, program_line, program_place
from virtual_gpus.state import current
from virtual_gpus.tree import tensors_in

Number = bool | int | float
VISIBLE = 1 << 20  # numbers in a tensor of which NaN is what one sees that are unknown; in a larger one zeros
# Functions whose whole numbers are neither sizes nor indices, and those that read values and are no operations
ARITHMETIC = {
    *"add sub rsub mul div true_divide floor_divide remainder fmod pow eq ne lt le gt ge maximum minimum".split(),
    *"add_ sub_ mul_ div_ fill_ masked_fill masked_fill_ clamp clamp_ where copy_".split(),
}
# Where libraries decide by numbers of every step: (file, a part of the line): what is usual
USUAL = {
    ("deepspeed/runtime/utils.py", "(norm < 0)"): False,  # a norm of gradients
    ("torchtitan/distributed/utils.py", "float(_dist_reduce_tensor("): 1.0,  # a loss that is logged
    ("torchtitan/trainer.py", "float(grad_norm.item())"): 1.0,  # and a norm
    ("megatron/core/timers.py", "x > 0.0"): False,  # times, which are then not printed
    ("megatron/training/training.py", "if avg >= 0.0"): True,  # a loss
    ("megatron/core/optimizer/clip_grads.py", "if clip_coeff < 1.0"): False,
    ("megatron/core/utils.py", "float(l2_reduced)"): 0.0,  # a part of that norm
}
PYTHON = {"equal", "allclose", "unique", "unique_consecutive", "is_nonzero"}


class Assumptions:
    """What the dry run of a program takes unknown numbers for.

    told   {"train.py:12": value}, where the program decides by them. Folders in front tell files of one name apart
    made   those that the program came to, and where numbers were taken for finite, in words
    """

    def __init__(self, told: Mapping[str, Number] | None = None):
        self.told = {}
        for place, value in (told or {}).items():
            path, _, line = place.rpartition(":")
            if not (path and line.isdecimal() and isinstance(value, Number)):
                raise ValueError(f"assume={place!r}: {value!r}: write it as 'train.py:12': True, or a number")
            self.told[path, int(line)] = value
        self.used: dict[str, None] = {}
        self.tests: dict[str, None] = {}  # the lines at which the program asks whether numbers are finite

    @property
    def made(self) -> list[str]:
        finite = [f"no number is infinite or NaN: tested at {'; '.join(self.tests)}"] if self.tests else []
        return [*self.used, *finite]

    def note(self, words: str) -> None:
        self.used[words] = None

    def finite(self) -> None:
        """The program asks, at the line where it is, whether unknown numbers are finite: they are."""
        self.tests[program_line()] = None

    def value_here(self) -> Number | None:
        """What was told for the line that the program is at."""
        path, line = program_place()
        path, text = f"/{path}".replace("\\", "/"), linecache.getline(path, line)
        told = {file: value for (file, number), value in self.told.items() if number == line}
        usual = {file: value for (file, words), value in USUAL.items() if words in text}
        for file, value in {**usual, **told}.items():
            if path.endswith(f"/{file}"):
                self.note(f"{file}:{line} = {str(value).lower()}")
                return value
        return None


def decide(kind: type, read_at: str | None = None) -> Number:
    """What the program takes an unknown number of that kind for, where it now depends on it. RuntimeError if nobody has
    said. read_at: where the program has read it, if that was elsewhere."""
    value = current().rendezvous.assumptions.value_here()
    if value is None:
        here = program_line()
        read = "" if read_at in (None, here) else f" (read at {read_at})"
        place, example = here.replace(", line ", ":"), "true" if kind is bool else "1"
        raise RuntimeError(
            f"a dry run has shapes and no values: at {here} the program goes on by a number that is unknown{read}. "
            f"Print it, leave it out of the step, or say what to take it for: --assume {place}={example}, or "
            f"assume={{{place!r}: {example.title()}}}"
        )
    return kind(value)


class UnknownScalar:
    """What .item() returns where a dry run has no value: it prints as "?", and arithmetic with it stays unknown.

    Where the program decides by it, `decide` says what it is taken for.
    """

    def __init__(self, kind: type, read_at: str):
        self.kind, self.read_at = kind, read_at

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"

    def decide(self) -> Number:
        return decide(self.kind, self.read_at)

    def __bool__(self) -> bool:
        return bool(self.decide())

    def __float__(self) -> float:
        return math.nan if called_by_formatting() else float(self.decide())

    def __int__(self) -> int:
        return int(self.decide())

    __index__ = __trunc__ = __floor__ = __ceil__ = __int__

    def __hash__(self) -> int:
        return hash(self.decide())

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_with_unknown(func, args, kwargs or {})


def result(kind: type | None) -> Callable:
    """The method of an operator that gives an UnknownScalar, None: of its operands' kind. Tensors do it themselves."""

    def method(self: UnknownScalar, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented
        kinds = {getattr(number, "kind", type(number)) for number in (self, *others)}
        return UnknownScalar(kind or (int if kinds <= {bool, int} else float), self.read_at)

    return method


for _names, _kind in (
    ("add radd sub rsub mul rmul floordiv rfloordiv mod rmod pow rpow neg pos abs round", None),
    ("truediv rtruediv", float),
    ("eq ne lt le gt ge", bool),
):
    for _name in _names.split():
        setattr(UnknownScalar, f"__{_name}__", result(_kind))
numbers.Real.register(UnknownScalar)


def unknown_scalars(shape: tuple[int, ...], dtype: torch.dtype) -> UnknownScalar | list:
    """What .tolist() returns, nested as `shape` says; one UnknownScalar for a shape without dimensions."""
    if shape:
        return [unknown_scalars(shape[1:], dtype) for _ in range(shape[0])]
    return UnknownScalar(kind_of(dtype), program_line())


def kind_of(dtype: torch.dtype) -> type:
    if dtype is torch.bool:
        return bool
    return float if dtype.is_floating_point or dtype.is_complex else int


class UnknownTensor(Tensor):
    """A tensor on the CPU whose values are unknown, or some of them."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_with_unknown(func, args, kwargs or {})

    def tolist(self) -> UnknownScalar | list:
        return unknown_scalars(self.shape, self.dtype)

    def item(self) -> UnknownScalar:
        self.reshape(())  # or PyTorch's error
        return UnknownScalar(kind_of(self.dtype), program_line())

    def decide(self) -> Number:
        return self.item().decide()

    __bool__, __float__ = UnknownScalar.__bool__, UnknownScalar.__float__
    __int__ = __index__ = UnknownScalar.__int__

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"tensor(?, size={tuple(self.shape)})"

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else "?"

    def _values(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise no_values(f"reading a tensor on the CPU, {self}, ")

    numpy = __array__ = data_ptr = _values  # the last one for libraries that write files

    def __reduce_ex__(self, protocol: Any) -> tuple:
        if called_by_serialization():
            raise no_values("torch.save")
        return unknown_tensor, (self.shape, self.dtype)


def unknown_tensor(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    values = torch.zeros(shape, dtype=dtype, device="cpu")  # which takes no memory before it is written to
    return forget(values.fill_(math.nan) if dtype.is_floating_point and shape.numel() <= VISIBLE else values)


def forget(tensor: Tensor) -> Tensor:
    """`tensor`, of whose values nothing is known any more."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if hasattr(local, "gpu"):
        invalidate_constants([local.inner])
    with DisableTorchFunctionSubclass():
        for each in (tensor, tensor._base):  # and what it is a view of
            if type(each) is Tensor and each.device.type == "cpu":
                each.__class__ = UnknownTensor  # the same object, which the program has elsewhere, too
    return tensor


def call_with_unknown(func: Callable, args: tuple, kwargs: dict) -> Any:
    """func(*args, **kwargs), which have unknown numbers: what it returns, and what it writes to, is unknown, too."""
    with DisableTorchFunctionSubclass():
        args, kwargs = decided(func, args, kwargs)
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        out = func(*args, **kwargs)
        written = [tensor for tensor, before in zip(tensors, versions, strict=True) if tensor._version != before]
    for tensor in (*tensors_in((out,)), *written):
        forget(tensor)
    return out


def decided(func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of `func` with numbers in the place of unknown ones: any, or what the program takes those for on
    which a shape or an index depends."""
    if func.__name__ in ("__getitem__", "__setitem__"):
        if any(isinstance(tensor, UnknownTensor) for tensor in tensors_in(args[1:2])):
            raise no_values("an index")
        args = args[0], tree_map_only(UnknownScalar, UnknownScalar.decide, args[1]), *args[2:]
    elif func.__name__ not in ARITHMETIC:
        check_shapes(func, args, kwargs)
        # a whole number may be a size or an index, which nothing stands in for
        args, kwargs = tree_map_only(UnknownScalar, lambda n: n if n.kind is float else n.decide(), (args, kwargs))
    return tree_map_only(UnknownScalar, stand_in, (args, kwargs))


@contextlib.contextmanager
def unknown_to_python() -> Iterator[None]:
    """Inside, the functions of `math`, and `json`, take an UnknownScalar."""
    with contextlib.ExitStack() as stack:
        for name in "exp expm1 log log1p log2 log10 sqrt fabs pow isnan isinf isfinite".split():
            stack.callback(setattr, math, name, getattr(math, name))
            setattr(math, name, taking_unknown(getattr(math, name)))
        stack.callback(setattr, json.JSONEncoder, "default", json.JSONEncoder.default)
        json.JSONEncoder.default = taking_unknown(json.JSONEncoder.default, "?")
        yield


def taking_unknown(function: Callable, answer: Any = None) -> Callable:
    """`function`, which gives an UnknownScalar of one, or `answer`; that it is finite is assumed."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        unknown = [number for number in args if isinstance(number, UnknownScalar)]
        if not unknown:
            return function(*args)
        if function.__name__ in FINITE:
            current().rendezvous.assumptions.finite()
            return FINITE[function.__name__]
        return answer or UnknownScalar(float, unknown[0].read_at)

    return call


def stand_in(number: UnknownScalar) -> Number:
    return {float: math.nan, int: 1, bool: True}[number.kind]


def check_shapes(func: Callable, args: tuple, kwargs: dict) -> None:
    """The shape of a result, or which of two ways a program goes, must not depend on an UnknownTensor."""
    name = func.__name__
    variants = getattr(torch.ops.aten, name.strip("_"), None)
    tags = {tag for variant in variants.overloads() for tag in getattr(variants, variant).tags} if variants else set()
    if name in PYTHON or tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}:
        raise no_values(f"{name} of a tensor on the CPU")
