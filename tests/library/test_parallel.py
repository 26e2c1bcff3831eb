"""Data parallelism computes what one device does: any number of devices, any batch. Each well-known bug is caught."""

import math

import pytest
import torch
from common import some_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mgpu_lib.collectives import ring_allreduce
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import allreduce, get_params, max_divergence, sgd, split_batch, train_batch

LR = 0.1


@pytest.fixture(params=["cpu", "virtual"])
def kind(request):
    return request.param


@pytest.fixture
def devices(kind):
    with some_devices(kind, 3) as devices:
        yield devices


def make_batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 1, 28, 28, generator=generator), torch.randint(10, (rows,), generator=generator)


def optimizer_step(X, y, params):
    """The oracle: the same step by torch.optim.SGD on one device. Returns the loss and the new parameters."""
    params = [p.clone().requires_grad_() for p in params]
    loss = F.cross_entropy(lenet(X, params), y)
    loss.backward()
    torch.optim.SGD(params, LR).step()
    return loss.item(), params


def largest_gap(params, others):
    return max((p.detach().cpu() - q.detach().cpu()).abs().max().item() for p, q in zip(params, others))


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 5), rows=st.integers(1, 40), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_a_step_on_any_number_of_devices_equals_one_on_one(kind, count, rows, seed):
    X, y = make_batch(rows, seed)
    alone = [get_params(lenet_params(), "cpu")]
    train_batch(X, y, alone, [torch.device("cpu")], LR)
    expected_loss, expected = optimizer_step(X, y, lenet_params())
    with some_devices(kind, count) as devices:
        device_params = [get_params(lenet_params(), device) for device in devices]
        loss = train_batch(X, y, device_params, devices, LR)
        assert max_divergence(device_params) == 0.0
        for params in device_params:
            assert largest_gap(params, alone[0]) < 1e-5
            assert largest_gap(params, expected) < 1e-5
    assert isinstance(loss, float) and loss == pytest.approx(expected_loss, abs=1e-5)


def test_many_steps_equal_those_of_one_device(kind):
    """A gradient that was not zeroed would show from the second step on."""
    expected = lenet_params()
    with some_devices(kind, 3) as devices:
        device_params = [get_params(lenet_params(), device) for device in devices]
        for seed, rows in enumerate([16, 7, 2, 16, 1]):
            X, y = make_batch(rows, seed)
            train_batch(X, y, device_params, devices, LR)
            expected = [p.detach() for p in optimizer_step(X, y, expected)[1]]
        assert largest_gap(device_params[2], expected) < 1e-5
        assert all(p.grad.count_nonzero() == 0 for params in device_params for p in params)


def test_replicas_are_leaves_on_their_devices(devices):
    for device, params in zip(devices, [get_params(lenet_params(), device) for device in devices]):
        assert all(p.device == device and p.is_leaf and p.requires_grad and p.grad is None for p in params)
        assert all(torch.equal(p.cpu(), q) for p, q in zip(params, lenet_params()))


@pytest.mark.parametrize("source", ["plain", "leaf", "computed"])
def test_replicas_never_alias(devices, source):
    params = [torch.ones(2, 3), torch.zeros(3)]
    if source != "plain":
        params = [p.requires_grad_() for p in params]
    if source == "computed":
        params = [p * 1 for p in params]
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


def test_allreduce_sums_into_the_tensors_it_was_given(devices):
    data = [torch.full((2, 2), 10.0**i).to(device) for i, device in enumerate(devices)]
    given = list(data)
    allreduce(data)
    assert all(tensor is before for tensor, before in zip(data, given))
    assert [tensor.device for tensor in given] == devices
    assert [tensor.cpu().tolist() for tensor in given] == [[[111.0, 111.0], [111.0, 111.0]]] * 3


def test_allreduce_takes_gradients_leaves_and_tuples(devices):
    leaves = [torch.ones(3, device=device, requires_grad=True) for device in devices]
    for i, leaf in enumerate(leaves):
        (leaf * i).sum().backward()
    allreduce(tuple(leaf.grad for leaf in leaves))
    assert [leaf.grad.cpu().tolist() for leaf in leaves] == [[3.0] * 3] * 3
    allreduce(leaves)
    assert [leaf.detach().cpu().tolist() for leaf in leaves] == [[3.0] * 3] * 3
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)


def test_allreduce_of_one_changes_nothing(devices):
    data = [torch.arange(3.0)]
    allreduce(data)
    assert data[0].tolist() == [0.0, 1.0, 2.0]


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 40), count=st.integers(1, 9))
def test_shards_are_even_complete_and_in_order(rows, count):
    X, y = torch.arange(rows * 2).reshape(rows, 2), torch.arange(rows)
    X_shards, y_shards = split_batch(X, y, [torch.device("cpu")] * count)
    sizes = [len(shard) for shard in X_shards]
    assert len(sizes) == count and max(sizes) - min(sizes) <= 1
    assert sizes == [len(shard) for shard in y_shards] == sorted(sizes, reverse=True)
    assert torch.equal(torch.cat(X_shards), X) and torch.equal(torch.cat(y_shards), y)


