"""The op table: how each operation of PyTorch is run on virtual tensors.

Three things have to be told apart:
- func      the OpOverload that comes to `__torch_dispatch__`, such as aten.add.Tensor
- handler   what `__torch_dispatch__` calls for it, with virtual tensors. Modules above register the handlers:
            `tensors.dispatch`, and `ranks` those of collectives
- kernel    what computes it on inner tensors: `func` itself, or a stand-in for a kernel that only CUDA has

An operation gets its handler and its Op, which says what is special about it, when it is called for the first time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from virtual_gpus.compat import Base, OpOverload, dispatch_has_kernel_for_dispatch_key
from virtual_gpus.ops import attention, native_functions, normalization, products

PACK = "_pack_padded_sequence"
MIXES_DEVICES = {
    *("copy_", PACK, "_pack_padded_sequence_backward"),  # the lengths of sequences stay on the CPU
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),  # for biases that there aren't, C++ makes zeros on the CPU
}
# {operation that CUDA has and the CPU has not, or not in this form: the function of inner tensors that computes it}
CUDA_KERNELS: dict[OpOverload, Callable] = (
    attention.FORWARD
    | attention.BACKWARD
    | normalization.SYNC_BATCH_NORM
    | normalization.RMS_NORM
    | normalization.SOFTMAX
    | products.PRODUCTS
)
for func, kernel in CUDA_KERNELS.items():
    kernel.overloadpacket = func.overloadpacket  # by which the clock knows it, and its FLOPs


class Op(NamedTuple):
    """What is special about an operation."""

    func: OpOverload  # as it comes to __torch_dispatch__
    kernel: Callable  # computes it on inner tensors
    mixes_devices: bool  # PyTorch lets it take tensors on several devices
    takes_cpu_scalars: bool  # for certain; of mutable operations `errors.check_devices` decides
    is_composite: bool  # CompositeExplicitAutograd: made of operations which check their devices themselves
    is_mutable: bool  # writes to an argument, and returns it
    may_resize: bool  # may change that argument's sizes or strides
    mutable_lists: list[tuple[int, str]]  # (position, name) of lists that it writes to, as _foreach_add_ does

    @classmethod
    def of(cls, func: OpOverload) -> "Op":
        name, schema = func.overloadpacket.__name__, func._schema
        composite = func not in CUDA_KERNELS and native_functions.is_composite_explicit(func)
        checked = composite or name in native_functions.SCALARS or native_functions.is_checked(func)
        return cls(
            func=func,
            kernel=CUDA_KERNELS.get(func) or with_generator(func) or func,
            mixes_devices=name in MIXES_DEVICES,
            takes_cpu_scalars=not (checked or schema.is_mutable),
            is_composite=composite,
            is_mutable=schema.is_mutable,
            may_resize=torch.Tag.inplace_view in func.tags or not name.endswith("_"),  # resize_ and the like, and out=
            mutable_lists=[
                (position, argument.name)
                for position, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
                if argument.type.kind() == "ListType"
            ],
        )


class MixedDevices(Exception):
    """A composite operation has tensors on several devices; those that it is made of decide whether it may."""


Handler = Callable[[Op, tuple, dict], Any]  # handler(op, args, kwargs) runs op.func on virtual tensors
H = TypeVar("H", bound=Handler)
NAMESPACE_HANDLERS: dict[str, Handler] = {}  # of all operations in a namespace, such as c10d
HANDLERS: list[tuple[Callable[[OpOverload], bool], Handler]] = []  # (is it this one's?, handler); the last that is
OPS: dict[int, Callable[[tuple, dict], Any]] = {}  # by id, because an OpOverload's hash is a Python function


def register_handler(applies: Callable[[OpOverload], bool]) -> Callable[[H], H]:
    """Decorates the handler of all operations for which `applies(func)` is true, unless a later one's is, too."""

    def register(handler: H) -> H:
        HANDLERS.append((applies, handler))
        return handler

    return register


def named(*names: str) -> Callable[[OpOverload], bool]:
    return lambda func: func.overloadpacket.__name__ in names


def add_to_table(func: OpOverload) -> Callable[[tuple, dict], Any]:
    """Find the handler of `func`, bind it to its Op, and keep it in OPS."""
    handler = NAMESPACE_HANDLERS.get(func.namespace)
    handler = handler or next(handler for applies, handler in reversed(HANDLERS) if applies(func))
    OPS[id(func)] = functools.partial(handler, Op.of(func))
    return OPS[id(func)]


def is_composite_implicit(func: OpOverload) -> bool:
    """Whether `func` is CompositeImplicitAutograd. Autograd takes these apart, and in inference mode there is none.

    Some, as silu_backward, are so for other devices only: CPU and CUDA have a kernel.
    """
    has_kernel = functools.partial(dispatch_has_kernel_for_dispatch_key, func.name())
    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU") and func not in CUDA_KERNELS


def with_generator(func: OpOverload) -> Callable | None:
    """The kernel of a random operation, which takes a generator=…; None if `func` is not random."""
    packet = func.overloadpacket
    if packet.__name__ == "native_dropout":
        return native_dropout
    variants = [getattr(packet, name) for name in packet.overloads()]
    able = [f for f in variants if any(a.name == "generator" for a in f._schema.arguments)]
    return (func if func in able else packet) if able else None


def native_dropout(x: Tensor, p: float, train: bool | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """aten::native_dropout, which takes no generator, as it is on the CPU (aten/src/ATen/native/Dropout.cpp)."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = Base.bernoulli_(Base.new_empty(x, x.shape, dtype=torch.bool), 1 - p, generator=generator)
    return x.mul(mask).mul_(0 if p == 1 else 1 / (1 - p)), mask
