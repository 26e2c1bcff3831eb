"""The house around the book: requirements, the program that runs the notebooks, the Makefile."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import run_notebooks
import yaml
from packaging.requirements import Requirement

ROOT = run_notebooks.ROOT


def requirements(name):
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


@pytest.mark.parametrize("name", ["requirements-book.txt", "requirements.txt", "requirements-dev.txt"])
def test_every_requirement_has_a_lower_and_an_upper_bound(name):
    for requirement in requirements(name):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, f"{requirement} wants a lower and an upper bound"


def test_requirements_hold_what_the_library_declares():
    declared = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S).group(1)
    declared = [Requirement(text) for text in re.findall(r'"(.+?)"', declared) if "virtual-gpus" not in text]
    book = {requirement.name: requirement for requirement in requirements("requirements.txt")}
    assert declared, "pyproject.toml declares the library's dependencies"
    for requirement in declared:  # the book's outputs are the newest PyTorch's
        assert requirement == book[requirement.name] or requirement.name in ("torch", "torchvision")


# scripts/run_notebooks.py


def notebook(*sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for cell in cells:
        del cell["id"]
    return nbformat.v4.new_notebook(cells=cells, nbformat_minor=4)


PROGRAM = """import os, sys
print("to stdout")
print("to stdout, later", flush=True)
[os.environ[name] for name in ("MGPU_VIRTUAL", "MGPU_FULL", "TQDM_DISABLE")]"""
WIDGET = """import ipywidgets
class Figure(ipywidgets.IntSlider):
    def _repr_mimebundle_(self, **kwargs):
        live = super()._repr_mimebundle_(**kwargs)
        return {**live, "text/html": "<p class='mgpu'>static</p>", "text/plain": "Figure"}
Figure()"""


def run(*paths):
    command = [sys.executable, str(ROOT / "scripts/run_notebooks.py"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_running_twice_changes_no_byte(tmp_path):
    path = tmp_path / "sample.ipynb"
    nbformat.write(notebook(PROGRAM, WIDGET), path)
    path.chmod(0o640)
    assert run(path).returncode == 0
    first, when = path.read_bytes(), path.stat().st_mtime_ns
    again = run(path)
    assert (again.returncode, path.read_bytes(), path.stat().st_mtime_ns) == (0, first, when)
    assert "unchanged" in again.stdout
    assert path.stat().st_mode & 0o777 == 0o640
    stored = json.loads(first)
    assert set(stored["metadata"]) == {"kernelspec", "language_info"}
    assert "version" not in stored["metadata"]["language_info"]
    printed, value = stored["cells"][0]["outputs"]
    assert "".join(printed["text"]) == "to stdout\nto stdout, later\n"
    assert "".join(value["data"]["text/plain"]) == "['1', '1', '1']"
    assert set(stored["cells"][1]["outputs"][0]["data"]) == {"text/html", "text/plain"}
    assert all(cell["id"] and not cell["metadata"] for cell in stored["cells"])


FAULTY = {
    "raises": ("1 / 0", "ZeroDivisionError"),
    "tells": ("from pathlib import Path\nprint(Path.home() / 'data')", "names a place of this machine"),
    "blank": ("import ipywidgets\nipywidgets.IntSlider()", "a widget without text/html"),
}


@pytest.mark.slow
def test_a_notebook_that_must_not_be_stored_stays_as_it_was(tmp_path):
    before = {}
    for name, (source, _) in FAULTY.items():
        path = tmp_path / f"{name}.ipynb"
        nbformat.write(notebook("print('fine')", source), path)
        before[path] = path.read_bytes()
    done = run(*before)
    assert done.returncode == 1
    for name, (_, message) in FAULTY.items():
        assert re.search(rf"{name}.ipynb: NOT written.*?{message}", done.stderr, re.S)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_traceback_keeps_the_notebooks_own_lines():
    own, rule, library = (
        "Cell In[1], line 2\n----> 2 step()",
        "\x1b[31m---\x1b[39m",
        "\x1b[36mFile \x1b[39mtorch/nn.py:3",
    )
    frames = run_notebooks.own_frames([rule, own, library, library, "RuntimeError: no"])
    assert frames == [own, run_notebooks.LEFT_OUT, "RuntimeError: no"]


# Makefile


# In place of the environment's programs: writes down how it was called; there is no package where FAILS says so.
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> "$(dirname "$0")/../called"
case "$*" in *"$(cat "$(dirname "$0")/../fails")"*) exit 1;; esac
"""


