"""Bytes of one training step, against figures worked out by hand. Needs a GPU, real or virtual, to count them."""

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


def step_arguments(device, optimizer=torch.optim.SGD, rows=ROWS, **options):
    net = nn.Sequential(nn.Linear(300, 1000), nn.ReLU(), nn.Linear(1000, 10)).to(device)
    X, y = torch.rand(rows, 300, device=device), torch.zeros(rows, dtype=torch.long, device=device)
    return net, X, y, optimizer(net.parameters(), lr=0.1, **options)


WEIGHTS = rounded(300 * 1000, 1000, 1000 * 10, 10)


@pytest.mark.parametrize(
    "optimizer, options, copies",
    [(torch.optim.SGD, {}, 0), (torch.optim.SGD, {"momentum": 0.9}, 1), (torch.optim.Adam, {}, 2)],
)
def test_parameters_gradients_and_optimizer_state(device, optimizer, options, copies):
    found = footprint(*step_arguments(device, optimizer, **options))
    assert list(found) == ["parameters", "activations", "gradients", "optimizer_state", "peak"]
    assert all(type(value) is int for value in found.values())
    assert found["parameters"] == found["gradients"] == WEIGHTS
    assert found["optimizer_state"] == copies * WEIGHTS


def test_activations_are_what_backward_needs(device):
    """ReLU and the second layer keep one tensor between them; the loss keeps log-probabilities and two scalars."""
    found = footprint(*step_arguments(device))
    assert found["activations"] == rounded(ROWS * 1000, ROWS * 10, 1, 1)
    batch = rounded(ROWS * 300) + rounded(ROWS, size=8)
    floor = found["parameters"] + found["activations"] + batch
    assert floor < found["peak"] < floor + found["gradients"] + 4 * rounded(ROWS * 1000)


def test_buffers_count_as_parameters(device):
    net = nn.BatchNorm1d(300).to(device)
    X, y = torch.rand(8, 300, device=device), torch.zeros(8, dtype=torch.long, device=device)
    found = footprint(net, X, y, torch.optim.SGD(net.parameters(), 0.1))
    assert found["parameters"] == rounded(300, 300, 300, 300) + rounded(1, size=8)
    assert found["gradients"] == rounded(300, 300)


def test_autocast_halves_the_activations(device):
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)], nn.Linear(128, 10)).to(device)
    X, y = torch.rand(512, 128, device=device), torch.zeros(512, dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    full, half = [footprint(net, X, y, optimizer, dtype=dtype) for dtype in (None, torch.float16)]
    assert 0.5 < half["activations"] / full["activations"] < 0.75
    assert half["parameters"] == full["parameters"] and half["gradients"] == full["gradients"]


def test_it_leaves_no_gradients_and_no_memory_behind(device):
    net, X, y, optimizer = step_arguments(device)
    before = torch.cuda.memory_allocated(device)
    first = footprint(net, X, y, optimizer)
    assert torch.cuda.memory_allocated(device) == before
    assert all(p.grad is None for p in net.parameters())
    assert footprint(net, X, y, optimizer) == first


def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"X is on cpu.*GPU, real or virtual"):
        footprint(*step_arguments(torch.device("cpu")))
