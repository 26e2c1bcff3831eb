"""Normalization as CUDA's kernels compute it, in operations that the CPU has. They get inner tensors.

    CUDA runs                               here the CPU runs
    batch_norm_stats, batch_norm_elemt, …   var_mean, mul, sub, sum: CPUs have nothing for nn.SyncBatchNorm
    _fused_rms_norm, …_backward             pow, mean, rsqrt, mul: PyTorch's own Python for compilers
    _softmax(half_to_float=True), …         to(float32), then _softmax: the CPU's takes no half_to_float

Values in half precision are computed in float32, as in aten/src/ATen/native/cuda/Normalization.cuh and
layer_norm_kernel.cu. Each counts on the clock as the one kernel that it is on CUDA.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from virtual_gpus.compat import OpOverloadPacket, decomposition_table

aten = torch.ops.aten
HALF = torch.float16, torch.bfloat16


def to_accumulate(x: Tensor) -> Tensor:
    """`x` in the dtype that CUDA accumulates in (at::acc_type)."""
    return x.float() if x.dtype in HALF else x


# nn.SyncBatchNorm. x and grad: (N, C, ...)


def batch_norm_stats(x, eps):
    """(mean, 1 / standard deviation) of each channel."""
    var, mean = torch.var_mean(to_accumulate(x), all_but_channels(x), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    """The same of all ranks' parts, whose means and sizes are rows of `means`, …; running statistics follow."""
    counts = counts.to(means.dtype)[:, None]
    n = counts.sum()
    mean = (means * counts).sum(0) / n
    squares = ((invstds**-2 - eps + (means - mean) ** 2) * counts).sum(0)
    for running, now in ((running_mean, mean), (running_var, squares / (n - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(momentum * now)
    return mean, (squares / n + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    """`x`, normalized."""
    out = (to_accumulate(x) - channels(mean, x)) * channels(scale(invstd, weight), x)
    return (out if bias is None else out + channels(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    """(sum of the gradient, its sum times x - mean, gradients of weight and bias), those that are asked for."""
    dtype, dims = mean.dtype if weight is None else weight.dtype, all_but_channels(x)
    total = to_accumulate(grad).sum(dims)
    total_centred = (to_accumulate(grad) * (to_accumulate(x) - channels(mean, x))).sum(dims)
    sums = (total, total_centred) if input_g else (None, None)
    of_weight = (total_centred * invstd).to(dtype) if weight_g else None
    return *sums, of_weight, total.to(dtype) if bias_g else None


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, total, total_centred, counts):
    """The gradient of the input."""
    n = counts.sum()
    slope = channels(total_centred / n * invstd**2, x)
    out = to_accumulate(grad) - channels(total / n, x) - (to_accumulate(x) - channels(mean, x)) * slope
    return (out * channels(scale(invstd, weight), x)).to(x.dtype)


def all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def channels(values: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, as something to compute with `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))


def scale(invstd: Tensor, weight: Tensor | None) -> Tensor:
    return invstd if weight is None else invstd * weight


SYNC_BATCH_NORM = {
    getattr(aten, function.__name__).default: function
    for function in (
        *(batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt),
        *(batch_norm_backward_reduce, batch_norm_backward_elemt),
    )
}


# nn.RMSNorm

RMS_NORM = {  # functions of our own, for the op table sets attributes of them
    func: functools.partial(decomposition_table[func])
    for func in (aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)
}
fused_rms_norm, fused_rms_norm_backward = RMS_NORM.values()


# softmax


def softmax(func: OpOverloadPacket) -> Callable:
    return lambda x, dim, half_to_float: func(x.float() if half_to_float else x, dim, False)


def softmax_backward(func: OpOverloadPacket) -> Callable:
    return lambda grad, out, dim, input_dtype: func(grad, out, dim, grad.dtype).to(input_dtype)


SOFTMAX = {
    aten._softmax.default: softmax(aten._softmax),
    aten._log_softmax.default: softmax(aten._log_softmax),
    aten._softmax_backward_data.default: softmax_backward(aten._softmax_backward_data),
    aten._log_softmax_backward_data.default: softmax_backward(aten._log_softmax_backward_data),
}
