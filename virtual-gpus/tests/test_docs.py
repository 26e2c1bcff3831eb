"""ARCHITECTURE.md names what there is, the README's figures are the recorded ones, examples in docstrings are true."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "virtual_gpus"
ARCHITECTURE = (PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8")
CODE = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))


def named(pattern):
    """What ARCHITECTURE.md has in backticks, if all of it fits the pattern."""
    return sorted(set(re.findall(rf"`({pattern})`", ARCHITECTURE)))


@pytest.mark.parametrize("name", named(r"[\w/]+(?:/|\.py|\.toml)"))
def test_files_that_the_architecture_names_are_there(name):
    assert (PACKAGE / name).exists() or (PROJECT / name).exists()


@pytest.mark.parametrize("name", named(r"[A-Z]\w+"))
def test_names_that_the_architecture_uses_are_in_the_code(name):
    assert re.search(rf"\b{name}\b", CODE)


def test_the_architecture_has_a_row_for_every_room():
    rooms = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(named(r"\w+/"))


def recorded(name):
    return json.loads((PROJECT / f"calibration/recorded/{name}.json").read_text(encoding="utf-8"))["summary"]


CLOCK, TRANSFORMERS, SCALING, RUNS, COLLECTIVES = (
    recorded(name)
    for name in "clock_validation transformer_validation ddp_scaling run_validation collective_validation".split()
)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("steps and forward passes", CLOCK["held out"]),
        ("… with those that rules", CLOCK["held out, and what late rules left out"]),
        ("training steps of transformers", TRANSFORMERS["held out"]),
        ("scaling efficiency", SCALING["one node"]["efficiency"]),
        ("… several nodes", SCALING["several nodes"]["efficiency"]),
        ("training runs", RUNS["time"]["both"]["all"]),
        ("… memory", RUNS["memory"]["both"]["all"]),
        *((f"collectives: {kind} ", found) for kind, found in COLLECTIVES["held out"].items()),
    ],
)
def test_errors_that_the_readme_states_are_those_that_were_recorded(row, found):
    [line] = re.findall(rf"^\| {row}.*$", (PROJECT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [str(found["rows"]), *(f"{found[name]:.0%}" for name in ("median", "nine in ten", "worst"))]
    assert [cell.strip() for cell in line.split("|")[2:6]] == wanted


WITH_EXAMPLES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_are_true(path):
    module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried and not failed
