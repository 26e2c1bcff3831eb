"""Attention as CUDA dispatches it: which of its kernels is called, and what that computes, made of the CPU's.

Which one is decided as in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for the wheels that PyTorch 2.15 is
installed from (CUDA 13, cuDNN 9.26): on Hopper and Blackwell cuDNN's is tried first, elsewhere FlashAttention, then the
memory-efficient one; what none of them takes is made of single operations. An H200 chose the same in 480 of 504 cases
(PyTorch 2.11; its cuDNN also trained heads of 200 numbers). Head sizes that are no multiples of 8 are not padded.

The kernels are called with the tensors inside of virtual ones. What the CPU's kernel can't do, they do by matrix
products: dropout, the gradient of a mask, values wider than keys.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from virtual_gpus import compat
from virtual_gpus.compat import OpOverload
from virtual_gpus.ops.native_functions import named_arguments
from virtual_gpus.ops.normalization import HALF, to_accumulate

aten = torch.ops.aten
FLASH, EFFICIENT, CUDNN, MATH = (
    getattr(SDPBackend, name).value for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
)
NAMES = {FLASH: "flash", EFFICIENT: "efficient", CUDNN: "cudnn"}
OPERATIONS = {kind: getattr(aten, f"_scaled_dot_product_{name}_attention").default for kind, name in NAMES.items()}


def backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    gqa: bool,
    capability: tuple[int, int],
) -> int:
    """The first kernel in PyTorch's order that is switched on and takes these tensors: FLASH, EFFICIENT, CUDNN, MATH.

    RuntimeError if there is none. `capability` is the GPU's, `gqa`: fewer heads of keys than of queries are allowed.
    """
    order = compat.get_sdp_priority_order()
    if order[:4] == [FLASH, EFFICIENT, MATH, CUDNN] and capability[0] in (9, 10):  # nobody has set another
        order = CUDNN, FLASH, EFFICIENT, MATH
    given = query, key, value, mask, is_causal, capability
    fits = shapes_match(query, key, value, mask, gqa)
    kernels = {  # whether each is switched on, and takes these tensors
        FLASH: (compat.get_flash_sdp_enabled, flash_takes),
        EFFICIENT: (compat.get_mem_efficient_sdp_enabled, efficient_takes),
        CUDNN: (compat.get_cudnn_sdp_enabled, cudnn_takes),
    }
    for kind in order:
        if kind == MATH and compat.get_math_sdp_enabled():
            return MATH
        if kind in kernels and fits:
            enabled, takes = kernels[kind]
            if enabled() and takes(*given):
                return kind
    raise RuntimeError("No available kernel. Aborting execution.")


def shapes_match(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gqa: bool) -> bool:
    """What all kernels ask for: four dimensions, something to attend to, and heads that match."""
    if not query.dim() == key.dim() == value.dim() == 4 or 0 in (query.shape[2], key.shape[2]):
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        return False
    same = query.shape[1] == key.shape[1] or (gqa and query.shape[1] % key.shape[1] == 0)
    packed = all(t.stride(-1) == 1 for t in (query, key, value))
    return same and packed and query.shape[3] == key.shape[3] and (mask is None or mask.stride(-1) == 1)


def flash_takes(query, key, value, mask, is_causal, capability):
    size, trained = query.shape[3], any(t.requires_grad for t in (query, key, value))
    if (8, 6) <= capability <= (8, 9) and trained and 192 < size <= 224:
        return False
    square = not is_causal or query.shape[2] == key.shape[2]
    fits = capability >= (8, 0) and query.dtype in HALF and size == value.shape[3] <= 256
    return fits and mask is None and square


def efficient_takes(query, key, value, mask, is_causal, capability):
    half = query.dtype in HALF
    unit = (8 if half else 4) if capability >= (8, 0) else (8 if half else 1)  # numbers that are read at once
    aligned = capability < (8, 0) or all(t.storage_offset() % unit == 0 for t in (query, key, value))
    typed = query.dtype in (torch.float16, torch.float32, *([torch.bfloat16] if capability >= (8, 0) else []))
    shaped = query.shape[1] == key.shape[1] and query.shape[3] % unit == value.shape[3] % unit == 0
    return typed and aligned and shaped


def cudnn_takes(query, key, value, mask, is_causal, capability):
    sizes, limit = (query.shape[3], value.shape[3]), 256 if capability[0] in (9, 10) else 128
    trained = any(t.requires_grad for t in (query, key, value))
    if trained and max(sizes) > 128 and sizes not in ((256, 256), (192, 128)):  # of those there is no backward pass
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    fits = max(sizes) <= limit and sizes[0] % 8 == sizes[1] % 8 == 0 and key.shape[2] != 1
    return fits and capability >= (8, 0) and query.dtype in HALF and takes_mask(query, key, mask)


def takes_mask(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """cuDNN takes masks of two or four dimensions, and has no gradients for them."""
    if mask is None:
        return True
    if mask.requires_grad:
        return False
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])[-mask.dim() :]
    return mask.dim() in (2, 4) and all(n in (1, size) for n, size in zip(mask.shape, wanted, strict=True))


# The kernels. The names of their arguments are those in PyTorch's schemas; `seed` decides what dropout leaves out.
#   query  (N, heads, queries, size)          out        (N, heads, queries, value size)
#   key    (N, KV heads, keys, size)          logsumexp  (N, heads, queries)
#   value  (N, KV heads, keys, value size)    attn_bias  expands to (N, heads, queries, keys)


def forward(*, query, key, value, dropout_p, is_causal, scale, attn_bias=None, seed=None, **_):
    """(what attention returns, the logarithms of the sums of exponentials)"""
    if dropout_p or query.shape[-1] != value.shape[-1]:
        weights, log_sums = softmax_of_products(query, key, attn_bias, is_causal, scale)
        kept = weights * dropout(weights, dropout_p, seed)
        return (kept @ for_each_head(to_accumulate(value), query)).to(query.dtype), log_sums
    options = {"attn_mask": attn_bias, "scale": scale}
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, **options)


def backward(grad, *, query, key, value, out, logsumexp, dropout_p, is_causal, scale, seed=None, **others):
    """The gradients of query, key, value and, if it is wanted, of the bias."""
    attn_bias, wants_bias = others.get("attn_bias"), others.get("grad_input_mask", [False])[-1]
    if not dropout_p and not wants_bias and query.shape[-1] == value.shape[-1]:
        given, options = (grad, query, key, value, out, logsumexp, 0.0, is_causal), {"scale": scale}
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, attn_mask=attn_bias, **options)
        return *grads, None
    grad, scale = to_accumulate(grad), query.shape[-1] ** -0.5 if scale is None else scale
    weights, _ = softmax_of_products(query, key, attn_bias, is_causal, scale)  # (N, heads, queries, keys)
    scaled = dropout(weights, dropout_p, seed)
    of_value = (weights * scaled).mT @ grad  # (N, heads, keys, value size)
    of_weights = (grad @ for_each_head(to_accumulate(value), query).mT) * scaled
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))  # (N, heads, queries, keys)
    of_query = of_scores @ for_each_head(to_accumulate(key), query) * scale
    of_key = of_scores.mT @ to_accumulate(query) * scale
    # heads of queries that share keys and values: their gradients are added up, (N, KV heads, keys, …)
    of_key, of_value = [g.unflatten(1, (key.shape[1], -1)).sum(2) for g in (of_key, of_value)]
    of_bias = of_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype) if wants_bias else None
    return of_query.to(query.dtype), of_key.to(query.dtype), of_value.to(query.dtype), of_bias


def softmax_of_products(query, key, bias, is_causal, scale):
    """(the weights of all keys for each query, the logarithms of the sums that they were divided by)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = to_accumulate(query) @ for_each_head(to_accumulate(key), query).mT * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).tril().logical_not(), -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def dropout(weights: Tensor, p: float, seed: Tensor | None) -> Any:
    """What the weights are multiplied by: 0 or 1 / (1 - p), the same numbers for the same seed."""
    if not p:
        return 1
    if weights.is_meta:
        return weights
    kept = torch.empty(weights.shape).bernoulli_(1 - p, generator=torch.Generator().manual_seed(int(seed))).to(weights)
    return kept / (1 - p) if p < 1 else kept


