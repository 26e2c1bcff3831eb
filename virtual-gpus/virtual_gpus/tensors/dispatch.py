"""Every operation on a virtual tensor: all on one GPU? Then run it on the inner tensors, and wrap what comes out."""

import torch
from torch import Tensor

from virtual_gpus.constants import constant_of
from virtual_gpus.errors import check_devices, check_generator, check_mask
from virtual_gpus.frames import called_from_cpp_autograd
from virtual_gpus.gpu import count
from virtual_gpus.meta_cache import form_of
from virtual_gpus.ops.attention import ATTENTION, completed, without_seeds
from virtual_gpus.ops.nondeterministic import KERNELS as NONDETERMINISTIC
from virtual_gpus.ops.nondeterministic import check_deterministic
from virtual_gpus.ops.table import PACK, Base, is_composite, rule_of, with_generator
from virtual_gpus.ops.unsupported import OPERATIONS, TYPES, check_type, without_kernel
from virtual_gpus.tensors.tensor import SUBCLASSES, VirtualTensor, copy_into, transfer, wrap
from virtual_gpus.tree import tensors_in

PLAIN = {int, str, type(None), torch.dtype}
AS_FOR_ALL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # where what is made for all devices is found
NAMESPACES = {}  # handlers of all operations in a namespace, such as c10d: see `ranks.collectives`
RULES = {}  # by the operation's id: operations live for ever, and hashing one is slow


def dispatch(cls, func, types, args=(), kwargs=None):
    """Every operation on a virtual tensor: __torch_dispatch__."""
    if len(types) > 1 and not all(issubclass(kind, VirtualTensor) for kind in types):
        return NotImplemented  # the other decides: a DTensor, for one
    rule = RULES.get(id(func)) or learn(func)
    try:
        return rule.handler(rule, func, args, kwargs or {})
    except Misplaced:
        return func.redispatch(AS_FOR_ALL, *args, **kwargs or {})


def learn(func):
    """The rule of an operation, found out when it is met for the first time."""
    if func.namespace in NAMESPACES:
        handler = NAMESPACES[func.namespace]
    elif is_composite(func):
        handler = decompose
    elif with_generator(func) is not None:
        handler = draw
    else:
        handler = SPECIAL.get(func.overloadpacket.__name__, view if func.is_view else call)
    RULES[id(func)] = rule_of(func, handler)
    return RULES[id(func)]


class Misplaced(Exception):
    """Tensors on two devices are given to an operation that PyTorch makes of others: those decide."""


# The handlers of a rule


def call(rule, func, args, kwargs):
    """An operation with nothing special about it."""
    inner, inner_kwargs, gpu, key = take_in(rule, func, args, kwargs)
    return finish(rule, inner, inner_kwargs, gpu, key, args, kwargs)


def view(rule, func, args, kwargs):
    """An operation that only looks at its argument in another way; in inference mode, too, that of a normal tensor is
    a normal tensor."""
    if torch.is_inference_mode_enabled() and isinstance(args[0], Tensor) and not args[0].is_inference():
        with torch.inference_mode(False):
            return call(rule, func, args, kwargs)
    return call(rule, func, args, kwargs)


def decompose(rule, func, args, kwargs):
    """An operation that is made of others: they come here one by one."""
    return func.decompose(*args, **kwargs)


def draw(rule, func, args, kwargs):
    """An operation that draws numbers: from the GPU's generator, unless it is given one."""
    inner, inner_kwargs, gpu, key = take_in(rule, func, args, kwargs)
    if not any(isinstance(value, torch._C.Generator) for value in (*inner, *inner_kwargs.values())):
        inner_kwargs["generator"] = gpu.generator
    return finish(rule, inner, inner_kwargs, gpu, key, args, kwargs)


def copy(rule, func, args, kwargs):
    """copy_, the one operation that may cross devices."""
    return copy_into(*args, **kwargs)


def with_value(rule, func, args, kwargs):
    """An operation that writes a value: a single number may come from any device (TensorAdvancedIndexing.cpp)."""
    value = args[2] if len(args) > 3 and type(args[3]) is bool else args[-1]  # index_put_ has another one behind it
    if isinstance(value, VirtualTensor) and not value.dim():
        home = getattr(args[0], "gpu", None)
        if value.gpu is not home:
            return func(*(transfer(a, home) if a is value else a for a in args), **kwargs)
    return call(rule, func, args, kwargs)


