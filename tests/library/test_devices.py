"""Finding GPUs, beyond what chapter 1 shows: that try_gpu falls back to the CPU, and the table of virtual ones."""

import pytest
import torch

import mgpu_lib as mgpu
from mgpu_lib import devices


@pytest.fixture(autouse=True)
def off(monkeypatch):
    """Virtual GPUs are off again before `monkeypatch` puts back what they stood in for."""
    monkeypatch.setenv("MGPU_VIRTUAL", "1")  # whatever GPUs this computer has
    yield
    while mgpu.current_machine():
        mgpu.current_machine().stop()
    devices._started = None


@pytest.fixture
def three_real(monkeypatch):
    monkeypatch.delenv("MGPU_VIRTUAL", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"Real {i}")


def test_gpus_for_which_the_driver_is_too_old_are_none(three_real, monkeypatch, capsys):
    """NVML, which device_count asks, counts them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.try_gpu(1) == torch.device("cpu") and devices.try_all_gpus() == [torch.device("cpu")]
    assert len(devices.use_gpus(2)) == 2
    assert "Using 2 virtual GPUs" in capsys.readouterr().out


def test_all_gpus_are_found_and_others_fall_back(capsys):
    mgpu.use_gpus(3)
    assert mgpu.try_all_gpus() == [mgpu.try_gpu(i) for i in range(3)] == [torch.device("cuda", i) for i in range(3)]
    assert "falling back" not in capsys.readouterr().out
    assert mgpu.try_gpu(3) == mgpu.try_gpu(-1) == torch.device("cpu")


def test_use_gpus_takes_real_ones_when_there_are_enough(three_real, capsys):
    assert mgpu.use_gpus(2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert capsys.readouterr().out == "Using 2 real GPUs: Real 0, Real 1.\n" and mgpu.current_machine() is None


def test_use_gpus_makes_virtual_ones_otherwise(three_real, monkeypatch, capsys):
    assert len(mgpu.use_gpus(4)) == 4 and mgpu.current_machine() is not None
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Using 4 virtual GPUs (A100-80), made of this computer's memory."
    assert second == "Your 3 real GPUs won't be used. use_gpus(3) in a restarted kernel would."
    mgpu.use_gpus(2)
    assert capsys.readouterr().out.startswith("Using 2 virtual GPUs"), "a program has GPUs of one kind"
    mgpu.current_machine().stop()
    monkeypatch.setenv("MGPU_VIRTUAL", "1")
    mgpu.use_gpus(1)
    assert capsys.readouterr().out == "Using 1 virtual GPU (A100-80), made of this computer's memory.\n"


def test_use_gpus_again_keeps_what_is_there():
    (device,) = mgpu.use_gpus(1)
    x = torch.ones(1, device=device)
    first = mgpu.current_machine()
    mgpu.use_gpus(3)
    assert mgpu.current_machine() is first and torch.cuda.device_count() == 3
    assert (x.to("cuda:2") + torch.ones(1, device="cuda:2")).item() == 2
    assert len(mgpu.use_gpus(2)) == 2 and torch.cuda.device_count() == 3
    mgpu.use_gpus(2, gpu="T4")
    assert torch.cuda.get_device_name() == "Tesla T4 (virtual)" and torch.cuda.device_count() == 2
    mgpu.current_machine().stop()
    with mgpu.virtual_gpus(2, gpu="A100-40") as machine:
        assert len(mgpu.use_gpus(3)) == 3 and mgpu.current_machine() is machine, "one of our own stays"


def test_use_gpus_wants_a_number():
    for n in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="whole number, at least 1"):
            mgpu.use_gpus(n)
    with pytest.raises(ValueError, match="no GPU named"):
        mgpu.use_gpus(1, gpu="Voodoo")


@pytest.mark.parametrize("utilization, shown", [("41 %", "41 %"), ("[N/A]", "N/A")])  # a part of a GPU (MIG)
def test_table_of_real_gpus(monkeypatch, tmp_path, utilization, shown):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n[ $# = 2 ] && echo '0, Tesla <V100>, 3446 MiB, 16130 MiB, {utilization}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    table = mgpu.gpu_table()
    assert [*table.rows[0].values()] == [0, "Tesla <V100>", "3446 MiB", "16130 MiB", shown] and len(table.rows) == 1
    assert "&lt;V100&gt;" in table._repr_html_()


def test_table_without_a_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "No NVIDIA GPU here" in repr(mgpu.gpu_table()) and "No NVIDIA GPU" in mgpu.gpu_table()._repr_html_()


def test_a_name_that_the_library_does_not_have():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mgpu.nothing  # noqa: B018
