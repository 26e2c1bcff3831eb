"""What chapters say about modelled times beyond what their cells print: with another host, or with another guess.

Each test names the cells with the sentences that depend on it.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mgpu_lib as mgpu
from virtual_gpus import virtual_gpus


@pytest.mark.parametrize(("host", "said"), [(1, (21, 8)), (1 / 3, (12, 6))])
def test_data_parallel_against_ddp_over_the_host_band(host, said):
    """Chapter 9, title, two-steps-explained: the milliseconds of both."""
    with virtual_gpus(4, backing="meta", host=host) as machine:
        step = training_step(nn.DataParallel(mgpu.resnet18().cuda()), images=128)
        step()  # the first one is a warm-up
        start = machine.elapsed()
        step()
        one_process = machine.timeline.since(start)

    def a_rank():
        return training_step(DistributedDataParallel(mgpu.resnet18().cuda()), images=32)

    four_processes = mgpu.dry_run(a_rank, 4, "A100-80", per_node=None, host=host).timeline
    assert [round(1e3 * (step.end - step.start)) for step in (one_process, four_processes)] == list(said)


def training_step(net, images):
    """A function: the step of both of the chapter's programs."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    X, y = torch.empty(images, 1, 28, 28), torch.empty(images, dtype=torch.long)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(net(X.cuda()), y.cuda()).backward()
        optimizer.step()

    return step
