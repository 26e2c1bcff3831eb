"""What one training step keeps in a GPU's memory, read from the allocator's own count."""

import torch
from torch.nn import functional as F


def footprint(net, X, y, optimizer, loss=F.cross_entropy, dtype=None):
    """Bytes on X's GPU, in a dict: parameters, activations, gradients, optimizer_state and the step's peak.

    `net`, X and y lie on one GPU, real or virtual; `optimizer` steps `net`'s parameters. With a `dtype` such as
    torch.bfloat16 the forward pass runs under autocast. Two real steps are taken, so the parameters change.

    parameters       with buffers, such as batch norm's running means
    activations      what the forward pass leaves for the backward pass, logits and loss included
    gradients        what the backward pass leaves
    optimizer_state  what the optimizer keeps from step to step
    peak             the most ever held during the step, with X, y and all else that lies on this GPU
    Source: torch.cuda.memory_allocated, whose blocks are multiples of 512 bytes. Raises ValueError on a CPU.
    """
    device = X.device
    if device.type != "cuda":
        raise ValueError(f"X is on {device}, whose memory nothing counts: move net, X and y to a GPU, real or virtual")
    train_step(net, X, y, optimizer, loss, dtype)  # creates what stays: optimizer state, and the libraries' workspaces
    torch.cuda.reset_peak_memory_stats(device)
    before, after_forward, after_backward = train_step(net, X, y, optimizer, loss, dtype)
    peak = torch.cuda.max_memory_allocated(device)
    state = [value for values in optimizer.state.values() for value in values.values()]
    return {
        "parameters": size_on(device, [*net.parameters(), *net.buffers()]),
        "activations": after_forward - before,
        "gradients": after_backward - before,
        "optimizer_state": size_on(device, state),
        "peak": peak,
    }


def train_step(net, X, y, optimizer, loss, dtype):
    """One step from no gradients to no gradients: bytes allocated before it, after forward and after backward."""
    optimizer.zero_grad()
    allocated = [torch.cuda.memory_allocated(X.device)]
    with torch.autocast(X.device.type, dtype=dtype, enabled=dtype is not None):
        value = loss(net(X), y)
    allocated.append(torch.cuda.memory_allocated(X.device))
    value.backward()
    del value
    allocated.append(torch.cuda.memory_allocated(X.device))
    optimizer.step()
    optimizer.zero_grad()
    return allocated


def size_on(device, tensors):
    """Bytes that copies of those `tensors` that lie on `device` take there, read from a copy of one of each size."""
    there = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.device == device]
    before, taken = torch.cuda.memory_allocated(device), {}
    for n_bytes, tensor in {tensor.nbytes: tensor for tensor in there}.items():
        copy = tensor.detach().clone()
        taken[n_bytes] = torch.cuda.memory_allocated(device) - before
        del copy
    return sum(taken[tensor.nbytes] for tensor in there)
