"""The tensor subclass that is on a virtual GPU.

To C++ it is a tensor on the CPU, so that autograd works without CUDA; to Python it is on `cuda:i`. Every operation
comes to `__torch_dispatch__`: its handler (see `dispatch`) checks that all tensors are on one GPU, runs it on the inner
tensors, and wraps the result.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from virtual_gpus import compat
from virtual_gpus.compat import Base, DisableTorchDispatch, DispatchKey, make_wrapper_subclass
from virtual_gpus.constants import constant_of
from virtual_gpus.errors import check_gradient, no_addresses, no_values
from virtual_gpus.frames import called_by_formatting
from virtual_gpus.gpu import VirtualGPU, record_copy
from virtual_gpus.memory.ledger import Block
from virtual_gpus.ops.table import OPS, MixedDevices, add_to_table
from virtual_gpus.tensors import identity
from virtual_gpus.tensors.storage import VirtualStorage, VirtualTypedStorage
from virtual_gpus.unknown import unknown_scalars

WRAP: dict[torch.layout, Callable] = {}  # {layout: what wraps an inner tensor that has it}, beside dense ones
STRIDED, CPU = torch.strided, torch.device("cpu")


def through_dispatch(method: Callable) -> Callable:
    """`method` of a tensor, whose operations come to __torch_dispatch__ also where C++ has excluded the Python key:
    torch.Tensor([x]) does, and calls x.__float__()."""

    def call(self):
        with enable_dispatch_keys(DispatchKey.Python, DispatchKey.PythonTLSSnapshot):  # that one before PyTorch 2.15
            return method(self)

    return call


as_float = through_dispatch(Base.__float__)


def is_unknown(x: Tensor) -> bool:
    """Whether the virtual tensor x is one number, of which a dry run has no value."""
    return x.gpu.machine.rendezvous is not None and x.numel() == 1 and constant_of(x.inner) is None


class VirtualTensor(Tensor):
    """A wrapper around the tensor `inner`, which has the values, on the virtual GPU `gpu`."""

    inner: Tensor
    tensor_meta: tuple  # meta_cache.tensor_meta_of(inner), kept because it is part of every key
    gpu: VirtualGPU

    __torch_function__ = compat.disabled_torch_function_impl

    def __new__(cls, data, requires_grad=None):
        """type(x)(data), as libraries copy a tensor; with requires_grad=…, as they copy a parameter, a parameter."""
        return data.detach() if requires_grad is None else Parameter(data, requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if len(types) > 1 and not all(issubclass(t, VirtualTensor) for t in types):
            return NotImplemented  # another class, such as DTensor, decides
        try:
            return (OPS.get(id(func)) or add_to_table(func))(args, kwargs or {})
        except MixedDevices:  # of an operation that PyTorch composes of others: those check their devices
            return func.redispatch(compat.DispatchKeySet(DispatchKey.CPU), *args, **kwargs or {})

    @property
    def __dict__(self):
        return identity.UserAttributes(identity.ALL_ATTRIBUTES.__get__(self))

    @__dict__.setter
    def __dict__(self, attributes):
        own = identity.ALL_ATTRIBUTES.__get__(self)
        identity.ALL_ATTRIBUTES.__set__(
            self, {**attributes, **{name: own[name] for name in identity.VIRTUAL_ATTRIBUTES}}
        )

    device = property(lambda self: self.gpu.device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self):
        return self.gpu.index

    def __repr__(self, *, tensor_contents=None):
        self.gpu.clock.wait_for_value(self.gpu)
        with DisableTorchDispatch():
            body = "..." if self.inner.is_meta else compat.tensor_str(self.inner, indent=len("tensor("))
        notes = [f"device='{self.device}'"]
        if self.inner.is_meta or (self.numel() == 0 and self.dim() != 1):
            notes.append(f"size={tuple(self.shape)}")
        default = torch.get_default_dtype()
        told = torch.int64, torch.bool, torch.cdouble if default == torch.double else torch.cfloat  # by the numbers
        if self.dtype != default and (self.inner.is_meta or self.numel() == 0 or self.dtype not in told):
            notes.append(f"dtype={self.dtype}")
        if self.grad_fn is not None:
            notes.append(f"grad_fn=<{type(self.grad_fn).__name__}>")
        elif self.requires_grad:
            notes.append("requires_grad=True")
        head = "tensor(" if type(self) is VirtualDenseTensor else f"{type(self).__name__}("
        text = compat.add_suffixes(head + body, notes, len(head), force_newline=False)
        return "Parameter containing:\n" + text if isinstance(self, Parameter) else text

    def item(self):
        """In a dry run an UnknownScalar, unless the value is known. Either way the host waits for it."""
        if not is_unknown(self):
            return Base.item(self)
        record_copy(self.element_size(), self.gpu, None)
        return unknown_scalars((), self.dtype)

    def __format__(self, spec):
        number = self.dim() == 0 and (not self.inner.is_meta or self.gpu.machine.rendezvous is not None)
        return format(self.item(), spec) if number else object.__format__(self, spec)

    def __float__(self):
        if is_unknown(self) and called_by_formatting():  # "%.3f" % x, in which x.item() is NaN as well
            record_copy(self.element_size(), self.gpu, None)
            return math.nan
        return as_float(self)

    __int__, __index__ = map(through_dispatch, (Base.__int__, Base.__index__))

    def tolist(self):
        if self.gpu.machine.rendezvous is None or constant_of(self.inner) is not None:
            return self.detach().cpu().tolist()
        record_copy(self.nbytes, self.gpu, None)
        return unknown_scalars(self.shape, self.dtype)

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def __array__(self, dtype=None):
        return self.numpy()

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
        """Differs for tensors that begin at different addresses, which is what libraries compare; not readable."""
        return self.inner.data_ptr()

    const_data_ptr = data_ptr

    def untyped_storage(self):
        return VirtualStorage(self.inner.untyped_storage(), self.gpu)

    def _typed_storage(self):
        return VirtualTypedStorage(self)

    storage = _typed_storage

    def apply_(self, function):
        raise TypeError("apply_ is only implemented on CPU tensors")

    map_ = apply_
    __cuda_array_interface__ = property(_raw_pointer)

    data = property(lambda self: Base.data.__get__(self), lambda self, value: set_data(self, value))

    @property
    def grad(self):
        grad = Base.grad.__get__(self)
        if grad is None or isinstance(grad, VirtualTensor):
            return grad
        Base.grad.__set__(self, gradient_on(grad, self.gpu))
        return Base.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        check_gradient(value, self)
        Base.grad.__set__(self, value)

    @grad.deleter
    def grad(self):
        Base.grad.__delete__(self)

    def __setitem__(self, index, value):
        if isinstance(index, list) and any(isinstance(i, Sequence) for i in index):
            index = tuple(index)  # what C++, which warns of it, takes lists of lists for
        parts = tuple(map(to_index, index if isinstance(index, tuple) else (index,)))
        away = isinstance(value, Tensor) and value.device != self.device
        if away and value.requires_grad and not any(map(is_advanced, parts)):
            value = value.to(self.device)  # a slice may be filled from another device; its gradient goes back
        if any(map(is_scalar_mask, parts)):  # C++ would index with a tensor on the CPU
            others = slice(None), *(i for i in parts if not is_scalar_mask(i))
            self.unsqueeze(0)[: all(map(bool, filter(is_scalar_mask, parts)))][others] = value
            return
        if any(isinstance(i, Tensor) and i.device.type == "cpu" for i in parts):  # and indices may lie on the CPU
            parts = tuple(i.to(self.device) if isinstance(i, Tensor) else i for i in parts)
        Base.__setitem__(self, parts if isinstance(index, tuple) else parts[0], value)

    def __copy__(self):
        if isinstance(self, Parameter):
            return Parameter(self.data, self.requires_grad)
        made = wrap(self.inner.detach(), self.gpu)
        made.__class__ = type(self)
        made.__dict__.update(vars(self))
        return made.requires_grad_(self.requires_grad)

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
            return compat.torch_utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())
        if self.inner.is_meta:
            raise no_values("saving a tensor")
        record_copy(self.nbytes, self.gpu, None)
        inner = Base.cpu(self.inner)
        inner.untyped_storage().saved_from = str(self.device)  # read by serialization.location_of
        function, (storage, offset, size, stride, _, *others) = Tensor._reduce_ex_internal(inner, protocol)
        arguments = storage, offset, size, stride, self.requires_grad, *others
        if type(self) is VirtualDenseTensor:
            return function, arguments
        return compat.rebuild_from_type_v2, (function, cpu_class(type(self)), arguments, dict(vars(self)))


class AnyTensor(compat.TensorMeta):
    """A class that all tensors are instances of, as they are of type(x) if x is on a real GPU: that is torch.Tensor."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, Tensor)


