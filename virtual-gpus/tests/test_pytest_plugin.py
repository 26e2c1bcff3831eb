"""The pytest plugin: tests of multi-GPU code on a machine without GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTEST = sys.executable, "-m", "pytest", "--strict-markers", "-rA", "--tb=short"
TESTS = """
import subprocess, sys, unittest
import pytest

def test_other_tests_pay_nothing():
    assert not {"torch"} & sys.modules.keys()

@pytest.fixture
def tensor():
    import torch
    return torch.ones(2, device="cuda:2")

@pytest.mark.virtual_gpus(3, gpu="T4")
def test_marked(tensor):
    import torch
    assert torch.cuda.device_count() == 3 and "T4" in torch.cuda.get_device_name()
    assert tensor.sum().item() == 2

def test_off_again(monkeypatch):
    import os, torch
    assert not torch.cuda.is_available() and "VIRTUAL_GPUS" not in os.environ

def test_default(virtual_gpus):
    assert len(virtual_gpus.gpus) == 4 and virtual_gpus.elapsed() == 0

@pytest.mark.virtual_gpus(2)
class TestClass(unittest.TestCase):
    def test_method(self):
        import torch
        assert torch.cuda.device_count() == 2

@pytest.mark.virtual_gpus(2)
def test_processes(virtual_gpus):
    code = "import torch; print(torch.cuda.device_count())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1000).stdout == "2\\n"

@pytest.mark.virtual_gpus(2, gpu="V101")
def test_no_such_gpu():
    pass

@pytest.mark.virtual_gpus()
def test_no_number():
    pass

@pytest.mark.virtual_gpus(2, colour="red")
def test_no_such_argument():
    pass
"""


@pytest.mark.slow
def test_the_plugin(tmp_path):
    options = ["-n", "2"] * (find_spec("xdist") is not None)  # test_distribution.py runs it without
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*PYTEST, *options, tmp_path], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2400
    )
    assert "6 passed, 3 errors" in done.stdout, done.stdout + done.stderr
    for words in (
        "the mark virtual_gpus(2, gpu='V101') names no virtual GPUs: no GPU named 'V101'.",
        "the mark virtual_gpus() names no virtual GPUs: say how many, and the rest by name",
        "the mark virtual_gpus(2, colour='red') names no virtual GPUs: ",
    ):
        assert words in done.stdout
