"""Copies between devices, and parameters that change theirs."""
import torch
from torch.nn.parameter import Parameter

from . import tensor as virtual  # which imports this module
from .clock import name_of
from .errors import bad_fork, no_data, no_values

COPY = torch.ops.aten.copy_.default


def count(nbytes, source, target, pinned=False, non_blocking=False):
    """Enter a copy between two virtual GPUs, or one and the CPU (None), in the machine's traffic and on its clock."""
    if source is not target:
        gpu = target or source
        if gpu.machine.forked:
            raise bad_fork()
        gpu.traffic[name_of(source), name_of(target)] += nbytes
        gpu.clock.copy(source, target, nbytes, pinned, non_blocking)


def copy_into(target, source, non_blocking=False):
    """copy_ across devices: the one operation that may."""
    if type(source) is virtual.VirtualTensor and source.inner.is_meta and type(target) is not virtual.VirtualTensor:
        raise no_values("copying to the CPU")
    ends = [getattr(t, "gpu", None) for t in (source, target)]
    count(source.nbytes, *ends, is_pinned(source) or is_pinned(target), non_blocking)
    inner = virtual.inner_of(target), virtual.inner_of(source)
    if ends[0] is ends[1]:
        ends[0].run(COPY, inner, {})
    elif not inner[0].is_meta:
        virtual.Base.copy_(*inner)
    return target


class Move(torch.autograd.Function):
    """A copy between devices; its gradient travels the same way back."""

    @staticmethod
    def forward(ctx, x, gpu, non_blocking):
        ctx.source = getattr(x, "gpu", None)
        return transfer(x, gpu, non_blocking)

    @staticmethod
    def backward(ctx, grad):
        return move(grad, ctx.source), None, None


def move(x, gpu, non_blocking=False):
    """A copy of x on `gpu` (None: the CPU), recorded by autograd if x requires a gradient."""
    if torch.is_grad_enabled() and x.requires_grad:
        return Move.apply(x, gpu, non_blocking)
    return transfer(x, gpu, non_blocking)


def transfer(x, gpu, non_blocking=False):
    """What `move` does, unseen by autograd. torch.OutOfMemoryError if the GPU has no room."""
    source = getattr(x, "gpu", None)
    inner = x.detach() if source is None else x.inner
    backing = torch.device("cpu") if gpu is None else gpu.backing
    if inner.is_meta and backing.type != "meta":
        raise no_data() if source is None else no_values(f"copying from {x.device} to {name_of(gpu)}")
    if gpu is not None:
        gpu.ledger.check(inner.nbytes)
    count(inner.nbytes, source, gpu, is_pinned(x), non_blocking)
    data = virtual.Base.to(inner, backing, copy=True)
    return data if gpu is None else virtual.wrap(data, gpu)


def is_pinned(x):
    return type(x) is not virtual.VirtualTensor and not x.is_meta and getattr(x.untyped_storage(), "pinned", False)


def set_data(tensor, value):
    """`tensor.data = value`, where one of them or both are on a virtual GPU."""
    if type(tensor) is type(value) is virtual.VirtualTensor:
        virtual.Base.data.__set__(tensor, value)
        tensor.inner, tensor.form, tensor.gpu = value.inner, value.form, value.gpu
    else:  # the object changes its kind, and keeps its identity
        fresh = value.detach()
        fresh = Parameter(fresh) if isinstance(tensor, Parameter) else fresh
        swap(tensor, fresh.requires_grad_(tensor.requires_grad))


def swap(a, b):
    """What torch.utils.swap_tensors does, also while a graph still holds them: a module on a GPU may move even so."""
    for tensor in (a, b):
        if tensor.is_leaf and tensor.requires_grad and not tensor.is_inference():
            with torch.inference_mode(False):
                torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(stale_graph)
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    hooks = [(t._backward_hooks, t._post_accumulate_grad_hooks) for t in (a, b)]
    torch._C._swap_tensor_impl(a, b)
    for tensor, ours in zip((a, b), hooks, strict=True):  # hooks belong to the tensor that they were given to
        if ours != (None, None):
            tensor._backward_hooks, tensor._post_accumulate_grad_hooks = ours


def stale_graph(grads):
    raise RuntimeError("this graph was made before its parameters moved to another device: backward can't reach them "
                       "any more. Move first, then run forward and backward.")
