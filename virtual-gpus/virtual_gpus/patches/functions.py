"""Functions that are replaced because C++, inside them, takes virtual tensors for tensors on the CPU.

It would make others there, or complain in the name of a kernel that runs on the CPU.
"""

import warnings
from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from virtual_gpus.compat import VF, AutoDispatchBelowAutograd, C_nn, DisableTorchDispatch, ExcludeDispatchKeyGuard
from virtual_gpus.errors import check_lengths, check_query, check_recurrent
from virtual_gpus.ops import attention as kernels
from virtual_gpus.ops.normalization import fused_rms_norm, fused_rms_norm_backward
from virtual_gpus.patches.autocast import KEYS as AUTOCAST
from virtual_gpus.patches.autocast import cast
from virtual_gpus.patches.patch import replaces
from virtual_gpus.tensors.tensor import VirtualTensor, inner_of, wrap

aten = torch.ops.aten
SCATTERED = (  # cuDNN copies such weights together at each call
    "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted at "
    "every call, possibly greatly increasing memory usage. To compact weights again call flatten_parameters()."
)
SHARDED_ATTENTION: dict[type, Callable] = {}  # {class, such as DTensor: attention of its tensors}


@replaces(F, "one_hot")
@replaces(torch, "vander")
@replaces(torch.linalg, "matrix_rank")
def on_inner(original, x, *args, **kwargs):
    """Functions whose result has no gradient, or none that PyTorch could compute: called on the inner tensors."""
    if not isinstance(x, VirtualTensor):
        return original(x, *args, **kwargs)
    inner = [inner_of(a) for a in (x, *args)], {k: inner_of(v) for k, v in kwargs.items()}
    with DisableTorchDispatch():
        return wrap(x.gpu.run(original, *inner), x.gpu)


@replaces(VF, "lstm gru rnn_tanh rnn_relu")
def recurrent(original, input, *args):
    """Called as the modules call them: (input, hidden, weights, whether there are biases, …), for packed sequences
    (input, lengths, hidden, weights, …)."""
    hidden, weights = args[:2] if isinstance(args[2], bool) else args[1:3]
    check_recurrent(input, hidden, weights)
    if not isinstance(input, VirtualTensor):
        return original(input, *args)
    if not torch.is_autocast_enabled("cuda"):  # which copies the weights together
        if torch.backends.cudnn.enabled and len({id(chunk_of(w)) for w in weights}) > 1:
            warnings.warn(SCATTERED, stacklevel=3)
        return original(input, *args)
    # Whatever type the program asks for, autocast gives float16 to cuDNN. (aten/src/ATen/cudnn/AutocastRNN.cpp)
    dtype = torch.float16 if torch.backends.cudnn.enabled else torch.get_autocast_dtype("cuda")
    with ExcludeDispatchKeyGuard(AUTOCAST):
        return original(*(cast(a, dtype) for a in (input, *args)))


def chunk_of(weight: VirtualTensor) -> Any:
    """What a weight shares with those that it lies beside; no parameter: it was computed, or is a replica's."""
    storage = weight.inner.untyped_storage()
    return getattr(storage, "chunk", storage if isinstance(weight, nn.Parameter) else weight)


@replaces(nn.RNNBase)
def flatten_parameters(original, self):
    """Weights that cuDNN would put into one chunk of memory stay where they are; their storages name the chunk."""
    original(self)
    weights, chunk = list(self.parameters(recurse=False)), object()
    types = {w.dtype if isinstance(w, VirtualTensor) else None for w in weights}
    if len(types) == 1 and types <= {torch.float16, torch.float32, torch.float64}:
        for weight in weights:
            weight.inner.untyped_storage().chunk = chunk


@replaces(VF, "lstm_cell gru_cell")
@replaces(torch, "lstm_cell gru_cell")
def cell(original, input, hidden, *weights):
    if torch.is_autocast_enabled("cuda"):  # which itself lowers, and keeps, the weights
        input, hidden = (cast(a, torch.get_autocast_dtype("cuda")) for a in (input, hidden))
    return original(input, hidden, *weights)


@replaces(torch, "quantile nanquantile")
@replaces(Tensor, "quantile nanquantile")
def quantile(original, x, q, *args, **kwargs):
    """The number `q` becomes a tensor here, and not in C++."""
    if isinstance(x, VirtualTensor) and not isinstance(q, Tensor):
        q = x.new_full((), q)
    return original(x, q, *args, **kwargs)


@replaces(torch)
@replaces(Tensor)
def tensor_split(original, x, where=None, *args, **kwargs):
    """Where to split has to be known on the CPU. (native/TensorShape.cpp)"""
    where = kwargs.pop("tensor_indices_or_sections", where)
    if isinstance(where, VirtualTensor):
        raise RuntimeError(f"tensor_split expected tensor_indices_or_sections to be on cpu, but it's on {where.device}")
    return original(x, *(() if where is None else (where,)), *args, **kwargs)


