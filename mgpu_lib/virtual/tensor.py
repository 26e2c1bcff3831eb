"""A tensor that says, and insists, that it lives on a GPU.

C++ sees a tensor on the CPU, so autograd just works. Python sees `cuda:i`. Every operation comes through
`__torch_dispatch__`: it checks that all tensors are on one GPU, runs on the inner tensors, and wraps what comes out.
"""
import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from . import moves
from .errors import check_generator, check_strays, no_addresses, no_values, not_numpy, tensors_in
from .memory import Block

Base = torch._C.TensorBase  # PyTorch's own methods, also while torch.Tensor's are patched


def run(cls, func, types, args=(), kwargs=None):
    """Every operation on a virtual tensor: __torch_dispatch__."""
    rule = RULES.get(id(func)) or learn(func)
    special = rule.special
    if special == "composite":
        return func.decompose(*args, **(kwargs or {}))
    key, strays = [id(func)], []
    inner_args, gpu = unwrap(args, None, strays, key)
    inner_kwargs = {}
    if kwargs:
        key.extend(kwargs)
        values, gpu = unwrap(kwargs.values(), gpu, strays, key)
        inner_kwargs = dict(zip(kwargs, values, strict=True))
    if strays and not rule.mixes and not called_by_autograd(sys._getframe(1)):
        for stray in check_strays(func, args, kwargs or {}, gpu, strays):
            moves.count(stray.nbytes, None, gpu)
    if special == "copy":
        return moves.copy_into(*args)
    if special == "random" and not any(isinstance(a, torch._C.Generator)
                                       for a in (*inner_args, *inner_kwargs.values())):
        inner_kwargs["generator"] = gpu.generator
    if complex_numbers and isinstance(inner_args[0], Tensor) and inner_args[0].is_complex():
        with conjugation():
            out = gpu.run(rule.func, inner_args, inner_kwargs, tuple(key), rule.call)
    else:
        out = gpu.run(rule.func, inner_args, inner_kwargs, tuple(key), rule.call)
    if special == "read":
        moves.count(args[0].element_size(), gpu, None)
    elif special == "pack":
        return wrap(out[0], gpu), out[1]
    if not rule.mutates:
        return wrap(out, gpu) if type(out) is Tensor else wrap_all(out, gpu)
    if args and out is inner_args[0]:  # the most frequent case, and the only tensor that was written to
        if rule.reshapes:
            refresh(args[0])
        return args[0]
    given = {id(t.inner): t for t in tensors_in((args, kwargs)) if type(t) is VirtualTensor}
    for position in rule.written_lists:  # autograd counts the writes to single tensors by itself
        torch.autograd.graph.increment_version(args[position])
    for tensor in given.values():
        refresh(tensor)
    return wrap_all(out, gpu, given)


