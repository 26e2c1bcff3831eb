"""flex_attention, whose score and mask are functions of the program.

CUDA compiles them into one kernel; here PyTorch's own reference computes the same, of the tensors inside of virtual
ones. On the clock it is one kernel, as FlashAttention is, for the share of blocks that the mask leaves.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import TorchDispatchMode, call_for_bhqkv, disable_current_modes, tree_map_only
from virtual_gpus.constants import constant_of
from virtual_gpus.errors import no_values
from virtual_gpus.frames import program_line
from virtual_gpus.patches.autocast import cast
from virtual_gpus.patches.patch import after_import
from virtual_gpus.state import current
from virtual_gpus.tensors.tensor import VirtualDenseTensor, VirtualTensor, inner_of, wrap

aten = torch.ops.aten
BLOCKS = 64  # along queries and keys, of which the mask is asked for one number


class Kernel:
    """A function of tensors inside of virtual ones, which takes as long as `packet` for a share of its work."""

    def __init__(self, function: Callable, packet: Any, share: float):
        self.function, self.overloadpacket, self.share = function, packet, share

    def __call__(self, *args: Tensor) -> Any:
        place = args[0].device  # "meta" where a CUDA graph asks for shapes
        with disable_current_modes(), Reading(lambda tensor: inside(tensor).to(place)):
            return self.function(*args)


class Reading(TorchDispatchMode):
    """Inside, read(tensor) takes the place of each virtual tensor that a score or a mask of the program's reads."""

    def __init__(self, read: Callable[[VirtualTensor], Tensor]):
        super().__init__()
        self.read = read

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(VirtualTensor, self.read, (args, kwargs or {}))
        return func(*args, **kwargs)


@after_import("torch._higher_order_ops.flex_attention")
def patch_flex_attention(module):
    hop = module.flex_attention

    def call(original, self, query, key, value, *options, **others):
        if not isinstance(query, VirtualTensor):
            return original(self, query, key, value, *options, **others)
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (cast(t, torch.get_autocast_dtype("cuda")) for t in (query, key, value))
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
            return FlexAttention.apply(module.math_attention, self, query, key, value, *options)
        return original(self, query, key, value, *options, **others)

    if VirtualDenseTensor not in hop.python_key_table:
        hop.py_impl(VirtualDenseTensor)(functools.partial(attend, module.math_attention))
    yield module.FlexAttentionHOP, "__call__", call


def attend(math_attention, query, key, value, score_mod, block_mask, scale, kernel_options, *buffers):
    """(what attention returns, logarithms of the sums of exponentials, largest scores), the last two in base 2."""
    function = functools.partial(reference_attention, math_attention, score_mod, block_mask, scale)
    share = share_of(block_mask[-1], query, key)
    kernel = Kernel(function, aten._scaled_dot_product_flash_attention, share)
    return run(kernel, query, key, value)


class FlexAttention(torch.autograd.Function):
    """Its backward pass computes the scores once more, as the compiled kernel does."""

    @staticmethod
    def forward(ctx, math_attention, hop, query, key, value, score_mod, block_mask, scale, *options):
        out, *statistics = hop(query, key, value, score_mod, block_mask, scale, *options)
        ctx.save_for_backward(query, key, value, out, statistics[0])
        ctx.function = functools.partial(reference_attention, math_attention, score_mod, block_mask, scale)
        ctx.share = share_of(block_mask[-1], query, key)
        ctx.mark_non_differentiable(statistics[1])
        return out, *statistics

    @staticmethod
    def backward(ctx, grad, grad_of_sums, _):
        def gradients(grad, query, key, value, out, sums, grad_of_sums):
            inputs = [t.detach().requires_grad_() for t in (query, key, value)]
            with torch.enable_grad():
                outputs = ctx.function(*inputs)[:2]
            return torch.autograd.grad(outputs, inputs, (grad, grad_of_sums))

        kernel = Kernel(gradients, aten._scaled_dot_product_flash_attention_backward, ctx.share)
        return None, None, *run(kernel, grad, *ctx.saved_tensors, grad_of_sums), *[None] * 5


def run(kernel: Kernel, *tensors: VirtualTensor) -> tuple[VirtualTensor, ...]:
    """The outputs of the kernel, on the GPU of the first tensor."""
    gpu, inner = tensors[0].gpu, [inner_of(tensor) for tensor in tensors]
    key = id(kernel.overloadpacket), kernel.share, *((t.shape, t.stride(), t.dtype) for t in inner)
    return tuple(wrap(out, gpu) for out in gpu.run(kernel, inner, {}, key))


def reference_attention(math_attention, score_mod, block_mask, scale, query, key, value):
    return math_attention(query, key, value, score_mod, block_mask, scale, {})


def inside(tensor: VirtualTensor) -> Tensor:
    """What a score or a mask reads, on the inner tensors' device."""
    if tensor.requires_grad:
        raise NotImplementedError(
            "virtual GPUs have no gradients for tensors that a score_mod of flex_attention reads: use a real GPU, or "
            "F.scaled_dot_product_attention with a bias"
        )
    return tensor.inner


class UnknownMask(Exception):
    """A mask reads values that a plan doesn't know, or that come with the replay of a CUDA graph."""


def share_of(mask_mod: Callable, query: Tensor, key: Tensor) -> float:
    """The share of blocks that the mask leaves, by one number of each; 1 where its values aren't known yet."""
    place = "cpu" if query.inner.is_meta else query.inner.device
    rows, columns = (centers(t.shape[2]) for t in (query, key))
    indices = [i.to(place) for i in (*map(torch.arange, query.shape[:2]), rows, columns)]
    try:
        with disable_current_modes(), Reading(known_values):
            return call_for_bhqkv(mask_mod, *indices).double().mean().item()
    except UnknownMask:
        rendezvous = current().rendezvous
        if rendezvous is not None:
            rendezvous.assumptions.note(f"flex_attention computes all blocks at {program_line()}")
        elif query.gpu.capturing() is not None:
            warnings.warn("flex_attention in a CUDA graph: the clock counts all blocks of its mask", stacklevel=2)
        else:  # backing="meta"
            raise no_values("the mask of flex_attention") from None
        return 1.0


def known_values(tensor: VirtualTensor) -> Tensor:
    inner, capturing = tensor.inner, tensor.gpu.capturing() is not None
    values = constant_of(inner) if inner.is_meta else inner
    if values is None or (capturing and not inner.is_meta and hasattr(inner.untyped_storage(), "register")):
        raise UnknownMask
    return values


def centers(length: int) -> Tensor:
    """Numbers in the middle of blocks of 128, or of so many that there are BLOCKS of them."""
    size = max(128, -(-length // BLOCKS))
    return (torch.arange(-(-length // size)) * size + size // 2).clamp(max=length - 1)
