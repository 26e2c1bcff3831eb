"""What nn.Module and nn.functional do differently with parameters and tensors on a virtual GPU."""
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parameter import UninitializedTensorMixin

from .machine import find
from .moves import set_data, swap, transfer
from .tensor import Base, VirtualTensor, wrap

# The originals, taken before anything is patched.
_apply, _swap_tensors = torch.nn.Module._apply, torch.utils.swap_tensors
_materialize = UninitializedTensorMixin.materialize
_pad_packed_sequence = torch._VF._pad_packed_sequence
_one_hot, _dropout, _attention = F.one_hot, F.dropout, F.scaled_dot_product_attention


def patches():
    """(owner, name, replacement), for machine.patch_everything."""
    yield Tensor, "data", property(Base.data.__get__, assign_data)
    yield Tensor, "_make_subclass", staticmethod(make_subclass)
    yield UninitializedTensorMixin, "materialize", materialize
    yield torch.nn.Module, "_apply", apply_to_module
    yield torch.utils, "swap_tensors", swap_tensors
    yield F, "one_hot", one_hot
    yield F, "dropout", dropout
    yield F, "scaled_dot_product_attention", attention
    yield torch._VF, "_pad_packed_sequence", pad_packed_sequence


def assign_data(self, value):
    if isinstance(self, UninitializedTensorMixin) and type(value) is VirtualTensor:
        self.device_to_be = value.device  # a lazy module was moved: there is nothing to move yet
    elif type(value) is VirtualTensor:
        set_data(self, value)
    else:
        Base.data.__set__(self, value)


def make_subclass(cls, data, requires_grad=False, **kwargs):
    """Lazy parameters made with device='cuda:i'."""
    if type(data) is not VirtualTensor:
        return Base._make_subclass(cls, data, requires_grad, **kwargs)
    lazy = Base._make_subclass(cls, torch.empty(0, dtype=data.dtype, device="cpu"), requires_grad)
    lazy.device_to_be = data.device
    return lazy


def materialize(self, shape, device=None, dtype=None):
    device = device or vars(self).pop("device_to_be", None)
    gpu = find(device)
    _materialize(self, shape, device if gpu is None else "cpu", dtype)
    if gpu is not None:
        set_data(self, transfer(self.detach(), gpu))


def apply_to_module(self, fn, recurse=True):
    """module.to(…): parameters are swapped in place, so that they keep their identity; lazy ones can't be yet."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    lazy = any(isinstance(p, UninitializedTensorMixin) for p in self._parameters.values())
    torch.__future__.set_swap_module_params_on_conversion(not lazy)
    try:
        return _apply(self, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def swap_tensors(a, b):
    return swap(a, b) if VirtualTensor in (type(a), type(b)) else _swap_tensors(a, b)


def one_hot(tensor, num_classes=-1):
    """F.one_hot makes a tensor inside C++, which takes it for one on the CPU."""
    if type(tensor) is VirtualTensor:
        return wrap(_one_hot(tensor.inner, num_classes), tensor.gpu)
    return _one_hot(tensor, num_classes)


def dropout(input, p=0.5, training=True, inplace=False):
    """As CUDA does it: the mask that is kept for backward takes one byte an element, not four."""
    if type(input) is VirtualTensor and training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, training)[0]
    return _dropout(input, p, training, inplace)


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention; the mask that is_causal stands for is made here, and not in C++."""
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