class VirtualTensor(Tensor):
    """Values in `inner`, of this `form` (see `form_of`), on the GPU `gpu` (a `machine.VirtualGPU`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: self.gpu.device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return self.gpu.index

    def __repr__(self, *, tensor_contents=None):
        self.gpu.clock.read(self.gpu)
        body = "..." if self.inner.is_meta else torch._tensor_str._tensor_str(self.inner, indent=len("tensor("))
        notes = [f"device='{self.device}'"]
        if self.inner.is_meta or (self.numel() == 0 and self.dim() != 1):
            notes.append(f"size={tuple(self.shape)}")
        if self.dtype not in (torch.get_default_dtype(), torch.int64, torch.bool):
            notes.append(f"dtype={self.dtype}")
        if self.grad_fn is not None:
            notes.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            notes.append("requires_grad=True")
        text = torch._tensor_str._add_suffixes("tensor(" + body, notes, len("tensor("), force_newline=False)
        return "Parameter containing:\n" + text if isinstance(self, Parameter) else text

    def __format__(self, spec):
        number = self.dim() == 0 and not self.inner.is_meta
        return format(self.item(), spec) if number else object.__format__(self, spec)

    def __float__(self):
        with python_again():
            return Base.__float__(self)

    def __int__(self):
        with python_again():
            return Base.__int__(self)

    def __index__(self):
        with python_again():
            return Base.__index__(self)

    def tolist(self):
        return self.detach().cpu().tolist()

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise not_numpy(self.device)

    def __array__(self, dtype=None):
        raise not_numpy(self.device)

    def pin_memory(self, device=None):
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def is_pinned(self, device=None):
        return False

    def is_shared(self):
        return True  # as documented: always True for CUDA tensors

    def share_memory_(self):
        return self

    def record_stream(self, stream):
        pass  # memory is never reused while a tensor lives

    def _raw_pointer(self, *args, **kwargs):
        raise no_addresses()

    data_ptr = const_data_ptr = untyped_storage = storage = __dlpack__ = __dlpack_device__ = _raw_pointer

    def apply_(self, function):
        raise TypeError("apply_ is only implemented on CPU tensors")

    map_ = apply_
    __cuda_array_interface__ = property(_raw_pointer)

    @property
    def data(self):
        return Base.data.__get__(self)

    @data.setter
    def data(self, value):
        moves.set_data(self, value)

    @property
    def grad(self):
        grad = Base.grad.__get__(self)
        if grad is None or type(grad) is VirtualTensor:
            return grad
        Base.grad.__set__(self, brought_home(grad, self.gpu))
        return Base.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        if value is not None and value.device != self.device:
            raise RuntimeError("assigned grad has data located on a different device")
        Base.grad.__set__(self, value)

    @grad.deleter
    def grad(self):
        Base.grad.__delete__(self)

    def __setitem__(self, index, value):
        parts = index if isinstance(index, tuple) else (index,)
        away = isinstance(value, Tensor) and value.device != self.device
        if away and value.requires_grad and not any(map(chooses, parts)):
            value = moves.move(value, self.gpu)  # a slice may be filled from another device; its gradient goes back
        if any(isinstance(i, Tensor) and i.device.type == "cpu" for i in parts):  # and chosen by indices on the CPU
            index = tuple(i.to(self.device) if isinstance(i, Tensor) else i for i in parts)
        Base.__setitem__(self, index, value)

    def __copy__(self):
        if isinstance(self, Parameter):
            return Parameter(self.data, self.requires_grad)
        return wrap(self.inner.detach(), self.gpu).requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                               "protocol at the moment.")
        made = wrap(copy.deepcopy(self.inner, memo), self.gpu)  # through `memo`: views stay views of one storage
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k not in vars(made)})
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol):
        """Pickled as PyTorch pickles a tensor on cuda:i: nothing of this library is needed to load it."""
        if isinstance(self, Parameter):
            return torch._utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())
        if self.inner.is_meta:
            raise no_values("saving a tensor")
        moves.count(self.nbytes, self.gpu, None)
        inner = Base.cpu(self.inner)
        storage = inner.untyped_storage()
        storage.saved_from = str(self.device)  # read by checkpoint.location_of
        where = inner.storage_offset(), tuple(inner.size()), inner.stride(), self.requires_grad, OrderedDict()
        if self.dtype in torch.storage._new_dtypes():  # which no typed storage has
            return torch._utils._rebuild_tensor_v3, (storage, *where, self.dtype)
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=self.dtype, _internal=True)
        return torch._utils._rebuild_tensor_v2, (typed, *where)

    __torch_dispatch__ = classmethod(run)


def chooses(index):
    """Whether an index chooses element by element, as those in x[[0, 2]] and x[x > 0] do."""
    return isinstance(index, list) or (isinstance(index, Tensor) and (index.dim() > 0 or index.dtype is torch.bool))


def conjugation():
    """Inside, C++ sees the bit that says "conjugate", as it does outside of __torch_dispatch__."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def python_again():
    """Inside, operations come through __torch_dispatch__ again, also where C++ has turned Python off, as
    torch.Tensor([x]) does."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded.remove(torch._C.DispatchKey.Python))


class Rule(NamedTuple):
    """What is special about an operation."""

    func: Callable       # what runs on the inner tensors
    call: Callable       # the same without a Python function around it
    special: str | None  # how it differs from most: a word of `specialty`
    mixes: bool          # PyTorch lets it mix devices
    mutates: bool        # writes to an argument, and returns it
    reshapes: bool       # may change that argument's sizes or strides
    written_lists: list  # positions of lists of tensors that it writes to, as the optimizers' foreach functions do


PACK = "_pack_padded_sequence"
MIXING = {"copy_", PACK, "_pack_padded_sequence_backward"}  # the lengths of sequences stay on the CPU
NAMED = {"copy_": "copy", "_local_scalar_dense": "read", PACK: "pack"}


RULES = {}  # by the operation's id: operations live for ever, and hashing one is slow


def learn(func):
    """The rule of an operation, found out when it is met for the first time."""
    name = func.overloadpacket.__name__
    draw = with_generator(func)
    reshapes = torch.Tag.inplace_view in func.tags or not name.endswith("_")  # resize_ and the like, and out=
    lists = [i for i, a in enumerate(func._schema.arguments)
             if a.alias_info is not None and a.alias_info.is_write and a.type.kind() == "ListType"]
    runs = draw or func
    RULES[id(func)] = Rule(runs, getattr(runs, "_op", runs), specialty(func, name, draw), name in MIXING,
                           func._schema.is_mutable, reshapes, lists)
    return RULES[id(func)]


def specialty(func, name, draw):
    """In a word how an operation differs from most, or None."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return "composite"  # made of others; autograd takes these apart, and in inference mode there is no autograd
    if draw is not None:
        return "random"  # draws from a generator
    return NAMED.get(name)  # "read": what .item() does; "pack": its second result stays on the CPU


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


