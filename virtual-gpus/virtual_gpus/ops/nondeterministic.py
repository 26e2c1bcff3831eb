"""What torch.use_deterministic_algorithms(True) forbids on CUDA: kernels that add in no certain order."""

from collections.abc import Sequence

import torch

from virtual_gpus.compat import OpOverload, alert_not_deterministic
from virtual_gpus.ops.native_functions import named_arguments

# {operation: what CUDA calls its kernel}: alertNotDeterministic in aten/src/ATen/native/cuda
NONDETERMINISTIC = {
    **{
        name: f"{name.removeprefix('_')}_cuda"
        for name in "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward "
        "adaptive_max_pool3d_backward avg_pool3d_backward fractional_max_pool2d_backward "
        "fractional_max_pool3d_backward grid_sampler_2d_backward grid_sampler_3d_backward index_reduce "
        "max_pool3d_with_indices_backward".split()
    },
    **{
        name: f"{name.removeprefix('_')}_out_cuda"
        for name in "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward reflection_pad1d_backward "
        "reflection_pad3d_backward upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward "
        "upsample_trilinear3d_backward".split()
    },
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "bincount": "_bincount_cuda",
    "histc": "_histc_cuda with floating point input",
    "index_reduce_": "index_reduce_cuda",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    **dict.fromkeys(("median", "nanmedian"), "median CUDA with indices output"),
    **dict.fromkeys(("put", "put_"), "put_"),
    **dict.fromkeys(("scatter", "scatter_"), "scatter_reduce_cuda_kernel"),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), "scatter_reduce_cuda_prod_"),
}


def check_deterministic(func: OpOverload, args: Sequence, kwargs: dict) -> None:
    """Raise or warn as PyTorch does if only deterministic algorithms are allowed, and CUDA has none for `func`."""
    if torch.are_deterministic_algorithms_enabled():
        name = func.overloadpacket.__name__
        if depends_on_order(name.removesuffix("_"), named_arguments(func, args, kwargs)):
            alert_not_deterministic(NONDETERMINISTIC[name])


def depends_on_order(name: str, given: dict) -> bool:
    """Whether an operation with these arguments, {name: value}, adds in an order that may differ."""
    if name in ("median", "nanmedian"):
        return "dim" in given
    if name == "bincount":
        return given.get("weights") is not None
    if name == "histc":
        return given["self"].is_floating_point()
    if name == "scatter":
        return "reduce" in given
    return name != "scatter_reduce" or given["reduce"] == "prod"
