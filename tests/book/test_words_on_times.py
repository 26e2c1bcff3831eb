"""What chapters say about modelled times beyond what their cells print: with another host, or with another guess.

Each test names the cells with the sentences that depend on it.
"""

import contextlib

import pages
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mgpu_lib as mgpu
from virtual_gpus import virtual_gpus
from virtual_gpus.clock import host as hosts


@contextlib.contextmanager
def chapter_5(monkeypatch, host=1):
    """The chapter's step_times(rows, k), on four virtual GPUs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as the chapter's first cell does, for good
    with virtual_gpus(4, host=host) as machine:
        functions = "LeNet", "phase", "step_in_phases", "step_times"
        yield pages.shown("05", *functions, seconds={}, devices=machine.devices)["step_times"]


@pytest.mark.parametrize("host", [1, 1 / 3])
def test_what_a_small_step_is_spent_on(monkeypatch, host):
    """Chapter 5, step-bytes-solution: of 64 rows on four GPUs, making replicas and threads that take turns."""
    with chapter_5(monkeypatch, host) as step_times:
        seconds = step_times(64, 4)
    assert seconds["replicate"] + seconds["parallel_apply"] > seconds["together"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("share", [hosts.GIL, 0.25])
def test_how_many_gpus_are_best_depends_on_a_guess(monkeypatch, share):
    """Chapter 5, phases-why: with 1,024 rows two are; if calls held the lock for a quarter of their time, also four."""
    monkeypatch.setattr(hosts, "GIL", share)
    with chapter_5(monkeypatch) as step_times:
        one, two, four = (step_times(1024, k)["together"] for k in (1, 2, 4))
    if share == 0.25:
        assert four == pytest.approx(two, rel=0.02)
    else:
        assert two < 0.9 * four and 1 < one / four < 1.1, "four are hardly faster than one"


@pytest.mark.parametrize(("host", "said"), [(1, (21, 8)), (1 / 3, (12, 6))])
def test_data_parallel_against_ddp_over_the_host_band(host, said):
    """Chapter 10, title, two-steps-explained: the milliseconds of both."""
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


@pytest.mark.parametrize(("host", "least", "most"), [(1, 0, 0.2), (1 / 3, 0.6, 1)])
def test_when_two_gpus_compute_side_by_side(host, least, most):
    """Chapter 7, lenet-4-viewer-why: hardly ever with the slow host, most of the time with the fast one."""
    images = torch.empty(256, 1, 28, 28, device="meta")
    timeline = mgpu.predict(mgpu.lenet_module(), images, "V100", 2, "manual", host=host).timeline
    computing = [event for event in timeline if event.gpu is not None and event.part != "communication"]
    first, second = ([event for event in computing if event.gpu == gpu] for gpu in (0, 1))
    both = sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in first for b in second)
    assert least <= both / sum(event.end - event.start for event in second) <= most
