"""What an operation asks of a GPU: its kind, floating-point operations, bytes, kernels, and precision.

FLOPs come from PyTorch's own registry, bytes from the tensors. What a GPU takes for it stands in `costs`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtual_gpus.compat import OpOverload, OpOverloadPacket, get_fp32_precision
from virtual_gpus.tree import tensors_in

aten = torch.ops.aten


class Work(NamedTuple):
    """What one call of an operation asks of a GPU."""

    name: str  # the operation's, as in torch.ops.aten
    kind: str  # a key of rates.HOST
    flops: int = 0
    outputs: int = 0  # numbers that the arithmetic makes: they are divided among a GPU's multiprocessors
    nbytes: int = 0  # read from and written to the GPU's memory
    layout_nbytes: int = 0  # moved before and after it on tensor cores, which want channels last: see `layout_copies`
    layout_copies: int = 0  # how many tensors these are
    kernels: int = 1  # launched one after another; 0: nothing runs on the GPU
    tensors: int = 0  # in its lists, for the optimizers' foreach operations: the host looks at each
    precision: str = "fp32"  # of the arithmetic: "fp32", "tf32", "fp16" or "bf16"


NOTHING_RUNS = set(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _unsafe_view _reshape_alias lift_fresh "
    "_local_scalar_dense _sparse_coo_tensor_with_dims_and_tensors".split()
)
READS_VALUES = {"equal", "allclose", "_assert_async", "check_for_nan"}  # and returns no tensor
_KINDS = {
    "matmul": "mm addmm bmm baddbmm addmv mv dot _scaled_mm",
    "norm": "native_batch_norm native_batch_norm_backward _native_batch_norm_legit batch_norm_stats batch_norm_elemt "
    "batch_norm_backward_reduce batch_norm_backward_elemt",
    "pool": "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
    "layer_norm": "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward",
    "softmax": "_softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
    "reduce": "sum mean amax amin argmax argmin max min norm linalg_vector_norm var std cumsum sort topk all any "
    "_coalesce",
    "scatter": "embedding_dense_backward",
    "gather": "embedding index index_put_ index_select gather scatter_ scatter_add_ index_add_",
}
OP_KINDS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
WRITES_ONLY = set(
    "zero_ fill_ normal_ uniform_ bernoulli_ zeros ones full zeros_like ones_like full_like new_zeros new_ones "
    "new_full select_backward slice_backward".split()
)
LISTS = ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad")  # how operations begin that take lists of tensors
PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def work_of(func: OpOverload, args: Sequence, kwargs: dict | None, out: Any, tf32: tuple[bool, bool]) -> Work:
    """What calling `func` (an operation, or a function that makes a tensor) asks of a GPU; `out` is its result.

    `tf32`: whether FP32 convolutions, and whether FP32 matrix products, are done in TF32 (see `tf32_allowed`).
    """
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else func.__name__
    inputs, outputs = list(tensors_in((*args, *(kwargs or {}).values()))), list(tensors_in((out,)))
    if name in NOTHING_RUNS or touches_no_data(func) or not any(t.numel() for t in (*inputs, *outputs)):
        return Work(name, "view", kernels=0)
    kind, nbytes = kind_of(name, args), bytes_moved(name, args, inputs, outputs)
    if kind.startswith("conv"):
        backward, moved = name == "convolution_backward", layout_copies(name, args, inputs, outputs)
        return Work(
            name,
            kind,
            flops=flops(func, args, kwargs, out),
            # backward these are gradients of the input, or sums over the output
            outputs=max(args[0].numel(), args[1].numel()) if backward else out.numel(),
            nbytes=nbytes,
            layout_nbytes=2 * sum(map(stored, moved)),  # each is read and written
            layout_copies=len(moved),
            # one for each gradient, or one more for the bias
            kernels=max(1, sum(args[-1])) if backward else 1 + isinstance(args[2], Tensor),
            precision=precision(inputs[0].dtype, tf32[0]),
        )
    if kind in ("matmul", "attention"):
        return Work(
            name,
            kind,
            flops=flops(func, args, kwargs, out),
            outputs=outputs[0].numel(),
            nbytes=nbytes,
            kernels=min(1, outputs[0].numel()),  # none for no numbers
            precision=precision(args[1].dtype, tf32[1]),  # the first may be a bias, of another type
        )
    if name.startswith(LISTS):
        nbytes += sum(map(stored, written_in_place(func, args)))
        tensors = next(arg for arg in args if isinstance(arg, (list, tuple)))  # behind the base, in _foreach_pow
        # a kernel takes at most 64 tensors, and 320 chunks of 65,536 numbers
        kernels = max(-(-len(tensors) // 64), -(-sum(t.numel() for t in tensors) // (320 * 65536)))
        return Work(name, "foreach", nbytes=nbytes, kernels=kernels, tensors=len(tensors))
    return Work(name, kind, nbytes=nbytes)


def written_in_place(func: OpOverload, args: Sequence) -> Iterable[Tensor]:
    """The tensors that a foreach operation reads and changes. It returns nothing, so they aren't among its results."""
    if func.overloadpacket.__name__ in ("_foreach_copy_", "_foreach_zero_"):  # changed without being read
        return ()
    arguments = zip(func._schema.arguments, args, strict=False)
    changed = [(known.name, arg) for known, arg in arguments if known.alias_info and known.alias_info.is_write]
    # a fused optimizer changes gradients only where it undoes their scale
    return tensors_in(arg for name, arg in changed if name != "grads")


