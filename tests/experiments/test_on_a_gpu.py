"""experiments.on_a_gpu on virtual GPUs: each part gives what it should, and goes on where it ended."""

import json
import time

import pytest
import torch

import mgpu_lib as mgpu
from experiments import on_a_gpu
from mgpu_lib import recorded
from virtual_gpus.clock import rates


@pytest.fixture
def gpu(monkeypatch):
    """One virtual A100, and few calls."""
    monkeypatch.setattr(on_a_gpu, "CALLS", 5)
    with mgpu.virtual_gpus(1) as machine:
        yield machine


def only(monkeypatch, part, *keys):
    """Take only these cases of a part."""
    cases, row = on_a_gpu.PARTS[part]
    monkeypatch.setitem(on_a_gpu.PARTS, part, (lambda: {key: cases()[key] for key in keys}, row))


@pytest.mark.usefixtures("gpu")
def test_what_a_call_costs_the_host(tmp_path):
    assert on_a_gpu.measure("host", tmp_path)
    rows = json.loads((tmp_path / "modelled_host.json").read_text())["rows"]
    assert rows.keys() == on_a_gpu.host_cases().keys()
    for name in on_a_gpu.SMALL:
        called, engine = (rows[f"{name}/{way}"]["median"] for way in ("called", "by the engine"))
        assert called >= 0.9 * rates.HOST[name][0] and engine >= 0.9 * rates.HOST[name][1], name


@pytest.mark.usefixtures("gpu")
def test_copies(tmp_path, monkeypatch):
    only(monkeypatch, "copies", "pinned/in/4194304", "pageable/in/4194304", "pageable/out/4096")
    assert on_a_gpu.measure("copies", tmp_path)
    copies = json.loads((tmp_path / "modelled_copies.json").read_text())
    pinned, pageable = (copies["rows"][f"{memory}/in/4194304"]["median"] for memory in ("pinned", "pageable"))
    assert pageable > pinned > 4e6 / 32e9 and copies["modelled"] is True
    assert copies["gpu"] == torch.cuda.get_device_name(0) and copies["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("part", "keys"),
    [
        ("host", ["matmul/called", "norm/by the engine"]),
        ("steps", ["LeNet/16/amp", "ResNet-18/64/fp32"]),
        ("memory", ["LeNet/SGD/fp32", "Transformer/Adam/bf16"]),
        ("llama", ["512/train", "2048/infer"]),
        pytest.param("validation", ["lenet/1/train", "resnet18/16/infer"], marks=pytest.mark.slow),
    ],
)
def test_a_virtual_h200_gives_what_was_recorded_of_one(tmp_path, monkeypatch, part, keys):
    only(monkeypatch, part, *keys)
    monkeypatch.setattr("sys.argv", ["on_a_gpu", "--out", str(tmp_path), "--modelled", "H200"])
    monkeypatch.setattr(on_a_gpu, "MODELLED", [part])
    on_a_gpu.main()
    rows = json.loads((tmp_path / f"modelled_{part}.json").read_text())["rows"]
    measured, modelled = (record["rows"] for record in recorded.measured(part))
    assert list(rows) == keys and measured.keys() == modelled.keys()
    for key, row in rows.items():
        numbers = {name: value for name, value in modelled[key].items() if not isinstance(value, str)}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-9)


@pytest.mark.usefixtures("gpu")
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
    assert [path.name for path in tmp_path.iterdir()] == ["modelled_host.json"]


@pytest.mark.usefixtures("gpu")
def test_measurements_of_two_gpus_are_not_mixed(tmp_path, monkeypatch):
    only(monkeypatch, "host", "view/called")
    on_a_gpu.measure("host", tmp_path)
    with mgpu.virtual_gpus(1, gpu="T4"), pytest.raises(ValueError, match=r"gpu .*A100.*, not .*T4.*another folder"):
        on_a_gpu.measure("host", tmp_path)


@pytest.mark.usefixtures("gpu")
def test_it_needs_a_real_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["on_a_gpu", "--out", str(tmp_path), "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="no real GPU"):
        on_a_gpu.main()
