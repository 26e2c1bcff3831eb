"""Gradients that people hand to autograd, or make for it, have to be where their tensor is.

C++ checks that, and takes virtual tensors for CPU tensors; so the checks are made here, in PyTorch's words: for what
`backward` and `autograd.grad` are given, for what a `torch.autograd.Function` returns, and for hooks on tensors. Not
for the hooks of graph nodes, modules and saved tensors: what those return counts as if it were on the right GPU.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction, Function

from virtual_gpus.compat import is_legacy_batchedtensor
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.patches.patch import patch, replaces
from virtual_gpus.state import current
from virtual_gpus.tensors.tensor import gradient_on


def gpu_of(value: Any) -> VirtualGPU | None:
    return getattr(value, "gpu", None)


def device_of(value: Any) -> torch.device | None:
    return value.device if isinstance(value, Tensor) else None


def batched(grad: Any) -> bool:
    """Whether this is a stack of gradients, which is_grads_batched=True makes; autograd takes it for one of them."""
    return isinstance(grad, Tensor) and is_legacy_batchedtensor(grad)


def on_device(grad: Any, device: torch.device | None, index: int, who: str = "") -> Any:
    """`grad` if it is on `device`, with PyTorch's error if it isn't; a single number moves."""
    if device is None or not isinstance(grad, Tensor) or batched(grad) or grad.device == device:
        return grad
    if grad.dim():
        raise RuntimeError(f"{who}invalid gradient at index {index} - expected device {device} but got {grad.device}")
    return grad.to(device)


class Engine:
    """Autograd's engine, with a thread for each GPU on the clock: under Tensor.backward and torch.autograd.grad, and
    called as such by pipelines of Megatron-LM."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def run_backward(self, tensors, grad_tensors, *args, **kwargs):
        pairs = enumerate(zip(tensors, grad_tensors, strict=True))
        grads = tuple(on_device(grad, device_of(out), i) for i, (out, grad) in pairs)
        with current().clock.backward():
            try:
                made = self.engine.run_backward(tensors, grads, *args, **kwargs)
            except RuntimeError as error:
                if "modified by an inplace operation: [torch." in str(error) and all(map(gpu_of, tensors)):
                    error.args = (str(error).replace("[torch.", "[torch.cuda."),)
                raise
        if not made:
            return made
        pairs = zip(made, args[2] if len(args) > 2 else kwargs["inputs"], strict=True)
        return tuple(grad if batched(grad) else gradient_on(grad, gpu_of(x)) for grad, x in pairs)


patch(Variable, {"_execution_engine": Engine(Variable._execution_engine)})


def apply(cls, *args, **kwargs):
    """torch.autograd.Function.apply, which also notes where its arguments and results are."""
    out = _apply.__get__(None, cls)(*args, **kwargs)
    outs = out if isinstance(out, tuple) else (out,)
    for ctx in (o.grad_fn for o in outs if isinstance(o, Tensor)):
        if getattr(ctx, "_forward_cls", None) is cls:
            ctx.virtual_gpus_places = [device_of(a) for a in args], [gpu_of(o) for o in outs]
            break
    return out


_apply = vars(Function)["apply"]
patch(Function, {"apply": classmethod(apply)})


@replaces(BackwardCFunction, "apply")
def apply_backward(original, ctx, *grads):
    """The backward pass of a torch.autograd.Function."""
    if not hasattr(ctx, "virtual_gpus_places"):
        return original(ctx, *grads)
    devices, gpus = ctx.virtual_gpus_places
    made = original(ctx, *map(gradient_on, grads, gpus))
    made = made if isinstance(made, tuple) else (made,)
    who = f"Function {type(ctx).__name__} returned an "
    checked, index = [], 0
    for grad, device in zip(made, devices, strict=False):
        checked.append(on_device(grad, device, index, who))
        index += device is not None  # C++ counts tensors only
    return (*checked, *made[len(devices) :])


@replaces(Tensor)
def register_hook(original, self, hook):
    tensor, gpu = weakref.ref(self), gpu_of(self)  # it may have moved, or be gone, when its gradient comes

    @functools.wraps(hook)
    def checking(grad):
        grad = gradient_on(grad, getattr(tensor(), "gpu", gpu if tensor() is None else None))
        new = hook(grad)
        if isinstance(new, Tensor) and new.is_cuda != grad.is_cuda:
            name = getattr(hook, "__name__", "<unknown>")
            raise RuntimeError(f"hook '{name}' has changed the type of value (was {grad.type()} got {new.type()})")
        return grad if new is None else new

    return original(self, checking)
