"""Checks for "Tensor parallelism": layers split over GPUs."""

import torch

from mgpu_lib.exercises.framework import exercise, expect, filled
from virtual_gpus import virtual_gpus


@exercise
def check_linear_three_gpus(answer):
    """linear_three_gpus(X, W, b, devices): X @ W.T + b, each device computing its share of the outputs."""
    for k in (3, 1, 4):
        X, W, b = (torch.randn(shape, generator=torch.Generator().manual_seed(k)) for shape in [(5, 8), (10, 8), (10,)])
        with virtual_gpus(k) as machine:
            inputs = X.to("cuda:0").requires_grad_(), W.clone().requires_grad_(), b.clone().requires_grad_()
            output = filled(answer(*inputs, machine.devices))
            sent = [machine.traffic.total("cpu", device) for device in machine.devices]
            sent[0] -= X.nbytes
            check_linear(output, inputs, X, W, b)
        share = -(-10 // k) * 8 * 4 + b.nbytes
        expect(
            max(sent) <= share,
            f"the numbers are right, but GPU {sent.index(max(sent))} was sent {max(sent)} "
            f"bytes, more than its share of W ({share}): cut W first, then move the pieces",
        )
    return "equal to the unsplit layer, gradients too; each GPU was sent its own share of W"


def check_linear(output, inputs, X, W, b):
    """Whether `output` is what the unsplit layer computes from X, W and b, with gradients for all three `inputs`."""
    expect(output.shape[0] == 5, f"the output has {output.shape[0]} rows, X has 5: the outputs are columns (dim=1)")
    expect(
        output.shape == (5, 10),
        f"the output has {output.shape[-1]} columns instead of 10. Are all rows of W used, "
        "also when the GPUs don't divide 10, and are the parts joined, not added?",
    )
    expect(output.device == inputs[0].device, f"the output is on {output.device} and belongs on devices[0]")
    result = output.detach().cpu()
    expect(not torch.allclose(result, X @ W.T, atol=1e-6), "the bias is missing")
    expect(
        torch.allclose(result, X @ W.T + b, atol=1e-5),
        "the numbers aren't those of X @ W.T + b: does each device use its own rows of W, and its own part of b?",
    )
    upstream = torch.arange(50.0).reshape(5, 10)
    if output.requires_grad:
        output.backward(upstream.to(output.device))
    for name, tensor, right in zip("XWb", inputs, (upstream @ W, upstream.T @ X, upstream.sum(0))):
        expect(tensor.grad is not None, f"{name} gets no gradient: is there a detach(), .data or no_grad() on its way?")
        expect(torch.allclose(tensor.grad.cpu(), right, rtol=1e-4, atol=1e-4), f"the gradient of {name} is wrong")


@exercise
def check_row_parallel(answer):
    """row_parallel(parts_X, parts_W, b): a list with the whole output X @ W.T + b on every GPU."""
    for k in (2, 3):
        X, W, b = (torch.randn(shape, generator=torch.Generator().manual_seed(k)) for shape in [(4, 7), (5, 7), (5,)])
        whole = X @ W.T
        with virtual_gpus(k) as machine:
            parts = [[part.to(device) for part, device in zip(T.tensor_split(k, 1), machine.devices)] for T in (X, W)]
            summands = [(x @ w.T).cpu() for x, w in zip(*parts)]
            data = answer(*parts, b.to("cuda:0"))
            expect(data is not None, "your function returns None. (mgpu.allreduce does, too: it works in place)")
            data = filled(data)
            expect(len(data) == k, f"{len(data)} outputs for {k} GPUs: return one for each")
            expect([part.device for part in data] == machine.devices, "each output belongs on the GPU of its part")
            data = [part.detach().cpu() for part in data]
        for gpu, output in enumerate(data):
            check_row(gpu, output, summands[gpu], whole, b, k)
    return "every GPU holds the whole output, and the bias once"


def check_row(gpu, output, summand, whole, b, k):
    def equals(right):
        return output.shape == right.shape and torch.allclose(output, right, atol=1e-5)

    expect(not equals(summand) and not equals(summand + b), f"GPU {gpu} holds only its summand: all-reduce the outputs")
    expect(not equals(whole + k * b), f"the bias is in there {k} times, once for each GPU: add it on one GPU only")
    expect(
        not equals(whole),
        f"GPU {gpu} has the sum without the bias. If you add it on GPU 0, do so before the "
        "all-reduce, so that it reaches all",
    )
    expect(equals(whole + b), f"GPU {gpu} doesn't hold X @ W.T + b")
