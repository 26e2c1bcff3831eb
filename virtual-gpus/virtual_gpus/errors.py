"""PyTorch's own words for what goes wrong on real GPUs."""

import warnings
import weakref

import torch

from virtual_gpus.frames import program_line
from virtual_gpus.ops.native_functions import is_iterated, is_structured, takes_scalar
from virtual_gpus.state import current
from virtual_gpus.tree import tensors_in

GENERATORS = weakref.WeakValueDictionary()  # generators of virtual GPUs, by address: C++ hands out new Python objects
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Where PyTorch's kernels on GPUs have other names than the operations that virtual tensors see.
KERNELS = {
    "convolution": "_cudnn_convolution",
    "stack": "cat",
}
NO_NUMBER = {  # aten/src/ATen/native/PointwiseOps.cpp
    "self": "CPU Scalar support for self argument is not supported when calling addcmul on CUDA tensors.",
    "tensor1": "CPU Scalar support for tensor1 argument is not supported when calling addcmul on CUDA tensors. "
    "However, CPU Scalar support for tensor2 is supported, please swap your tensor1 and tensor2 terms.",
}
ARGUMENTS = {
    ("convolution", "input"): "self",
}


def no_values(what):
    if current() is not None and current().rendezvous is not None:
        return RuntimeError(
            f"a dry run has shapes and no values: {what} needs some, at {program_line()}. Leave it out of the step; a "
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


def check_waiting(machine):
    """What torch.cuda.set_sync_debug_mode asked for, where the host waits. (c10/cuda/CUDAFunctions.cpp)"""
    if machine.sync_debug == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
    if machine.sync_debug == 1:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)


def misplaced_gradient(given, wanted):
    """What p.grad = … says. (torch/csrc/autograd/python_variable.cpp)"""
    what, pair = "with device type", (given.type, wanted.type)
    if given.type == wanted.type:
        what, pair = "located on device with index", (given.index, wanted.index)
    return (
        f"attempting to assign a gradient {what} '{pair[0]}' to a tensor {what} '{pair[1]}'. Please ensure that the "
        "gradient and the tensor are on the same device"
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
    if name == "block_diag":
        raise RuntimeError(scattered_blocks(*args))
    if is_iterated(func):
        argument = next(n for n, tensor in named(func, args, kwargs) if tensor is misplaced[0])
        if name in ("addcmul", "addcmul_") and argument in NO_NUMBER and is_number(misplaced[0]):
            raise RuntimeError(NO_NUMBER[argument])
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{gpu.device} and {misplaced[0].device}!"
        )
    (_, first), *others = named(func, args, kwargs)
    argument, other = next((n, t) for n, t in others if t.device != first.device)
    if name == "convolution" and "cpu" in (first.device.type, other.device.type) and not is_one_image(*args[:2]):
        raise RuntimeError(different_types(*args[:3]))
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but got {ARGUMENTS.get((name, argument), argument)} is on "
        f"{other.device}, different from other tensors on {first.device} (when checking argument in method "
        f"{wrapper(func, args)})"
    )


def named(func, args, kwargs):
    """(the argument's name, tensor) for all tensors that an operation is given."""
    given = [*zip((a.name for a in func._schema.arguments), args, strict=False), *kwargs.items()]
    return [(argument, tensor) for argument, value in given for tensor in tensors_in([value])]


def is_number(tensor):
    return not tensor.dim() and tensor.device.type == "cpu"


def is_scalar_operand(func, args, kwargs, tensor):
    """Whether `tensor` is a scalar on the CPU that this operation takes; it never writes a GPU's result into one."""
    if not is_number(tensor):
        return False
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    places = [argument for argument, given in named(func, args, kwargs) if given is tensor]
    return all(takes_scalar(func, argument) and argument not in written for argument in places)


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


def wrapper(func, args):
    """The function around CUDA's kernel, as PyTorch names it where it checks devices."""
    name, overload = func.overloadpacket.__name__, func._overloadname.replace("default", "")
    if name == "convolution" and args[0].is_cpu:
        return "wrapper_CUDA_slow_conv_transpose2d" if args[6] else "wrapper_CUDA___slow_conv2d_forward"
    if name in KERNELS:
        return f"wrapper_CUDA_{KERNELS[name]}"
    if is_structured(func):
        return f"wrapper_CUDA_{name}" + (overload and f"_{overload}")
    writes = any(a.is_out for a in func._schema.arguments)
    return f"wrapper_CUDA_{overload}_{name}" + ("_out" if writes else "")


def is_one_image(X, weight):
    """Whether a convolution is of one image on the CPU, which oneDNN leaves to the kernels that CUDA has, too."""
    return X.is_cpu and len(X) == 1 and X.dim() < 5 and not weight.is_cpu


def scattered_blocks(blocks):
    """What block_diag says. (aten/src/ATen/native/TensorShape.cpp)"""
    i, device = next((i, block.device) for i, block in enumerate(blocks) if block.device != blocks[0].device)
    return (
        "torch.block_diag: input tensors must all be on the same device. Input 0 is on device "
        f"{blocks[0].device} and input {i} is on device {device}"
    )


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
