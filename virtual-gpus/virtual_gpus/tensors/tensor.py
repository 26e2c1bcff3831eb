"""A tensor that says, and insists, that it lives on a GPU.

C++ sees a tensor on the CPU, so autograd just works. Python sees `cuda:i`. Every operation comes through
`__torch_dispatch__`: it checks that all tensors are on one GPU, runs on the inner tensors, and wraps what comes out.
"""

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from virtual_gpus.clock.clock import name_of
from virtual_gpus.constants import constant_of, invalidate_constants, set_constant, unknown_scalars
from virtual_gpus.errors import misplaced_gradient, no_addresses, no_data, no_values, not_numpy
from virtual_gpus.gpu import count
from virtual_gpus.memory.ledger import Block
from virtual_gpus.ops.table import Base

OWN = ("inner", "form", "gpu")  # the attributes that make a tensor virtual
ATTRIBUTES = vars(Tensor)["__dict__"]  # all attributes of a tensor, these included


class VirtualStorage:
    """What x.untyped_storage() is on a virtual GPU: it can be compared, measured and resized, not read."""

    is_cuda = True

    def __init__(self, inner, gpu):
        self.inner, self.gpu, self.device = inner, gpu, gpu.device

    def __eq__(self, other):
        return isinstance(other, VirtualStorage) and self._cdata == other._cdata

    def __hash__(self):
        return hash(self._cdata)

    _cdata = property(lambda self: self.inner._cdata)

    def data_ptr(self):
        return self.inner.data_ptr()

    def nbytes(self):
        return self.inner.nbytes()

    size = __len__ = nbytes

    def element_size(self):
        return 1

    def resize_(self, nbytes):
        """Take `nbytes` from now on, in the GPU's ledger, too; torch.OutOfMemoryError without room."""
        self.inner.block.resize(nbytes)
        self.inner.resize_(nbytes)
        return self


class VirtualTypedStorage:
    """What x._typed_storage() is, by which FSDP frees memory and takes it again: the same, counted in numbers."""

    def __init__(self, untyped, itemsize):
        self.untyped, self.itemsize = untyped, itemsize

    def _size(self):
        return self.untyped.nbytes() // self.itemsize

    def _resize_(self, size):
        self.untyped.resize_(size * self.itemsize)

    def _data_ptr(self):
        return self.untyped.data_ptr()


class Notes(dict):
    """The attributes that people have given to a virtual tensor: its __dict__, without what makes it virtual."""

    def __init__(self, attributes):
        super().__init__({name: value for name, value in attributes.items() if name not in OWN})
        self.attributes = attributes

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        self.attributes[name] = value

    def __delitem__(self, name):
        super().__delitem__(name)
        del self.attributes[name]

    # These go through the two above.
    update, setdefault = MutableMapping.update, MutableMapping.setdefault
    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear

    def __copy__(self):
        return dict(self)


