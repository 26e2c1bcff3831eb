"""Matrix products of half precision with a result in float32: torch.mm(a, b, out_dtype=torch.float32).

CUDA's kernels sum in float32 anyway, and leave out the rounding at the end; the CPU has none. The function gets inner
tensors. Errors are those of aten/src/ATen/native/cuda/Blas.cpp.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.compat import OpOverloadPacket
from virtual_gpus.ops.normalization import HALF

aten = torch.ops.aten
# {operation: PyTorch's name of its first factor}
FACTORS = {aten.mm: "self", aten.bmm: "self", aten.addmm: "mat1", aten.baddbmm: "batch1"}


def product(packet: OpOverloadPacket, *args: Any, **scales: float) -> Tensor:
    """`packet` of two factors, perhaps behind a bias, with a result of the last argument's type."""
    *bias, a, b, out_dtype = args  # a: (…, n, k), b: (…, k, m)
    if a.dtype != b.dtype:
        raise RuntimeError("input dtypes must be the same")
    if out_dtype != a.dtype and not (out_dtype == torch.float32 and a.dtype in HALF):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    if any(x.dtype not in (out_dtype, a.dtype) for x in bias):
        raise RuntimeError(f"self dtype must match either out_dtype or {FACTORS[packet]} dtype")
    return packet(*(x.to(out_dtype) for x in (*bias, a, b)), **scales)


PRODUCTS = {packet.dtype: functools.partial(product, packet) for packet in FACTORS}
