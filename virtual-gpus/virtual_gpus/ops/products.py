"""Matrix products of half precision with a result in float32: torch.mm(a, b, out_dtype=torch.float32).

CUDA's kernels sum in float32 anyway, and leave out the rounding at the end; the CPU has none. The functions get inner
tensors. Errors are those of aten/src/ATen/native/cuda/Blas.cpp.
"""

import torch
from torch import Tensor

aten = torch.ops.aten
HALF = torch.float16, torch.bfloat16


def mm(a, b, out_dtype):
    check_dtypes(a, b, out_dtype)
    return aten.mm(a.to(out_dtype), b.to(out_dtype))


def bmm(a, b, out_dtype):
    check_dtypes(a, b, out_dtype)
    return aten.bmm(a.to(out_dtype), b.to(out_dtype))


def addmm(bias, a, b, out_dtype, *, beta=1, alpha=1):
    check_dtypes(a, b, out_dtype, bias, "mat1")
    return aten.addmm(*(x.to(out_dtype) for x in (bias, a, b)), beta=beta, alpha=alpha)


def baddbmm(bias, a, b, out_dtype, *, beta=1, alpha=1):
    check_dtypes(a, b, out_dtype, bias, "batch1")
    return aten.baddbmm(*(x.to(out_dtype) for x in (bias, a, b)), beta=beta, alpha=alpha)


def check_dtypes(a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None, name: str = "") -> None:
    """RuntimeError for dtypes that CUDA's kernels don't take; `name` is what PyTorch calls `a`."""
    if a.dtype != b.dtype:
        raise RuntimeError("input dtypes must be the same")
    if out_dtype != a.dtype and not (out_dtype == torch.float32 and a.dtype in HALF):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    if bias is not None and bias.dtype not in (out_dtype, a.dtype):
        raise RuntimeError(f"self dtype must match either out_dtype or {name} dtype")


PRODUCTS = {getattr(aten, function.__name__).dtype: function for function in (mm, bmm, addmm, baddbmm)}
