"""The distribution as others install it: a wheel, outside of this checkout, beside PyTorch and nothing else.

Its pytest plugin comes along: tests of multi-GPU code on a machine without GPUs.
"""

import shutil
import subprocess
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import wheels

PROJECT = Path(__file__).parents[1]
TESTS = """
import subprocess, sys, unittest
import pytest

OTHERS = "numpy", "matplotlib", "scipy", "torchvision", "mgpu_lib"
for name in OTHERS:
    sys.modules[name] = None  # an import of it fails
pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, that there is no NumPy

def test_other_tests_pay_nothing():
    assert not {"torch"} & sys.modules.keys()

@pytest.fixture
def tensor():
    import torch
    return torch.ones(2, device="cuda:2")

@pytest.mark.virtual_gpus(3, gpu="T4")
def test_marked(tensor):
    import torch, virtual_gpus
    assert virtual_gpus.__file__.startswith(sys.prefix), virtual_gpus.__file__
    assert torch.cuda.device_count() == 3 and "T4" in torch.cuda.get_device_name()
    assert tensor.sum().item() == 2

def test_off_again(monkeypatch):
    import os, torch
    assert not torch.cuda.is_available() and "VIRTUAL_GPUS" not in os.environ

def program():
    from torch import nn, ones
    net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
    return lambda: net(ones(8, 64, device="cuda")).sum().backward()

def test_default(virtual_gpus):
    assert len(virtual_gpus.gpus) == 4 and virtual_gpus.elapsed() == 0
    from torch import nn, ones
    from virtual_gpus import dry_run
    nn.DataParallel(nn.Linear(4, 4).cuda())(ones(6, 4, device="cuda")).sum().backward()
    assert dry_run(program, 64).seconds > 0

@pytest.mark.virtual_gpus(2)
class TestClass(unittest.TestCase):
    def test_method(self):
        import torch
        assert torch.cuda.device_count() == 2

@pytest.mark.virtual_gpus(2)
def test_processes(virtual_gpus):
    looks = "from importlib.util import find_spec; assert find_spec('torch')"  # as many do before they import it
    code = f"{looks}; import virtual_gpus, torch; print(torch.cuda.device_count())"
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
CHILD = (
    "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import torch; torch.ones(2).cuda(2)']))"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(PROJECT, project / "copy", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "tests"))
    made = wheels.make("wheel --no-deps --wheel-dir wheels ./copy", project)
    assert [path.name for path in made] == ["virtual_gpus-0.1.0-py3-none-any.whl"]
    names = zipfile.ZipFile(made[0]).namelist()
    folders = {Path(name).parts[0] for name in names}
    assert folders == {"virtual_gpus", "virtual_gpus-0.1.0.dist-info"}  # neither tests nor calibration
    assert "virtual_gpus/cli/page.html" in names
    return wheels.environment(tmp_path_factory.mktemp("environment"), made)


@pytest.mark.slow
def test_it_needs_torch_alone_and_what_processes_inherit_comes_along(python, tmp_path):
    asked = "from importlib.metadata import requires; print(*requires('virtual-gpus'), sep='\\n')"
    needed = wheels.run(python, "-c", asked, cwd=tmp_path).splitlines()
    assert [name for name in needed if "extra" not in name] == ["torch<3,>=2.10"]
    (tmp_path / "child.py").write_text(CHILD)
    wheels.run(python, "-m", "virtual_gpus", "child.py", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n", "2"]])
def test_the_plugin(python, tmp_path, options):
    if "-n" in options and find_spec("xdist") is None:
        pytest.skip("no pytest-xdist")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [python, "-m", "pytest", "--strict-markers", "-W", "error", "-rA", "--tb=short", *options, tmp_path]
    done = subprocess.run(
        command, cwd=tmp_path, env=wheels.ENVIRONMENT, capture_output=True, text=True, timeout=wheels.LIMIT
    )
    assert "6 passed, 3 errors" in done.stdout, done.stdout + done.stderr
    for words in (
        "the mark virtual_gpus(2, gpu='V101') names no virtual GPUs: no GPU named 'V101'.",
        "the mark virtual_gpus() names no virtual GPUs: say how many, and the rest by name",
        "the mark virtual_gpus(2, colour='red') names no virtual GPUs: ",
    ):
        assert words in done.stdout
