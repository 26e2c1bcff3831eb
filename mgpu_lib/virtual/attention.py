"""The attention that PyTorch has for CUDA only, and DTensor knows how to share out, made of the CPU's.

It is called with the tensors inside of virtual ones.
"""

import torch

aten = torch.ops.aten


def efficient_attention(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, scale=None):
    """(the result, logarithms of the sums of exponentials, seed and offset of the dropout, which there is none of)."""
    options = {"attn_mask": bias, "scale": scale}
    result = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, **options)
    none = torch.zeros((2,), dtype=torch.int64, device=query.device)
    return *result, none[0].clone(), none[1].clone()


def efficient_attention_backward(grad, query, key, value, bias, *rest, is_causal=False, scale=None):
    """The gradients of query, key and value; there is none of the bias."""
    out, log_sums, _, _, dropout_p, wanted, *causal = rest
    if wanted[3]:
        raise NotImplementedError("virtual GPUs: the mask of an attention that is shared out can't have a gradient")
    given = grad, query, key, value, out, log_sums, dropout_p, causal[0] if causal else is_causal
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, attn_mask=bias, scale=scale)
    return *gradients, None


ATTENTION = {
    aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
}
for operation, function in ATTENTION.items():
    function.overloadpacket = operation.overloadpacket  # by which its FLOPs are counted
