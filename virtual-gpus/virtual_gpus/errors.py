"""PyTorch's own words for what goes wrong on real GPUs."""

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from virtual_gpus.compat import Generator, OpOverload
from virtual_gpus.frames import program_line
from virtual_gpus.ops.native_functions import is_iterated, is_structured, named_arguments, takes_scalar
from virtual_gpus.state import current
from virtual_gpus.tree import tensors_in

if TYPE_CHECKING:
    from virtual_gpus.gpu import VirtualGPU
    from virtual_gpus.machine import Machine

GENERATORS = weakref.WeakValueDictionary()  # generators of virtual GPUs, by address: C++ hands out new Python objects
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
CUDA_NAMES = {"convolution": "_cudnn_convolution", "stack": "cat"}  # of kernels that aren't called as the operation
NO_NUMBER = {  # aten/src/ATen/native/PointwiseOps.cpp
    "self": "CPU Scalar support for self argument is not supported when calling addcmul on CUDA tensors.",
    "tensor1": "CPU Scalar support for tensor1 argument is not supported when calling addcmul on CUDA tensors. "
    "However, CPU Scalar support for tensor2 is supported, please swap your tensor1 and tensor2 terms.",
}


def no_values(what: str) -> RuntimeError:
    """`what` needs values, and these are meta tensors."""
    if current() is not None and current().rendezvous is not None:
        return RuntimeError(
            f"a dry run has shapes and no values: {what} needs some, at {program_line()}. Leave it out of the step; a "
            "number that is only printed can be read with .item()"
        )
    return RuntimeError(
        f'{what}: there are no values here, these virtual GPUs were started with backing="meta" '
        '(shapes only). Use backing="cpu" for values.'
    )


def bad_fork() -> RuntimeError:
    return RuntimeError(
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
        "use the 'spawn' start method"
    )


def no_addresses() -> RuntimeError:
    return RuntimeError(
        "a virtual GPU has no addresses: its tensors can't be handed over as raw pointers "
        "(DLPack, __cuda_array_interface__). Copy to the CPU first."
    )


def no_cpu_kernel(func: OpOverload) -> NotImplementedError:
    return NotImplementedError(
        f"{func} has no kernel for the CPU, by whose kernels virtual GPUs compute. If PyTorch documents a function "
        "that chooses such operations by itself, as F.scaled_dot_product_attention and F.dropout do, call that. Or "
        f'give it a kernel in your program, a function of CPU tensors: @torch.library.impl("{func.name()}", "CPU"). '
        "Or use a real GPU."
    )


CAPTURE_ERRORS = {  # {number: (its name, what cudaGetErrorString says)}
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    907: ("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
}


def capture_error(number: int) -> torch.AcceleratorError:
    """What CUDA says of something that a capture of a graph doesn't allow."""
    name, words = CAPTURE_ERRORS[number]
    return torch.AcceleratorError(
        f"CUDA error: {words}\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information.\n"
    )


def check_waiting(machine: "Machine") -> None:
    """What torch.cuda.set_sync_debug_mode asked for, where the host waits. (c10/cuda/CUDAFunctions.cpp)"""
    if machine.sync_debug == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
    if machine.sync_debug == 1:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)


def check_gradient(grad: Tensor | None, tensor: Tensor) -> None:
    """What p.grad = … says. (torch/csrc/autograd/python_variable.cpp)"""
    if grad is None or grad.device == tensor.device:
        return
    what, pair = "with device type", (grad.device.type, tensor.device.type)
    if pair[0] == pair[1]:
        what, pair = "located on device with index", (grad.device.index, tensor.device.index)
    raise RuntimeError(
        f"attempting to assign a gradient {what} '{pair[0]}' to a tensor {what} '{pair[1]}'. Please ensure that the "
        "gradient and the tensor are on the same device"
    )


