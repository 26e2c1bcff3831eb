"""torch.autocast('cuda') on virtual GPUs.

C++ takes virtual tensors for CPU tensors, so what runs is the CPU's autocast, with CUDA's lists of operations added.
One difference is left: matrix products of tensors that really are on the CPU are cast too; on real GPUs they are not.
"""

import torch

from mgpu_lib.virtual.running import current
from mgpu_lib.virtual.tensor import VirtualTensor

# https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32" and "… to float16"
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm group_norm norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim "
    "nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss "
    "kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp prod "
    "prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm sum "
    "sum.dim_IntList".split()
)
LOWER = ["addmv", "addr", "mv", "prelu"]
BANNED = """torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.
Many models use a sigmoid layer right before the binary cross entropy layer.
In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits
or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are
safe to autocast."""
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def patches():
    """(owner, name, replacement), for patches.install."""
    yield torch.amp.autocast_mode, "is_autocast_available", lambda device: device == "cuda" or _is_available(device)
    yield torch.amp.autocast, "__enter__", enter
    yield torch.amp.autocast, "__exit__", leave
    yield torch._C._nn, "binary_cross_entropy", binary_cross_entropy
    yield torch.amp.GradScaler, "_maybe_opt_step", maybe_opt_step


_is_available = torch.amp.autocast_mode.is_autocast_available
_enter, _exit = torch.amp.autocast.__enter__, torch.amp.autocast.__exit__
_binary_cross_entropy = torch._C._nn.binary_cross_entropy
_maybe_opt_step = torch.amp.GradScaler._maybe_opt_step


def enter(self):
    _enter(self)
    if self.device == "cuda":
        self.cpu_before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        torch.set_autocast_enabled("cpu", self._enabled)
        torch.set_autocast_dtype("cpu", self.fast_dtype)
    return self


def leave(self, *exc):
    if self.device == "cuda":
        enabled, dtype = self.cpu_before
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
    return _exit(self, *exc)


def maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
    """GradScaler's. It looks whether a gradient has overflown; a dry run can't know, and takes none for such."""
    if current().meeting is None:
        return _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs)
    for found in optimizer_state["found_inf_per_device"].values():
        found.item()  # for which the host waits
    return optimizer.step(*args, **kwargs)


def binary_cross_entropy(input, *args):
    """Under F.binary_cross_entropy."""
    if isinstance(input, VirtualTensor) and torch.is_autocast_enabled("cuda"):
        raise RuntimeError(BANNED)
    return _binary_cross_entropy(input, *args)


def register_autocast(stack):
    """Add CUDA's lists to the CPU's autocast; `stack` undoes it."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    stack.callback(library._destroy)
    for names, wanted in ((FLOAT32, lambda: torch.float32), (LOWER, lambda: torch.get_autocast_dtype("cpu"))):
        for name in names:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                library.impl(name, casting(name, wanted))


def casting(name, wanted):
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            if torch.is_autocast_enabled("cuda"):
                args = [cast(a, wanted()) for a in args]
            return operation(*args, **kwargs)

    return kernel


def cast(value, dtype):
    """Floating-point tensors on a virtual GPU take the wanted type; double stays double, as in CUDA's autocast."""
    eligible = isinstance(value, VirtualTensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if eligible else value
