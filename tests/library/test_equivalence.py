"""One device is the oracle: every parallel program of the book computes the gradient that one device computes.

On 1 to 4 virtual GPUs, with batches that they share evenly, unevenly, and that are too small for all of them. The
programs are the library's, a study's, and those that a page shows without comparing them itself: what it shows is
executed. Sums by themselves are in test_collectives.py, networks that are split by layers in test_splitting.py.
"""

import copy
from functools import cache

import pytest
from common import images
from pages import shown
from torch.nn import functional as F

from experiments import resnet18
from mgpu_lib import parallel, primitives, traffic
from mgpu_lib.models import lenet, lenet_params
from virtual_gpus import virtual_gpus

PARAMS = [p.double() for p in lenet_params()]  # 64 bits: what differs by more than 1e-10 is no rounding
NET = traffic.networks(width=10)["LeNet"].double()  # the module that chapter 10 splits
LR = 0.5


def make_net():
    return copy.deepcopy(NET)


def make_batch(rows):
    X, y = images(rows)
    return X.double(), y


def gradients(module):
    return [p.grad for p in module.parameters()]


# The library's programs, and others for the same two networks. Each takes a batch on the CPU and devices, and returns
# the gradients of the mean loss: one list per replica.


def stepped(step):
    """Gradients from what a step with learning rate LR does to lasting replicas of LeNet's parameters."""

    def program(X, y, devices):
        replicas = [parallel.get_params(PARAMS, device) for device in devices]
        loss = step(X, y, replicas, devices, LR)
        if step is parallel.train_batch:
            assert loss == pytest.approx(F.cross_entropy(lenet(X, PARAMS), y).item(), abs=1e-12)
        return [[(before - p.detach().cpu()) / LR for before, p in zip(PARAMS, params)] for params in replicas]

    return program


def wrapped(forward):
    """A module on all GPUs, in whose original the gradients arrive: `forward(net, X, devices)` gives the logits."""

    def program(X, y, devices):
        net = make_net().to(devices[0])
        F.cross_entropy(forward(net, X.to(devices[0]), devices), y.to(devices[0])).backward()
        return [gradients(net)]

    return program


def recorded(X, y, devices):
    """Chapter 5's study of ResNet-18, by what its step with learning rate LR does to the network."""
    net = make_net().to(devices[0])
    before = [p.detach().cpu().clone() for p in net.parameters()]
    loss = resnet18.program(net, devices, LR)(X, y)
    assert loss == pytest.approx(F.cross_entropy(NET(X), y).item(), abs=1e-12)
    return [[(old - p.detach().cpu()) / LR for old, p in zip(before, net.parameters())]]


def as_in_d2l(X, y, replicas, devices, lr):
    """Chapter 6: train_batch as D2L's program has it, which waits for GPU 0 in place of reading the loss."""
    shown("06", "d2l_step")["d2l_step"](X, y, replicas, devices, lr)


def gradients_for_the_noise(X, y, devices):
    """Chapter 8: the mean gradients of the shards, none of them empty. Weighted by their rows they are the batch's."""
    devices = devices[: len(X)]
    replicas = [parallel.get_params(PARAMS, device) for device in devices]
    found = shown("08", "replica_gradients", devices=devices, replicas=replicas)["replica_gradients"](X, y)
    shares = [len(shard) / len(X) for shard in X.tensor_split(len(devices))]
    return [[sum(share * grad.cpu() for share, grad in zip(shares, same)) for same in zip(*found)]]


ON_PARAMS = {
    "train_batch": stepped(parallel.train_batch),
    "chapter 6: d2l_step": stepped(as_in_d2l),
    "chapter 8: replica_gradients": gradients_for_the_noise,
    "museum: right_step": stepped(shown("museum", "backward", "right_step")["right_step"]),
}
ON_NET = {
    "primitives.data_parallel": wrapped(primitives.data_parallel),
    "chapter 5: by_hand": wrapped(shown("05", "by_hand")["by_hand"]),
    "resnet18.program": recorded,
}
PROGRAMS = {**ON_PARAMS, **ON_NET}


@cache
def one_device(rows, raw):
    """The gradients of the mean loss by plain PyTorch, on the CPU."""
    X, y = make_batch(rows)
    if not raw:
        net = make_net()
        F.cross_entropy(net(X), y).backward()
        return gradients(net)
    params = [p.clone().requires_grad_() for p in PARAMS]
    F.cross_entropy(lenet(X, params), y).backward()
    return [p.grad for p in params]


@pytest.mark.sweep(5)  # which meets all counts and all sizes of a batch
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_parallel_program_computes_what_one_device_does(name, count, rows):
    X, y = make_batch(rows)
    with virtual_gpus(count) as machine:
        replicas = PROGRAMS[name](X, y, list(machine.devices))
        replicas = [[grad.detach().cpu() for grad in grads] for grads in replicas]
    expected = one_device(rows, raw=name in ON_PARAMS)
    for grads in replicas:
        assert [grad.shape for grad in grads] == [grad.shape for grad in expected]
        gap = max((ours - right).abs().max().item() for ours, right in zip(grads, expected))
        assert gap < 1e-10
