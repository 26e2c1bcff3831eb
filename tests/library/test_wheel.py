"""The library as others install it: a wheel, outside this checkout, has all that its figures and exercises need."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_lib import widgets
from mgpu_lib.recorded import RESULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "test-your-own-program.md").read_text(encoding="utf-8")
BOOK = "path/to/this-book"
[MAKE] = re.findall(rf"^pip (wheel .* ){BOOK}$", PAGE, re.M)
[WHEEL] = re.findall(r"^pip install .* (wheels/\S+)$", PAGE, re.M)
LIMIT = 3000  # seconds for each of the steps
SHOW = """
import json, sys
from pathlib import Path
import torch
import mgpu_lib as mgpu
from mgpu_lib import exercises, recorded, widgets
from mgpu_lib.text import load_alice

assert Path(mgpu.__file__).is_relative_to(sys.prefix), mgpu.__file__
with mgpu.virtual_gpus(2) as machine:
    torch.ones(1000, device="cuda:1").sum().item()
table = widgets.memory.memory_table({"SimpleCNN": (mgpu.SimpleCNN, (3, 8, 8))}, [64], ["V100"])
moved = [{"name": "net", "layers": 2, "layer_wise": [0, 80], "in_layer": [0, 160], "data_parallel": [0, 10**6]}]
given = {"TimelineViewer": [machine.timeline], "MemoryExplorer": [table], "SplitExplorer": [moved]}
shown = {name: len(getattr(widgets, name)(*given.get(name, [])).static_html()) for name in widgets.__all__}
exercises.check_best_lr(lambda batch_size, known: (known[batch_size // 2] * known[batch_size * 2]) ** 0.5)
assert "<img" in widgets.WhySlower().static_html(), "the pictures for pages without JavaScript come along"
assert len(load_alice().tokens) == 143_082 and len(mgpu.load_fashion_mnist().X_train) == 1_500
print(json.dumps({"figures": shown, "results": sorted(path.name for path in recorded.RESULTS.glob("*.json"))}))
"""

TESTS = """
import sys
import pytest

def test_other_tests_pay_nothing():
    assert not {"torch", "mgpu_lib"} & sys.modules.keys()

@pytest.mark.virtual_gpus(3, gpu="T4")
def test_gpus():
    import mgpu_lib, torch
    assert mgpu_lib.__file__.startswith(sys.prefix), mgpu_lib.__file__
    assert torch.cuda.device_count() == 3
"""
CHILD = (
    "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import torch; torch.ones(2).cuda(2)']))"
)

PIP = sys.executable, "-m", "pip", "--disable-pip-version-check"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which names this checkout


def run(*command, **options):
    options = {"env": ENVIRONMENT, "stdin": subprocess.DEVNULL, "timeout": LIMIT, **options}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command[:4]}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that the page's command makes of a copy of the library, in which a study is still being recorded."""
    project = tmp_path_factory.mktemp("project")
    book = project / BOOK
    shutil.copytree(ROOT / "mgpu_lib", book / "mgpu_lib", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "pytest_virtual_gpus.py"):
        shutil.copy(ROOT / name, book)
    (book / RESULTS.relative_to(ROOT) / "some.unfinished.json").write_text("{}")
    run(*PIP, *MAKE.split(), BOOK, "--no-index", "--no-build-isolation", cwd=project)  # which needs no network
    assert [str(path.relative_to(project)) for path in project.glob("wheels/*")] == [WHEEL]
    return project / WHEEL


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of an environment that holds the wheel alone; other libraries are those of the environment around it.

    A .pth file names them. Such files in there are not read: this checkout, which one of them names, isn't found.
    """
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = next(
        path for path in (environment / "bin" / "python", environment / "Scripts" / "python.exe") if path.exists()
    )
    run(*PIP, "--python", python, "install", "--no-index", "--no-deps", wheel)
    (there,) = run(python, "-c", "import site; print(*site.getsitepackages())").split()
    Path(there, "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


@pytest.mark.slow
def test_every_figure_shows_outside_of_the_checkout(python, tmp_path):
    said = run(python, "-c", SHOW, cwd=tmp_path, env={**ENVIRONMENT, "MGPU_DATA": "digits"})
    found = json.loads(said.splitlines()[-1])
    assert "right: batch 32" in said
    assert found["figures"].keys() == {*widgets.__all__} and min(found["figures"].values()) > 1000
    assert found["results"] == sorted(path.name for path in RESULTS.glob("*.json") if "unfinished" not in path.name)


@pytest.mark.slow
def test_the_pytest_plugin_and_what_processes_inherit_come_along(python, tmp_path):
    (tmp_path / "test_gpus.py").write_text(TESTS)
    (tmp_path / "child.py").write_text(CHILD)
    run(python, "-m", "pytest", "--strict-markers", "-W", "error", tmp_path, cwd=tmp_path)
    run(python, "-m", "mgpu_lib.virtual", "child.py", cwd=tmp_path)