class VirtualTensor(Tensor):
    """Values in `inner`, of this `form` (see `shapes.form_of`), on the GPU `gpu` (a `gpu.VirtualGPU`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, data, requires_grad=None):
        """What type(x)(data) makes: of a parameter, whose type is this one, and requires_grad=…, a parameter."""
        return data.detach() if requires_grad is None else Parameter(data, requires_grad)

    @property
    def __dict__(self):
        """Some libraries hand it on from tensor to tensor, as fastai does: values and place must not go with it."""
        return Notes(ATTRIBUTES.__get__(self))

    @__dict__.setter
    def __dict__(self, notes):
        attributes = ATTRIBUTES.__get__(self)
        ATTRIBUTES.__set__(self, {**notes, **{name: attributes[name] for name in OWN}})

    device = property(lambda self: self.gpu.device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return self.gpu.index

    def __repr__(self, *, tensor_contents=None):
        self.gpu.clock.wait_for_value(self.gpu)
        with unseen():
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
        head = "tensor(" if type(self) is VirtualTensor else f"{type(self).__name__}("
        text = torch._tensor_str._add_suffixes(head + body, notes, len(head), force_newline=False)
        return "Parameter containing:\n" + text if isinstance(self, Parameter) else text

    def item(self):
        """A number; in a dry run one that is unknown. Either way the host waits for it."""
        if self.gpu.machine.rendezvous is None or self.numel() != 1 or constant_of(self.inner) is not None:
            return Base.item(self)
        count(self.element_size(), self.gpu, None)
        return unknown_scalars(())

    def __format__(self, spec):
        number = self.dim() == 0 and (not self.inner.is_meta or self.gpu.machine.rendezvous is not None)
        return format(self.item(), spec) if number else object.__format__(self, spec)

    def __float__(self):
        with python_dispatch():
            return Base.__float__(self)

    def __int__(self):
        with python_dispatch():
            return Base.__int__(self)

    def __index__(self):
        with python_dispatch():
            return Base.__index__(self)

    def tolist(self):
        if self.gpu.machine.rendezvous is None or constant_of(self.inner) is not None:
            return self.detach().cpu().tolist()
        count(self.nbytes, self.gpu, None)
        return unknown_scalars(self.shape)

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

    __dlpack__ = __dlpack_device__ = _raw_pointer

    def data_ptr(self):
        """What tells tensors apart that begin at other places; of no use to whoever would read there."""
        return self.inner.data_ptr()

    const_data_ptr = data_ptr

    def untyped_storage(self):
        return VirtualStorage(self.inner.untyped_storage(), self.gpu)

    def _typed_storage(self):
        return VirtualTypedStorage(self.untyped_storage(), self.element_size())

    def storage(self):
        raise RuntimeError("virtual GPUs have no typed storages: use untyped_storage()")

    def apply_(self, function):
        raise TypeError("apply_ is only implemented on CPU tensors")

    map_ = apply_
    __cuda_array_interface__ = property(_raw_pointer)

    @property
    def data(self):
        return Base.data.__get__(self)

    @data.setter
    def data(self, value):
        set_data(self, value)

    @property
    def grad(self):
        grad = Base.grad.__get__(self)
        if grad is None or isinstance(grad, VirtualTensor):
            return grad
        Base.grad.__set__(self, gradient_on(grad, self.gpu))
        return Base.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        if value is not None and value.device != self.device:
            raise RuntimeError(misplaced_gradient(value.device, self.device))
        Base.grad.__set__(self, value)

    @grad.deleter
    def grad(self):
        Base.grad.__delete__(self)

    def __setitem__(self, index, value):
        parts = index if isinstance(index, tuple) else (index,)
        away = isinstance(value, Tensor) and value.device != self.device
        if away and value.requires_grad and not any(map(is_advanced, parts)):
            value = move(value, self.gpu)  # a slice may be filled from another device; its gradient goes back
        if any(isinstance(i, Tensor) and i.device.type == "cpu" for i in parts):  # and indices may lie on the CPU
            index = tuple(i.to(self.device) if isinstance(i, Tensor) else i for i in parts)
        Base.__setitem__(self, index, value)

    def __copy__(self):
        if isinstance(self, Parameter):
            return Parameter(self.data, self.requires_grad)
        return like(self, wrap(self.inner.detach(), self.gpu)).requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        made = wrap(copy.deepcopy(self.inner, memo), self.gpu)  # through `memo`: views stay views of one storage
        made.__class__ = type(self)
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
        count(self.nbytes, self.gpu, None)
        inner = Base.cpu(self.inner)
        storage = inner.untyped_storage()
        storage.saved_from = str(self.device)  # read by checkpoint.location_of
        where = inner.storage_offset(), tuple(inner.size()), inner.stride(), self.requires_grad, OrderedDict()
        if self.dtype in torch.storage._new_dtypes():  # which no typed storage has
            rebuilt = torch._utils._rebuild_tensor_v3, (storage, *where, self.dtype)
        else:
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=self.dtype, _internal=True)
            rebuilt = torch._utils._rebuild_tensor_v2, (typed, *where)
        if type(self) is VirtualTensor:
            return rebuilt
        function, arguments = rebuilt
        return torch._tensor._rebuild_from_type_v2, (function, plain_class(type(self)), arguments, notes_of(self))


# As real tensors are called in errors and by repr(type(x)).
VirtualTensor.__module__, VirtualTensor.__name__, VirtualTensor.__qualname__ = "torch", "Tensor", "Tensor"


class VirtualSubclass(VirtualTensor):
    """What virtual tensors of subclasses have in common: super().__torch_function__ there is torch.Tensor's."""


VirtualSubclass.__torch_function__ = inspect.getattr_static(Tensor, "__torch_function__")  # see `virtual_class`


@functools.cache
def virtual_class(cls):
    """The class of tensors of class `cls`, a subclass of torch.Tensor, that lie on a virtual GPU."""
    if cls is Tensor or issubclass(cls, VirtualTensor):
        return VirtualTensor if cls is Tensor else cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    above = [virtual_class(base) for base in cls.__bases__ if issubclass(base, Tensor) and base is not Tensor]
    made = type(cls)(cls.__name__, (cls, *(above or [VirtualSubclass])), names)
    # Set afterwards: of a class with a __torch_dispatch__, PyTorch switches its own off.
    made.__torch_function__ = inspect.getattr_static(cls, "__torch_function__")
    SUBCLASSES.add(made)
    return made


