"""The operations under nn.SyncBatchNorm, which PyTorch has for CUDA only, made of others.

They are called with the tensors inside of virtual ones. Statistics of numbers in half precision are floats. What each
computes is what PyTorch's kernels do (aten/src/ATen/native/cuda/Normalization.cuh).
"""

import torch

aten = torch.ops.aten


def batch_norm_stats(x, eps):
    """(mean, 1 / standard deviation) of each channel."""
    var, mean = torch.var_mean(precise(x), all_but_channels(x), correction=0)
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
    out = (precise(x) - channels(mean, x)) * channels(scale(invstd, weight), x)
    return (out if bias is None else out + channels(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    """(sum of the gradient, its sum times x - mean, gradients of weight and bias), those that are asked for."""
    dtype, dims = mean.dtype if weight is None else weight.dtype, all_but_channels(x)
    total = precise(grad).sum(dims)
    total_centred = (precise(grad) * (precise(x) - channels(mean, x))).sum(dims)
    sums = (total, total_centred) if input_g else (None, None)
    of_weight = (total_centred * invstd).to(dtype) if weight_g else None
    return *sums, of_weight, total.to(dtype) if bias_g else None


def batch_norm_backward_elemt(grad, x, mean, invstd, weight, total, total_centred, counts):
    """The gradient of the input."""
    n = counts.sum()
    slope = channels(total_centred / n * invstd**2, x)
    out = precise(grad) - channels(total / n, x) - (precise(x) - channels(mean, x)) * slope
    return (out * channels(scale(invstd, weight), x)).to(x.dtype)


def precise(x):
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def all_but_channels(x):
    return [0, *range(2, x.dim())]


def channels(values, x):
    """A number for each channel, as something to compute with `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))


def scale(invstd, weight):
    return invstd if weight is None else invstd * weight


SYNC_BATCH_NORM = {
    getattr(aten, function.__name__).default: function
    for function in (
        *(batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt),
        *(batch_norm_backward_reduce, batch_norm_backward_elemt),
    )
}