def check_devices(
    func: OpOverload, args: tuple, kwargs: dict, gpu: "VirtualGPU", elsewhere: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Raise PyTorch's own error for the tensors `elsewhere`, which are not on `gpu`, unless the operation takes them.

    Returns those that it copies to `gpu`: it hands over scalars with the call, and copies indices.
    """
    elsewhere = [tensor for tensor in elsewhere if not is_scalar_operand(func, args, kwargs, tensor)]
    if not elsewhere:
        return []
    name, by_argument = func.overloadpacket.__name__, tensors_by_argument(func, args, kwargs)
    if name in INDEXING:
        check_indices(args[0], args[1], args[2:3])
        return elsewhere
    if name == "block_diag":
        raise RuntimeError(scattered_blocks(*args))
    if is_iterated(func):
        argument = next(argument for argument, tensor in by_argument if tensor is elsewhere[0])
        if name in ("addcmul", "addcmul_") and argument in NO_NUMBER and is_cpu_scalar(elsewhere[0]):
            raise RuntimeError(NO_NUMBER[argument])
        raise two_devices(gpu.device, elsewhere[0].device)
    (_, first), *others = by_argument
    argument, other = next((argument, tensor) for argument, tensor in others if tensor.device != first.device)
    if name == "convolution" and "cpu" in (first.device.type, other.device.type):
        X, weight = args[:2]
        # of one image on the CPU: oneDNN leaves it to the kernels that CUDA has, too
        if not (X.is_cpu and len(X) == 1 and X.dim() < 5 and not weight.is_cpu):
            raise RuntimeError(different_types(*args[:3]))
    if name == "convolution" and argument == "input":
        argument = "self"
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but got {argument} is on {other.device}, different from other "
        f"tensors on {first.device} (when checking argument in method {wrapper(func, args)})"
    )


def two_devices(first: torch.device, second: torch.device) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    )


def tensors_by_argument(func: OpOverload, args: tuple, kwargs: dict) -> list[tuple[str, Tensor]]:
    """(the argument's name, tensor) for all tensors that an operation is given."""
    return [(name, t) for name, value in named_arguments(func, args, kwargs).items() for t in tensors_in([value])]


def is_cpu_scalar(tensor: Tensor) -> bool:
    return not tensor.dim() and tensor.device.type == "cpu"


def is_scalar_operand(func: OpOverload, args: tuple, kwargs: dict, tensor: Tensor) -> bool:
    """Whether `tensor` is a scalar on the CPU that this operation takes; it never writes a GPU's result into one."""
    if not is_cpu_scalar(tensor):
        return False
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    places = [argument for argument, given in tensors_by_argument(func, args, kwargs) if given is tensor]
    return all(takes_scalar(func, argument) and argument not in written for argument in places)


def check_indices(indexed: Tensor, indices: Sequence, values: Sequence[Tensor]) -> None:
    """Indices may lie on the CPU, or where the indexed tensor lies; values only there."""
    if any(t.device.type != "cpu" and t.device != indexed.device for t in tensors_in(indices)):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({indexed.device})"
        )
    for value in values:
        if value.device != indexed.device and (value.dim() or value.device.type != "cpu"):
            raise two_devices(indexed.device, value.device)


def check_mask(tensor: Tensor, mask: Tensor, value: Any) -> None:
    """What masked_fill says. (aten/src/ATen/native/cuda/Indexing.cu, masked_fill__cuda)"""
    if tensor.device.type == "cpu" and isinstance(value, Tensor) and value.device.type != "cpu":
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")
    if tensor.device != mask.device:
        raise RuntimeError(
            f"expected self and mask to be on the same device, but got mask on {mask.device} and self on "
            f"{tensor.device}"
        )


def wrapper(func: OpOverload, args: tuple) -> str:
    """The function around CUDA's kernel, as PyTorch names it where it checks devices."""
    name, overload = func.overloadpacket.__name__, func._overloadname.replace("default", "")
    if name == "convolution" and args[0].is_cpu:
        return "wrapper_CUDA_slow_conv_transpose2d" if args[6] else "wrapper_CUDA___slow_conv2d_forward"
    if name in CUDA_NAMES:
        return f"wrapper_CUDA_{CUDA_NAMES[name]}"
    if is_structured(func):
        return f"wrapper_CUDA_{name}" + (overload and f"_{overload}")
    writes = any(a.is_out for a in func._schema.arguments)
    return f"wrapper_CUDA_{overload}_{name}" + ("_out" if writes else "")


def scattered_blocks(blocks: Sequence[Tensor]) -> str:
    """What block_diag says. (aten/src/ATen/native/TensorShape.cpp)"""
    i, device = next((i, block.device) for i, block in enumerate(blocks) if block.device != blocks[0].device)
    return (
        "torch.block_diag: input tensors must all be on the same device. Input 0 is on device "
        f"{blocks[0].device} and input {i} is on device {device}"
    )


def different_types(X: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """What convolution says about its input and its weights, one of them on the CPU."""
    name, other = ("weight", weight) if weight.type() != X.type() else ("bias", bias)
    onednn = " or input should be a MKLDNN tensor and weight is a dense tensor" if X.is_cpu and len(X) > 1 else ""
    return f"Input type ({X.type()}) and {name} type ({other.type()}) should be the same{onednn}"


def check_recurrent(X: Tensor, hidden: Any, weights: Sequence[Tensor]) -> None:
    """What LSTM, GRU and RNN say, unless all is where the input is. (aten/src/ATen/native/RNN.h, check_attributes)"""
    for name, tensors in (("hidden", tensors_in([hidden])), ("parameter", weights)):
        for tensor in tensors:
            if tensor.device != X.device:
                raise RuntimeError(
                    f"Input and {name} tensors are not at the same device, found input tensor at "
                    f"{X.device} and {name} tensor at {tensor.device}"
                )


def check_lengths(lengths: Tensor) -> None:
    """The lengths of sequences must be on the CPU; the words are those of PyTorch's PackedSequence.cpp."""
    if lengths.device.type != "cpu":
        kind = lengths.type().rpartition(".")[2].removesuffix("Tensor")
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} {kind} tensor"
        )


def check_query(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What attention says to three devices (transformers/attention.cpp, validate_sdpa_input); types come first."""
    if query.dtype == key.dtype == value.dtype and not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )


def check_generator(generator: Generator, gpu: "VirtualGPU | None") -> None:
    """PyTorch's error unless `generator` belongs to `gpu` (None: the CPU)."""
    owner = getattr(GENERATORS.get(generator._cdata), "gpu", None)
    if owner is not gpu:
        expected, actual = (("cpu" if g is None else "cuda") for g in (gpu, owner))
        if expected != actual:
            raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{actual}'")
        raise RuntimeError(f"Expected a '{gpu.device}' generator device but found '{owner.device}'")
