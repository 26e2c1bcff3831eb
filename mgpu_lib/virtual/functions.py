"""Functions that are replaced because C++, inside them, takes virtual tensors for tensors on the CPU.

It would make others there, or complain in the name of a kernel that runs on the CPU.
"""
import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import check_query, check_recurrent
from .tensor import VirtualTensor, inner_of, wrap

# The originals, taken before anything is patched.
_dropout, _attention, _pad_packed_sequence = F.dropout, F.scaled_dot_product_attention, torch._VF._pad_packed_sequence
_ctc_loss = torch.ctc_loss


def patches():
    """(owner, name, replacement), for machine.patch_everything."""
    yield F, "dropout", dropout
    yield F, "scaled_dot_product_attention", attention
    yield torch._VF, "_pad_packed_sequence", pad_packed_sequence
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        yield torch._VF, name, recurrent(getattr(torch._VF, name))
    yield torch, "ctc_loss", ctc_loss
    for owner, name in ((F, "one_hot"), (torch, "vander"), (torch.linalg, "matrix_rank")):
        yield owner, name, of_inner(getattr(owner, name))
    for owner in (torch, Tensor):
        for name in ("quantile", "nanquantile"):
            yield owner, name, quantile(getattr(owner, name))


def of_inner(original):
    """`original`, called on the inner tensors: its result has no gradient, or none that PyTorch could compute."""
    @functools.wraps(original)
    def call(x, *args, **kwargs):
        if type(x) is not VirtualTensor:
            return original(x, *args, **kwargs)
        inner = [inner_of(a) for a in (x, *args)], {k: inner_of(v) for k, v in kwargs.items()}
        return wrap(x.gpu.run(original, *inner), x.gpu)
    return call


def recurrent(original):
    """torch._VF.lstm and its like, called as the modules call them: (input, hidden, weights, whether there are biases,
    …), for packed sequences (input, lengths, hidden, weights, …)."""
    @functools.wraps(original)
    def call(input, *args):
        hidden, weights = args[:2] if isinstance(args[2], bool) else args[1:3]
        check_recurrent(input, hidden, weights)
        return original(input, *args)
    return call


def quantile(original):
    """torch.quantile and its like: the number `q` becomes a tensor here, and not in C++."""
    @functools.wraps(original)
    def call(x, q, *args, **kwargs):
        if type(x) is VirtualTensor and not isinstance(q, Tensor):
            q = x.new_full((), q)
        return original(x, q, *args, **kwargs)
    return call


def ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs):
    """torch.ctc_loss: the lengths may be numbers, or lie anywhere."""
    if type(log_probs) is VirtualTensor:
        device = log_probs.device
        input_lengths, target_lengths = (torch.as_tensor(n, device=device) for n in (input_lengths, target_lengths))
    return _ctc_loss(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)


def dropout(input, p=0.5, training=True, inplace=False):
    """As CUDA does it: the mask that is kept for backward takes one byte an element, not four."""
    if type(input) is VirtualTensor and training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, training)[0]
    return _dropout(input, p, training, inplace)


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention; the mask that is_causal stands for is made here, and not in C++."""
    check_query(query, key, value)
    if is_causal and attn_mask is None and type(query) is VirtualTensor:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        is_causal = False
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length):
    """Under nn.utils.rnn.pad_packed_sequence; C++ would make the padded tensor on the CPU."""
    if type(data) is not VirtualTensor:
        return _pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length)
    rows, sizes = int(batch_sizes[0]), batch_sizes.tolist()
    padded = data.new_full((max(total_length, len(sizes)), rows, *data.shape[1:]), padding_value)
    for i, (size, step) in enumerate(zip(sizes, data.split(sizes), strict=True)):
        padded[i, :size] = step
    lengths = (batch_sizes[:, None] > torch.arange(rows, device="cpu")).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths
