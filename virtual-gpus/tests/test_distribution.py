"""The distribution as others install it: a wheel, outside of this checkout, beside PyTorch and nothing else."""

import shutil
import zipfile
from pathlib import Path

import pytest
import wheels

PROJECT = Path(__file__).parents[1]
TESTS = """
import sys
import pytest

OTHERS = "numpy", "matplotlib", "scipy", "torchvision", "mgpu_lib"
for name in OTHERS:
    sys.modules[name] = None  # an import of it fails

def program():
    from torch import nn, ones
    net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
    return lambda: net(ones(8, 64, device="cuda")).sum().backward()

@pytest.mark.filterwarnings("ignore")  # PyTorch's, that there is no NumPy
@pytest.mark.virtual_gpus(3, gpu="T4")
def test_gpus():
    import torch, virtual_gpus
    assert virtual_gpus.__file__.startswith(sys.prefix), virtual_gpus.__file__
    net = torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda(), [0, 1, 2])
    net(torch.ones(6, 4, device="cuda")).sum().backward()
    assert torch.cuda.device_count() == 3 and virtual_gpus.dry_run(program, 64).seconds > 0
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
def test_it_needs_torch_alone_and_the_pytest_plugin_and_what_processes_inherit_come_along(python, tmp_path):
    asked = "from importlib.metadata import requires; print(*requires('virtual-gpus'), sep='\\n')"
    needed = wheels.run(python, "-c", asked, cwd=tmp_path).splitlines()
    assert [name for name in needed if "extra" not in name] == ["torch<3,>=2.10"]
    (tmp_path / "test_gpus.py").write_text(TESTS)
    (tmp_path / "child.py").write_text(CHILD)
    wheels.run(python, "-m", "pytest", "--strict-markers", "-W", "error", tmp_path, cwd=tmp_path)
    wheels.run(python, "-m", "virtual_gpus", "child.py", cwd=tmp_path)