@pytest.fixture
def make(tmp_path):
    """`make(words…, fails=…)`: what was printed, and the calls of programs in an environment of stubs."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "jupyter", "ruff", "lint-imports"):
        (tmp_path / "bin" / name).write_text(STUB)
        (tmp_path / "bin" / name).chmod(0o755)

    def run_make(*words, fails="nothing"):
        (tmp_path / "fails").write_text(fails)
        (tmp_path / "called").write_text("")
        command = ["make", *words, f"VENV={tmp_path}", f"PYTHON={sys.executable}"]
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "CPU")}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
        calls = [line for line in (tmp_path / "called").read_text().splitlines() if "--version" not in line]
        return done.stdout, [re.sub("-m pip install --disable-pip-version-check", "pip", call) for call in calls]

    return run_make


def test_each_command_installs_what_it_needs_and_once(make):
    assert make("book")[1] == ["python pip -r requirements-book.txt", "python scripts/build_book.py"]
    assert make("book")[1] == ["python scripts/build_book.py"]
    said, calls = make("lab")
    assert calls == ["python pip -r requirements.txt", "jupyter lab --notebook-dir=. --preferred-dir=chapters"]
    assert "Setting up" in said
    assert make("test")[1][:2] == ["python pip -r requirements-dev.txt", "ruff check ."]
    for target in ("book", "lab", "run-notebooks", "pictures"):
        assert "pip" not in str(make(target)[1]), "what the tests need holds all that"


def test_an_installation_that_broke_off_is_begun_again(make):
    make("book")
    assert make("lab", fails="requirements.txt")[1] == ["python pip -r requirements.txt"]
    assert make("book")[1][0] == "python pip -r requirements-book.txt", "it may have left something half changed"


def test_cpu_builds_are_taken_where_they_can_be_had(make):
    index = "https://download.pytorch.org/whl/cpu"
    said, calls = make("lab", "CPU=1")
    assert calls[0].startswith("python pip ") and f"--index-url {index} " in calls[0]
    assert calls[1:2] == ["python pip -r requirements.txt"] and "CPU=1: no PyTorch" not in said
    said, calls = make("test", "CPU=1", fails=index)
    assert f"CPU=1: no PyTorch from {index}" in said and "python pip -r requirements-dev.txt" in calls
    assert "index-url" not in str(make("book", "CPU=1")[1])


def test_make_explains_each_of_its_targets():
    text = (ROOT / "Makefile").read_text()
    for target in re.search(r"^\.PHONY: (.*)", text, re.M)[1].split():
        assert f"#   make {target} " in text


# What GitHub reads

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCHEMAS = {
    "citation-file-format": [ROOT / "CITATION.cff"],
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "github-issue-forms": sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")),
    "github-workflows": WORKFLOWS,
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_that_github_reads_follow_their_schemas(schema):
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *SCHEMAS[schema]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_codespace_is_set_up_by_a_command_that_there_is():
    command = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["postCreateCommand"]
    done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "jupyter lab" in done.stdout, done.stderr


def test_workflows_run_what_can_be_run_here():
    """Each of their steps is an action, a target of the Makefile, or a program that such a machine has."""
    targets = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M)[1].split()
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    commands = [step["run"].split() for job in jobs for step in job["steps"] if "run" in step]
    assert {words[1] for words in commands if words[0] == "make"} <= set(targets)
    assert {words[0] for words in commands} == {"make", "sudo", "mkdir", "gh", ".venv/bin/python"}
    scripts = {words[1] for words in commands if words[0] == ".venv/bin/python"}
    assert scripts and all((ROOT / name).is_file() for name in scripts)
    assert all("timeout-minutes" in job for job in jobs)
