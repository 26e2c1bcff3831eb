"""Everything that names a device: torch.zeros(…, device='cuda:1'), X.to('cuda:1'), X.cuda(), torch.Generator('cuda').

The functions are replaced where they live, in `torch` and `torch.Tensor`, so that every thread and every library sees
the replacements. For functions imported before, with `from torch import zeros`, see `patches.imported_before`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from virtual_gpus import compat
from virtual_gpus.compat import Base, C_nn, DisableTorchDispatch
from virtual_gpus.compat import Generator as _Generator
from virtual_gpus.constants import FEW, set_constant
from virtual_gpus.errors import check_generator
from virtual_gpus.gpu import VirtualGenerator, VirtualGPU
from virtual_gpus.patches.patch import Method, patch, replaces
from virtual_gpus.state import current, find
from virtual_gpus.tensors.copies import host_memory, move, pinned
from virtual_gpus.tensors.sparse import check_values
from virtual_gpus.tensors.tensor import VirtualTensor, inner_of, wrap
from virtual_gpus.unknown import UnknownScalar, UnknownTensor, call_with_unknown, forget, stand_in

RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"}
NOT_DENSE = set(
    "sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor "
    "sparse_bsc_tensor nested_tensor empty_quantized".split()
)
# {class of tensors made of others: wrapper(make, x, …), which makes one like x on a named device}
WRAPPERS: dict[type, Callable] = {}


def default_device() -> Any:
    """What `with torch.device(…)`, torch.set_default_device or set_default_tensor_type say, if anything.

    (torch.get_default_device would make a tensor to find out, and so come back here.)
    """
    default = None if current() is None else current().default_device
    modes = compat.get_current_function_mode_stack() if compat.len_torch_function_stack() else ()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, compat.DeviceContext)), default)


@replaces(torch.utils.data.dataset, "randperm")  # which PyTorch itself has imported, for random_split
def construct(original, *args, **kwargs):
    """torch.zeros and its like: makes a tensor from sizes, and understands device='cuda:i'."""
    if kwargs.get("device") is None and "out" not in kwargs and (device := default_device()) is not None:
        kwargs["device"] = device
    return make(original, *args, **kwargs)


@replaces(torch, "empty_like zeros_like ones_like full_like rand_like randn_like randint_like normal")
@replaces(Tensor, "new_empty new_zeros new_ones new_full new_empty_strided")
def make(original, *args, **kwargs):
    """The same for functions that make a tensor like another one, where that is."""
    if args and type(args[0]) in WRAPPERS:
        if kwargs.get("device") is None:
            return original(*args, **kwargs)
        return WRAPPERS[type(args[0])](functools.partial(make, original), *args, **kwargs)
    if any(isinstance(a, UnknownScalar) for a in (*args, *kwargs.values())):
        return call_with_unknown(functools.wraps(original)(functools.partial(make, original)), args, kwargs)
    like = next((a for a in args if isinstance(a, VirtualTensor)), None)
    device = kwargs.get("device")
    gpu = find(device)
    if isinstance(kwargs.get("generator"), _Generator):
        check_generator(kwargs["generator"], like.gpu if device is None and like is not None else gpu)
    pin = kwargs.pop("pin_memory", False)
    if gpu is None and (device is None or like is None):
        return pinned(original(*args, **kwargs), pin)
    if original.__name__ in NOT_DENSE:
        raise RuntimeError(f"torch.{original.__name__}: virtual GPUs hold dense and sparse COO tensors only")
    check_pin(pin, gpu)
    requires_grad = kwargs.pop("requires_grad", False)
    kwargs = {k: inner_of(v) for k, v in kwargs.items()}
    made = pinned(on_gpu(gpu, original, [inner_of(a) for a in args], kwargs), pin)
    return made.requires_grad_() if requires_grad else made


def on_gpu(gpu: VirtualGPU | None, original: Callable, args: Sequence, kwargs: dict) -> Tensor:
    """Make a tensor on `gpu`, or where `kwargs` say if that is None."""
    if gpu is None:
        return original(*args, **kwargs)
    generator = kwargs.pop("generator", None)
    if gpu.backing.type == "cpu":  # asks for the size first: too large a tensor must not fill the real memory
        with contextlib.suppress(NotImplementedError), DisableTorchDispatch():
            gpu.ledger.check(original(*args, **{**kwargs, "device": "meta"}).nbytes)
    if original.__name__ in RANDOM:
        kwargs["generator"] = generator or gpu.generator
    return wrap(gpu.run(original, args, {**kwargs, "device": gpu.backing}), gpu)


def from_data(original, data, *args, **kwargs):
    """torch.tensor, as_tensor and asarray: the values are made on the CPU, and then travel."""
    copies, device = original.__name__ == "tensor", kwargs.get("device")
    if device is None and (copies or not isinstance(data, Tensor)):
        device = default_device()
    gpu = find(device)
    pin = kwargs.pop("pin_memory", False)
    check_pin(pin, gpu)
    if isinstance(data, Tensor) and (gpu is not None or isinstance(data, VirtualTensor)):
        data = data.detach() if copies else data
        made = pinned(convert(data, device, kwargs.get("dtype"), copy=copies), pin)
    elif gpu is None:
        return pinned(construct_on_cpu(original, data, *args, **kwargs), pin)
    else:
        options = {k: v for k, v in kwargs.items() if k != "requires_grad"}
        values = construct_on_cpu(original, data, *args, **{**options, "device": "cpu"})
        made = move(values, gpu)
        if gpu.machine.rendezvous is not None and values.numel() <= FEW and not isinstance(values, UnknownTensor):
            set_constant(made.inner, values, follows=True)
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def sparse_coo_tensor(original, indices=None, values=None, size=None, *, dtype=None, device=None, **kwargs):
    """torch.sparse_coo_tensor. Its checks read entries, so they are done on inner tensors; always, since the CPU would
    write where an index outside of the tensor says."""
    device = default_device() if device is None else device
    gpu = getattr(values, "gpu", None) if device is None else find(device)
    given = [a for a in (indices, values, size) if a is not None]
    if gpu is None:
        given = [a.to(device) if isinstance(a, VirtualTensor) else a for a in given]
        return original(*given, dtype=dtype, device=device, **kwargs)
    check_values(gpu)
    requires_grad, checks = kwargs.pop("requires_grad", False), {"check_invariants": True, "device": "cpu"}
    with DisableTorchDispatch():
        checked = original(*map(inner_of, given), **{**kwargs, **checks}, dtype=dtype)
    if isinstance(values, Tensor):
        indices, values = torch.as_tensor(indices, device=gpu.device), values.to(gpu.device, checked.dtype)
        made = original(indices, values, checked.shape, **{**kwargs, "check_invariants": False})
    else:
        made = move(checked, gpu)
    return made.requires_grad_() if requires_grad else made


@replaces(torch)
def _validate_sparse_coo_tensor_args(original, *args, **kwargs):
    """Of a tensor that comes from a file."""
    original(*map(inner_of, args), **kwargs)


CONSTRUCT = {**dict.fromkeys(("tensor", "as_tensor", "asarray"), from_data), "sparse_coo_tensor": sparse_coo_tensor}
for owner in (torch, torch.fft, torch.nested):
    names = [name for name, f in vars(owner).items() if callable(f) and f in compat.device_constructors()]
    patch(owner, {name: CONSTRUCT.get(name, construct) for name in names})


def construct_on_cpu(original, data, *args, **kwargs):
    """original(data, …), also of a list with scalars on a virtual GPU, and of what a dry run doesn't know."""
    unknown = []

    def plain(data):
        if isinstance(data, (list, tuple)):
            return [plain(d) for d in data]
        number = data.tolist() if isinstance(data, VirtualTensor) else data
        if not isinstance(number, UnknownScalar):
            return number
        unknown.append(number)
        return stand_in(number)

    made = original(plain(data), *args, **kwargs)
    return forget(made) if unknown else made


