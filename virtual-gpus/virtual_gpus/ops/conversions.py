"""Floating-point numbers that an integer type can't hold: CUDA's conversions saturate, and the CPU's wrap."""

import torch
from torch import Tensor

# {integer type: the one that CUDA converts to first, of which it keeps the lowest bits}
VIA = dict.fromkeys((torch.int8, torch.int16, torch.int32), torch.int32)
VIA |= dict.fromkeys((torch.uint8, torch.int64), torch.int64)


def saturate(out: Tensor, x: Tensor) -> None:
    """Have `out`, the CPU's conversion of x, hold what an H100 makes of x. All of it is read, but not on `meta`."""
    if out.dtype not in VIA or not x.is_floating_point() or x.is_meta or not x.numel():
        return
    low, high = x.aminmax()
    limit = 2.0**63 if out.dtype is torch.int64 else 2.0**31
    if -limit <= low and high < limit:  # which NaN isn't
        return
    via = VIA[out.dtype]
    limits = torch.iinfo(via)
    nan = 0 if via is torch.int32 and x.dtype is not torch.float64 else limits.min
    x = x.double()
    converted = x.nan_to_num(0.0).clamp(limits.min, limits.max).long()
    converted[x >= limits.max] = limits.max
    converted[x.isnan()] = nan
    out.copy_(converted)
