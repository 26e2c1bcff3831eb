"""Gradients on virtual GPUs: where they are, and what happens to those that are handed over on the wrong device."""

import pytest
import torch
from oracle import check_same_on_a_gpu
from torch import nn

GPU0, GPU1 = torch.device("cuda", 0), torch.device("cuda", 1)


class Twice(torch.autograd.Function):
    """Two results, of which the second often has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x, x.sum()

    @staticmethod
    def backward(ctx, grad, other):
        assert grad.device == other.device
        return 2 * grad + other


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_gradients_that_fit_are_taken(gpus, device):
    """What does not fit is refused in PyTorch's words, as test_tensors says."""
    x = torch.ones(2, device=device, requires_grad=True)
    x.sum().backward(torch.tensor(3.0))  # a single number moves
    (x * 2).backward(torch.ones(2, device=device))
    assert x.grad.device == x.device and x.grad.tolist() == [5, 5]
    Twice.apply(x)[0].sum().backward()  # the other result's gradient is zeros, made in C++
    y, seen = x * 1, []
    for hooked in (x, y):
        hooked.register_hook(lambda grad: 2 * grad)
        hooked.register_hook(seen.append)
    y.sum().backward()
    assert x.grad.tolist() == [11, 11] and [grad.device for grad in (*seen, x.grad)] == 3 * [x.device]


def test_a_hook_follows_its_parameter(gpus):
    net, seen = nn.Linear(2, 1), []
    handle = net.weight.register_hook(lambda grad: seen.append(grad.device))
    net.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.device))
    for device in ("cuda:1", "cpu", "cuda:0"):
        net.to(device)
        net(torch.ones(1, 2, device=device)).sum().backward()
    assert seen == [GPU1, GPU1, torch.device("cpu"), torch.device("cpu"), GPU0, GPU0]
    handle.remove()
    net(torch.ones(1, 2, device="cuda:0")).sum().backward()
    assert seen[6:] == [GPU0]


ZEROS = {
    "sgn": torch.sgn,
    "floor": torch.floor,
    "repeat": lambda x: x.repeat(0, 1),
    "cat": lambda x: torch.cat([x[:0], torch.ones(1, 2, device=x.device)]),
}


@pytest.mark.parametrize("function", ZEROS.values(), ids=ZEROS)
def test_zero_gradients_are_on_the_gpu_too(gpus, function):
    def program(device):
        x, seen = torch.ones(2, 2, device=device, requires_grad=True), []
        x.register_hook(lambda grad: seen.append(grad))
        for factor in (function, function, lambda x: 3 * x):
            factor(x).sum().backward()
        return x.grad, seen, torch.autograd.grad(function(x).sum(), x)

    check_same_on_a_gpu(program)


def test_zero_gradients_cross_devices(gpus):
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    torch.sgn(x.to("cuda:1")).sum().backward()
    assert x.grad.device == GPU0 and x.grad.tolist() == [0, 0] and torch.cuda.memory_allocated(0) == 2 * 512
