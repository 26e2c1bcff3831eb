"""The pieces of a data-parallel step: replicas, shards, sums. That it is one device's step: test_equivalence.py."""

import math

import pytest
import torch
from common import images, some_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mgpu_lib.collectives import ring_allreduce
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import get_params, max_divergence, sgd, split_batch, train_batch
from virtual_gpus import virtual_gpus

LR = 0.1


@pytest.fixture(params=["cpu", "virtual"])
def devices(request):
    with some_devices(request.param, 3) as devices:
        yield devices


SOURCES = {"plain": lambda p: p, "leaf": torch.Tensor.requires_grad_, "computed": lambda p: p.requires_grad_() * 1}


@pytest.mark.parametrize("source", SOURCES)
def test_replicas_never_alias(devices, source):
    params = [SOURCES[source](p) for p in (torch.ones(2, 3), torch.zeros(3))]
    device_params = [get_params(params, device) for device in devices]
    device_params.append(get_params(device_params[0], devices[0]))  # a replica of a replica on the same GPU
    for i, replica in enumerate(device_params):
        with torch.no_grad():
            for p in replica:
                p += 10**i
    assert [p[0].detach().cpu().tolist() for p, _ in device_params] == [[1 + 10**i] * 3 for i in range(4)]
    assert params[0].tolist() == [[1, 1, 1], [1, 1, 1]]
    device_params[1][0].sum().backward()
    assert [p.grad is not None for p, _ in device_params] == [False, True, False, False]
    assert params[0].grad is None if params[0].is_leaf else True


@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 40), count=st.integers(1, 9))
def test_shards_are_even_complete_and_in_order(rows, count):
    X, y = torch.arange(rows * 2).reshape(rows, 2), torch.arange(rows)
    with virtual_gpus(count) as machine:
        X_shards, y_shards = split_batch(X, y, machine.devices)
        for shards in (X_shards, y_shards):
            assert [shard.device for shard in shards] == machine.devices
        sizes = [len(shard) for shard in X_shards]
        assert max(sizes) - min(sizes) <= 1 and sizes == [len(shard) for shard in y_shards] == sorted(sizes)[::-1]
        assert torch.equal(torch.cat([shard.cpu() for shard in X_shards]), X)
        assert torch.equal(torch.cat([shard.cpu() for shard in y_shards]), y)


@pytest.mark.parametrize(
    "rows, labels, count, replicas, message",
    [
        (3, 2, 2, 2, "X has 3 rows and y has 2"),
        (0, 0, 2, 2, "0 rows between 2 devices"),
        (3, 3, 0, 0, "3 rows between 0 devices"),
        (3, 3, 2, 1, "1 replicas for 2 devices"),
    ],
)
def test_a_batch_that_cannot_be_split_says_why(rows, labels, count, replicas, message):
    with pytest.raises(ValueError, match=message):
        train_batch(torch.zeros(rows, 1), torch.zeros(labels), [[]] * replicas, [torch.device("cpu")] * count, LR)


def test_all_forward_passes_start_before_any_loss_is_read(monkeypatch):
    """Reading a loss waits for its GPU: done in the loop, the GPUs would work one after the other."""
    calls = []
    backward, item = torch.Tensor.backward, torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: calls.append("backward") or backward(*a, **k))
    monkeypatch.setattr(torch.Tensor, "item", lambda *a: calls.append("item") or item(*a))
    parts = {
        "net": lambda X, params: calls.append("forward") or lenet(X, params),
        "update": lambda *a, **k: calls.append("sgd") or sgd(*a, **k),
    }
    devices = [torch.device("cpu")] * 2
    train_batch(*images(4), [get_params(lenet_params(), device) for device in devices], devices, LR, **parts)
    assert calls == ["forward"] * 2 + ["backward"] * 2 + ["sgd"] * 2 + ["item"] * 2


def test_the_network_the_sum_and_the_update_can_be_others(devices):
    """A linear network with a bias, in a step whose gradients go around a ring."""

    def linear(X, params):
        W, b = params
        return X.flatten(1) @ W + b

    def halved(params, lr, batch_size):
        for p in params:
            p.grad *= 0.5
        sgd(params, lr, batch_size)

    start = [0.01 * torch.ones(784, 10), torch.arange(10.0)]
    X, y = images(7)
    alone = [p.clone().requires_grad_() for p in start]
    F.cross_entropy(linear(X, alone), y).backward()
    device_params = [get_params(start, device) for device in devices]
    train_batch(X, y, device_params, devices, LR, net=linear, reduce=ring_allreduce, update=halved)
    for params in device_params:
        for p, q in zip(params, alone, strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach() - 0.5 * LR * q.grad)


def test_divergence_is_the_largest_difference_from_replica_0_and_nan_if_there_is_one(devices):
    device_params = [[torch.zeros(2, device=device), torch.zeros(3, device=device)] for device in devices]
    assert max_divergence(device_params) == max_divergence(device_params[:1]) == 0.0
    device_params[2][1][0] = -0.5
    device_params[1][0][1] = 0.25
    assert max_divergence(device_params) == 0.5
    for replica in (2, 0):
        device_params[replica][0][0] = math.nan
        assert math.isnan(max_divergence(device_params))
