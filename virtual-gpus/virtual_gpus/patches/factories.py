"""Everything that names a device: torch.zeros(…, device='cuda:1'), X.to('cuda:1'), X.cuda(), torch.Generator('cuda').

The functions are replaced where they live, in `torch` and `torch.Tensor`, so that every thread and every library sees
the replacements. For functions imported before, with `from torch import zeros`, see `patches.imported_before`.
"""

import contextlib
import functools
import math

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from virtual_gpus.compat import (
    C_nn,
    DeviceContext,
    device_constructors,
    get_current_function_mode_stack,
    len_torch_function_stack,
)
from virtual_gpus.compat import Generator as _Generator
from virtual_gpus.compat import parse_to as _parse_to
from virtual_gpus.constants import UnknownScalar
from virtual_gpus.errors import check_generator
from virtual_gpus.gpu import VirtualGenerator
from virtual_gpus.patches.methods import Method
from virtual_gpus.state import current, find
from virtual_gpus.tensors.copies import host_memory, move, pinned
from virtual_gpus.tensors.tensor import Base, DisableTorchDispatch, VirtualTensor, inner_of, wrap

RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"}
FROM_DATA = {"tensor", "as_tensor", "asarray"}
DENSE_ONLY = set(
    "sparse_coo_tensor sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor "
    "sparse_bsc_tensor nested_tensor empty_quantized".split()
)
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
DRAWS = {
    Tensor: "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_",
    torch: "bernoulli multinomial poisson",
}
WRAPPERS = {}  # {class of tensors made of others: wrapper(make, x, …), which makes one like x on a named device}
_randperm = torch.utils.data.dataset.randperm  # which PyTorch itself has imported, for random_split
NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


def patches():
    """(owner, name, replacement), for patches.install."""
    for original in device_constructors():
        owner, name = public_name(original)
        yield owner, name, from_data(original) if name in FROM_DATA else placed(original, constructs=True)
    yield torch.utils.data.dataset, "randperm", placed(_randperm, constructs=True)
    for name in LIKE:
        yield torch, name, placed(getattr(torch, name))
    yield torch, "normal", placed(torch.normal)
    for name in NEW:
        yield Tensor, name, placed(getattr(Tensor, name))
    for owner, names in DRAWS.items():
        for name in names.split():
            yield owner, name, drawing(getattr(owner, name))
    for function in (to, cuda, cpu, copy_, type_as, new, new_tensor, pin_memory, is_pinned):
        yield Tensor, function.__name__, function
    yield Tensor, "type", type_
    yield torch, "Generator", Generator
    yield C_nn, "_parse_to", parse_to


def public_name(function):
    """The module that PyTorch's users import `function` from, and its name there."""
    for owner in (torch, torch.fft, torch.nested):
        for name in (function.__name__, function.__name__.removeprefix("fft_")):  # fft.fftfreq is named fft_fftfreq
            if getattr(owner, name, None) is function:
                return owner, name
    raise AssertionError(f"{function} is not where virtual GPUs look for it; this PyTorch is newer than they are")


def default_device():
    """What `with torch.device(…)`, torch.set_default_device or set_default_tensor_type say, if anything.

    (torch.get_default_device would make a tensor to find out, and so come back here.)
    """
    default = None if current() is None else current().default_device
    modes = get_current_function_mode_stack() if len_torch_function_stack() else ()
    return next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), default)


def placed(original, constructs=False):
    """`original`, which makes a tensor from sizes or from a tensor's shape, made to understand device='cuda:i'."""
    random, dense = original.__name__ in RANDOM, original.__name__ not in DENSE_ONLY

    @functools.wraps(original)
    def make(*args, **kwargs):
        if args and type(args[0]) in WRAPPERS:
            elsewhere = kwargs.get("device") is not None
            return WRAPPERS[type(args[0])](make, *args, **kwargs) if elsewhere else original(*args, **kwargs)
        like = next((a for a in args if isinstance(a, VirtualTensor)), None)
        device = kwargs.get("device")
        if device is None and constructs and "out" not in kwargs:
            device = default_device()
        gpu = find(device)
        if isinstance(kwargs.get("generator"), _Generator):
            check_generator(kwargs["generator"], like.gpu if device is None and like is not None else gpu)
        if gpu is None and (device is None or like is None):
            pin = kwargs.pop("pin_memory", False)
            return pinned(original(*args, **kwargs), pin)
        if not dense:
            raise RuntimeError(f"torch.{original.__name__}: virtual GPUs hold dense tensors only")
        return make_inner(original, args, {**kwargs, "device": device}, gpu, random)

    return make


