"""What is special about each operation of PyTorch."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from virtual_gpus.ops import attention, batch_norm, native_functions, rms_norm, softmax

Base = torch._C.TensorBase  # PyTorch's own methods, also while torch.Tensor's are patched
PACK = "_pack_padded_sequence"
MIXING = {"copy_", PACK, "_pack_padded_sequence_backward"}  # the lengths of sequences stay on the CPU
MIXING |= {
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
}  # in place of biases that there aren't, C++ makes zeros there

FOR_CUDA_ONLY = attention.ATTENTION | batch_norm.SYNC_BATCH_NORM | rms_norm.RMS_NORM | softmax.SOFTMAX


class Rule(NamedTuple):
    """What is special about an operation."""

    handler: Callable  # handler(rule, func, args, kwargs) is the operation on virtual tensors, see `dispatch`
    func: Callable  # what runs on the inner tensors
    call: Callable  # the same without a Python function around it
    mixes: bool  # PyTorch lets it mix devices
    takes_scalars: bool  # for certain; of operations that write to their arguments `errors.check_devices` decides
    composed: bool  # PyTorch makes it of other operations, which see to it that their tensors are on one device
    mutates: bool  # writes to an argument, and returns it
    reshapes: bool  # may change that argument's sizes or strides
    written_lists: list  # (position, name) of lists of tensors that it writes to, as optimizers' foreach functions do


def rule_of(func, handler):
    """The rule of the operation `func`, which `handler` takes care of."""
    name = func.overloadpacket.__name__
    runs = FOR_CUDA_ONLY.get(func) or with_generator(func) or func
    reshapes = torch.Tag.inplace_view in func.tags or not name.endswith("_")  # resize_ and the like, and out=
    arguments = list(enumerate(func._schema.arguments))
    written = [(i, a) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    lists = [(i, a.name) for i, a in written if a.type.kind() == "ListType"]
    call = getattr(runs, "_op", runs)
    composed = func not in FOR_CUDA_ONLY and native_functions.is_made_of_others(func)
    takes_scalars = not (
        func._schema.is_mutable or composed or name in native_functions.SCALARS or native_functions.is_checked(func)
    )
    return Rule(handler, runs, call, name in MIXING, takes_scalars, composed, func._schema.is_mutable, reshapes, lists)


def is_composite(func):
    """Whether it is made of others; autograd takes these apart, and in inference mode there is no autograd.

    Some, as silu_backward, are so for other devices, and have a kernel of their own where CPUs and CUDA have one.
    """
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    return has_kernel("CompositeImplicitAutograd") and not has_kernel("CPU") and func not in FOR_CUDA_ONLY


def with_generator(func):
    """What `func` does, with numbers from a generator; None if it draws none."""
    packet = func.overloadpacket
    if packet.__name__ == "native_dropout":
        return native_dropout
    variants = [getattr(packet, name) for name in packet.overloads()]
    able = [f for f in variants if any(a.name == "generator" for a in f._schema.arguments)]
    return (func if func in able else packet) if able else None


def native_dropout(x, p, train, generator):
    """What PyTorch's own does on the CPU, with numbers from `generator` (that takes none)."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = Base.bernoulli_(Base.new_empty(x, x.shape, dtype=torch.bool), 1 - p, generator=generator)
    return x.mul(mask).mul_(0 if p == 1 else 1 / (1 - p)), mask