@replaces(
    Tensor, "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_"
)
@replaces(torch, "bernoulli multinomial poisson")
def draw(original, tensor, *args, **kwargs):
    """Functions that draw numbers for a tensor; for one on the CPU only a generator of the CPU will do."""
    if not isinstance(tensor, VirtualTensor):
        for value in (*args, *kwargs.values()):
            if isinstance(value, _Generator):
                check_generator(value, None)
    return original(tensor, *args, **kwargs)


@replaces(Tensor)
def new(self, *args, **kwargs):
    """Tensor.new(sizes), with which old programs make a tensor like another one."""
    if not isinstance(self, VirtualTensor):
        return Base.new(self, *args, **kwargs)
    gpu = find(kwargs.pop("device", None)) or self.gpu
    made = wrap(Base.new(self.inner, *map(inner_of, args), **kwargs), self.gpu)
    return made if gpu is self.gpu else move(made, gpu)


@replaces(Tensor)
def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    options = {"dtype": dtype or self.dtype, "device": self.device if device is None else device}
    return torch.tensor(data, **options, requires_grad=requires_grad, pin_memory=pin_memory)


@replaces(Tensor)
def to(self, *args, **kwargs):
    """Tensor.to in all its forms."""
    other = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    copy = kwargs.pop("copy", False)
    flags = [a for a in args if isinstance(a, bool)]
    if len(flags) == 2:  # (…, non_blocking, copy)
        copy, args = flags[1], args[:-1]
    if other is None:
        device, dtype, non_blocking, layout = C_nn._parse_to(*args, **kwargs)
    else:
        device, dtype, layout = other.device, other.dtype, kwargs.get("memory_format")
        non_blocking = flags[:1] == [True] or kwargs.get("non_blocking", False)
    return convert(self, device, dtype, layout, copy, non_blocking)


@replaces(C_nn)
def _parse_to(original, *args, **kwargs):
    """What X.to(…) and net.to(…) make of their arguments; 1 is cuda:1, also for a PyTorch built without CUDA."""
    args = [torch.device("cuda", arg) if type(arg) is int else arg for arg in args]
    if "tensor" in kwargs:
        args.insert(0, kwargs.pop("tensor"))
    if args and isinstance(args[0], Tensor):  # C++ wouldn't see on which virtual GPU it is
        args[:1] = args[0].device, args[0].dtype
    if type(kwargs.get("device")) is int:
        kwargs["device"] = torch.device("cuda", kwargs["device"])
    return original(*args, **kwargs)


