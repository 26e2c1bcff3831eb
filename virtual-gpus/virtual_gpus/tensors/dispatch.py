"""The handlers of operations on virtual tensors: `run`, and of what needs more. The last one that applies counts.

A handler is called as handler(op, args, kwargs). Most unwrap the arguments, do something, and `run` the operation.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import Base, DispatchKey, DispatchKeySet, Generator
from virtual_gpus.constants import constant_of
from virtual_gpus.errors import check_mask
from virtual_gpus.gpu import VirtualGPU, record_copy
from virtual_gpus.ops import attention
from virtual_gpus.ops.conversions import saturate
from virtual_gpus.ops.native_functions import named_arguments
from virtual_gpus.ops.nondeterministic import NONDETERMINISTIC, check_deterministic
from virtual_gpus.ops.table import PACK, Op, is_composite_implicit, named, register_handler, with_generator
from virtual_gpus.ops.unsupported import CPU_ONLY, DTYPE_ERRORS, check_dtype
from virtual_gpus.state import current
from virtual_gpus.tensors.arguments import Arguments
from virtual_gpus.tensors.copies import copy_into, transfer
from virtual_gpus.tensors.sparse import check_values
from virtual_gpus.tensors.tensor import VirtualTensor, enable_dispatch_keys, wrap
from virtual_gpus.tree import tensors_in
from virtual_gpus.unknown import decide, kind_of


@register_handler(lambda func: True)
def run(op: Op, args: tuple, kwargs: dict, given: Arguments | None = None) -> Any:
    """Run `op` on the inner tensors, `given` if they are unwrapped already, and wrap what it returns.

    Tensors that it wrote to are the same objects again.
    """
    if given is None:
        given = Arguments(op, args, kwargs)
    inner, gpu = given.inner, given.gpu
    if inner and isinstance(inner[0], Tensor) and inner[0].is_complex():
        with enable_dispatch_keys(DispatchKey.Conjugate, DispatchKey.Negative):  # C++ resolves lazy conjugation
            out = gpu.run(op.kernel, inner, given.inner_kwargs, given.key)
    else:
        out = gpu.run(op.kernel, inner, given.inner_kwargs, given.key)
    if not op.is_mutable:
        return wrap(out, gpu) if type(out) is Tensor else wrap_all(out, gpu)
    if args and out is inner[0]:  # the most frequent case, and the only tensor that was written to
        if op.may_resize or out.is_sparse:
            update_meta(args[0])
        return args[0]
    wrappers = {id(t.inner): t for t in tensors_in((args, kwargs)) if isinstance(t, VirtualTensor)}
    for position, name in op.mutable_lists:  # autograd counts the writes to single tensors by itself
        torch.autograd.graph.increment_version(args[position] if position < len(args) else kwargs[name])
    for tensor in wrappers.values():
        update_meta(tensor)
    return wrap_all(out, gpu, wrappers)


@register_handler(lambda func: func.is_view)
def view(op: Op, args: tuple, kwargs: dict) -> Any:
    """In inference mode, too, a view of a normal tensor is a normal tensor."""
    if torch.is_inference_mode_enabled() and isinstance(args[0], Tensor) and not args[0].is_inference():
        with torch.inference_mode(False):
            return run(op, args, kwargs)
    return run(op, args, kwargs)


@register_handler(named("copy_"))
def copy(op: Op, args: tuple, kwargs: dict) -> Any:
    return copy_into(*args, **kwargs)


@register_handler(named("_to_copy"))
def to_copy(op: Op, args: tuple, kwargs: dict) -> Any:
    out = run(op, args, kwargs)
    out.gpu.call(saturate, out.inner, args[0].inner)
    return out


@register_handler(named("_foreach_copy_"))
def copy_each(op: Op, args: tuple, kwargs: dict) -> Any:
    """Tensor by tensor if several devices are involved."""
    targets, sources, *options = args
    if len({getattr(tensor, "gpu", None) for tensor in (*targets, *sources)}) == 1:
        return run(op, args, kwargs)
    for target, source in zip(targets, sources, strict=True):
        copy_into(target, source, *options, **kwargs)


@register_handler(named(*"index_put index_put_ _index_put_impl_ index_fill index_fill_ fill fill_".split()))
def with_value(op: Op, args: tuple, kwargs: dict) -> Any:
    """The value may be a scalar tensor on any device. (aten/src/ATen/native/TensorAdvancedIndexing.cpp)"""
    value = args[2] if len(args) > 3 and type(args[3]) is bool else args[-1]  # index_put_ has another one behind it
    if isinstance(value, VirtualTensor) and not value.dim():
        home = getattr(args[0], "gpu", None)
        if value.gpu is not home:
            return op.func(*(transfer(a, home) if a is value else a for a in args), **kwargs)
    return run(op, args, kwargs)


@register_handler(named("index"))
def index(op: Op, args: tuple, kwargs: dict) -> Any:
    """In a dry run a mask is no index, but the positions that it names are, if it is known."""
    x, indices = args
    if current() is not None and current().rendezvous is not None:
        parts = [i.nonzero().unbind(1) if i is not None and i.dtype is torch.bool else [i] for i in indices]
        indices = [i for part in parts for i in part]
    return run(op, (x, indices), kwargs)


@register_handler(named("masked_fill", "masked_fill_"))
def masked_fill(op: Op, args: tuple, kwargs: dict) -> Any:
    check_mask(*args)
    return with_value(op, args, kwargs)


@register_handler(named("_local_scalar_dense"))
def item(op: Op, args: tuple, kwargs: dict) -> Any:
    """The operation under x.item(): a number travels to the host."""
    [x] = args
    known = constant_of(x.inner)
    if x.gpu.machine.rendezvous is None:
        number = run(op, args, kwargs)
    else:
        number = decide(kind_of(x.dtype)) if known is None else known.item()
    record_copy(x.element_size(), x.gpu, None)
    return number


@register_handler(named("_sparse_coo_tensor_with_dims_and_tensors", "_to_sparse"))
def make_sparse(op: Op, args: tuple, kwargs: dict) -> Any:
    given = Arguments(op, args, kwargs)
    check_values(given.gpu)
    return run(op, args, kwargs, given)


@register_handler(named(PACK))
def pack_padded_sequence(op: Op, args: tuple, kwargs: dict) -> Any:
    """The second result, the sizes of the batches, stays on the CPU."""
    given = Arguments(op, args, kwargs)
    data, batch_sizes = given.gpu.run(op.kernel, given.inner, given.inner_kwargs, given.key)
    return wrap(data, given.gpu), batch_sizes


@register_handler(named(*DTYPE_ERRORS, *NONDETERMINISTIC))
def check_kernel(op: Op, args: tuple, kwargs: dict) -> Any:
    """Operations whose kernels on CUDA take fewer dtypes than the CPU's, or are not deterministic."""
    name = op.func.overloadpacket.__name__
    if name in NONDETERMINISTIC:
        check_deterministic(op.func, args, kwargs)
    given = Arguments(op, args, kwargs)
    if name in DTYPE_ERRORS:
        check_dtype(name, given.inner[0])
    return run(op, args, kwargs, given)