def test_shards_lie_on_their_devices(devices):
    X_shards, y_shards = split_batch(*make_batch(2), devices)
    assert [shard.device for shard in X_shards] == [shard.device for shard in y_shards] == devices
    assert [len(shard) for shard in X_shards] == [1, 1, 0]


@pytest.mark.parametrize(
    "rows, labels, count, message",
    [
        (3, 2, 2, "X has 3 rows and y has 2"),
        (0, 0, 2, "0 rows between 2 devices"),
        (3, 3, 0, "3 rows between 0 devices"),
    ],
)
def test_a_batch_that_cannot_be_split_says_why(rows, labels, count, message):
    with pytest.raises(ValueError, match=message):
        split_batch(torch.zeros(rows, 1), torch.zeros(labels), [torch.device("cpu")] * count)


def test_replicas_and_devices_must_match():
    with pytest.raises(ValueError, match="1 replicas for 2 devices"):
        train_batch(*make_batch(4), [get_params(lenet_params(), "cpu")], [torch.device("cpu")] * 2, LR)


def test_a_failed_step_changes_nothing():
    device_params = [get_params(lenet_params(), "cpu")]
    with pytest.raises(ValueError):
        train_batch(*make_batch(0), device_params, [torch.device("cpu")], LR)
    assert largest_gap(device_params[0], lenet_params()) == 0


def test_sgd_divides_the_sum_and_zeroes_it():
    p = torch.ones(2, requires_grad=True)
    (p * torch.tensor([4.0, 8.0])).sum().backward()
    sgd([p], lr=0.5, batch_size=4)
    assert p.tolist() == [0.5, 0.0] and p.grad.tolist() == [0.0, 0.0]


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
    train_batch(*make_batch(4), [get_params(lenet_params(), device) for device in devices], devices, LR, **parts)
    assert calls == ["forward"] * 2 + ["backward"] * 2 + ["sgd"] * 2 + ["item"] * 2


def test_the_network_the_sum_and_the_update_can_be_others(kind):
    """A linear network with a bias, in a step whose gradients go around a ring."""

    def linear(X, params):
        W, b = params
        return X.flatten(1) @ W + b

    def halved(params, lr, batch_size):
        for p in params:
            p.grad *= 0.5
        sgd(params, lr, batch_size)

    start = [0.01 * torch.ones(784, 10), torch.arange(10.0)]
    X, y = make_batch(7)
    alone = [p.clone().requires_grad_() for p in start]
    F.cross_entropy(linear(X, alone), y).backward()
    with some_devices(kind, 3) as devices:
        device_params = [get_params(start, device) for device in devices]
        train_batch(X, y, device_params, devices, LR, net=linear, reduce=ring_allreduce, update=halved)
        for params in device_params:
            assert largest_gap(params, [p - 0.5 * LR * p.grad for p in alone]) < 1e-5


def test_max_divergence_is_the_largest_difference_from_replica_0(devices):
    device_params = [[torch.zeros(2, device=device), torch.zeros(3, device=device)] for device in devices]
    assert max_divergence(device_params) == 0.0
    device_params[2][1][0] = -0.5
    device_params[1][0][1] = 0.25
    assert max_divergence(device_params) == 0.5
    assert max_divergence(device_params[:1]) == 0.0


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_max_divergence_does_not_hide_nan(devices, replica):
    device_params = [[torch.zeros(2, device=device), torch.ones(2, device=device)] for device in devices]
    device_params[2][1][0] = 5
    device_params[replica][0][0] = math.nan
    assert math.isnan(max_divergence(device_params))


# Negative controls: the two bugs of the sources, put in on purpose, must show.


def rebinding_allreduce(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i] = data[0].to(data[i].device)  # changes the list only


def test_a_rebinding_allreduce_lets_the_replicas_drift_apart(kind):
    with some_devices(kind, 2) as devices:
        device_params = [get_params(lenet_params(), device) for device in devices]
        train_batch(*make_batch(16), device_params, devices, LR, reduce=rebinding_allreduce)
        assert max_divergence(device_params) > 1e-3
        # Replica 0 did receive the sum, so its accuracy looks fine.
        assert largest_gap(device_params[0], optimizer_step(*make_batch(16), lenet_params())[1]) < 1e-5


def test_aliased_replicas_agree_and_are_wrong():
    """`p.to(device)` is `p` itself where it already is: both "replicas" are one, and each gradient counts twice."""
    shared = [p.requires_grad_() for p in lenet_params()]
    devices = [torch.device("cpu")] * 2
    device_params = [[p.to(device) for p in shared] for device in devices]
    X, y = make_batch(16)
    train_batch(X, y, device_params, devices, LR)
    assert max_divergence(device_params) == 0.0  # the meter can't see it: there is nothing to differ
    expected = optimizer_step(X, y, lenet_params())[1]
    assert largest_gap(device_params[0], expected) > 1e-3
    moved = [(p.detach() - q) for p, q in zip(shared, lenet_params())]
    right = [(p.detach() - q) for p, q in zip(expected, lenet_params())]
    assert all(torch.allclose(m, 2 * r, atol=1e-6) for m, r in zip(moved, right))
