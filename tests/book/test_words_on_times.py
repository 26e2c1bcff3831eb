"""What chapters say about modelled times beyond what their cells print: with another host, or with another guess.

Each test runs the chapter's own cells and names those with the sentences that depend on it.
"""

from pathlib import Path

import nbformat
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mgpu_lib as mgpu
from mgpu_lib.virtual import clock

CHAPTERS = Path(__file__).resolve().parents[2] / "chapters"


def code(chapter, *ids):
    """The source of these cells, one below the other."""
    cells = {cell.id: cell.source for cell in nbformat.read(CHAPTERS / f"{chapter}.ipynb", as_version=4).cells}
    return "\n".join(cells[name] for name in ids)


@pytest.fixture
def machines_off():
    """A chapter's cells turn virtual GPUs on and leave them so; other tests of this process want none."""
    yield
    while mgpu.current_machine():
        mgpu.current_machine().stop()


@pytest.mark.parametrize("share", [clock.PYTHON, 0.25])
def test_how_many_gpus_are_best_depends_on_a_guess(monkeypatch, machines_off, share):
    """Chapter 5, phases-why: with 1,024 rows two are; if calls held the lock for a quarter of their time, also four."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as the first cell does, for good
    monkeypatch.setattr(clock, "PYTHON", share)
    names, cells = {}, ("setup", "lenet-module", "counted", "phases", "step-in-phases", "phases-run")
    exec(code("05-the-parallel-primitives", *cells), names)
    one, two, four = (names["step_times"](1024, k)["together"] for k in (1, 2, 4))
    if share == 0.25:
        assert four == pytest.approx(two, rel=0.02)
    else:
        assert two < 0.9 * four and 1 < one / four < 1.1, "four are hardly faster than one"


@pytest.mark.parametrize(("host", "said"), [(1, (21, 8)), (1 / 3, (12, 6))])
def test_data_parallel_against_ddp_over_the_host_band(host, said):
    """Chapter 10, title, two-steps-explained: the milliseconds of both."""
    step = code("10-distributeddataparallel", "dataparallel-step").replace('"meta"', f'"meta", host={host}')
    names = {"mgpu": mgpu, "torch": torch, "nn": nn, "F": F}
    exec(step, names)
    ddp = mgpu.dry_run(a_rank, 4, "A100-80", per_node=None, host=host).timeline
    milliseconds = [1e3 * (timeline.end - timeline.start) for timeline in (names["one_process"], ddp)]
    assert [round(each) for each in milliseconds] == list(said)


def a_rank():
    """The step of the chapter's script, on one rank: a function."""
    net = DistributedDataParallel(mgpu.resnet18().cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    X, y = torch.empty(32, 1, 28, 28), torch.empty(32, dtype=torch.long)

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
    first, second = (
        [event for event in timeline if event.gpu == gpu and event.part != "communication"] for gpu in (0, 1)
    )
    both = sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a in first for b in second)
    assert least <= both / sum(event.end - event.start for event in second) <= most
