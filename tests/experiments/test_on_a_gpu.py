"""experiments.on_a_gpu on virtual GPUs: each part gives what it should, and goes on where it ended."""

import json
import time

import pytest
import torch

import mgpu_lib as mgpu
from experiments import on_a_gpu
from mgpu_lib import recorded
from mgpu_lib.virtual import rates


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """One virtual A100, and few calls."""
    monkeypatch.setattr(on_a_gpu, "CALLS", 5)
    with mgpu.virtual_gpus(1) as machine:
        yield machine


def only(monkeypatch, part, *keys):
    """Take only these cases of a part."""
    cases, row = on_a_gpu.PARTS[part]
    monkeypatch.setitem(on_a_gpu.PARTS, part, (lambda: {key: cases()[key] for key in keys}, row))


def test_the_most_valuable_comes_first():
    assert list(on_a_gpu.PARTS) == ["host", "steps", "copies", "validation", "resnet_grid"]
    assert on_a_gpu.LIMIT <= 8 * 60 and set(on_a_gpu.SMALL) <= set(rates.HOST)


def test_what_a_call_costs_the_host(tmp_path):
    assert on_a_gpu.measure("host", tmp_path)
    rows = json.loads((tmp_path / "measured_host.json").read_text())["rows"]
    assert rows.keys() == on_a_gpu.host_cases().keys()
    for name in on_a_gpu.SMALL:
        called, engine = (rows[f"{name}/{way}"]["median"] for way in ("called", "by the engine"))
        assert called >= 0.9 * rates.HOST[name][0] and engine >= 0.9 * rates.HOST[name][1], name


@pytest.mark.slow
def test_steps_and_copies(tmp_path, monkeypatch):
    only(monkeypatch, "steps", "LeNet/16/fp32", "LeNet/16/amp")
    only(monkeypatch, "copies", "pinned/in/4194304", "pageable/in/4194304", "pageable/out/4096")
    assert on_a_gpu.measure("steps", tmp_path) and on_a_gpu.measure("copies", tmp_path)
    steps, copies = (json.loads((tmp_path / f"measured_{part}.json").read_text()) for part in ("steps", "copies"))
    net = mgpu.lenet_module()
    said = mgpu.predict(net, torch.empty(16, 1, 28, 28)).seconds
    assert steps["rows"]["LeNet/16/fp32"]["median"] == pytest.approx(said, rel=0.05)
    assert copies["rows"]["pageable/in/4194304"]["median"] > copies["rows"]["pinned/in/4194304"]["median"] > 4e6 / 32e9
    assert steps["gpu"] == torch.cuda.get_device_name(0) and steps["modelled"] is True
    assert steps["torch"] == torch.__version__ and "driver" in steps


def test_steps_of_the_validation(tmp_path, monkeypatch):
    only(monkeypatch, "validation", "lenet/1/train", "lenet/16/infer")
    assert on_a_gpu.measure("validation", tmp_path)
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    assert recorded.measured("validation")["rows"]["lenet/1/train"]["mode"] == "train"
    assert recorded.measured("steps") is None


def test_the_grid_of_resnet18(tmp_path, monkeypatch):
    monkeypatch.setitem(on_a_gpu.PARTS, "resnet_grid", (on_a_gpu.resnet_grid.cases, lambda *case: {"case": case}))
    assert on_a_gpu.measure("resnet_grid", tmp_path)
    rows = json.loads((tmp_path / "measured_resnet_grid.json").read_text())["rows"]
    assert rows["batch/16/0.025/1"] == {"case": ["batch", 16, 0.025, 1]} and len(rows) == 25 * 5


def test_a_part_stops_before_the_deadline_and_goes_on(tmp_path, monkeypatch):
    now, done = [0.0], []

    def row(case):
        now[0] += 100
        done.append(case)
        return {"case": case}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setitem(on_a_gpu.PARTS, "host", (lambda: {str(i): (i,) for i in range(5)}, row))
    assert on_a_gpu.measure("host", tmp_path, deadline=330) is False
    assert done == [0, 1] and now[0] == 200, "the next would take 150 s of 130, as it may be half as long again"
    assert on_a_gpu.measure("host", tmp_path, deadline=now[0] + 480) is True and done == [0, 1, 2, 3, 4]
    assert on_a_gpu.measure("host", tmp_path) is True and len(done) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["measured_host.json"]


def test_measurements_of_two_gpus_are_not_mixed(tmp_path, monkeypatch):
    only(monkeypatch, "host", "view/called")
    on_a_gpu.measure("host", tmp_path)
    with mgpu.virtual_gpus(1, gpu="T4"), pytest.raises(ValueError, match=r"gpu .*A100.*, not .*T4.*another folder"):
        on_a_gpu.measure("host", tmp_path)


def test_it_needs_a_real_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["on_a_gpu", "--out", str(tmp_path), "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="no real GPU"):
        on_a_gpu.main()