def make_inner(original, args, kwargs, gpu, random):
    """What `placed` makes where a virtual GPU is concerned: on `gpu`, or on another device like a tensor on one."""
    requires_grad, pin = kwargs.pop("requires_grad", False), kwargs.pop("pin_memory", False)
    kwargs = {k: inner_of(v) for k, v in kwargs.items()}
    check_pin(pin, gpu)
    if gpu is not None:
        kwargs["device"] = gpu.backing
    made = pinned(on_gpu(gpu, original, [inner_of(a) for a in args], kwargs, random), pin)
    return made.requires_grad_() if requires_grad else made


def drawing(original):
    """`original`, which draws numbers for a tensor; for one on the CPU only a generator of the CPU will do."""

    @functools.wraps(original)
    def draw(tensor, *args, **kwargs):
        if not isinstance(tensor, VirtualTensor):
            for value in (*args, *kwargs.values()):
                if isinstance(value, _Generator):
                    check_generator(value, None)
        return original(tensor, *args, **kwargs)

    return draw


def on_gpu(gpu, original, args, kwargs, random):
    """Make a tensor on `gpu`, or on the CPU if that is None."""
    if gpu is None:
        return original(*args, **kwargs)
    generator = kwargs.pop("generator", None)
    if gpu.backing.type == "cpu":  # asks for the size first: too large a tensor must not fill the real memory
        with contextlib.suppress(NotImplementedError), DisableTorchDispatch():
            gpu.ledger.check(original(*args, **{**kwargs, "device": "meta"}).nbytes)
    if random:
        kwargs["generator"] = generator or gpu.generator
    return wrap(gpu.run(original, args, kwargs), gpu)


def from_data(original):
    """torch.tensor, as_tensor and asarray: the values are made on the CPU, and then travel."""
    copies = original is torch.tensor

    @functools.wraps(original)
    def make(data, *args, **kwargs):
        device = kwargs.get("device")
        if device is None:
            device = None if isinstance(data, Tensor) and not copies else default_device()
        gpu = find(device)
        check_pin(kwargs.get("pin_memory"), gpu)
        if isinstance(data, Tensor) and (gpu is not None or isinstance(data, VirtualTensor)):
            data = data.detach() if copies else data
            made = pinned(convert(data, device, kwargs.get("dtype"), copy=copies), kwargs.get("pin_memory"))
        elif gpu is None:
            pin = kwargs.pop("pin_memory", False)
            return pinned(original(plain(data), *args, **kwargs), pin)
        else:
            options = {k: v for k, v in kwargs.items() if k != "requires_grad"}
            made = move(original(plain(data, math.nan), *args, **{**options, "device": "cpu"}), gpu)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    return make


def new(self, *args, **kwargs):
    """Tensor.new(sizes), with which old programs make a tensor like another one."""
    if not isinstance(self, VirtualTensor):
        return Base.new(self, *args, **kwargs)
    gpu = find(kwargs.pop("device", None)) or self.gpu
    made = wrap(Base.new(self.inner, *map(inner_of, args), **kwargs), self.gpu)
    return made if gpu is self.gpu else move(made, gpu)


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    options = {"dtype": dtype or self.dtype, "device": self.device if device is None else device}
    return torch.tensor(data, **options, requires_grad=requires_grad, pin_memory=pin_memory)


def plain(data, unknown=None):
    """Scalars on a virtual GPU inside a list become numbers. So does what a dry run doesn't know, if it gets to a GPU,
    where nothing is known; on the CPU that is an error."""
    if isinstance(data, (list, tuple)):
        return [plain(d, unknown) for d in data]
    if isinstance(data, UnknownScalar):
        return float(data) if unknown is None else unknown
    return data.tolist() if isinstance(data, VirtualTensor) else data


def to(self, *args, **kwargs):
    """Tensor.to in all its forms."""
    if current() is None and not isinstance(self, VirtualTensor):
        return Base.to(self, *args, **kwargs)
    other = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    copy = kwargs.pop("copy", False)
    flags = [a for a in args if isinstance(a, bool)]
    if len(flags) == 2:  # (…, non_blocking, copy)
        copy, args = flags[1], args[:-1]
    if other is None:
        device, dtype, non_blocking, layout = parse_to(*args, **kwargs)
    else:
        device, dtype, layout = other.device, other.dtype, kwargs.get("memory_format")
        non_blocking = flags[:1] == [True] or kwargs.get("non_blocking", False)
    return convert(self, device, dtype, layout, copy, non_blocking)


