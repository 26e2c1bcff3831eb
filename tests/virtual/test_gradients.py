"""Gradients on virtual GPUs: where they are, and what happens to those that are handed over on the wrong device."""

import gc

import pytest
import torch
from torch import nn

from mgpu_lib.virtual import virtual_gpus

GPU0, GPU1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def gpus():
    with virtual_gpus(2) as machine:
        yield machine


@pytest.fixture
def x(gpus):
    return torch.ones(2, device="cuda:0", requires_grad=True)


class Double(torch.autograd.Function):
    """Two results, of which the second often has no gradient; `change` is done to the gradient."""

    change = staticmethod(lambda grad: grad)

    @staticmethod
    def forward(ctx, factor, x):
        return factor * x, x.sum()

    @staticmethod
    def backward(ctx, grad, other):
        assert grad.device == other.device
        return None, Double.change(2 * grad + other)


def test_backward_wants_a_gradient_where_the_tensor_is(x):
    words = "^invalid gradient at index {} - expected device {} but got {}$"
    for wrong in ("cpu", "cuda:1"):
        with pytest.raises(RuntimeError, match=words.format(0, "cuda:0", wrong)):
            (x * 2).backward(torch.ones(2, device=wrong))
        with pytest.raises(RuntimeError, match=words.format(1, "cuda:0", wrong)):
            torch.autograd.grad([x * 2, x * 3], [x], [torch.ones(2, device="cuda:0"), torch.ones(2, device=wrong)])
        with pytest.raises(RuntimeError, match=words.format(0, "cuda:0", wrong)):
            torch.autograd.backward([x * 2], [torch.ones(2, device=wrong)])
    with pytest.raises(RuntimeError, match=words.format(0, "cpu", "cuda:0")):
        torch.ones(2, requires_grad=True).backward(torch.ones(2, device="cuda:0"))
    assert x.grad is None
    x.sum().backward(torch.tensor(3.0))  # a single number moves
    assert x.grad.device == GPU0 and x.grad.tolist() == [3, 3]
    (x * 2).backward(torch.ones(2, device="cuda:0"))
    assert x.grad.tolist() == [5, 5]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_function_returns_gradients_where_its_arguments_are(x, monkeypatch, device):
    monkeypatch.setattr(Double, "change", staticmethod(lambda grad: grad.to(device)))
    words = f"Function DoubleBackward returned an invalid gradient at index 0 - expected device cuda:0 but got {device}"
    with pytest.raises(RuntimeError, match=words):
        Double.apply(2, x)[0].sum().backward()
    assert x.grad is None
    cpu = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(Double, "change", staticmethod(lambda grad: grad.to("cuda:1")))
    with pytest.raises(RuntimeError, match="expected device cpu but got cuda:1"):
        Double.apply(2, cpu)[0].sum().backward()


def test_gradients_that_a_function_is_given_are_where_its_results_are(x):
    Double.apply(2, x)[0].sum().backward()  # the other result's gradient is zeros, made in C++
    assert x.grad.device == GPU0 and x.grad.tolist() == [2, 2]
    assert Double.apply(2, torch.ones(2))[0].tolist() == [2, 2]


@pytest.mark.parametrize("leaf", [True, False])
def test_hooks_return_gradients_of_the_same_kind(x, leaf):
    def to_cpu(grad):
        return grad.cpu()

    def double(grad):
        return grad * 2

    y = x if leaf else x * 1
    y.register_hook(double)
    handle = y.register_hook(to_cpu)
    words = r"hook 'to_cpu' has changed the type of value \(was torch.cuda.FloatTensor got torch.FloatTensor\)"
    with pytest.raises(RuntimeError, match=words):
        y.sum().backward()
    handle.remove()
    seen = []
    y.register_hook(seen.append)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2] and x.grad.device == seen[0].device == GPU0
    cpu = torch.ones(2, requires_grad=True)
    cpu.register_hook(lambda grad: grad.cuda())
    with pytest.raises(RuntimeError, match="hook '<lambda>' has changed the type of value"):
        cpu.sum().backward()


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


def test_a_hook_keeps_no_memory(gpus):
    gc.disable()
    try:
        y = torch.ones(1000, device="cuda:0", requires_grad=True)
        y.register_hook(lambda grad: None)
        del y
        assert torch.cuda.memory_allocated(0) == 0
    finally:
        gc.enable()


ZEROS = {
    "sgn": torch.sgn,
    "sign": torch.sign,
    "copysign": lambda x: torch.copysign(torch.ones_like(x), x),
    "floor": torch.floor,
    "repeat": lambda x: x.repeat(0, 1),
    "cat": lambda x: torch.cat([x[:0], torch.ones(1, 2, device=x.device)]),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zero_gradients_are_on_the_gpu_too(gpus, name):
    x = torch.ones(2, 2, device="cuda:1", requires_grad=True)
    plain = torch.ones(2, 2, requires_grad=True)
    expected = torch.autograd.grad(ZEROS[name](plain).sum(), plain)[0]
    seen = []
    (found,) = torch.autograd.grad(ZEROS[name](x).sum(), x)
    x.register_hook(lambda grad: seen.append(grad.device))
    ZEROS[name](x).sum().backward()
    ZEROS[name](x).sum().backward()
    assert found.device == x.grad.device == GPU1 and set(seen) == {GPU1}
    assert torch.equal(found.cpu(), expected) and torch.equal(x.grad.cpu(), expected)
    assert torch.cuda.memory_allocated(1) == 3 * 512
    (x.grad + found + 1).sum().item()
    (x * 3).sum().backward()
    assert x.grad.device == GPU1 and torch.equal(x.grad.cpu(), expected + 3)


def test_zero_gradients_cross_devices(gpus):
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    torch.sgn(x.to("cuda:1")).sum().backward()
    assert x.grad.device == GPU0 and x.grad.tolist() == [0, 0]