@replaces(torch)
def ctc_loss(original, log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    """The lengths may be numbers, or lie anywhere, as the targets may."""
    device = log_probs.device
    targets = targets.to(device)
    if isinstance(log_probs, VirtualTensor):
        input_lengths, target_lengths = (torch.as_tensor(n, device=device) for n in (input_lengths, target_lengths))
    return original(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


@replaces(F)
def dropout(original, input, p=0.5, training=True, inplace=False):
    """As CUDA does it: the mask that is kept for backward takes one byte an element, not four."""
    if isinstance(input, VirtualTensor) and training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, training)[0]
    return original(input, p, training, inplace)


@replaces(F)
def scaled_dot_product_attention(
    original, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """By the kernel that CUDA would choose (see `virtual_gpus.ops.attention`)."""
    check_query(query, key, value)
    if type(query) in SHARDED_ATTENTION and not dropout_p and not enable_gqa:
        return SHARDED_ATTENTION[type(query)](query, key, value, attn_mask, is_causal, scale)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if not isinstance(query, VirtualTensor):
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value, attn_mask = (cast(t, dtype) for t in (query, key, value, attn_mask))
    with ExcludeDispatchKeyGuard(AUTOCAST):
        fits = query.dtype == key.dtype == value.dtype and min(query.dim(), key.dim(), value.dim()) > 1
        if not fits or (attn_mask is not None and is_causal):
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def attend(query, key, value, mask, dropout_p, is_causal, scale, gqa):
    """The same for virtual tensors that autocast has done with."""
    if 0 in query.shape[:-1]:
        return query @ key.transpose(-2, -1) @ value  # nothing to attend to: of all that is left the shape
    kind = kernels.backend(query, key, value, mask, is_causal, gqa, query.gpu.spec.capability)
    if is_causal and kind == kernels.MATH:  # made here, and not in C++
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        of_type = {"dtype": query.dtype, "device": "cpu"}
        mask = torch.where(mask, torch.scalar_tensor(0.0, **of_type), torch.scalar_tensor(-inf, **of_type))
    if kind != kernels.MATH:
        return kernels.call_kernel(kind, query, key, value, mask, dropout_p, is_causal, scale)
    math = aten._scaled_dot_product_attention_math
    return math(query, key, value, mask, dropout_p, scale=scale, enable_gqa=gqa)[0]


@replaces(torch)
def rms_norm(original, input, normalized_shape, weight=None, eps=None):
    """Under F.rms_norm: one kernel unless the types differ, where CUDA's is made of others, too."""
    if torch.is_autocast_enabled("cuda"):
        input, weight = cast(input, torch.float32), cast(weight, torch.float32)
    alike = weight is None or weight.dtype == input.dtype
    virtual = any(isinstance(t, VirtualTensor) for t in (input, weight))
    if virtual and alike and input.numel() and input.is_floating_point():
        return RMSNorm.apply(input, list(normalized_shape), weight, eps)
    return original(input, normalized_shape, weight, eps)


class RMSNorm(torch.autograd.Function):
    """CUDA's two kernels. To C++ these are tensors on the CPU, for which it would make the first of others."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        with AutoDispatchBelowAutograd():
            out, scale = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.options = shape, eps
        return out

    @staticmethod
    def backward(ctx, grad):
        (x, weight, scale), (shape, eps), wanted = ctx.saved_tensors, ctx.options, ctx.needs_input_grad[0:3:2]
        if torch.is_grad_enabled():  # this pass will be differentiated, too
            scale = fused_rms_norm(x, shape, weight, eps)[1]
            of_x, of_weight = fused_rms_norm_backward(grad, x, shape, scale, weight, wanted)
        else:
            of_x, of_weight = aten._fused_rms_norm_backward(grad, x, shape, scale, weight, wanted)
        return of_x, None, of_weight, None


@replaces(VF)
def _pack_padded_sequence(original, input, lengths, batch_first):
    """Under nn.utils.rnn.pack_padded_sequence; C++ would take lengths on a GPU for lengths on the CPU."""
    check_lengths(lengths)
    return original(input, lengths, batch_first)


@replaces(C_nn)
def pad_sequence(original, sequences, batch_first=False, padding_value=0.0, padding_side="right"):
    """Under nn.utils.rnn.pad_sequence; C++ would make the padded tensor on the CPU."""
    if not any(isinstance(s, VirtualTensor) for s in sequences):
        return original(sequences, batch_first, padding_value, padding_side)
    sequences = [s.to(sequences[0]) for s in sequences]  # each (length, *); the first decides where, and of which type
    longest = max(len(s) for s in sequences)

    def padded(s):
        around = (0, longest - len(s)) if padding_side == "right" else (longest - len(s), 0)
        return F.pad(s, (0, 0) * (s.dim() - 1) + around, value=padding_value)

    return torch.stack([padded(s) for s in sequences], dim=0 if batch_first else 1)


@replaces(torch)
def _nested_tensor_from_mask_left_aligned(original, t, mask):
    """No: then nn.TransformerEncoder does without nested tensors, which virtual GPUs can't hold."""
    return not isinstance(t, VirtualTensor) and original(t, mask)


@replaces(VF)
def _pad_packed_sequence(original, data, batch_sizes, batch_first, padding_value, total_length):
    """Under nn.utils.rnn.pad_packed_sequence; C++ would make the padded tensor on the CPU."""
    if not isinstance(data, VirtualTensor):
        return original(data, batch_sizes, batch_first, padding_value, total_length)
    rows, sizes = int(batch_sizes[0]), batch_sizes.tolist()
    # (steps, sequences, *)
    padded = data.new_full((max(total_length, len(sizes)), rows, *data.shape[1:]), padding_value)
    for i, (size, step) in enumerate(zip(sizes, data.split(sizes), strict=True)):  # step: (sequences still going, *)
        padded[i, :size] = step
    lengths = (batch_sizes[:, None] > torch.arange(rows, device="cpu")).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths
