"""The library's own ZeRO, in all stages, against the network on one device: checks of from_scratch.py."""

import copy
import gc
import random
from functools import partial

import torch
import torch.distributed as dist
from checking import Branches, Tied, check, raises
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_lib import current_machine
from mgpu_lib.zero import ZeRO

F = nn.functional
OPTIMIZERS = (
    partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
)


class Random(nn.Module):
    """A few layers of any width, one of them perhaps frozen, or used twice; numbers that scale and shift the result."""

    def __init__(self, seed, recompute=False):
        super().__init__()
        chosen, _ = random.Random(seed), torch.manual_seed(seed)
        width = chosen.choice((1, 2, 5, 7))
        inner = [nn.Linear(width, width, bias=chosen.random() < 0.5) for _ in range(chosen.randint(1, 3))]
        if chosen.random() < 0.5:
            inner[0].requires_grad_(False)
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3, bias=chosen.random() < 0.5)
        self.inner, self.scale = nn.ModuleList(inner), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.ones(3))
        self.twice, self.recompute = chosen.random() < 0.5, recompute
        self.double()

    def forward(self, X):
        H = self.first(X)
        for layer in [*self.inner, *(self.inner if self.twice else [])]:
            H = torch.tanh(checkpoint(layer, H, use_reentrant=False) if self.recompute else layer(H))
        return self.scale * self.last(H) + self.shift


def compare(net, layers, rank, n, data, optimizer, stage, micro_batches=1):
    """Three steps of `net` in this stage, and of a copy on one device, have the same parameters."""
    alone, net = copy.deepcopy(net), copy.deepcopy(net)
    if rank > 0:
        with torch.no_grad():
            for tensor in *net.parameters(), *net.buffers():
                tensor.add_(rank)  # rank 0's numbers count
    oracle = optimizer([p for p in alone.parameters() if p.requires_grad])
    zero = ZeRO(net, optimizer, stage, layers(net))
    for X, y in data:
        F.cross_entropy(alone(X), y).backward()
        # As equal parts as can be: some may have one row more. The mean over the ranks is that over all rows.
        for rows in torch.arange(len(X)).tensor_split(n)[rank].tensor_split(micro_batches):
            loss = F.cross_entropy(zero(X[rows].cuda()), y[rows].cuda(), reduction="sum")
            (loss * n / len(X)).backward()
        zero.step()
        oracle.step()
        oracle.zero_grad()
    state, wanted = zero.whole_state(), alone.state_dict()
    assert list(state) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(state[name], wanted[name], rtol=1e-9, atol=1e-9, msg=name)


def some_batches(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        X = torch.randn(rows, 5, dtype=torch.float64, generator=generator)
        yield X, torch.randint(3, (rows,), generator=generator)


@check
def any_shape(rank, n):
    """Also ranks with fewer rows, or with none; layers by themselves, some of them, and all in one."""
    for seed in range(3 * n, 3 * n + 3):
        rows, chosen = random.Random(seed).randint(n - 1, 3 * n) or 1, OPTIMIZERS[seed % 2]
        layers = (lambda net: [net.first, *net.inner, net.last], lambda net: net.inner[1:], lambda net: [])[seed % 3]
        for stage in (1, 2, 3):
            compare(Random(seed), layers, rank, n, some_batches(rows, seed), chosen, stage)


@check
def accumulation_of_shards(rank, n):
    for stage in (1, 2, 3):
        data = some_batches(3 * n + 1, 7)
        compare(Random(1), lambda net: [net.first, net.last], rank, n, data, OPTIMIZERS[0], stage, micro_batches=3)


@check
def recomputation(rank, n):
    """Layers are computed again in the backward pass, hooks and all."""
    for stage in (1, 2, 3):
        net = Random(1, recompute=True)
        compare(net, lambda net: net.inner, rank, n, some_batches(2 * n, 2), OPTIMIZERS[0], stage)


@check
def tied(rank, n):
    """A weight that two layers share, or two names of one layer."""
    for stage in (1, 2, 3):
        for shared in (lambda net: [net.first, net.last], lambda net: [net]):
            compare(Tied(), shared, rank, n, some_batches(n, 5), OPTIMIZERS[0], stage)


@check
def what_cannot_be_trained_is_named(rank, n):
    make, linear = OPTIMIZERS[1], nn.Linear(5, 3)
    raises(ValueError, "stage=4: ZeRO has the stages 1, 2 and 3", ZeRO, linear, make, 4)
    raises(ValueError, "nothing to train", ZeRO, copy.deepcopy(linear).requires_grad_(False), make, 1)
    mixed = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).double())
    raises(ValueError, "of one type", ZeRO, mixed, make, 1)
    raises(ValueError, "this Linear of `layers` is no part of the network", ZeRO, Random(1), make, 3, [linear])
    raises(ValueError, "a ModuleList is never called", ZeRO, Random(1), make, 3, [Random(1).inner])
    X = torch.ones(2, 5, dtype=torch.float64, device="cuda")
    for stage in (1, 2, 3):
        net = Branches()
        zero = ZeRO(net, make, stage, [net.trunk, *net.branches])
        zero(X, 1).sum().backward()
        raises(RuntimeError, "no gradient for branches.0.weight, branches.0.bias: freeze", zero.step)


SIZE = 60 * 128  # numbers of a layer: in bytes a multiple of 512 for each of the ranks


def built(stage):
    net = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in [(60, 128), (128, 60)] * 2))
    return ZeRO(net, partial(torch.optim.Adam, lr=0.01), stage, net)


@check
def kept_bytes(rank, n):
    """To the byte what the formulas say, and never more than three times a layer on top."""
    X, flag, nbytes = torch.ones(1, 60, device="cuda"), torch.ones(1, device="cuda"), 4 * 4 * SIZE

    def held():
        dist.all_reduce(flag)  # what was sent last is there until something else is sent
        return torch.cuda.memory_allocated()

    for stage in (1, 2, 3):
        gc.collect()  # hooks and what they are attached to refer to each other
        start = held()
        zero = built(stage)
        parameters, gradients = (nbytes / n if stage >= sharded else nbytes for sharded in (3, 2))
        state = 2 * nbytes / n
        assert held() - start == parameters
        for step in range(2):
            zero(X).sum().backward()
            assert held() - start == parameters + gradients + (state if step else 0)
            zero.step()
            assert held() - start == parameters + state
        torch.cuda.reset_peak_memory_stats()
        zero(X).sum().backward()
        peak = torch.cuda.max_memory_allocated() - start
        assert peak <= parameters + gradients + state + 3 * 4 * SIZE + 4096, (stage, peak)
        zero = None
        gc.collect()
        assert held() == start


@check
def bytes_sent(rank, n):
    """Stages 1 and 2 send as much as an all-reduce does; stage 3 collects the parameters once more."""
    machine, X = current_machine(), torch.ones(1, 60, device="cuda")
    for stage in (1, 2, 3):
        zero = built(stage)
        torch.cuda.synchronize()
        start = machine.elapsed()
        zero(X).sum().backward()
        zero.step()
        torch.cuda.synchronize()
        events = [e for e in machine.timeline.since(start) if e.kind == "collective" and e.gpu == rank]
        names = [e.name for e in events]
        assert names.count("reduce_scatter") == 4 and names.count("all_gather") == (8 if stage == 3 else 4), names
