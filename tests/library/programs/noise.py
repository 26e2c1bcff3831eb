"""The library's NoiseMeter under PyTorch's DistributedDataParallel: checks of from_scratch.py."""

import pytest
import torch
import torch.distributed as dist
from checking import check, network, raises
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_lib.tuning import NoiseMeter, gradient_noise, noise_scale

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
def uneven_shards_of_a_quadratic_with_known_noise(rank, n):
    """Rows x ~ N(0, diag(sigma²)), loss |w - x|²/2 at w: |G|² is |w|²."""
    net = nn.Linear(1, 3, bias=False).double().cuda()
    net.weight.data = torch.tensor([[2.0], [0.0], [1.0]], dtype=torch.double).cuda()
    sigma = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double).cuda()
    wrapped, rows = DistributedDataParallel(net), (1, 5, 2, 2)[rank]
    meter, estimates = NoiseMeter(wrapped), []
    torch.manual_seed(rank)
    for _ in range(2000):
        x = sigma * torch.randn(rows, 3, dtype=torch.double).cuda()
        ((wrapped(torch.ones(rows, 1, dtype=torch.double).cuda()) - x).square().sum() / 2 / rows).backward()
        net.zero_grad()
        estimates.append(meter.estimate(rows))
    assert noise_scale(estimates) == pytest.approx(14 / 5, rel=0.1)


@check
def an_estimate_without_a_backward_pass(rank, n):
    meter = NoiseMeter(DistributedDataParallel(nn.Linear(5, 3).cuda()))
    raises(ValueError, "no backward pass yet", meter.estimate, 4)
    raises(ValueError, "rows is 0", meter.estimate, 0)
