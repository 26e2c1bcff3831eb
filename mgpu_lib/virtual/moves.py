"""Copies between devices, and parameters that change theirs."""
import torch
from torch.nn.parameter import Parameter

from . import tensor as virtual  # which imports this module
from .errors import no_values

Base = torch._C.TensorBase  # PyTorch's own methods, also while torch.Tensor's are patched


def copy_into(target, source):
    """copy_ across devices: the one operation that may."""
    if type(source) is virtual.VirtualTensor and source.inner.is_meta and type(target) is not virtual.VirtualTensor:
        raise no_values("copying to the CPU")
    inner = [t.inner if type(t) is virtual.VirtualTensor else t for t in (target, source)]
    count_copy(source, target)
    if not inner[0].is_meta:
        Base.copy_(*inner)
    return target


def count_copy(source, target):
    gpus = [getattr(t, "gpu", None) for t in (source, target)]
    if gpus[0] is not gpus[1]:
        (gpus[0] or gpus[1]).traffic[str(source.device), str(target.device)] += source.nbytes


class Move(torch.autograd.Function):
    """A copy between devices; its gradient travels the same way back."""

    @staticmethod
    def forward(ctx, x, gpu):
        ctx.source = getattr(x, "gpu", None)
        return transfer(x, gpu)

    @staticmethod
    def backward(ctx, grad):
        return move(grad, ctx.source), None


def move(x, gpu):
    """A copy of x on `gpu` (None: the CPU), recorded by autograd if x requires a gradient."""
    if torch.is_grad_enabled() and x.requires_grad:
        return Move.apply(x, gpu)
    return transfer(x, gpu)


def transfer(x, gpu):
    """What `move` does, unseen by autograd. torch.OutOfMemoryError if the GPU has no room."""
    source = getattr(x, "gpu", None)
    inner = x.detach() if source is None else x.inner
    backing = torch.device("cpu") if gpu is None else gpu.backing
    if inner.is_meta and backing.type != "meta":
        raise no_values(f"copying from {x.device} to {'cpu' if gpu is None else gpu.device}")
    if gpu is not None:
        gpu.ledger.check(inner.numel() * inner.element_size())
    data = Base.to(inner, backing, copy=True)
    (gpu or source).traffic[str(x.device), "cpu" if gpu is None else str(gpu.device)] += data.nbytes
    return data if gpu is None else virtual.wrap(data, gpu)


def set_data(tensor, value):
    """`tensor.data = value`, where one of them or both are on a virtual GPU."""
    if type(tensor) is type(value) is virtual.VirtualTensor:
        Base.data.__set__(tensor, value)
        tensor.inner, tensor.gpu = value.inner, value.gpu
    else:  # the object changes its kind, and keeps its identity
        fresh = value.detach()
        fresh = Parameter(fresh) if isinstance(tensor, Parameter) else fresh
        swap(tensor, fresh.requires_grad_(tensor.requires_grad))


def swap(a, b):
    """What torch.utils.swap_tensors does, also while a graph still holds them: a module on a GPU may move even so."""
    for tensor in (a, b):
        if tensor.is_leaf and tensor.requires_grad:
            torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(stale_graph)
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def stale_graph(grads):
    raise RuntimeError("this graph was made before its parameters moved to another device: backward can't reach them "
                       "any more. Move first, then run forward and backward.")
