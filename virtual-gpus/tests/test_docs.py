"""ARCHITECTURE.md names what there is, and the README's figures are those that were recorded."""

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
