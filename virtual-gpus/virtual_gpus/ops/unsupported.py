"""What PyTorch's CPU kernels compute and CUDA has no kernel for: some operations, and of others some dtypes."""

import torch
from torch import Tensor

BOOL, BYTES, BRAINS, HALVES = (torch.bool,), (torch.uint8,), (torch.bfloat16,), (torch.float16,)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# (operations, dtypes of their first argument, what CUDA calls its kernel); aten/src/ATen/native/cuda
NOT_IMPLEMENTED = [
    ("mm addmm addmm_ addbmm addbmm_", WHOLE, "addmm_cuda"),
    ("mv addmv addmv_", WHOLE, "addmv_impl_cuda"),
    ("bmm baddbmm baddbmm_ _trilinear", WHOLE, "baddbmm_cuda"),
    ("dot vdot", WHOLE, "dot"),
    ("avg_pool2d", WHOLE, "avg_pool2d_out_cuda_frame"),
    ("avg_pool3d", WHOLE, "avg_pool3d_out_cuda"),
    ("max_pool2d_with_indices", WHOLE, "max_pool2d_with_indices_out_cuda_frame"),
    ("max_pool3d_with_indices", WHOLE, "max_pool3d_with_indices_out_frame"),
    ("native_dropout_backward", WHOLE, "masked_scale"),
    ("scatter_reduce scatter_reduce_", BOOL, "cuda_scatter_gather_base_kernel_func"),
    ("igamma igamma_", HALVES + BRAINS, "igamma_cuda"),
    ("igammac igammac_", HALVES + BRAINS, "igammac_cuda"),
    ("histc", BRAINS, "histc"),
    ("linalg_vector_norm", (torch.complex32,), "norm_kernel_cuda"),
    ("upsample_linear1d", BYTES, "upsample_linear1d_out_frame"),
    ("upsample_bilinear2d", BYTES, "upsample_bilinear2d_out_frame"),
    ("upsample_bicubic2d", BYTES, "upsample_bicubic2d_out_frame"),
    ("upsample_trilinear3d", BYTES, "upsample_trilinear3d_out_frame"),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", BYTES, "upsample_gen2d_aa_out_cuda"),
]
if torch.__version__ < "2.14":
    NOT_IMPLEMENTED.append(("angle", HALVES + BRAINS, "angle_cuda"))
# The same, and what is said where it isn't the macro AT_DISPATCH that says it; cudnn/Descriptors.cpp, SummaryOps.cu
REFUSALS = [
    *((names, dtypes, f"\"{kernel}\" not implemented for '{{}}'") for names, dtypes, kernel in NOT_IMPLEMENTED),
    ("convolution", WHOLE, "getCudnnDataTypeFromScalarType() not supported for {}"),
    ("histc", HALVES, "{}Tensor is not supported"),
]
DTYPE_ERRORS: dict[str, dict[torch.dtype, str]] = {}  # {operation: {dtype: what is said}}
for names, dtypes, text in REFUSALS:
    for name in names.split():
        DTYPE_ERRORS.setdefault(name, {}).update(dict.fromkeys(dtypes, text))
CPU_ONLY = set("histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors".split())


def check_dtype(name: str, x: Tensor) -> None:
    """Raise what CUDA says if its kernel for the operation `name` doesn't take the dtype of `x`."""
    text = DTYPE_ERRORS[name].get(x.dtype)
    if text is not None:
        kind = x.type().rpartition(".")[2].removesuffix("Tensor")
        raise (NotImplementedError if "not implemented" in text else RuntimeError)(text.format(kind))
