"""The recorded steps of DistributedDataParallel: how they are made, and that they fit each other."""

from types import SimpleNamespace

import pytest
import torch
from figure_samples import US, kernel, packed_times, timeline

import mgpu_lib as mgpu
from experiments import ddp_step
from mgpu_lib.recorded import study


@pytest.fixture(scope="module")
def recorded():
    return study("ddp_step")


def test_the_grid_is_whole(recorded):
    assert list(recorded["cells"]) == list(ddp_step.configurations())
    for name, cells in recorded["cells"].items():
        assert len(cells) == (len(recorded["buckets"]) if name.count("/") > 1 else 1)


def test_every_gradient_travels_once(recorded):
    for name, (net, _) in ddp_step.networks().items():
        params = [p.numel() * 4 for p in net.parameters()]
        lists = [list(map(int, sizes.split())) for sizes in recorded["bytes"][name]]
        assert sorted(lists[0]) == sorted(params), "a bucket for each parameter"
        assert lists[-1] == [sum(params)], "one for all of them"
        assert {sum(sizes) for sizes in lists} == {sum(params)}
        assert [len(sizes) for sizes in lists] == sorted((len(sizes) for sizes in lists), reverse=True)


def test_a_gpu_that_neither_computes_nor_communicates_waits_for_the_host():
    """The figure says so."""
    net, shape = ddp_step.networks()["ResNet-18"]
    X = torch.empty(64, *shape, device="meta")
    step = mgpu.predict(net, X, gpu="A100-80", n_gpus=2, strategy="ddp", link="PCIe tree", bucket_cap_mb=25)
    idle = int(ddp_step.cell(step).split()[3]) / 1000
    assert idle > 0.1
    assert step.timeline.waiting_for_host(0) / step.seconds == pytest.approx(idle, abs=0.02)


def test_buckets_that_differ_between_links_are_refused():
    found = {"net/fast": {"bytes": [""]}, "net/fast/PCIe tree/2": {"bytes": ["4 4"]}}
    assert ddp_step.sizes(found) == {"net": ["4 4"]}
    found["net/fast/PCIe tree/8"] = {"bytes": ["8"]}
    with pytest.raises(ValueError, match="net/fast/PCIe tree/8 has other buckets"):
        ddp_step.sizes(found)


def test_a_cell_says_what_runs_when_and_what_is_hidden():
    """A step of 200 µs: forward 10 to 50 with a gap of 1 µs, backward to 120; an all-reduce from 80 to 150, of which 40
    are hidden; then the update until 200. A broadcast from 0 to 10 is not hidden."""
    events = (
        kernel("broadcast", 0, 10, kind="collective", row="collective", phase="forward", nbytes=4),
        kernel("k", 10, 30, phase="forward"),
        kernel("k", 31, 50, phase="forward"),
        kernel("k", 50, 120, phase="backward"),
        kernel("all_reduce", 80, 150, kind="collective", row="collective", phase="backward", nbytes=8),
        kernel("k", 160, 200, phase="update"),
    )
    step = SimpleNamespace(timeline=timeline(*(e._replace(called=0.0) for e in events)), seconds=200 * US)
    ticks, kernels, exposed, idle, hidden, *words = ddp_step.cell(step).split(" ")
    assert (ticks, kernels, exposed, idle, hidden) == ("20000", "745", "200", "55", "500")
    assert list(map(packed_times, words)) == [
        [(10, 50, 39)],
        [(50, 120, 70)],
        [(160, 200, 40)],
        [(0, 10, 10), (120, 150, 30)],
        [(0, 10, 10)],
        [(80, 150, 70)],
    ]
    assert [e.nbytes for e in ddp_step.collectives(step, "all_reduce")] == [8]