def plain_class(cls):
    """The class of tensors of class `cls` that lie on the CPU."""
    return next(base for base in cls.__mro__ if not issubclass(base, VirtualTensor))


def notes_of(tensor):
    """The attributes that people have given to a virtual tensor."""
    return dict(vars(tensor))


def like(tensor, made):
    """`made`, with the class and the attributes of `tensor`, both on virtual GPUs."""
    made.__class__ = type(tensor)
    made.__dict__.update(notes_of(tensor))
    return made


def is_advanced(index):
    """Whether an index picks elements one by one (NumPy's "advanced indexing"), as in x[[0, 2]] and x[x > 0]."""
    return isinstance(index, list) or (isinstance(index, Tensor) and (index.dim() > 0 or index.dtype is torch.bool))


def python_dispatch():
    """Inside, operations come through __torch_dispatch__ again, also where C++ has turned Python off, as
    torch.Tensor([x]) does."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):  # the second before PyTorch 2.15
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def is_virtual(value):
    """Whether `value` is a tensor on a virtual GPU; its values are those of the tensor `value.inner`."""
    return isinstance(value, VirtualTensor)


def inner_of(value):
    """The tensor inside a virtual one; anything else as it is."""
    return value.inner if isinstance(value, VirtualTensor) else value


def check_dense(x):
    """RuntimeError for a tensor that is more than numbers in a row."""
    if x.layout is not STRIDED or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise RuntimeError(
            f"virtual GPUs hold dense tensors only, and this one is {kind}. Make it dense first: to_dense(), "
            "to_padded_tensor() or dequantize()."
        )


def wrap(inner, gpu):
    """`inner` as a tensor on `gpu`; its storage is entered in the GPU's ledger unless it is there already."""
    check_dense(inner)
    dtype = inner.dtype
    if dtype.is_complex:
        inner = inner.resolve_conj()  # C++ looks for the conjugate bit on the wrapper, which has none
    storage = inner.untyped_storage()
    block = getattr(storage, "block", None)
    if block is None:
        storage.block = Block(gpu.ledger, gpu.ledger.allocate(storage.nbytes()))
    elif block.ledger is not gpu.ledger:
        raise AssertionError("a storage belongs to one GPU")
    shape, stride = inner.shape, inner.stride()
    # By position (after the offset: memory_format, dtype, layout, device), because names are slow to look up here.
    self = _make_wrapper(VirtualTensor, shape, stride, inner.storage_offset(), None, dtype, STRIDED, CPU)
    self.inner, self.form, self.gpu = inner, (shape, stride, dtype), gpu
    return self


def gradient_on(grad, gpu):
    """A gradient for a tensor on `gpu` (None: on the CPU). C++ makes those that are zero on the CPU."""
    if gpu is None or isinstance(grad, VirtualTensor) or not isinstance(grad, Tensor):
        return grad
    return wrap(Base.to(Base.clone(grad), gpu.backing), gpu)


unseen = torch._C._DisableTorchDispatch  # inside, operations on inner tensors reach no mode of the program's
SUBCLASSES = set()  # what `virtual_class` has made
_make_wrapper = Tensor._make_wrapper_subclass
STRIDED, CPU = torch.strided, torch.device("cpu")


# Copies between devices, and parameters that change theirs

COPY_OP = torch.ops.aten.copy_.default


def copy_into(target, source, non_blocking=False):
    """copy_ across devices: the one operation that may."""
    if isinstance(source, VirtualTensor) and source.inner.is_meta and not isinstance(target, VirtualTensor):
        raise no_values("copying to the CPU")
    ends = [getattr(t, "gpu", None) for t in (source, target)]
    count(source.nbytes, *ends, host_memory(source, target), non_blocking)
    inner = inner_of(target), inner_of(source)
    if ends[0] is ends[1]:
        ends[0].run(COPY_OP, inner, {})
    elif not inner[0].is_meta:
        Base.copy_(*inner)
    elif inner[1].is_meta:
        invalidate_constants(inner[:1])
    else:
        set_constant(*inner)  # also x[1] = 7, which is a copy before PyTorch 2.14
    return target