@register_handler(named(*CPU_ONLY))
def unsupported(op: Op, args: tuple, kwargs: dict) -> Any:
    given = Arguments(op, args, kwargs)
    return op.func.redispatch(DispatchKeySet(DispatchKey.CUDA), *given.inner, **given.inner_kwargs)  # PyTorch says so


@register_handler(attention.FORWARD.__contains__)
def attention_forward(op: Op, args: tuple, kwargs: dict) -> Any:
    """One of CUDA's attention kernels. Its dropout is a function of a seed, which the GPU's generator gives."""
    given, seed = Arguments(op, args, kwargs), torch.empty((), dtype=torch.int64, device="cpu")
    if named_arguments(op.func, args, kwargs)["dropout_p"] > 0:
        given.gpu.call(functools.partial(Base.random_, generator=given.gpu.generator), seed)
        given.inner_kwargs = given.inner_kwargs | {"seed": seed}
    query, key, *_ = args
    return attention.all_outputs(run(op, args, kwargs, given), query, key, op.func, seed)


@register_handler(attention.BACKWARD.__contains__)
def attention_backward(op: Op, args: tuple, kwargs: dict) -> Any:
    args, seed = attention.without_seeds(args)
    given = Arguments(op, args, kwargs)
    given.inner_kwargs = given.inner_kwargs | {"seed": seed}
    return run(op, args, kwargs, given)


@register_handler(lambda func: with_generator(func) is not None)
def random(op: Op, args: tuple, kwargs: dict) -> Any:
    """Random numbers come from the GPU's generator, unless the program gives one."""
    given = Arguments(op, args, kwargs)
    if not any(isinstance(value, Generator) for value in (*given.inner, *given.inner_kwargs.values())):
        given.inner_kwargs["generator"] = given.gpu.generator
    return run(op, args, kwargs, given)


@register_handler(is_composite_implicit)
def decompose(op: Op, args: tuple, kwargs: dict) -> Any:
    return op.func.decompose(*args, **kwargs)


def wrap_all(out: Any, gpu: VirtualGPU, wrappers: dict[int, VirtualTensor] | None = None) -> Any:
    """`out` with its tensors wrapped, those in `wrappers`, {id of the inner tensor: wrapper}, by the same objects."""
    if isinstance(out, Tensor):
        wrapper = wrappers.get(id(out)) if wrappers else None
        return wrap(out, gpu) if wrapper is None else wrapper
    if isinstance(out, (list, tuple)):
        return type(out)([wrap_all(o, gpu, wrappers) for o in out])
    return out


def update_meta(tensor: VirtualTensor) -> None:
    """The wrapper's sizes and strides follow the inner tensor's, after resize_, t_, out= and the like."""
    if tensor.inner.is_sparse:  # its entries may be others now
        tensor.tensor_meta = wrap(tensor.inner, tensor.gpu).tensor_meta
        return
    if tensor.inner.shape == tensor.shape and tensor.inner.stride() == tensor.stride():
        return
    storage = tensor.inner.untyped_storage()
    block = getattr(storage, "block", None)
    try:
        if block is not None:
            block.resize(storage.nbytes())
    except torch.OutOfMemoryError:  # the tensor stays as it was
        storage.resize_(block.nbytes)
        tensor.inner.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        raise
    resized = wrap(tensor.inner, tensor.gpu)
    Base.data.__set__(tensor, resized)
    tensor.tensor_meta = resized.tensor_meta