def parse_to(*args, **kwargs):
    """What X.to(…) and net.to(…) make of their arguments; 1 is cuda:1, also for a PyTorch built without CUDA."""
    return _parse_to(*(torch.device("cuda", a) if type(a) is int else a for a in args), **kwargs)


def convert(x, device, dtype=None, memory_format=None, copy=False, non_blocking=False):
    """`x` on `device`, with `dtype`; the same object if that changes nothing and no copy is asked for."""
    gpu, options = find(device), {"dtype": dtype or x.dtype}
    if memory_format is not None:
        options["memory_format"] = memory_format
    target = gpu or (None if device is None else torch.device(device))
    if target in (None, getattr(x, "gpu", None) or x.device):
        return Base.to(x, copy=copy, **options)
    if gpu is None and not isinstance(x, VirtualTensor):
        return Base.to(x, device, copy=copy, **options)
    if isinstance(x, UninitializedTensorMixin):
        return lazy_on(x, gpu.device, options["dtype"])
    if gpu is None and target.type == "meta":  # where there are no values, and no gradients come back from
        made = Base.to(inner_of(x), "meta", copy=True, **options)
        return made.requires_grad_(x.requires_grad and torch.is_grad_enabled())
    same = dtype in (None, x.dtype) and memory_format is None
    moved = move(x if same else Base.to(x, **options), gpu, non_blocking)
    if memory_format not in (None, torch.preserve_format):
        moved = moved.contiguous(memory_format=memory_format)
    return moved if gpu or target.type == "cpu" else Base.to(moved, device)


def lazy_on(x, device, dtype):
    """A lazy parameter or buffer like `x` that will be on `device`: there is nothing to move yet."""
    lazy = Base._make_subclass(type(x), torch.empty(0, dtype=dtype, device="cpu"), x.requires_grad)
    lazy.__dict__.update(vars(x), device_to_be=device)
    return lazy


def cuda(self, device=None, non_blocking=False, memory_format=None):
    if current() is None and not isinstance(self, VirtualTensor):
        return Base.cuda(self, device, non_blocking)
    return convert(self, "cuda" if device is None else device, memory_format=memory_format, non_blocking=non_blocking)


def cpu(self, memory_format=torch.preserve_format):
    if not isinstance(self, VirtualTensor):
        return Base.cpu(self, memory_format=memory_format)
    return convert(self, "cpu", memory_format=memory_format)


def copy_(self, source, non_blocking=False):
    """Across devices the source moves first, so that its gradient comes back."""
    if isinstance(self, VirtualTensor) and not isinstance(source, Tensor):
        return self.fill_(source)
    elsewhere = isinstance(source, Tensor) and source.device != self.device
    if (
        elsewhere
        and (isinstance(self, VirtualTensor) or isinstance(source, VirtualTensor))
        and (source.requires_grad or self.is_cpu)
    ):
        # Only then: on a GPU the second copy would take room.
        source = move(source, getattr(self, "gpu", None), non_blocking, host_memory(self, source))
    return Base.copy_(self, source, non_blocking)


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


def type_as(self, other):
    return convert(self, other.device, other.dtype)


def check_pin(pin, gpu):
    """PyTorch's error if a tensor on a GPU shall be pinned."""
    if pin and gpu is not None:
        raise RuntimeError("Only dense CPU tensors can be pinned")


def pin_memory(self, device=None):
    """A copy that says it is pinned; what that saves is the clock's business."""
    if current() is None:
        return Base.pin_memory(self) if device is None else Base.pin_memory(self, device)
    if self.is_pinned():
        return self
    return pinned(self.clone())


def is_pinned(self, device=None):
    if current() is None:
        return Base.is_pinned(self) if device is None else Base.is_pinned(self, device)
    return getattr(self.untyped_storage(), "pinned", False)


class GeneratorType(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, _Generator)


class Generator(metaclass=GeneratorType):
    """torch.Generator, for any device."""

    def __new__(cls, device="cpu"):
        gpu = find(device)
        return _Generator(device) if gpu is None else VirtualGenerator(gpu=gpu)


# Its own: they work when the GPUs are off, too.
for name, function in {"to": to, "cuda": cuda, "cpu": cpu, "type": type_}.items():
    setattr(VirtualTensor, name, Method(getattr(Base, name), function))
