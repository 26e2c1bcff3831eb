"""Attention as CUDA dispatches it: which of its kernels is called, and what that computes, made of the CPU's.

Which one is decided as in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for the wheels that PyTorch 2.15 is
installed from (CUDA 13, cuDNN 9.26): on Hopper and Blackwell cuDNN's is tried first, elsewhere FlashAttention, then the
memory-efficient one; what none of them takes is made of single operations. Those that this library can't make of the
CPU's kernel are, too: attention with dropout, with a mask that has a gradient, with values wider than keys. Head sizes
that are no multiples of 8 are not padded. The kernels are called with the tensors inside of virtual ones.
"""

import torch
from torch.nn.attention import SDPBackend

aten = torch.ops.aten
FLASH, EFFICIENT, CUDNN, MATH = (
    getattr(SDPBackend, name).value for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
)
HALF = torch.float16, torch.bfloat16


def backend(query, key, value, mask, is_causal, gqa, capability):
    """The first kernel in PyTorch's order that is switched on and takes these tensors: FLASH, EFFICIENT, CUDNN, MATH.

    RuntimeError if there is none. `capability` is the GPU's, `gqa`: fewer heads of keys than of queries are allowed.
    """
    order = torch._C._get_sdp_priority_order()
    if order[:4] == [FLASH, EFFICIENT, MATH, CUDNN] and capability[0] in (9, 10):  # nobody has set another
        order = CUDNN, FLASH, EFFICIENT, MATH
    given = query, key, value, mask, is_causal, capability
    fits = is_regular(query, key, value, mask, gqa)
    for kind in order:
        if kind == FLASH and fits and torch._C._get_flash_sdp_enabled() and flash_takes(*given):
            return FLASH
        if kind == EFFICIENT and fits and torch._C._get_mem_efficient_sdp_enabled() and efficient_takes(*given):
            return EFFICIENT
        if kind == CUDNN and fits and torch._C._get_cudnn_sdp_enabled() and cudnn_takes(*given):
            return CUDNN
        if kind == MATH and torch._C._get_math_sdp_enabled():
            return MATH
    raise RuntimeError("No available kernel. Aborting execution.")


def is_regular(query, key, value, mask, gqa):
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
    return typed and aligned and query.shape[3] % unit == value.shape[3] % unit == 0


def cudnn_takes(query, key, value, mask, is_causal, capability):
    sizes, limit = (query.shape[3], value.shape[3]), 256 if capability[0] in (9, 10) else 128
    trained = any(t.requires_grad for t in (query, key, value))
    if trained and max(sizes) > 128 and sizes not in ((256, 256), (192, 128)):  # of those there is no backward pass
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    fits = max(sizes) <= limit and sizes[0] % 8 == sizes[1] % 8 == 0 and key.shape[2] != 1
    return fits and capability >= (8, 0) and query.dtype in HALF and takes_mask(query, key, mask)


def takes_mask(query, key, mask):
    """cuDNN takes masks of two or four dimensions."""
    if mask is None:
        return True
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])[-mask.dim() :]
    return mask.dim() in (2, 4) and all(n in (1, size) for n, size in zip(mask.shape, wanted, strict=True))


def can_be_made(value, query, mask, dropout_p):
    """Whether the CPU's kernel computes what CUDA's would."""
    return not dropout_p and value.shape[-1] == query.shape[-1] and not (mask is not None and mask.requires_grad)


# The kernels. A kernel gives (the result, the logarithms of the sums of exponentials); `completed` adds the rest.


def plain(query, key, value, bias, dropout_p, is_causal, scale):
    if dropout_p:
        raise NotImplementedError(
            "virtual GPUs: one of CUDA's attention kernels was called with dropout, which they can't make. "
            "F.scaled_dot_product_attention makes it of single operations."
        )
    options = {"attn_mask": bias, "scale": scale}
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, **options)


def plain_backward(grad, query, key, value, out, log_sums, bias, is_causal, scale):
    """The gradients of query, key and value."""
    given = grad, query, key, value, out, log_sums, 0.0, is_causal
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, attn_mask=bias, scale=scale)


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    if query.dtype not in HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return plain(query, key, value, None, dropout_p, is_causal, scale)


def flash_backward(grad, query, key, value, out, log_sums, *rest, scale=None):
    return plain_backward(grad, query, key, value, out, log_sums, None, rest[5], scale)


def efficient(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, scale=None):
    return plain(query, key, value, bias, dropout_p, is_causal, scale)


def efficient_backward(grad, query, key, value, bias, out, log_sums, *rest, is_causal=False, scale=None):
    if rest[3][3]:
        raise NotImplementedError("virtual GPUs: the mask of an attention that is shared out can't have a gradient")
    is_causal = rest[4] if len(rest) > 4 else is_causal
    return *plain_backward(grad, query, key, value, out, log_sums, bias, is_causal, scale), None


def cudnn(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug=False, scale=None):
    return plain(query, key, value, bias, dropout_p, is_causal, scale)


def cudnn_backward(grad, query, key, value, out, log_sums, *rest, scale=None):
    return plain_backward(grad, query, key, value, out, log_sums, rest[2], rest[8], scale)


def completed(made, query, key, packet):
    """All results of CUDA's operation. Dropout's seed and offset, of which there are none here, are on the CPU."""
    seeds = torch.empty((), dtype=torch.int64, device="cpu"), torch.empty((), dtype=torch.int64, device="cpu")
    if packet is aten._scaled_dot_product_efficient_attention:
        return *made, *seeds
    return *made, None, None, query.shape[2], key.shape[2], *seeds, None


def without_seeds(args):
    """The arguments of a backward kernel, those two left out."""
    return [None if isinstance(a, torch.Tensor) and a.is_cpu and a.dtype is torch.int64 else a for a in args]


KERNELS = {FLASH: flash, EFFICIENT: efficient, CUDNN: cudnn}
ATTENTION = {}
for function in (*KERNELS.values(), flash_backward, efficient_backward, cudnn_backward):
    kernel, _, backward = function.__name__.partition("_")
    operation = getattr(aten, f"_scaled_dot_product_{kernel}_attention{backward and '_backward'}").default
    function.overloadpacket = operation.overloadpacket  # by which its FLOPs are counted
    ATTENTION[operation] = function


def dispatched(kind, query, key, value, bias, is_causal, scale):
    """What CUDA's kernel of this `kind` makes of virtual tensors, or of DTensors."""
    if kind == FLASH:
        made = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
        return made[0]
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    kernel = aten._scaled_dot_product_cudnn_attention if kind == CUDNN else aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, trained, 0.0, is_causal, scale=scale)[0]
