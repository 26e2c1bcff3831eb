"""An index out of range, and whatever else CUDA's kernels find out while they run: a device-side assert.

The host has gone on by then. It hears of it at the next synchronization, and from then on no GPU of the process works
any more. Until then the kernel's result is zeros here. With CUDA_LAUNCH_BLOCKING=1 the host hears of it at once.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from virtual_gpus.compat import Base, OpOverload, tree_map_only
from virtual_gpus.frames import program_line
from virtual_gpus.tree import tensors_in

if TYPE_CHECKING:
    from virtual_gpus.machine import Machine

# Where PyTorch's sources for CUDA have CUDA_KERNEL_ASSERT, and its CPU kernels an error.
ASSERTING = set(
    "index index_put index_put_ _index_put_impl_ index_select index_add index_add_ index_copy index_copy_ index_fill "
    "index_fill_ gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ take put put_ "
    "embedding _embedding_bag _embedding_bag_forward_only nll_loss_forward nll_loss2d_forward one_hot bernoulli "
    "bernoulli_ binary_cross_entropy multi_margin_loss".split()
)
WORDS = re.compile(  # the CPU's for what CUDA's kernels find out; what it checks on the host has others
    r"index -?\d+ is out of bounds|index out of range in self|Target -?\d+ is out of bounds|out of range: tried to"
    r"|Index \d+ of input takes value|Class values must be|Expected p_in|all elements of input should be between"
    r"|target out of range"
)


def is_assert(func: OpOverload | Callable, error: Exception) -> bool:
    """Whether CUDA's kernel for `func` would have asserted where the CPU's raised `error`."""
    return getattr(func, "overloadpacket", func).__name__ in ASSERTING and WORDS.match(str(error)) is not None


def device_side_assert(what: str) -> torch.AcceleratorError:
    """CUDA's words, and `what` it was in ours."""
    return torch.AcceleratorError(
        "CUDA error: device-side assert triggered\n"
        "Search for `cudaErrorAssert' in "
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        f"(virtual GPU: it was {what}. A real one doesn't say so: run the program with CUDA_LAUNCH_BLOCKING=1, or on "
        "the CPU, to be stopped there.)\n"
    )


def record_assert(machine: "Machine", func: Callable, args: Sequence, kwargs: dict, error: Exception) -> Any:
    """Note it, and return zeros of the right shapes; raise at once if the host waits for every kernel."""
    name = getattr(func, "overloadpacket", func).__name__
    machine.asserted = f"{name} at {program_line()}, {str(error).splitlines()[0].rstrip('.')}"
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        machine.raise_assert()
    if hasattr(func, "_schema") and func._schema.is_mutable:
        return kwargs.get("out", args[0])
    try:
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda x: Base.to(x, "meta"), (tuple(args), kwargs))
        made = func(*meta_args, **meta_kwargs)
    except (RuntimeError, NotImplementedError):  # its shape depends on values
        machine.raise_assert()
    device = next(tensors_in((args, kwargs))).device
    zeros = [Base.new_zeros(torch.empty(0, device=device), t.shape, dtype=t.dtype) for t in tensors_in([made])]
    return zeros[0] if isinstance(made, Tensor) else tuple(zeros)
