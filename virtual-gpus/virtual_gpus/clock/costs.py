"""What an operation asks of a GPU, and how long a GPU takes for it: a roofline for every kernel.

A kernel takes the longer of two times, that of its arithmetic and that of its memory traffic, and a fixed time beside.
FLOPs come from PyTorch's own registry, bytes from the tensors. The rates that a GPU reaches stand in `rates.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from virtual_gpus.clock.rates import (
    COPY,
    CORES,
    FACTOR,
    FIXED,
    HALF,
    HOST,
    HOST_MEMORY,
    LOW_POWER,
    MEMORY,
    ROUND,
    TENSOR,
    generation,
)
from virtual_gpus.tree import tensors_in

aten = torch.ops.aten


class Work(NamedTuple):
    """What one operation asks of a GPU."""

    name: str  # the operation's
    kind: str  # a key of rates.HOST
    flops: int = 0
    results: int = 0  # numbers that the arithmetic makes: they are shared out among a GPU's multiprocessors
    nbytes: int = 0  # read from and written to the GPU's memory
    layout: int = 0  # bytes moved before and after it, on tensor cores, which want channels last: see `layout_copies`
    layout_copies: int = 0  # how many tensors these are
    kernels: int = 1  # launched one after another; 0: nothing runs on the GPU
    tensors: int = 0  # in its lists, for the optimizers' foreach operations: the host looks at each
    precision: str = "fp32"  # of the arithmetic: "fp32", "tf32", "fp16" or "bf16"


class Cost(NamedTuple):
    """What an operation costs on one kind of GPU, in seconds."""

    work: Work
    seconds: float  # of its kernels
    bound: str  # what those spend most of their time on: "compute", "memory" or "fixed"
    from_python: float  # of the host's time, called by Python
    from_cpp: float  # the same, called by autograd's engine, or by other C++


NOTHING_RUNS = set(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ set_ "
    "_unsafe_view _reshape_alias lift_fresh _local_scalar_dense _fused_sdp_choice".split()
)
KINDS = {
    "matmul": "mm addmm bmm baddbmm addmv mv dot _scaled_mm",
    "norm": "native_batch_norm native_batch_norm_backward _native_batch_norm_legit batch_norm_stats batch_norm_elemt "
    "batch_norm_backward_reduce batch_norm_backward_elemt",
    "pool": "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward",
    "layer_norm": "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward",
    "softmax": "_softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward",
    "reduce": "sum mean amax amin argmax argmin max min norm linalg_vector_norm var std cumsum sort topk all any",
    "gather": "embedding embedding_dense_backward index index_put_ index_select gather scatter_ scatter_add_ "
    "index_add_",
}
KIND = {name: kind for kind, names in KINDS.items() for name in names.split()}
WRITES_ONLY = set(
    "zero_ fill_ normal_ uniform_ bernoulli_ zeros ones full zeros_like ones_like full_like new_zeros new_ones "
    "new_full select_backward slice_backward".split()
)
PRODUCTS = ("matmul", "attention")  # kinds that are matrix products
SLOWER_BACKWARD = ("conv1x1", "conv3x3", "conv", "conv_grouped", "conv_depthwise", "attention")
LISTS = ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad")  # how operations begin that take lists of tensors
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def work(func, args, kwargs, out, tf32):
    """What calling `func` (an operation, or a function that makes a tensor) asks of a GPU; `out` is its result.

    `tf32`: whether FP32 convolutions, and whether FP32 matrix products, are done in TF32 (see `tf32_allowed`).
    """
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else func.__name__
    inputs, outputs = list(tensors_in((*args, *(kwargs or {}).values()))), list(tensors_in((out,)))
    if name in NOTHING_RUNS or is_view(func) or not any(t.numel() for t in (*inputs, *outputs)):
        return Work(name, "view", kernels=0)
    kind, nbytes = kind_of(name, args), memory(name, args, inputs, outputs)
    if kind.startswith("conv"):
        counted = flops(func, args, kwargs, out), results(name, args, out), nbytes
        moved = layout_copies(name, args, inputs, outputs)
        return Work(name, kind, *counted, *moved, kernels(name, args), 0, precision(inputs[0].dtype, tf32[0]))
    if kind in ("matmul", "attention"):
        counted = flops(func, args, kwargs, out), outputs[0].numel(), nbytes
        return Work(name, kind, *counted, precision=precision(inputs[0].dtype, tf32[1]))
    if name.startswith(LISTS):
        return foreach_work(name, args, nbytes + sum(map(stored, written_in_place(func, args))))
    return Work(name, kind, nbytes=nbytes)


def foreach_work(name, args, nbytes):
    """An optimizer's foreach operation: a kernel takes at most 64 tensors, and 320 chunks of 65,536 numbers."""
    tensors = next(arg for arg in args if isinstance(arg, (list, tuple)))  # behind the base, in _foreach_pow
    launched = max(-(-len(tensors) // 64), -(-sum(t.numel() for t in tensors) // (320 * 65536)))
    return Work(name, "foreach", nbytes=nbytes, kernels=launched, tensors=len(tensors))


def written_in_place(func, args):
    """The tensors in those lists that `func` reads and changes. It returns nothing: they aren't among its results."""
    if func.overloadpacket.__name__ in ("_foreach_copy_", "_foreach_zero_"):  # changed without being read
        return ()
    arguments = zip(func._schema.arguments, args, strict=False)
    changed = [(known.name, arg) for known, arg in arguments if known.alias_info and known.alias_info.is_write]
    # a fused optimizer changes gradients only where it undoes their scale
    return tensors_in(arg for name, arg in changed if name != "grads")


def is_view(func):
    """Whether `func` only looks at its argument in another way."""
    returns = func._schema.returns if hasattr(func, "_schema") else ()
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def kind_of(name, args):
    if name == "convolution":
        return kind_of_convolution(args[1], args[3], args[5], args[8])
    if name == "convolution_backward":
        return kind_of_convolution(args[2], args[4], args[6], args[9])
    if "scaled_dot_product" in name:
        return "attention"
    return KIND.get(name, "pointwise")


def kind_of_convolution(W, stride, dilation, groups):
    """cuDNN has other algorithms for some: 1x1 convolutions are matrix products, 3x3 has Winograd's algorithm."""
    if groups > 1 and W.shape[1] < 16:
        return "conv_depthwise" if W.shape[1] == 1 else "conv_grouped"
    if W[0, 0].numel() == 1:
        return "conv1x1"
    return "conv3x3" if W.shape[2:] == (3, 3) and {*stride, *dilation} == {1} else "conv"


def precision(dtype, tf32):
    """Of a convolution's or a matrix product's arithmetic."""
    return TYPES.get(dtype) or ("tf32" if tf32 and dtype == torch.float32 else "fp32")


def tf32_allowed():
    """Whether convolutions, and whether matrix products, of FP32 tensors may use TF32: PyTorch's own switches."""
    allowed = torch._C._get_fp32_precision_getter  # knows both the older and the newer switches
    return allowed("cuda", "conv") == "tf32", allowed("cuda", "matmul") == "tf32"


def flops(func, args, kwargs, out):
    """By PyTorch's registry. A convolution's backward takes as many as its forward for each gradient that is wanted."""
    packet = func.overloadpacket
    if packet is aten.convolution_backward:
        grad, X, W, _, *options, mask = args
        return sum(mask[:2]) * registered_flops(aten.convolution, (X, W, None, *options), {}, grad)
    attention = "scaled_dot_product" in packet.__name__
    found = attention_flops(packet, args) if attention else registered_flops(packet, args, kwargs or {}, out)
    if found is None:
        return 2 * max(t.numel() for t in tensors_in(args))
    return found // 2 if is_causal(func, args, kwargs) else found  # causal: the kernels leave out what is in the future


def attention_flops(packet, args):
    """Two matrix products; backwards five, of which one is computed once more. As in the registry from PyTorch 2.15 on,
    which has not all of them before."""
    backward = packet.__name__.endswith("backward")
    (*batch, rows, width), (*_, columns, _), (*_, depth) = (x.shape for x in args[backward : 3 + backward])
    products = 3 * width + 2 * depth if backward else width + depth
    return 2 * math.prod(batch) * rows * columns * products


def registered_flops(packet, args, kwargs, out):
    """What the registry's formula says, or None without one. It is given shapes here: what PyTorch has around the
    formulas to find them leaves cycles behind, which only Python's garbage collector takes away."""
    from torch.utils.flop_counter import flop_registry  # imports much: only when it is needed

    if packet in (aten.addmm, aten.baddbmm):  # those two call the next one
        packet, args = (aten.mm if packet is aten.addmm else aten.bmm), args[1:]
    count = flop_registry.get(packet)
    if not hasattr(count, "__wrapped__"):  # somebody's own formula may want the tensors
        return count and count(*args, **kwargs, out_val=out)
    kwargs = {name: shape_of(value) for name, value in kwargs.items()}
    return count.__wrapped__(*map(shape_of, args), **kwargs, out_shape=shape_of(out))


def shape_of(value):
    return value.shape if isinstance(value, Tensor) else value


def is_causal(func, args, kwargs):
    """Whether this is attention that leaves out what comes later."""
    names = (argument.name for argument in func.overloadpacket.default._schema.arguments)
    return dict(zip(names, args, strict=False)).get("is_causal", (kwargs or {}).get("is_causal", False))


def results(name, args, out):
    """Numbers that a convolution makes. For its backward these are gradients of the input, or sums over the output."""
    return max(args[0].numel(), args[1].numel()) if name == "convolution_backward" else out.numel()


def memory(name, args, inputs, outputs):
    """Bytes read and written."""
    written = sum(map(stored, outputs))
    if name in WRITES_ONLY:
        return written
    if name == "all_gather_copy_in":  # of FSDP: this rank's parts, to their place in what will be the whole
        return 2 * sum(map(stored, args[0]))
    if KIND.get(name) == "gather":  # the rows that are asked for, not the whole table
        return 2 * min(written, min(stored(t) for t in inputs if t.numel())) if name.endswith("_") else 2 * written
    return sum(map(stored, inputs)) + written + read_again(name, args)


def read_again(name, args):
    """Bytes read a second time. Batch norm needs the mean before it can use it."""
    if name == "native_batch_norm":
        return stored(args[0]) if args[5] else 0  # in training
    if name == "native_batch_norm_backward":
        return stored(args[0]) + stored(args[1])
    if name == "native_layer_norm_backward":  # a kernel for the input's gradient, one for those of weight and bias
        return stored(args[0]) + stored(args[1]) if any(args[-1][1:]) else 0
    if name == "convolution_backward":  # a kernel for each gradient
        return stored(args[0]) if all(args[-1][:2]) else 0
    return 0


def layout_copies(name, args, inputs, outputs):
    """Bytes that a convolution on tensor cores has moved to other places before and after it, and for how many tensors.

    They work on channels last. Of tensors in another memory format each is read and written once more.
    """
    X = args[0 if name == "convolution" else 1]
    if X.dim() != 4 or X.is_contiguous(memory_format=torch.channels_last):
        return 0, 0
    moved = [stored(t) for t in (*inputs, *outputs) if t.dim() == 4]
    return 2 * sum(moved), len(moved)


def stored(tensor):
    """Bytes of different numbers in a tensor: an expanded one repeats the same."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()


def kernels(name, args):
    """Kernels of a convolution or a matrix product: one for the bias of a convolution, one for each gradient."""
    if name == "convolution":
        return 1 + isinstance(args[2], Tensor)
    return max(1, sum(args[-1])) if name == "convolution_backward" else 1


def cost(work, spec):
    """What `work` costs on a GPU with the data sheet `spec`."""
    host, engine = (HOST[work.kind][i] + work.tensors * HOST["tensor"][i] for i in (0, 1))
    if not work.kernels:
        return Cost(work, 0.0, "fixed", host, engine)
    arithmetic = work.flops / rate(work, spec) if work.flops else 0.0
    traffic = work.nbytes / bandwidth(work.kind, spec)
    fixed, layout = work.kernels * FIXED[work.kind], 0.0
    if on_tensor_cores(work, spec):
        fixed += work.layout_copies * FIXED["layout"]
        layout = work.layout / bandwidth("layout", spec)
    longest = max(arithmetic, traffic)
    bound = "fixed" if fixed > longest + layout else "compute" if arithmetic > traffic + layout else "memory"
    return Cost(work, fixed + longest + layout, bound, host, engine)


def bandwidth(kind, spec):
    """Bytes per second that a GPU's memory reaches."""
    return spec.bandwidth * min(1.0, MEMORY[kind] * FACTOR["memory"].get(generation(spec), 1.0))


def on_tensor_cores(work, spec):
    return work.precision != "fp32" and getattr(spec, work.precision) is not None and work.kind in TENSOR


def rate(work, spec):
    """FLOP per second that a GPU reaches. Few results don't fill its multiprocessors."""
    kind = f"{work.kind} backward" if work.kind in SLOWER_BACKWARD and work.name.endswith("backward") else work.kind
    group, throttled = generation(spec), FACTOR["low power"] if spec.power <= LOW_POWER else 1.0
    if on_tensor_cores(work, spec):
        factor = FACTOR["products" if work.kind in PRODUCTS else "tensor cores"]
        reached = getattr(spec, work.precision) * min(1.0, TENSOR[kind] * factor.get(group, 1.0))
    else:
        reached = spec.fp32 * CORES[kind] * FACTOR["cores"].get(group, 1.0)
    return throttled * reached * work.results / (work.results + HALF * spec.sm_count)


def link_seconds(nbytes, link, kind):
    """Seconds that a copy of `nbytes` takes over `link`; its `kind` is a key of rates.COPY or HOST_MEMORY."""
    if kind in HOST_MEMORY:  # pinned memory comes between, which the host fills: the slower of two sets the pace
        return link.latency + nbytes / min(link.bandwidth * COPY["pinned"], HOST_MEMORY[kind])
    return link.latency + nbytes / (link.bandwidth * COPY[kind])


def round_seconds(nbytes, link):
    """Seconds of one round of a collective operation, in which every GPU sends at most `nbytes`."""
    return ROUND + nbytes / (link.bandwidth * COPY["collective"])


def ring_seconds(nbytes, k, link):
    """Seconds of a ring all-reduce of `nbytes` on each of `k` GPUs: 2(k-1) rounds, in each a k-th on every link."""
    return 2 * (k - 1) * round_seconds(nbytes / k, link)


def pipeline_seconds(nbytes, k, link):
    """Seconds of a broadcast or a reduction of `nbytes` among `k` GPUs in a chain, cut fine: every link is busy."""
    return (k - 2) * ROUND + round_seconds(nbytes, link) if k > 1 else 0.0


def packing_seconds(nbytes, spec):
    """Seconds to copy tensors into one buffer on a GPU: every byte is read and written."""
    return 2 * nbytes / bandwidth("pointwise", spec)
