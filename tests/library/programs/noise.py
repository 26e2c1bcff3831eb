"""The library's NoiseMeter under PyTorch's DistributedDataParallel: checks of from_scratch.py."""

import pytest
import torch
import torch.distributed as dist
from checking import check, network, raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_lib.tuning import NoiseMeter, gradient_noise

F = nn.functional


def gradient(net, X, y):
    return torch.autograd.grad(F.cross_entropy(net(X), y), list(net.parameters()))


@check
def the_estimates_of_gradient_noise(rank, n):
    """On four ranks and on two, with one bucket and with several, and the gradients are those of no hook."""
    for k in (n, 2):
        group = dist.new_group(range(k))
        for cap in (25, 1e-4) if rank < k else ():
            net = network(99).cuda()
            wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap)
            meter = NoiseMeter(wrapped)
            for step in range(2):
                torch.manual_seed(step)
                X, y = torch.randn(k, 3, 5, dtype=torch.double).cuda(), torch.randint(3, (k, 3)).cuda()
                each = [gradient(net, *shard) for shard in zip(X, y)]
                net.zero_grad()
                F.cross_entropy(wrapped(X[rank]), y[rank]).backward()
                assert meter.estimate(3) == pytest.approx(gradient_noise(each, [3] * k), rel=1e-9)
                for p, grads in zip(net.parameters(), zip(*each), strict=True):
                    torch.testing.assert_close(p.grad, sum(grads) / k)


@check
def uneven_shards(rank, n):
    """The mean of n means of r rows each has the squared length |G|² + tr Σ · mean(1/r) / n, a single one of them
    |G|² + tr Σ / r."""
    sizes, net = (1, 5, 2, 2), network().cuda()
    wrapped = DistributedDataParallel(net)
    meter = NoiseMeter(wrapped)
    torch.manual_seed(0)
    X, y = torch.randn(sum(sizes), 5, dtype=torch.double).cuda(), torch.randint(3, (sum(sizes),)).cuda()
    shards = [*zip(X.split(sizes), y.split(sizes))]
    each = torch.stack([torch.cat([g.flatten() for g in gradient(net, *shard)]) for shard in shards])
    F.cross_entropy(wrapped(shards[rank][0]), shards[rank][1]).backward()
    signal, noise = meter.estimate(sizes[rank])
    inverse = sum(1 / rows for rows in sizes) / n
    assert signal + noise * inverse == pytest.approx(each.square().sum(dim=1).mean().item(), rel=1e-9)
    assert signal + noise * inverse / n == pytest.approx(each.mean(dim=0).square().sum().item(), rel=1e-9)


@check
def an_estimate_without_a_backward_pass(rank, n):
    meter = NoiseMeter(DistributedDataParallel(nn.Linear(5, 3).cuda()))
    raises(ValueError, "no backward pass yet", meter.estimate, 4)
    raises(ValueError, "rows is 0", meter.estimate, 0)
