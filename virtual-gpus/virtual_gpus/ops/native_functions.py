"""native_functions.yaml, of which PyTorch's C++ is generated: who checks that an operation's tensors are on one device.

Where CUDA has a kernel, generated code around it checks all tensors (torchgen/dest/register_dispatch_key.py), unless
the file says that TensorIterator does, which takes a scalar from the CPU, too. Composite operations leave it to those
that they call.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from virtual_gpus.compat import OpOverload, dispatch_has_kernel_for_dispatch_key

# Of these TensorIterator takes fewer scalars from the CPU than of others: only for the arguments named here. (As an
# H200 says: losses, addcmul and lerp need their numbers in memory, the others make their output beside the first.)
SCALARS = {
    **dict.fromkeys("addcdiv smooth_l1_loss mse_loss binary_cross_entropy block_diag".split(), ()),
    **{"addcmul": ("tensor2",), "lerp": ("weight",), "index_fill": ("value",), "soft_margin_loss": ("target",)},
    **dict.fromkeys("logical_and logical_or logical_xor".split(), ("other",)),
    "clamp_min_": ("min",),  # CUDA takes none, but C++ makes one on the CPU under F.cosine_similarity
}
# Composite, but in C++, where what they call would make its outputs on the CPU: here they are one operation.
AS_ONE = set(
    "convolution index_put linspace logspace logical_and logical_or logical_xor soft_margin_loss block_diag "
    "linalg_pinv".split()
)


def named_arguments(func: OpOverload, args: Sequence, kwargs: dict) -> dict[str, Any]:
    """{name: value} of all arguments of `func`, in the schema's order; those that aren't given have their defaults."""
    schema = func._schema.arguments
    return {a.name: a.default_value for a in schema} | dict(zip((a.name for a in schema), args, strict=False)) | kwargs


@functools.cache
def options() -> dict[str, str]:
    """{operation: what the file says about it}."""
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    return dict(re.findall(r"^- func: ([\w.]+)\(.*\n((?:[ #].*\n)*)", path.read_text(encoding="utf-8"), re.MULTILINE))


def options_of(func: OpOverload) -> str:
    return options().get(func.name().removeprefix("aten::"), "")


def is_structured(func: OpOverload) -> bool:
    """Whether it is a structured kernel, whose meta function finds out the output's sizes."""
    return re.search(r"^  structured", options_of(func), re.MULTILINE) is not None


def is_iterated(func: OpOverload) -> bool:
    """Whether TensorIterator checks the devices."""
    return "device_check: NoCheck" in options_of(func) or func.overloadpacket.__name__ == "soft_margin_loss"


def is_checked(func: OpOverload) -> bool:
    """Whether all tensors have to be on one device, scalars, too."""
    kernel = is_structured(func) or has_cuda_kernel(func) or func.overloadpacket.__name__ == "convolution"
    return kernel and not is_iterated(func)


def takes_scalar(func: OpOverload, argument: str) -> bool:
    """Whether the `argument` of that name may be a scalar tensor on the CPU."""
    name = func.overloadpacket.__name__
    named = SCALARS.get(name, SCALARS.get(name.removesuffix("_")))
    return not is_checked(func) if named is None else argument in named


def has_cuda_kernel(func: OpOverload) -> bool:
    return re.search(r"^    (.*[ ,])?CUDA\b.*:", options_of(func), re.MULTILINE) is not None


def is_composite_explicit(func: OpOverload) -> bool:
    """Whether it is CompositeExplicitAutograd: one kernel for all devices, which calls other operations."""
    has_kernel = functools.partial(dispatch_has_kernel_for_dispatch_key, func.name())
    explicit = has_kernel("CompositeExplicitAutograd") or has_kernel("CompositeExplicitAutogradNonFunctional")
    own = has_kernel("CPU") or has_cuda_kernel(func) or func.overloadpacket.__name__ in AS_ONE
    return explicit and not own