class VirtualDenseTensor(VirtualTensor, metaclass=AnyTensor):
    """type(x) of a tensor that is of no class of the program's."""


def call_it_tensor(cls: type) -> None:
    """As real tensors are called in errors and by repr(type(x))."""
    cls.__module__, cls.__name__, cls.__qualname__ = "torch", "Tensor", "Tensor"


call_it_tensor(VirtualTensor)
call_it_tensor(VirtualDenseTensor)


def cpu_class(cls: type) -> type:
    """The class of tensors of class `cls` that lie on the CPU."""
    return next(base for base in cls.__mro__ if not issubclass(base, VirtualTensor))


def is_advanced(index: Any) -> bool:
    """Whether an index picks elements one by one (NumPy's "advanced indexing"), as in x[[0, 2]] and x[x > 0]."""
    return isinstance(index, list) or (isinstance(index, Tensor) and (index.dim() > 0 or index.dtype is torch.bool))


def to_index(part: Any) -> Any:
    """A part of an index: of numbers a tensor, which C++ would make on the CPU and use there."""
    if hasattr(part, "__array_interface__") and part.ndim:  # a number of NumPy's has none
        return torch.as_tensor(part)
    if not has_only_numbers(part):
        return part
    made = torch.as_tensor(part)
    return made if made.numel() else made.long()