def touches_no_data(func: OpOverload) -> bool:
    """Whether `func` returns a view of its argument, makes it one in place, or only asks about its metadata."""
    if is_view(func):
        return True
    if not hasattr(func, "_schema"):
        return False
    asks = not func._schema.is_mutable and not any("Tensor" in str(r.type) for r in func._schema.returns)
    return torch.Tag.inplace_view in func.tags or (asks and func.overloadpacket.__name__ not in READS_VALUES)


def is_view(func: OpOverload) -> bool:
    """Whether what `func` returns is a view of its argument."""
    returns = func._schema.returns if hasattr(func, "_schema") else ()
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def kind_of(name: str, args: Sequence) -> str:
    """A key of rates.HOST."""
    if name == "convolution":
        return kind_of_convolution(args[1], args[3], args[5], args[8])
    if name == "convolution_backward":
        return kind_of_convolution(args[2], args[4], args[6], args[9])
    if "scaled_dot_product" in name:
        return "attention"
    return OP_KINDS.get(name, "pointwise")


def kind_of_convolution(W: Tensor, stride: list[int], dilation: list[int], groups: int) -> str:
    """W: (out channels, in channels / groups, *kernel). cuDNN has other algorithms for some: 1x1 convolutions are
    matrix products, 3x3 has Winograd's algorithm."""
    if groups > 1 and W.shape[1] < 16:
        return "conv_depthwise" if W.shape[1] == 1 else "conv_grouped"
    if W[0, 0].numel() == 1:
        return "conv1x1"
    return "conv3x3" if W.shape[2:] == (3, 3) and {*stride, *dilation} == {1} else "conv"


def precision(dtype: torch.dtype, tf32: bool) -> str:
    """Of a convolution's or a matrix product's arithmetic."""
    return PRECISIONS.get(dtype) or ("tf32" if tf32 and dtype == torch.float32 else "fp32")


def tf32_allowed() -> tuple[bool, bool]:
    """Whether convolutions, and whether matrix products, of FP32 tensors may use TF32: PyTorch's own switches."""
    return get_fp32_precision("cuda", "conv") == "tf32", get_fp32_precision("cuda", "matmul") == "tf32"


def flops(func: OpOverload, args: Sequence, kwargs: dict | None, out: Any) -> int:
    """By PyTorch's registry. A convolution's backward takes as many as its forward for each gradient that is wanted."""
    packet = func.overloadpacket
    if packet is aten.convolution_backward:
        grad, X, W, _, *options, mask = args
        return sum(mask[:2]) * registered_flops(aten.convolution, (X, W, None, *options), {}, grad)
    attention = "scaled_dot_product" in packet.__name__
    count = attention_flops(packet, args) if attention else registered_flops(packet, args, kwargs or {}, out)
    if count is None:
        return 2 * max(t.numel() for t in tensors_in(args))
    if hasattr(func, "share"):  # flex_attention, which leaves out blocks
        return round(count * func.share)
    return count // 2 if is_causal(func, args, kwargs) else count  # causal: the kernels leave out what is in the future


