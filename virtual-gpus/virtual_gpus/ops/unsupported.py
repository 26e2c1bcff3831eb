"""What PyTorch's CPU kernels compute and CUDA has no kernel for: some operations, and of others some dtypes."""

import torch
from torch import Tensor

BOOL, BYTES, BRAINS, HALVES = (torch.bool,), (torch.uint8,), (torch.bfloat16,), (torch.float16,)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# (operations, dtypes of their first argument, what CUDA calls its kernel, {} their name); aten/src/ATen/native/cuda
NOT_IMPLEMENTED = [
    ("mm addmm addmm_ addbmm addbmm_", WHOLE, "addmm_cuda"),
    ("mv addmv addmv_", WHOLE, "addmv_impl_cuda"),
    ("bmm baddbmm baddbmm_ _trilinear", WHOLE, "baddbmm_cuda"),
    ("dot vdot", WHOLE, "dot"),
    ("avg_pool2d max_pool2d_with_indices", WHOLE, "{}_out_cuda_frame"),
    ("avg_pool3d", WHOLE, "avg_pool3d_out_cuda"),
    ("max_pool3d_with_indices", WHOLE, "{}_out_frame"),
    ("native_dropout_backward", WHOLE, "masked_scale"),
    ("scatter_reduce scatter_reduce_", BOOL, "cuda_scatter_gather_base_kernel_func"),
    ("igamma igamma_ igammac igammac_", HALVES + BRAINS, "{}_cuda"),
    ("histc", BRAINS, "histc"),
    ("linalg_vector_norm", (torch.complex32,), "norm_kernel_cuda"),
    ("upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d", BYTES, "{}_out_frame"),
    ("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", BYTES, "upsample_gen2d_aa_out_cuda"),
]
if torch.__version__ < "2.14":
    NOT_IMPLEMENTED.append(("angle", HALVES + BRAINS, "angle_cuda"))
# {operation: {dtype: what is said}}; but for the macro AT_DISPATCH, cudnn/Descriptors.cpp and SummaryOps.cu say it
DTYPE_ERRORS: dict[str, dict[torch.dtype, str]] = {
    "convolution": dict.fromkeys(WHOLE, "getCudnnDataTypeFromScalarType() not supported for {}"),
    "histc": dict.fromkeys(HALVES, "{}Tensor is not supported"),
}
for names, dtypes, kernel in NOT_IMPLEMENTED:
    for name in names.split():
        text = f"\"{kernel.format(name.removesuffix('_'))}\" not implemented for '{{}}'"
        DTYPE_ERRORS.setdefault(name, {}).update(dict.fromkeys(dtypes, text))
CPU_ONLY = set("histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors".split())


def check_dtype(name: str, x: Tensor) -> None:
    """Raise what CUDA says if its kernel for the operation `name` doesn't take the dtype of `x`."""
    text = DTYPE_ERRORS[name].get(x.dtype)
    if text is not None:
        kind = x.type().rpartition(".")[2].removesuffix("Tensor")
        raise (NotImplementedError if "not implemented" in text else RuntimeError)(text.format(kind))