def has_only_numbers(part: Any) -> bool:
    """Whether a part of an index is a sequence of whole numbers, or of such sequences."""
    sequence = isinstance(part, Sequence) and not isinstance(part, str)
    return sequence and all(isinstance(i, Integral) or has_only_numbers(i) for i in part)


def is_scalar_mask(index: Any) -> bool:
    """Whether an index is a mask without dimensions, as in x[True]: it picks all of x, or nothing."""
    kinds = torch.bool, torch.uint8
    return isinstance(index, bool) or (isinstance(index, Tensor) and not index.dim() and index.dtype in kinds)


def enable_dispatch_keys(*keys: DispatchKey) -> compat.ForceDispatchKeyGuard:
    """Inside, C++ dispatches by these keys, too, which it has excluded on its way here."""
    excluded = compat.dispatch_tls_local_exclude_set()
    for key in keys:
        excluded = excluded.remove(key)
    return compat.ForceDispatchKeyGuard(compat.dispatch_tls_local_include_set(), excluded)


def is_virtual(value: Any) -> bool:
    """Whether `value` is a tensor on a virtual GPU; its values are those of the tensor `value.inner`."""
    return isinstance(value, VirtualTensor)


def inner_of(value: Any) -> Any:
    """The tensor inside a virtual one; anything else as it is."""
    return value.inner if isinstance(value, VirtualTensor) else value


def check_dense(x: Tensor) -> None:
    """RuntimeError for nested and quantized tensors, and for sparse ones but for COO."""
    if x.layout not in (STRIDED, torch.sparse_coo) or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise RuntimeError(
            f"virtual GPUs hold dense and sparse COO tensors, and this one is {kind}. Make it dense first: to_dense(), "
            "to_padded_tensor() or dequantize()."
        )


def wrap(inner: Tensor, gpu: VirtualGPU) -> VirtualTensor:
    """`inner` as a tensor on `gpu`; its storage is entered in the GPU's ledger unless it is there already."""
    if inner.layout is not STRIDED or inner.is_nested or inner.is_quantized:
        check_dense(inner)
        return WRAP[inner.layout](inner, gpu)
    dtype = inner.dtype
    if dtype.is_complex and inner.is_conj():
        capture = gpu.capturing()
        # C++ looks for the conjugate bit on the wrapper, which has none
        inner = inner.resolve_conj() if capture is None else capture.resolve_conj(inner)
    storage = inner.untyped_storage()
    block = getattr(storage, "block", None)
    if block is None:
        if gpu.machine.capture is not None:
            gpu.machine.capture.check_made(gpu, storage)
        storage.block = Block(gpu.ledger, gpu.ledger.allocate(storage.nbytes()))
    elif block.ledger is not gpu.ledger:
        raise AssertionError("a storage belongs to one GPU")
    shape, stride = inner.shape, inner.stride()
    # By position (after the offset: memory_format, dtype, layout, device), because names are slow to look up here.
    self = make_wrapper_subclass(VirtualDenseTensor, shape, stride, inner.storage_offset(), None, dtype, STRIDED, CPU)
    self.inner, self.tensor_meta, self.gpu = inner, (shape, stride, dtype), gpu
    return self


def gradient_on(grad: Any, gpu: VirtualGPU | None) -> Any:
    """A gradient for a tensor on `gpu` (None: on the CPU). C++ makes zero gradients on the CPU."""
    if gpu is None or isinstance(grad, VirtualTensor) or not isinstance(grad, Tensor):
        return grad
    inner = Base.to(Base.clone(grad), gpu.backing)
    if gpu.capturing() is not None:
        gpu.call(Base.copy_, inner, grad)
    return wrap(inner, gpu)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`, where one of them or both are on a virtual GPU."""
    if isinstance(tensor, VirtualTensor) and isinstance(value, VirtualTensor):
        Base.data.__set__(tensor, value)
        tensor.inner, tensor.tensor_meta, tensor.gpu = value.inner, value.tensor_meta, value.gpu
    else:
        moved = value.detach()
        moved = Parameter(moved) if isinstance(tensor, Parameter) else moved
        identity.move_in_place(tensor, moved.requires_grad_(tensor.requires_grad))
