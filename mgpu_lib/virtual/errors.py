"""PyTorch's own words for what goes wrong on real GPUs."""

import functools
import re
import weakref
from pathlib import Path

import torch

from mgpu_lib.virtual.nests import tensors_in
from mgpu_lib.virtual.rules import STRICT
from mgpu_lib.virtual.running import current
from mgpu_lib.virtual.unknown import where_called

GENERATORS = weakref.WeakValueDictionary()  # generators of virtual GPUs, by address: C++ hands out new Python objects
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Where PyTorch's kernels on GPUs have other names than the operations that virtual tensors see.
KERNELS = {
    "convolution": "_cudnn_convolution",
    "embedding": "_index_select",
    "stack": "cat",
}
# Pointwise inside: like pointwise operations, they don't say which argument is elsewhere.
ITERATED = set("mse_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits allclose dist".split())
ARGUMENTS = {
    ("embedding", "indices"): "index",
    ("embedding", "weight"): "self",
    ("convolution", "input"): "self",
}


def no_values(what):
    if current() is not None and current().meeting is not None:
        return RuntimeError(
            f"a dry run has shapes and no values: {what} needs some, at {where_called()}. Leave it out of the step; a "
            "number that is only printed can be read with .item()"
        )
    return RuntimeError(
        f'{what}: there are no values here, these virtual GPUs were started with backing="meta" '
        '(shapes only). Use backing="cpu" for values.'
    )


def bad_fork():
    return RuntimeError(
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
        "use the 'spawn' start method"
    )


def no_addresses():
    return RuntimeError(
        "a virtual GPU has no addresses: its tensors can't be handed over as raw pointers "
        "(DLPack, __cuda_array_interface__). Copy to the CPU first."
    )


def cuda_only(func):
    return NotImplementedError(
        f"{func} is one of CUDA's own operations, and virtual GPUs don't have it. Call what PyTorch documents instead "
        "(F.scaled_dot_product_attention, F.dropout and so on), which chooses such an operation by itself, or use a "
        "real GPU."
    )


def not_compiled(name):
    return NotImplementedError(
        f"{name} takes a function and compiles it, and virtual GPUs don't compile. Use operations that take tensors "
        "(for attention, F.scaled_dot_product_attention with a mask), or a real GPU."
    )


def no_data():
    return NotImplementedError("Cannot copy out of meta tensor; no data!")


def not_numpy(device):
    return TypeError(
        f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


def check_devices(func, args, kwargs, gpu, misplaced):
    """Raise PyTorch's own error for `misplaced` tensors, which are not on `gpu`, unless the operation takes them.

    Returns those that it copies to `gpu`: it hands over scalars with the call, and copies indices.
    """
    misplaced = [tensor for tensor in misplaced if not is_scalar_operand(func, args, kwargs, tensor)]
    if not misplaced:
        return []
    name = func.overloadpacket.__name__
    if name in INDEXING:
        check_indices(args[0], args[1], args[2:3])
        return misplaced
    if (torch.Tag.pointwise in func.tags and name != "equal") or name in ITERATED:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{gpu.device} and {misplaced[0].device}!"
        )
    given = [*zip((a.name for a in func._schema.arguments), args, strict=False), *kwargs.items()]
    named = [(argument, tensor) for argument, value in given for tensor in tensors_in([value])]
    common = named[0][1].device
    argument, other = next((n, t) for n, t in named if t.device != common)
    if name == "convolution" and "cpu" in (common.type, other.device.type):
        raise RuntimeError(different_types(*args[:3]))
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but got {ARGUMENTS.get((name, argument), argument)} is on "
        f"{other.device}, different from other tensors on {common} (when checking argument in method "
        f"{wrapper(func)})"
    )


def is_scalar_operand(func, args, kwargs, tensor):
    """Whether `tensor` is a scalar on the CPU that this operation takes; it never writes a GPU's result into one."""
    if tensor.dim() or tensor.device.type != "cpu" or func.overloadpacket.__name__ in STRICT:
        return False
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return not any(tensor is out for name in written for out in tensors_in([given.get(name)]))


def check_indices(indexed, indices, values):
    """Indices may lie on the CPU, or where the indexed tensor lies; values only there."""
    if any(t.device.type != "cpu" and t.device != indexed.device for t in tensors_in(indices)):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({indexed.device})"
        )
    for value in values:
        if value.device != indexed.device and (value.dim() or value.device.type != "cpu"):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{indexed.device} and {value.device}!"
            )


def check_mask(tensor, mask, value):
    """What masked_fill says. (aten/src/ATen/native/cuda/Indexing.cu, masked_fill__cuda)"""
    if tensor.device.type == "cpu" and isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")
    if tensor.device != mask.device:
        raise RuntimeError(
            f"expected self and mask to be on the same device, but got mask on {mask.device} and self on "
            f"{tensor.device}"
        )


@functools.cache
def structured():
    """The operations that PyTorch generates the checks of in another way, by its own list."""
    path = Path(torch.__file__).parents[1] / "torchgen/packaged/ATen/native/native_functions.yaml"
    entries = re.findall(r"^- func: ([\w.]+)\(.*\n((?:[ #].*\n)*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for name, options in entries if "\n  structured" in "\n" + options}


def wrapper(func):
    """The function around CUDA's kernel, as PyTorch names it where it checks devices."""
    name, overload = func.overloadpacket.__name__, func._overloadname.replace("default", "")
    if name in KERNELS:
        return f"wrapper_CUDA_{KERNELS[name]}"
    if func._schema.name.split("::")[1] + (overload and f".{overload}") in structured():
        return f"wrapper_CUDA_{name}" + (overload and f"_{overload}")
    return f"wrapper_CUDA_{overload}_{name}"


def different_types(X, weight, bias):
    """What convolution says about its input and its weights, one of them on the CPU."""
    name, other = ("weight", weight) if weight.type() != X.type() else ("bias", bias)
    onednn = " or input should be a MKLDNN tensor and weight is a dense tensor" if X.is_cpu and len(X) > 1 else ""
    return f"Input type ({X.type()}) and {name} type ({other.type()}) should be the same{onednn}"


def check_recurrent(X, hidden, weights):
    """What LSTM, GRU and RNN say, unless all is where the input is. (aten/src/ATen/native/RNN.h, check_attributes)"""
    for name, tensors in (("hidden", tensors_in([hidden])), ("parameter", weights)):
        for tensor in tensors:
            if tensor.device != X.device:
                raise RuntimeError(
                    f"Input and {name} tensors are not at the same device, found input tensor at "
                    f"{X.device} and {name} tensor at {tensor.device}"
                )


def check_lengths(lengths):
    """The lengths of sequences must be on the CPU; the words are those of PyTorch's PackedSequence.cpp."""
    if lengths.device.type != "cpu":
        kind = lengths.type().rpartition(".")[2].removesuffix("Tensor")
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} {kind} tensor"
        )


def check_query(query, key, value):
    """What attention says to three devices (transformers/attention.cpp, validate_sdpa_input); types come first."""
    if query.dtype == key.dtype == value.dtype and not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )


def check_generator(generator, gpu):
    """PyTorch's error unless `generator` belongs to `gpu` (None: the CPU)."""
    owner = getattr(GENERATORS.get(generator._cdata), "gpu", None)
    if owner is not gpu:
        wanted, found = (("cpu" if g is None else "cuda") for g in (gpu, owner))
        if wanted != found:
            raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")
        raise RuntimeError(f"Expected a '{gpu.device}' generator device but found '{owner.device}'")
