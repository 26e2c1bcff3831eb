"""The library's own DistributedDataParallel, against the network on one device, and against PyTorch's; and its ZeRO.

Run by torchrun; with names of checks as arguments, only those.
"""

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_lib import current_machine
from mgpu_lib.ddp import DDP

sys.path.append(str(Path(__file__).parents[3] / "virtual-gpus" / "tests" / "programs"))
import moe  # noqa: F401 (its checks enter themselves)
import noise  # noqa: F401
import zero  # noqa: F401
from checking import (
    Branches,
    Tied,
    check,
    check_accumulation,
    check_unused_parameters,
    equal_on_all_ranks,
    network,
    parts,
    raises,
    run,
    same_networks,
    train,
    trained_alone,
)

F = nn.functional
SIZES = 1, 200, 25 * 2**20  # bytes: a bucket for each tensor, some, and one for all


def replica(net, rank, **options):
    """Ranks begin with different numbers: all get those of rank 0."""
    net = copy.deepcopy(net).cuda()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)
    return DDP(net, **options)


@check
def any_bucket(rank, n):
    for net in (network(), Tied()):
        for size in SIZES:
            ddp = train(replica(net, rank, bucket_bytes=size), parts(rank, n))
            same_networks(ddp.module, trained_alone(net))
            assert all(equal_on_all_ranks(p) for p in ddp.parameters())


@check
def as_pytorch_does_it(rank, n):
    """To the last bit: the same sums in the same order, but for PyTorch's first step.

    There its bucket has the parameters in the order of the network, later in that in which gradients arrive. Where a
    number lies decides from which rank on the ring adds it up, and so how the sum is rounded.
    """
    net = network().float()
    data = [(X.float(), y) for X, y in parts(rank, n)]
    theirs = DistributedDataParallel(copy.deepcopy(net).cuda(), device_ids=[rank])
    F.cross_entropy(theirs(data[0][0]), data[0][1]).backward()
    theirs, ours = train(theirs, data), train(replica(net, rank), data)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@check
def accumulation(rank, n):
    check_accumulation(replica(network(), rank, bucket_bytes=200), network(), rank, n)


@check
def unused_parameters(rank, n):
    for size in SIZES:
        net = replica(Branches(5), rank, bucket_bytes=size, find_unused=True)
        check_unused_parameters(net, Branches(5), rank, n)


@check
def unused_parameters_are_named(rank, n):
    net, X = replica(Branches(), rank), torch.ones(2, 5, dtype=torch.float64, device="cuda")
    words = "no gradient for branches.0.weight, branches.0.bias, branches.2.weight, branches.2.bias: freeze"
    raises(RuntimeError, words, lambda: net(X, 1).sum().backward())
    net.find_unused = True  # the pass that failed is forgotten
    net(X, 1).sum().backward()
    assert equal_on_all_ranks(net.module.trunk.weight.grad)


@check
def buffers(rank, n):
    """Running statistics are those of rank 0 before each pass, or each rank's own; counts stay whole numbers."""
    for broadcast in (True, False):
        net = replica(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double(), rank, broadcast_buffers=broadcast)
        theirs = copy.deepcopy(net.module)
        theirs = DistributedDataParallel(theirs, device_ids=[rank], broadcast_buffers=broadcast)
        for X, _ in parts(rank, n):
            for each in (net, theirs):
                each(X + rank).sum().backward()
        for ours, expected in zip(net.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(ours, expected) and ours.dtype == expected.dtype
        net.eval()(X)
        assert net.module[1].num_batches_tracked == 3


@check
def different_networks(rank, n):
    words = "rank 1 and rank 0 have different networks: 0.weight"
    raises(ValueError, words, DDP, nn.Sequential(nn.Linear(5, 4 if rank == 1 else 3, bias=False)).cuda())
    half = nn.Linear(5, 3).cuda()
    half.bias.requires_grad_(rank != 2)
    raises(ValueError, "rank 2 and rank 0 have different networks: bias", DDP, half)
    parts = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}
    turned = nn.ModuleDict(dict(reversed(parts.items())) if rank == 3 else parts).cuda()
    raises(
        ValueError, "rank 3 and rank 0 have different networks: ['second.weight', 'second.bias', 'first.", DDP, turned
    )
    raises(ValueError, "nothing to train", DDP, nn.Linear(5, 3).requires_grad_(False).cuda())
    raises(ValueError, "bucket_bytes is 0", DDP, nn.Linear(5, 3).cuda(), bucket_bytes=0)


@check
def buckets_travel_behind_the_backward_pass(rank, n):
    """All but the last are sent before the pass is over, and there are as many as their size says."""
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6))).cuda()
    X, machine = torch.ones(64, 1024, device="cuda"), current_machine()
    for size, expected in ((4 * 2**20, 6), (8 * 2**20, 3), (25 * 2**20, 1)):
        ddp = DDP(copy.deepcopy(net), bucket_bytes=size)
        loss, start = ddp(X).sum(), machine.elapsed()
        loss.backward()
        events = [e for e in machine.timeline if e.called >= start and e.gpu == rank]
        sums = [e for e in events if e.kind == "collective"]
        last = max(e.called for e in events if e.phase == "backward" and e.kind == "matmul")
        assert len(sums) == expected and [e.called < last for e in sums] == [True] * (expected - 1) + [False]


if __name__ == "__main__":
    run(sys.argv[1:])
