"""The library as others install it: a wheel, outside this checkout, has all that its figures and exercises need."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import wheels

from mgpu_lib import widgets
from mgpu_lib.recorded import RESULTS

ROOT = Path(__file__).parents[2]
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
moved = [{"name": "net", "limits": {}, "pipeline": [0, 80], "tensor": [0, 160], "data": [0, 10**6]}]
given = {"TimelineViewer": [machine.timeline], "MemoryExplorer": [table], "SplitExplorer": [moved]}
quick = {*widgets.__all__} - {"TuningExplorer", "LoopExplorer"}  # those make their data of a record, which takes long
shown = {name: len(getattr(widgets, name)(*given.get(name, [])).static_html()) for name in quick}
exercises.check_died_at(lambda losses, logits: -1)
assert "<img" in widgets.WhySlower().static_html(), "the pictures for pages without JavaScript come along"
assert len(load_alice().tokens) == 143_082 and len(mgpu.load_fashion_mnist().X_train) == 1_500
print(json.dumps({"figures": shown, "results": sorted(path.name for path in recorded.RESULTS.glob("*.json"))}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with wheels of copies of both libraries; a study is still being recorded."""
    project = tmp_path_factory.mktemp("project")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests")
    for folder in "mgpu_lib", "virtual-gpus":
        shutil.copytree(ROOT / folder, project / "book" / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / "book")
    (project / "book" / RESULTS.relative_to(ROOT) / "some.unfinished.json").write_text("{}")
    for folder in "book/virtual-gpus", "book":  # as `make dist` does: the wheel is made of the sdist
        wheels.run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", folder, cwd=project)
    made = sorted(project.glob("dist/*.whl"))
    assert [path.name.partition("-")[0] for path in made] == ["mgpu_lib", "virtual_gpus"]
    return wheels.environment(tmp_path_factory.mktemp("environment"), made)


@pytest.mark.slow
def test_every_figure_shows_outside_of_the_checkout(python, tmp_path):
    said = wheels.run(python, "-c", SHOW, cwd=tmp_path, env={**wheels.ENVIRONMENT, "MGPU_DATA": "digits"})
    found = json.loads(said.splitlines()[-1])
    assert "not yet: the run that dies early may be ended" in said
    assert len(found["figures"]) == len(widgets.__all__) - 2 and min(found["figures"].values()) > 1000
    assert found["results"] == sorted(path.name for path in RESULTS.glob("*.json") if "unfinished" not in path.name)
