"""Split by layers, a network computes what one device does."""

import copy

import pytest
import torch
from common import images
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mgpu_lib.splitting import layer_wise, layers, stages
from mgpu_lib.traffic import networks
from virtual_gpus import virtual_gpus

NAMES = ["LeNet", "ResNet-18", "wide MLP"]


@pytest.fixture(scope="module")
def nets():
    """In 64 bits: in 32, rounding can push a number across the corner of a ReLU, and gradients differ by a percent."""
    torch.manual_seed(0)
    return {name: net.double() for name, net in networks(width=50).items()}


def check_gradients(parts, whole, X, y):
    """Those of the parts are what plain PyTorch on the CPU finds for the whole network."""
    whole = copy.deepcopy(whole)
    whole.zero_grad()
    F.cross_entropy(whole(X), y, reduction="sum").backward()
    for p, q in zip([p for part in parts for p in part.parameters()], whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=0, atol=1e-9 * q.grad.abs().max().clamp(min=1).item())


# Split by layers


def test_layer_wise_equals_the_unsplit_network_with_batch_norm_too(nets):
    """Networks without it: the next test."""
    X, y = images(4)
    X, whole = X[..., ::2, ::2].double(), copy.deepcopy(nets["ResNet-18"])
    F.cross_entropy(whole(X), y).backward()
    before = copy.deepcopy(whole.state_dict())
    with virtual_gpus(3) as machine:
        parts = layer_wise(whole, X, y, machine.devices)  # whose gradients must not be added
        for part, device in zip(parts, machine.devices, strict=True):
            assert {p.device for p in part.parameters()} == {p.grad.device for p in part.parameters()} == {device}
        check_gradients(parts, whole, X, y)
    assert all(torch.equal(before[key], value) for key, value in whole.state_dict().items()), "net is unchanged"


@settings(deadline=None, max_examples=12)
@given(k=st.integers(1, 6), more=st.integers(0, 4), rows=st.integers(1, 12), micro_batches=st.integers(1, 8))
def test_any_number_of_stages_and_micro_batches_equals_one_device(k, more, rows, micro_batches):
    """Stages of unequal length, micro-batches of unequal size, and some that are empty."""
    torch.manual_seed(more)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(k + more)]
    net, X, y = nn.Sequential(*blocks).double(), torch.randn(rows, 5).double(), torch.randint(5, (rows,))
    with virtual_gpus(k) as machine:
        check_gradients(layer_wise(net, X, y, machine.devices, micro_batches), net, X, y)


def test_all_forward_passes_come_before_the_first_backward():
    """GPipe's order: otherwise a GPU would wait for a gradient while a micro-batch is ready."""
    order, last = [], nn.Linear(12, 10)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 12), last)
    last.register_forward_hook(lambda *_: order.append("forward"))
    last.register_full_backward_hook(lambda *_: order.append("backward"))
    with virtual_gpus(2) as machine:
        layer_wise(net, *images(6), machine.devices, micro_batches=3)
    assert order == ["forward"] * 3 + ["backward"] * 3


@pytest.mark.parametrize(("name", "count"), list(zip(NAMES, (4, 10, 4))))
def test_stages_hold_every_layer_once_and_in_order(nets, name, count):
    pieces = layers(nets[name])
    assert len(pieces) == count
    for num_stages in range(1, count + 1):
        cut = stages(nets[name], num_stages)
        sizes = [len(stage) for stage in cut]
        assert len(cut) == num_stages and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes)[::-1]
        assert [p for stage in cut for p in stage.parameters()] == [p for piece in pieces for p in piece.parameters()]
    for impossible in (0, count + 1):
        with pytest.raises(ValueError, match=f"{count} layers can't be cut into {impossible}.*1 to {count}"):
            stages(nets[name], impossible)