def for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values of which several heads of queries share one, once for each of them."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def forward_kernel(func: OpOverload, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """What `func`, one of CUDA's attention operations, computes. `all_outputs` adds the other outputs."""
    if func is OPERATIONS[FLASH] and args[0].dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    out, log_sums = forward(**named_arguments(func, args, kwargs))
    if func is OPERATIONS[EFFICIENT]:  # it writes the heads inside of tokens
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, log_sums


def backward_kernel(func: OpOverload, grad: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """What `func`, the backward of one of them, computes."""
    grads = backward(grad, **named_arguments(func, (grad, *args), kwargs))
    return grads if "efficient" in func.name() else grads[:3]  # the others have no gradient for a bias


FORWARD = {func: partial(forward_kernel, func) for func in OPERATIONS.values()}
BACKWARD = {
    func: partial(backward_kernel, func)
    for func in (getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default for name in NAMES.values())
}


def all_outputs(made: tuple, query: Tensor, key: Tensor, func: OpOverload, seed: Tensor) -> tuple:
    """All outputs of CUDA's operation. Dropout's seed is on the CPU, and an offset, of which there is none here."""
    seeds = seed, torch.empty((), dtype=torch.int64, device="cpu")
    if func is OPERATIONS[EFFICIENT]:
        return *made, *seeds
    return *made, None, None, query.shape[2], key.shape[2], *seeds, None


def without_seeds(args: Sequence) -> tuple[list, Tensor | None]:
    """(the arguments of a backward kernel without the seed and the offset, the seed)"""
    seeds = [a for a in args if isinstance(a, Tensor) and a.is_cpu and a.dtype is torch.int64]
    return [None if any(a is seed for seed in seeds) else a for a in args], seeds[0] if seeds else None


def call_kernel(
    kind: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of virtual tensors, or of DTensors, by CUDA's kernel of this `kind`."""
    if kind == FLASH:
        return OPERATIONS[kind](query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, bias))
    return OPERATIONS[kind](query, key, value, bias, trained, dropout_p, is_causal, scale=scale)[0]