def masked_fill(rule, func, args, kwargs):
    check_mask(*args)
    return with_value(rule, func, args, kwargs)


def copy_each(rule, func, args, kwargs):
    """_foreach_copy_, which copies tensor by tensor where several devices are involved."""
    targets, sources, *options = args
    if len({getattr(tensor, "gpu", None) for tensor in (*targets, *sources)}) == 1:
        return call(rule, func, args, kwargs)
    for target, source in zip(targets, sources, strict=True):
        copy_into(target, source, *options, **kwargs)


def read(rule, func, args, kwargs):
    """What .item() does: a number travels to the host."""
    value = constant_of(args[0].inner) if args[0].inner.is_meta else None
    number = call(rule, func, args, kwargs) if value is None else value.item()
    count(args[0].element_size(), args[0].gpu, None)
    return number


def typed(rule, func, args, kwargs):
    """An operation whose kernel on CUDA takes fewer types than the CPU's."""
    inner, inner_kwargs, gpu, key = take_in(rule, func, args, kwargs)
    check_type(func.overloadpacket.__name__, inner[0])
    return finish(rule, inner, inner_kwargs, gpu, key, args, kwargs)


def uncertain(rule, func, args, kwargs):
    """An operation for which CUDA has no deterministic algorithm."""
    check_deterministic(func, args, kwargs)
    return (typed if func.overloadpacket.__name__ in TYPES else call)(rule, func, args, kwargs)


def missing(rule, func, args, kwargs):
    """An operation that CUDA doesn't have."""
    inner, inner_kwargs, *_ = take_in(rule, func, args, kwargs)
    return without_kernel(func, inner, inner_kwargs)


def pack(rule, func, args, kwargs):
    """Under nn.utils.rnn.pack_padded_sequence: the second result, the sizes of the batches, stays on the CPU."""
    inner, inner_kwargs, gpu, key = take_in(rule, func, args, kwargs)
    data, batch_sizes = gpu.run(rule.func, inner, inner_kwargs, key, rule.call)
    return wrap(data, gpu), batch_sizes


def attention(rule, func, args, kwargs):
    """One of CUDA's attention kernels. Where it drops something, a seed from the GPU's generator decides what."""
    inner, inner_kwargs, gpu, key = take_in(rule, func, args, kwargs)
    seed = torch.empty((), dtype=torch.int64, device="cpu")
    if drops(func, args, kwargs):
        seed = Base.random_(seed, generator=gpu.generator)
        inner_kwargs = inner_kwargs | {"seed": seed}
    made = finish(rule, inner, inner_kwargs, gpu, key, args, kwargs)
    return completed(made, *args[:2], func.overloadpacket, seed)


def attention_backward(rule, func, args, kwargs):
    args, seed = without_seeds(args)
    inner, inner_kwargs, gpu, key = take_in(rule, func, args, kwargs)
    return finish(rule, inner, inner_kwargs | {"seed": seed}, gpu, key, args, kwargs)


def drops(func, args, kwargs):
    """Whether an attention kernel is asked for dropout."""
    position = next(i for i, argument in enumerate(func._schema.arguments) if argument.name == "dropout_p")
    return (args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)) > 0


ATTENDING = {f.overloadpacket.__name__: attention_backward if "backward" in str(f) else attention for f in ATTENTION}
WITH_VALUE = "index_put index_put_ _index_put_impl_ index_fill index_fill_ fill fill_".split()
SPECIAL = {
    "copy_": copy,
    "_foreach_copy_": copy_each,
    **dict.fromkeys(WITH_VALUE, with_value),
    **dict.fromkeys(("masked_fill", "masked_fill_"), masked_fill),
    "_local_scalar_dense": read,
    PACK: pack,
    **dict.fromkeys(TYPES, typed),
    **dict.fromkeys(OPERATIONS, missing),
    **dict.fromkeys(NONDETERMINISTIC, uncertain),
    **ATTENDING,
}


# What they are made of


def take_in(rule, func, args, kwargs):
    """The inner arguments, also by name, the GPU that they are on, and what the operation's time depends on.

    Raises PyTorch's own error for tensors on two devices, unless this operation may mix them.
    """
    inner, key, gpu, misplaced = unwrap(args, None)
    if kwargs:
        values, more, gpu, elsewhere = unwrap(kwargs.values(), gpu)
        inner_kwargs, key = dict(zip(kwargs, values, strict=True)), (id(func), key, *kwargs, more)
        misplaced += elsewhere
    else:
        inner_kwargs, key = kwargs, (id(func), key)
    if misplaced and not accepts(rule, misplaced) and not called_from_cpp_autograd():
        if rule.composed:
            raise Misplaced
        for tensor in check_devices(func, args, kwargs, gpu, misplaced):
            count(tensor.nbytes, None, gpu)
    return inner, inner_kwargs, gpu, key