def convert(x: Tensor, device: Any, dtype=None, memory_format=None, copy=False, non_blocking=False) -> Tensor:
    """`x` on `device`, with `dtype`; the same object if that changes nothing and no copy is asked for."""
    gpu, options = find(device), {"dtype": dtype or x.dtype}
    if memory_format is not None:
        options["memory_format"] = memory_format
    target: Any = gpu or (None if device is None else torch.device(device))
    if target in (None, getattr(x, "gpu", None) or x.device):
        return Base.to(x, copy=copy, **options)
    if gpu is None and not isinstance(x, VirtualTensor):
        return Base.to(x, device, copy=copy, **options)
    if isinstance(x, UninitializedTensorMixin):  # a lazy parameter or buffer: there is nothing to move yet
        lazy = Base._make_subclass(type(x), torch.empty(0, dtype=options["dtype"], device="cpu"), x.requires_grad)
        lazy.__dict__.update(vars(x), device_to_be=gpu.device)
        return lazy
    if gpu is None and target.type == "meta":  # where there are no values, and no gradients come back from
        made = Base.to(inner_of(x), "meta", copy=True, **options)
        return made.requires_grad_(x.requires_grad and torch.is_grad_enabled())
    same = dtype in (None, x.dtype) and memory_format is None
    moved = move(x if same else Base.to(x, **options), gpu, non_blocking)
    if memory_format not in (None, torch.preserve_format):
        moved = moved.contiguous(memory_format=memory_format)
    return moved if gpu or target.type == "cpu" else Base.to(moved, device)


@replaces(Tensor)
def cuda(self, device=None, non_blocking=False, memory_format=None):
    return convert(self, "cuda" if device is None else device, memory_format=memory_format, non_blocking=non_blocking)


@replaces(Tensor)
def cpu(self, memory_format=torch.preserve_format):
    if not isinstance(self, VirtualTensor):
        return Base.cpu(self, memory_format=memory_format)
    return convert(self, "cpu", memory_format=memory_format)


@replaces(Tensor)
def copy_(self, source, non_blocking=False):
    """Across devices the source moves first where its gradient has to come back, or where it goes to the CPU. (On a
    GPU the second copy would take room, and a CUDA graph captures copies only.)"""
    virtual = isinstance(self, VirtualTensor)
    if not isinstance(source, Tensor):
        return self.fill_(source) if virtual else Base.copy_(self, source, non_blocking)
    across = source.device != self.device and (virtual or isinstance(source, VirtualTensor))
    if across and (source.requires_grad or self.is_cpu) and (virtual or source.gpu.capturing() is None):
        source = move(source, getattr(self, "gpu", None), non_blocking, host_memory(self, source))
    return Base.copy_(self, source, non_blocking)


@replaces(Tensor, "type")
def type_(self, dtype=None, non_blocking=False):
    """Tensor.type: the type's name, or the tensor as another type; also by an old name, as "torch.cuda.FloatTensor"."""
    virtual = isinstance(self, VirtualTensor)
    if dtype is None:
        name = Base.type(self.inner.new_empty(0, device="cpu") if virtual else self)
        return name.replace("torch.", "torch.cuda.") if virtual else name
    if isinstance(dtype, torch.dtype):
        return self.to(dtype)
    full_name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    kind, _, name = full_name.rpartition(".")
    if not (virtual or kind == "torch.cuda"):
        return Base.type(self, full_name)
    if not name.endswith("Tensor") or not hasattr(torch, name):
        raise ValueError(f"invalid type: {dtype!r}")
    device = "cpu" if kind == "torch" else self.device if virtual else "cuda"
    return convert(self, device, getattr(torch, name).dtype, non_blocking=non_blocking)


@replaces(Tensor)
def type_as(self, other):
    return convert(self, other.device, other.dtype)


def check_pin(pin: bool | None, gpu: VirtualGPU | None) -> None:
    """PyTorch's error if a tensor on a GPU shall be pinned."""
    if pin and gpu is not None:
        raise RuntimeError("Only dense CPU tensors can be pinned")


@replaces(Tensor)
def pin_memory(self, *args, **kwargs):
    """A copy that says it is pinned; what that saves is the clock's business."""
    return self if self.is_pinned() else pinned(self.clone())


@replaces(Tensor)
def is_pinned(self, *args, **kwargs):
    return getattr(self.untyped_storage(), "pinned", False)


class GeneratorType(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, _Generator)


class Generator(metaclass=GeneratorType):
    """torch.Generator, for any device."""

    def __new__(cls, device="cpu"):
        gpu = find(device)
        return _Generator(device) if gpu is None else VirtualGenerator(gpu=gpu)


patch(torch, {"Generator": Generator})
# Its own: they work when the GPUs are off, too.
for name, function in {"to": to, "cuda": cuda, "cpu": cpu, "type": type_}.items():
    setattr(VirtualTensor, name, Method(getattr(Base, name), function))
