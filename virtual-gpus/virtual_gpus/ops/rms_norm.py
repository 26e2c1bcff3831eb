"""The one kernel that CUDA has for nn.RMSNorm, and the one for its backward, made of others.

They are called with the tensors inside of virtual ones. Numbers in half precision are computed as floats, as PyTorch's
kernels do it (aten/src/ATen/native/cuda/layer_norm_kernel.cu).
"""

import torch

from virtual_gpus.ops.batch_norm import precise


def fused_rms_norm(x, shape, weight, eps):
    """(`x`, divided by the root of its mean square over the last dimensions, `shape`; 1 / that root)."""
    wide = precise(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = (wide.pow(2).mean(dims(shape), keepdim=True) + eps).rsqrt()
    out = wide * scale if weight is None else wide * scale * weight
    return out.to(x.dtype), scale


def fused_rms_norm_backward(grad, x, shape, scale, weight, wanted):
    """The gradients of `x` and of `weight`, those that are `wanted`."""
    wide, normal = precise(grad), precise(x) * scale
    slope = wide if weight is None else wide * weight
    of_x = (slope - normal * (slope * normal).mean(dims(shape), keepdim=True)) * scale
    of_weight = (wide * normal).sum_to_size(shape).to(weight.dtype) if wanted[1] else None
    return of_x.to(x.dtype) if wanted[0] else None, of_weight


def dims(shape):
    return list(range(-len(shape), 0))


RMS_NORM = {
    torch.ops.aten._fused_rms_norm.default: fused_rms_norm,
    torch.ops.aten._fused_rms_norm_backward.default: fused_rms_norm_backward,
}
for operation, function in RMS_NORM.items():
    function.overloadpacket = operation.overloadpacket  # by which its time is told
