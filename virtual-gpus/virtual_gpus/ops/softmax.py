"""CUDA's softmax kernels, which also make float32 of half precision in one go, made of the CPU's, which don't.

They are called with the tensors inside of virtual ones.
"""

import torch

aten = torch.ops.aten


def softmax(x, dim, half_to_float):
    return aten._softmax(x.float() if half_to_float else x, dim, False)


def log_softmax(x, dim, half_to_float):
    return aten._log_softmax(x.float() if half_to_float else x, dim, False)


def softmax_backward(grad, out, dim, input_dtype):
    return aten._softmax_backward_data(grad, out, dim, grad.dtype).to(input_dtype)


def log_softmax_backward(grad, out, dim, input_dtype):
    return aten._log_softmax_backward_data(grad, out, dim, grad.dtype).to(input_dtype)


SOFTMAX = {
    aten._softmax.default: softmax,
    aten._log_softmax.default: log_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
}
for operation, function in SOFTMAX.items():
    function.overloadpacket = operation.overloadpacket  # by which its time is told