def inner_of(value):
    """The tensor inside a virtual one; anything else as it is."""
    return value.inner if type(value) is VirtualTensor else value


def wrap(inner, gpu):
    """`inner` as a tensor on `gpu`; its storage is entered in the GPU's ledger unless it is there already."""
    if inner.layout is not STRIDED or inner.is_quantized:
        raise RuntimeError(f"virtual GPUs hold dense tensors only, not {inner.layout} or quantized ones. Densify "
                           "first.")
    dtype = inner.dtype
    if dtype.is_complex:
        complex_numbers.append(True)
        inner = inner.resolve_conj()  # C++ looks for the conjugate bit on the wrapper, which has none
    storage = inner.untyped_storage()
    block = getattr(storage, "block", None)
    if block is None:
        storage.block = Block(gpu.ledger, gpu.ledger.take(storage.nbytes()))
    elif block.ledger is not gpu.ledger:
        raise AssertionError("a storage belongs to one GPU")
    shape, stride = inner.shape, inner.stride()
    # By position (after the offset: memory_format, dtype, layout, device), because names are slow to look up here.
    self = _make_wrapper(VirtualTensor, shape, stride, inner.storage_offset(), None, dtype, STRIDED, CPU)
    self.inner, self.form, self.gpu = inner, (shape, stride, dtype), gpu
    return self


def brought_home(grad, gpu):
    """A gradient for a tensor on `gpu` (None: on the CPU). C++ makes those that are zero on the CPU."""
    if gpu is None or type(grad) is VirtualTensor or not isinstance(grad, Tensor):
        return grad
    return wrap(Base.to(Base.clone(grad), gpu.backing), gpu)


def wrap_all(out, gpu, given=None):
    """Wrap the tensors in an operation's result; those that were arguments come back as the same objects."""
    if isinstance(out, Tensor):
        known = given.get(id(out)) if given else None
        return wrap(out, gpu) if known is None else known
    if isinstance(out, (list, tuple)):
        return type(out)([wrap_all(o, gpu, given) for o in out])
    return out


complex_numbers = deque(maxlen=1)  # whether there have been any: few programs need to look for them
_make_wrapper = Tensor._make_wrapper_subclass
STRIDED, CPU = torch.strided, torch.device("cpu")
PLAIN = {int, str, type(None), torch.dtype}


def form_of(tensor):
    """What the time that an operation takes depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype


def unwrap(values, gpu, strays, key):
    """The inner tensors of `values` and the first GPU met.

    `strays` gathers tensors that are elsewhere, `key` what the operation's time and the sizes of its result depend on.
    """
    out = []
    for value in values:
        kind = type(value)
        if kind is VirtualTensor:
            if value.gpu is not gpu:
                if gpu is None:
                    gpu = value.gpu
                else:
                    strays.append(value)
            key.append(value.form)
            value = value.inner
        elif kind is list or kind is tuple:
            if value and type(value[0]) is int:  # sizes: there is nothing to unwrap
                key.append(tuple(value))
            else:
                key.append(len(value))
                value, gpu = unwrap(value, gpu, strays, key)
        elif kind in PLAIN:
            key.append(value)
        elif kind is bool:
            key.append("yes" if value else "no")  # True == 1
        elif kind is float:
            key.append(kind)  # a learning rate, say, may differ in every step
        elif isinstance(value, Tensor):
            key.append(form_of(value))
            strays.append(value)
        elif isinstance(value, torch._C.Generator):
            check_generator(value, gpu)
            value = None if gpu.backing.type == "meta" else value
        else:
            key.append(value)
            if kind is torch.device and gpu is not None:
                value = gpu.backing
        out.append(value)
    return out, gpu


def key_of(func, args, kwargs, gpu):
    """What `unwrap` gathers, for operations that don't come through `run`."""
    key = [id(func), *kwargs]
    unwrap((*args, *kwargs.values()), gpu, [], key)
    return tuple(key)


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


def called_by_autograd(frame):
    """Whether an operation is part of a derivative in C++.

    Those make tensors of their own like the ones they are given, and take a virtual tensor for one on the CPU. What
    Python code does in a backward pass has a frame of its own.
    """
    return frame.f_code.co_name == "_engine_run_backward"
