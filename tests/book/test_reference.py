"""The reference in the book describes every public name, and every one that a chapter uses; its examples are true."""

import doctest
import importlib
import re

import build_book
import pages
import pytest
from bs4 import BeautifulSoup

import mgpu_lib
import virtual_gpus
from mgpu_lib import widgets

PAGES = "api-mgpu-lib", "api-virtual-gpus"
# What the pages say in a sentence: four names of the library are the simulator's, and `virtual_gpus` is its Machine.
SAID = {f"mgpu_lib.{name}" for name in ("virtual_gpus", "dry_run", "checks", "current_machine")}
SAID |= {"virtual_gpus.virtual_gpus", "virtual_gpus.checks"}
IMPORTED = re.compile(r"^ *from (mgpu_lib|mgpu_lib\.[\w.]+|virtual_gpus) import ([\w, ]+)", re.M)


@pytest.fixture(scope="module")
def described(book):
    made = [BeautifulSoup((book / f"{name}.html").read_text(encoding="utf-8"), "html.parser") for name in PAGES]
    return {tag["id"] for page in made for tag in page.select("dt.sig[id]")}


def test_every_public_name_is_described(described):
    public = {f"{package.__name__}.{name}" for package in (mgpu_lib, virtual_gpus, widgets) for name in package.__all__}
    assert public - SAID <= described


def used(code):
    """Names of the libraries that a chapter's code uses, in full; of modules, those in them."""
    names = {f"{module}.{name.strip()}" for module, names in IMPORTED.findall(code) for name in names.split(",")}
    modules = {name for name in names if name.removeprefix("mgpu_lib.") in mgpu_lib.MODULES or "." not in name}
    others = "clock_errors", "evidence", "recorded", "planning", "training"
    modules |= {f"mgpu_lib.{name}" for name in others} & names
    calls = [(module, re.findall(rf"(?<![\w.]){module.rpartition('.')[2]}\.(\w+)\(", code)) for module in modules]
    calls.append(("mgpu_lib", re.findall(r"\bmgpu\.((?!__)(?:\w+\.)?\w+)\b", code)))
    return names - modules | {f"{module}.{name}" for module, names in calls for name in names}


def test_every_name_that_a_chapter_uses_is_described(described):
    """Under whichever of its addresses: `mgpu.Table` is also `mgpu_lib.table.Table`."""
    last = {name.rpartition(".")[2] for name in described}
    for page in pages.PAGES:
        code = "\n".join(cell.source for cell in pages.cells(page) if cell.cell_type == "code")
        names = {name for name in used(code) - SAID if not name.startswith("mgpu_lib.exercises")}
        assert {name for name in names if name.rpartition(".")[2] not in last} == set(), page


LIBRARY = build_book.ROOT / "mgpu_lib"
WITH_EXAMPLES = [path for path in sorted(LIBRARY.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_are_true(path):
    module = importlib.import_module(".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts))
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried and not failed