class Move(torch.autograd.Function):
    """A copy between devices; its gradient travels the same way back."""

    @staticmethod
    def forward(ctx, x, gpu, non_blocking, memory):
        ctx.source = getattr(x, "gpu", None)
        return transfer(x, gpu, non_blocking, memory)

    @staticmethod
    def backward(ctx, grad):
        return move(grad, ctx.source), None, None, None


def move(x, gpu, non_blocking=False, memory=None):
    """A copy of x on `gpu` (None: the CPU), recorded by autograd if x requires a gradient.

    On the CPU it is pinned if it is `non_blocking`, as in PyTorch; unless the caller will put it into other `memory`,
    see `host_memory`.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return Move.apply(x, gpu, non_blocking, memory)
    return transfer(x, gpu, non_blocking, memory)


def transfer(x, gpu, non_blocking=False, memory=None):
    """What `move` does, unseen by autograd. torch.OutOfMemoryError if the GPU has no room."""
    source = getattr(x, "gpu", None)
    inner = x.detach() if source is None else x.inner
    backing = torch.device("cpu") if gpu is None else gpu.backing
    values = constant_of(inner) if inner.is_meta and backing.type != "meta" else inner
    if values is None:
        raise no_data() if source is None else no_values(f"copying from {x.device} to {name_of(gpu)}")
    if gpu is not None:
        check_dense(inner)
        gpu.ledger.check(inner.nbytes)
    pin = non_blocking and gpu is None and memory is None
    count(inner.nbytes, source, gpu, "pinned" if pin else memory or host_memory(x), non_blocking)
    data = pinned(Base.to(values, backing, copy=True), pin)
    if data.is_meta and not inner.is_meta:
        set_constant(data, inner)
    return data if gpu is None else wrap(data, gpu)


def pinned(tensor, pin=True):
    """`tensor`, which says that it is pinned if `pin` is true."""
    if pin:
        tensor.untyped_storage().pinned = True
    return tensor


def host_memory(*ends):
    """What memory of the host lies at one of these ends of a copy: "pinned", "shared" or "pageable"."""
    storages = [x.untyped_storage() for x in ends if not isinstance(x, VirtualTensor) and not x.is_meta]
    if any(getattr(storage, "pinned", False) for storage in storages):
        return "pinned"
    return "shared" if any(storage.is_shared() for storage in storages) else "pageable"


def set_data(tensor, value):
    """`tensor.data = value`, where one of them or both are on a virtual GPU."""
    if isinstance(tensor, VirtualTensor) and isinstance(value, VirtualTensor):
        Base.data.__set__(tensor, value)
        tensor.inner, tensor.form, tensor.gpu = value.inner, value.form, value.gpu
    else:  # the object changes its kind, and keeps its identity
        fresh = value.detach()
        fresh = Parameter(fresh) if isinstance(tensor, Parameter) else fresh
        become(tensor, fresh.requires_grad_(tensor.requires_grad))


def become(tensor, fresh):
    """`tensor` gets what `fresh` is, on another device; it stays the same object, with what people have noted on it."""
    notes = notes_of(tensor)
    notes.pop("_is_param", None)  # PyTorch's own, on Parameters of other classes: `fresh` has it where it must
    swap(tensor, fresh)
    tensor.__dict__.update(notes)


def swap(a, b):
    """What torch.utils.swap_tensors does, also while a graph still holds them: a module on a GPU may move even so."""
    for tensor in (a, b):
        if tensor.is_leaf and tensor.requires_grad and not tensor.is_inference():
            with torch.inference_mode(False):
                torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(stale_graph)
    a.__class__, b.__class__ = b.__class__, a.__class__
    attributes = ATTRIBUTES.__get__(a), ATTRIBUTES.__get__(b)
    ATTRIBUTES.__set__(a, attributes[1])
    ATTRIBUTES.__set__(b, attributes[0])
    hooks = [(t._backward_hooks, t._post_accumulate_grad_hooks) for t in (a, b)]
    torch._C._swap_tensor_impl(a, b)
    for tensor, ours in zip((a, b), hooks, strict=True):  # hooks belong to the tensor that they were given to
        if ours != (None, None):
            tensor._backward_hooks, tensor._post_accumulate_grad_hooks = ours


def stale_graph(grads):
    raise RuntimeError(
        "this graph was made before its parameters moved to another device: backward can't reach them "
        "any more. Move first, then run forward and backward. (FullyShardedDataParallel moves them itself if it is "
        "given cpu_offload: fully_shard with a CPUOffloadPolicy does the same, and works.)"
    )
