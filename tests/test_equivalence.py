"""One device is the oracle: every parallel program of the book computes the gradient that one device computes.

On 1 to 4 virtual GPUs, with batches that they share evenly, unevenly, and that are too small for all of them.
"""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib import collectives, parallel, primitives, splitting, traffic
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.virtual import virtual_gpus

PARAMS = [p.double() for p in lenet_params()]  # 64 bits: what differs by more than 1e-10 is no rounding
NET = traffic.networks(width=10)["LeNet"].double()  # the module that chapter 3 splits
LR = 0.5


def make_net():
    return copy.deepcopy(NET)


def make_batch(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, 1, 28, 28, generator=generator).double(), torch.randint(10, (rows,), generator=generator)


# Each program takes a batch on the CPU and devices, and returns the gradients of the mean loss: one list per replica.


def train_batch(X, y, devices):
    replicas = [parallel.get_params(PARAMS, device) for device in devices]
    loss = parallel.train_batch(X, y, replicas, devices, LR)
    assert loss == pytest.approx(F.cross_entropy(lenet(X, PARAMS), y).item(), abs=1e-12)
    return [[(before - p.detach().cpu()) / LR for before, p in zip(PARAMS, params)] for params in replicas]


def by_hand(reduce):
    """The step of chapter 4 with another all-reduce: `reduce` works on one list of gradients per GPU, in place."""
    def program(X, y, devices):
        replicas = [parallel.get_params(PARAMS, device) for device in devices]
        for params, X_shard, y_shard in zip(replicas, *parallel.split_batch(X, y, devices)):
            F.cross_entropy(lenet(X_shard, params), y_shard, reduction="sum").backward()
        reduce([[p.grad for p in params] for params in replicas])
        return [[p.grad / len(X) for p in params] for params in replicas]
    return program


def one_by_one(allreduce):
    def reduce(device_grads):
        for same in zip(*device_grads):
            allreduce(list(same))
    return reduce


def wrapped(forward):
    """A module on all GPUs, in whose original the gradients arrive: `forward(net, X, devices)` gives the logits."""
    def program(X, y, devices):
        net = make_net().to(devices[0])
        F.cross_entropy(forward(net, X.to(devices[0]), devices), y.to(devices[0])).backward()
        return [gradients(net)]
    return program


def replicas_of_a_module(X, y, devices):
    return [[grad / len(X) for grad in gradients(net)] for net in traffic.data_parallel(make_net(), X, y, devices)]


def layer_wise(micro_batches):
    def program(X, y, devices):
        stages = splitting.layer_wise(make_net(), X, y, devices, micro_batches)
        return [[grad / len(X) for stage in stages for grad in gradients(stage)]]
    return program


def in_layer(X, y, devices):
    """The parts of each parameter are put together again. What every GPU holds whole must be right on every GPU."""
    joined = []
    for block, parts in zip(make_net(), splitting.in_layer(make_net(), X, y, devices)):
        for name, whole in block.named_parameters():
            grads = [dict(part.named_parameters())[name].grad.cpu() / len(X) for part in parts
                     if name in dict(part.named_parameters())]
            cut = [dim for dim in range(whole.dim()) if grads[0].shape[dim] != whole.shape[dim]]
            joined.append(torch.cat(grads, cut[0]) if cut else grads[0])
    return [joined]


def gradients(module):
    return [p.grad for p in module.parameters()]


PROGRAMS = {
    "train_batch": train_batch,
    "star_allreduce": by_hand(one_by_one(collectives.star_allreduce)),
    "ring_allreduce": by_hand(one_by_one(collectives.ring_allreduce)),
    "tree_allreduce": by_hand(one_by_one(collectives.tree_allreduce)),
    "bucketed_allreduce": by_hand(lambda grads: collectives.bucketed_allreduce(grads, bucket_bytes=100_000)),
    "traffic.data_parallel": replicas_of_a_module,
    "primitives.data_parallel": wrapped(primitives.data_parallel),
    "nn.parallel.data_parallel": wrapped(nn.parallel.data_parallel),
    "nn.DataParallel": wrapped(lambda net, X, devices: nn.DataParallel(net, devices)(X)),
    "layer_wise": layer_wise(1),
    "layer_wise, 3 micro-batches": layer_wise(3),
    "in_layer": in_layer,
}
ON_RAW_TENSORS = {"train_batch", "star_allreduce", "ring_allreduce", "tree_allreduce", "bucketed_allreduce"}


@cache
def one_device(rows, raw):
    """The gradients of the mean loss by plain PyTorch, on the CPU."""
    X, y = make_batch(rows)
    if raw:
        params = [p.clone().requires_grad_() for p in PARAMS]
        F.cross_entropy(lenet(X, params), y).backward()
        return [p.grad for p in params]
    net = make_net()
    F.cross_entropy(net(X), y).backward()
    return gradients(net)


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_parallel_program_computes_what_one_device_does(program, count, rows):
    X, y = make_batch(rows)
    expected = one_device(rows, raw=program in ON_RAW_TENSORS)
    with virtual_gpus(count) as machine:
        replicas = [[grad.cpu() for grad in grads] for grads in PROGRAMS[program](X, y, list(machine.devices))]
    for grads in replicas:
        assert [grad.shape for grad in grads] == [grad.shape for grad in expected]
        gap = max((ours - right).abs().max().item() for ours, right in zip(grads, expected))
        assert gap < 1e-10


@pytest.mark.parametrize("reduce", [
    lambda grads: None,
    one_by_one(lambda data: [tensor.div_(2) for tensor in (collectives.ring_allreduce(data), data)[1]])])
def test_a_wrong_program_does_not_pass(reduce):
    """The negative control: without an all-reduce, and with a mean in place of a sum."""
    X, y = make_batch(7)
    with virtual_gpus(2) as machine:
        for grads in by_hand(reduce)(X, y, list(machine.devices)):
            gap = max((ours.cpu() - right).abs().max().item() for ours, right in zip(grads, one_device(7, raw=True)))
            assert gap > 1e-3