def accepts(rule, misplaced):
    """Whether an operation takes these tensors from other devices, as far as that can be said at once."""
    if rule.takes_scalars and all(type(t) is Tensor and t.dim() == 0 and t.is_cpu for t in misplaced):
        return True
    return rule.mixes


def unwrap(values, gpu):
    """(inner values, key, GPU, misplaced): what is inside `values`, and on which GPU; `gpu` if they are on none.

    The key is what the operation's time and the sizes of its result depend on. Misplaced are tensors on other devices.
    """
    inner, key, misplaced = [], [], ()
    for value in values:
        kind = type(value)
        if kind is VirtualTensor:
            if gpu is None:
                gpu = value.gpu
            elif value.gpu is not gpu:
                misplaced += (value,)
            key.append(value.form)
            value = value.inner
        elif kind in PLAIN:
            key.append(value)
        elif kind is float:
            key.append(kind)  # a learning rate, say, may differ in every step
        elif kind is list or kind is tuple:
            if value and type(value[0]) is int:  # sizes: there is nothing to unwrap
                key.append(tuple(value))
            else:
                value, form, gpu, elsewhere = unwrap(value, gpu)
                key.append(form)
                misplaced += elsewhere
        elif kind in SUBCLASSES:  # looked for here, because it is rare: the tensor without its class
            [value], [form], gpu, elsewhere = unwrap([wrap(value.inner, value.gpu)], gpu)
            key.append(form)
            misplaced += elsewhere
        elif isinstance(value, Tensor):
            key.append(form_of(value))
            misplaced += (value,)
        else:
            value, form = unwrap_option(value, gpu)
            key.append(form)
        inner.append(value)
    return inner, tuple(key), gpu, misplaced


def unwrap_option(value, gpu):
    """What is inside an argument that is no tensor, and its part of the key."""
    if type(value) is bool:
        return value, "yes" if value else "no"  # True == 1
    if isinstance(value, torch._C.Generator):
        check_generator(value, gpu)
        return None if gpu.backing.type == "meta" else value, None
    if type(value) is torch.device and gpu is not None:
        return gpu.backing, value
    return value, value


def finish(rule, inner, inner_kwargs, gpu, key, args, kwargs):
    """Run the operation on the inner tensors and wrap what comes out; what it wrote to is the same object again."""
    if inner and isinstance(inner[0], Tensor) and inner[0].is_complex():
        with conjugation():
            out = gpu.run(rule.func, inner, inner_kwargs, key, rule.call)
    else:
        out = gpu.run(rule.func, inner, inner_kwargs, key, rule.call)
    if not rule.mutates:
        return wrap(out, gpu) if type(out) is Tensor else wrap_all(out, gpu)
    if args and out is inner[0]:  # the most frequent case, and the only tensor that was written to
        if rule.reshapes:
            refresh(args[0])
        return args[0]
    given = {id(t.inner): t for t in tensors_in((args, kwargs)) if isinstance(t, VirtualTensor)}
    for position, name in rule.written_lists:  # autograd counts the writes to single tensors by itself
        torch.autograd.graph.increment_version(args[position] if position < len(args) else kwargs[name])
    for tensor in given.values():
        refresh(tensor)
    return wrap_all(out, gpu, given)


def wrap_all(out, gpu, given=None):
    """Wrap the tensors in an operation's result; those that were arguments come back as the same objects."""
    if isinstance(out, Tensor):
        known = given.get(id(out)) if given else None
        return wrap(out, gpu) if known is None else known
    if isinstance(out, (list, tuple)):
        return type(out)([wrap_all(o, gpu, given) for o in out])
    return out


def refresh(tensor):
    """Let the wrapper's sizes follow the inner tensor's, after resize_, t_, out= and the like."""
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
    made = wrap(tensor.inner, tensor.gpu)
    Base.data.__set__(tensor, made)
    tensor.form = made.form


def conjugation():
    """Inside, C++ sees the bit that says "conjugate", as it does outside of __torch_dispatch__."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


VirtualTensor.__torch_dispatch__ = classmethod(dispatch)
