"""Bytes of one training step, beyond what chapter 3 works out by hand; tests/figures/test_memory.py adds them up."""

import pytest
import torch
from torch import nn

from mgpu_lib.footprint import footprint
from virtual_gpus import virtual_gpus

ROWS = 64


def rounded(*counts, size=4):
    """Bytes of tensors with so many elements: each takes a multiple of 512."""
    return sum(-(-count * size // 512) * 512 for count in counts)


@pytest.fixture(params=["cpu", "meta"])
def device(request):
    with virtual_gpus(1, backing=request.param) as machine:
        yield machine.devices[0]


def step_arguments(device):
    net = nn.Sequential(nn.Linear(300, 1000), nn.ReLU(), nn.Linear(1000, 10)).to(device)
    X, y = torch.rand(ROWS, 300, device=device), torch.zeros(ROWS, dtype=torch.long, device=device)
    return net, X, y, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def test_activations_are_what_backward_needs(device):
    """ReLU and the second layer keep one tensor between them; the loss keeps log-probabilities and two scalars."""
    found = footprint(*step_arguments(device))
    assert list(found) == ["parameters", "activations", "gradients", "optimizer_state", "peak"]
    assert found["parameters"] == found["gradients"] == found["optimizer_state"]
    assert found["activations"] == rounded(ROWS * 1000, ROWS * 10, 1, 1)
    batch = rounded(ROWS * 300) + rounded(ROWS, size=8)
    floor = found["parameters"] + found["optimizer_state"] + found["activations"] + batch
    assert floor < found["peak"] < floor + found["gradients"] + 4 * rounded(ROWS * 1000)


def test_buffers_count_as_parameters(device):
    net = nn.BatchNorm1d(300).to(device)
    X, y = torch.rand(8, 300, device=device), torch.zeros(8, dtype=torch.long, device=device)
    found = footprint(net, X, y, torch.optim.SGD(net.parameters(), 0.1))
    assert found["parameters"] == rounded(300, 300, 300, 300) + rounded(1, size=8)
    assert found["gradients"] == rounded(300, 300)


def test_it_leaves_no_gradients_and_no_memory_behind(device):
    net, X, y, optimizer = step_arguments(device)
    before = torch.cuda.memory_allocated(device)
    first = footprint(net, X, y, optimizer)
    assert torch.cuda.memory_allocated(device) == before + first["optimizer_state"]
    assert all(p.grad is None for p in net.parameters())
    assert footprint(net, X, y, optimizer) == first


def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"X is on cpu.*GPU, real or virtual"):
        footprint(*step_arguments(torch.device("cpu")))