def attention_flops(packet: OpOverloadPacket, args: Sequence) -> int:
    """Two matrix products; backwards five, of which one is recomputed. As in the registry from PyTorch 2.15 on, which
    has not all of them before."""
    backward = packet.__name__.endswith("backward")
    # query: (*batch, rows, width), key: (*batch, columns, width), value: (*batch, columns, depth)
    (*batch, rows, width), (*_, columns, _), (*_, depth) = (x.shape for x in args[backward : 3 + backward])
    products = 3 * width + 2 * depth if backward else width + depth
    return 2 * math.prod(batch) * rows * columns * products


def registered_flops(packet: OpOverloadPacket, args: Sequence, kwargs: dict, out: Any) -> int | None:
    """What the registry's formula says, or None without one. It is given shapes here: what PyTorch has around the
    formulas to find them leaves cycles behind, which only Python's garbage collector takes away."""
    from torch.utils.flop_counter import flop_registry  # imports much: only when it is needed

    if packet in (aten.addmm, aten.baddbmm):  # those two call the next one
        packet, args = (aten.mm if packet is aten.addmm else aten.bmm), args[1:]
    if packet in (aten.mm, aten.bmm):
        args = args[:2]  # PyTorch 2.11 has no formula for bmm with a dtype of the result
    count = flop_registry.get(packet)
    if not hasattr(count, "__wrapped__"):  # somebody's own formula may want the tensors
        return count and count(*args, **kwargs, out_val=out)
    kwargs = {name: shape_of(value) for name, value in kwargs.items()}
    shapes = [shape_of(arg) for arg in args if not isinstance(arg, torch.dtype)]  # bmm_flop once took no out_dtype
    return count.__wrapped__(*shapes, **kwargs, out_shape=shape_of(out))


def shape_of(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value


def is_causal(func: OpOverload, args: Sequence, kwargs: dict | None) -> bool:
    """Whether this is attention that leaves out what comes later."""
    names = (argument.name for argument in func.overloadpacket.default._schema.arguments)
    return dict(zip(names, args, strict=False)).get("is_causal", (kwargs or {}).get("is_causal", False))


def bytes_moved(name: str, args: Sequence, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes read and written."""
    written = sum(map(stored, outputs))
    sparse = [stored(t) for t in (*inputs, *outputs) if t.is_sparse]
    if sparse and name != "_to_dense":  # of a dense tensor beside it only the rows that it names
        return sum(stored(t) if t.is_sparse else min(stored(t), max(sparse)) for t in (*inputs, *outputs))
    if name in WRITES_ONLY:
        return written
    if name == "all_gather_copy_in":  # of FSDP: this rank's parts, to their place in what will be the whole
        return 2 * sum(map(stored, args[0]))
    if OP_KINDS.get(name) in ("gather", "scatter"):  # the rows that are asked for, not the whole table
        return 2 * min(written, min(stored(t) for t in inputs if t.numel())) if name.endswith("_") else 2 * written
    return sum(map(stored, inputs)) + written + read_again(name, args)


def read_again(name: str, args: Sequence) -> int:
    """Bytes read a second time. Batch norm needs the mean before it can use it."""
    if name == "native_batch_norm":
        return stored(args[0]) if args[5] else 0  # in training
    if name == "native_batch_norm_backward":
        return stored(args[0]) + stored(args[1])
    if name in ("native_layer_norm_backward", "_fused_rms_norm_backward"):
        # a kernel for the input's gradient, one for those of weight and bias
        return stored(args[0]) + stored(args[1]) if any(args[-1][1:]) else 0
    if name == "convolution_backward":  # a kernel for each gradient
        return stored(args[0]) if all(args[-1][:2]) else 0
    return 0


def layout_copies(name: str, args: Sequence, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """The tensors that a convolution on tensor cores, which work on channels last, copies from or to another layout."""
    X = args[0 if name == "convolution" else 1]  # (batch, channels, height, width), if it is of images
    if X.dim() != 4 or X.is_contiguous(memory_format=torch.channels_last):
        return []
    return [t for t in (*inputs, *outputs) if t.dim() == 4]


def stored(tensor: Tensor) -> int:
    """Bytes of different numbers in a tensor: an expanded one repeats the same. A sparse one has indices, too."""
    if tensor.layout is not torch.strided:  # other sparse ones are refused when they are wrapped
        return stored(tensor._indices()) + stored(tensor._values()) if tensor.is_sparse else 0
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()
