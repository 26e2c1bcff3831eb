"""torch.autocast('cuda') on virtual GPUs.

C++ takes virtual tensors for CPU tensors, so what runs is the CPU's autocast, with CUDA's lists of operations added.
One difference is left: matrix products of tensors that really are on the CPU are cast too; on real GPUs they are not.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from virtual_gpus.compat import C_nn, DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard, OpOverload
from virtual_gpus.ops.native_functions import named_arguments
from virtual_gpus.ops.normalization import HALF
from virtual_gpus.patches.patch import replaces
from virtual_gpus.state import current
from virtual_gpus.tensors.tensor import VirtualTensor
from virtual_gpus.tree import tensors_in

# The lists of torch/include/ATen/autocast_mode.h, without what the CPU's autocast does as well
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm norm.Scalar "
    "norm.ScalarOpt_dim frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp "
    "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa".split()
)
INTO_FLOAT32 = (  # whose kernels take half precision and make float32 of it, where the caller names no other type
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList".split()
)
LOWER = ["addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot"]
PROMOTED = (  # to the widest type among the arguments
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
)
UNTOUCHED = ["cat", "stack"]  # by CUDA's; the CPU's does with them what they do by themselves
FLOAT32_ON_CPU = ["prod", "prod.dim_int", "grid_sampler"]  # where the CPU's differs
BANNED = """torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.
Many models use a sigmoid layer right before the binary cross entropy layer.
In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits
or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are
safe to autocast."""
KEYS = DispatchKeySet(DispatchKey.AutocastCPU)


@replaces(torch.amp.autocast_mode)
def is_autocast_available(original, device):
    return device == "cuda" or original(device)


@replaces(torch.amp.autocast, "__enter__")
def enter(original, self):
    original(self)
    if self.device == "cuda":
        self.cpu_before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        torch.set_autocast_enabled("cpu", self._enabled)
        torch.set_autocast_dtype("cpu", self.fast_dtype)
    return self


@replaces(torch.amp.autocast, "__exit__")
def leave(original, self, *exc):
    if self.device == "cuda":
        enabled, dtype = self.cpu_before
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
    return original(self, *exc)


@replaces(torch.amp.GradScaler)
def _maybe_opt_step(original, self, optimizer, optimizer_state, *args, **kwargs):
    """It looks whether a gradient has overflown; a dry run can't know, and takes none for such."""
    if current().rendezvous is None:
        return original(self, optimizer, optimizer_state, *args, **kwargs)
    for found_inf in optimizer_state["found_inf_per_device"].values():
        found_inf.item()  # for which the host waits
    return optimizer.step(*args, **kwargs)


@replaces(C_nn)
def binary_cross_entropy(original, input, *args):
    """Under F.binary_cross_entropy."""
    if isinstance(input, VirtualTensor) and torch.is_autocast_enabled("cuda"):
        raise RuntimeError(BANNED)
    return original(input, *args)


def register_autocast(stack: contextlib.ExitStack) -> None:
    """Add CUDA's lists to the CPU's autocast; `stack` undoes it."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    stack.callback(library._destroy)
    lists = [
        (INTO_FLOAT32, into_float32),
        (FLOAT32, casting(lambda args: torch.float32)),
        (LOWER, casting(lambda args: torch.get_autocast_dtype("cpu"))),
        (PROMOTED, casting(promoted_type)),
        (UNTOUCHED, lambda operation, args, kwargs: operation(*args, **kwargs)),
    ]
    kernels = {name: kernel_of(name, on_gpu) for names, on_gpu in lists for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # of overridden ones, in 2.10 to 2.13
        for name, kernel in {**kernels, "cross_entropy_loss": cross_entropy_loss}.items():
            library.impl(name, kernel)


def kernel_of(name: str, on_gpu: Callable[[OpOverload, Sequence, dict], Any]) -> Callable:
    """The operation `name` under autocast: on_gpu(operation, args, kwargs), or what the CPU's makes of it."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args, **kwargs):
        with ExcludeDispatchKeyGuard(KEYS):
            if torch.is_autocast_enabled("cuda"):
                return on_gpu(operation, args, kwargs)
            return operation(*(widened(args) if name in FLOAT32_ON_CPU else args), **kwargs)

    return kernel


def casting(dtype_of: Callable[[Sequence], torch.dtype]) -> Callable[[OpOverload, Sequence, dict], Any]:
    """Calls an operation with its arguments cast to dtype_of(args)."""

    def call(operation, args, kwargs):
        dtype = dtype_of(args)
        return operation(*(cast(a, dtype) for a in args), **kwargs)

    return call


def into_float32(operation: OpOverload, args: Sequence, kwargs: dict) -> Any:
    """Calls one of INTO_FLOAT32."""
    given, x = named_arguments(operation, args, kwargs), args[0]
    if given.get("dtype") is not None or not eligible(x):
        return operation(*args, **kwargs)
    fused = {"softmax": torch.ops.aten._softmax, "log_softmax": torch.ops.aten._log_softmax}
    if (name := operation.overloadpacket.__name__) in fused and x.dtype != torch.float32:
        return fused[name](x, given["dim"], True)  # in C++ for tensors on a CPU, x would be copied first
    return operation(**given | {"dtype": torch.float32})


def promoted_type(args: Sequence) -> torch.dtype:
    """What PROMOTED operations compute in. (torch/include/ATen/autocast_mode.h, prioritize)"""
    lower = widest = torch.get_autocast_dtype("cuda")
    for tensor in filter(eligible, tensors_in(args)):
        if torch.float32 in (widest, tensor.dtype):
            widest = torch.float32
        elif tensor.dtype != lower:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return widest


def widened(args: Sequence) -> list:
    """The arguments with half precision in float32, where the CPU's own autocast makes that of them."""
    return [a.float() if isinstance(a, torch.Tensor) and a.dtype in HALF else a for a in args]


def cross_entropy_loss(input, *args, **kwargs):
    """The CPU's autocast lets it compute in float32; CUDA's takes no notice of it, only of what it is made of."""
    operation = torch.ops.aten.cross_entropy_loss.default
    if torch.is_autocast_enabled("cuda") and isinstance(input, VirtualTensor):
        return operation._op_dk(DispatchKey.CompositeImplicitAutograd, input, *args, **kwargs)
    with ExcludeDispatchKeyGuard(KEYS):
        return operation(*widened((input, *args)), **kwargs)


def eligible(value: Any) -> bool:
    """Whether CUDA's autocast would cast it: floating-point tensors on a virtual GPU, but for those in float64."""
    return isinstance(value, VirtualTensor) and value.is_floating_point() and value.dtype != torch.float64


def cast(value: Any, dtype: torch.dtype) -> Any:
    """An argument as it is when autocast has done with it."""
    if isinstance(value, (list, tuple)):
        return type(value)(cast(v, dtype) for v in value)
    return value.to(dtype) if eligible(value) else value
