"""What lint-imports doesn't read: of the virtual GPUs, pages and programs see what `virtual_gpus` offers."""

import ast
import importlib
import runpy
from pathlib import Path

import pytest
from pages import PAGES, statements

import virtual_gpus

ROOT = Path(__file__).parents[2]


def below(tree):
    """What Python code imports from below `virtual_gpus`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("virtual_gpus."))
        elif isinstance(node, ast.ImportFrom) and node.module == "virtual_gpus":
            yield from (alias.name for alias in node.names if alias.name not in virtual_gpus.__all__)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("virtual_gpus."):
            yield node.module


def test_pages_and_programs_import_no_deeper_than_mgpu_lib_virtual():
    found = {page: [name for _, node in statements(page) for name in below(node)] for page in PAGES}
    for folder in ("benchmarks", "scripts", "examples"):
        for path in (ROOT / folder).glob("*.py"):
            found[path.name] = list(below(ast.parse(path.read_text(encoding="utf-8"))))
    assert {where for where, names in found.items() if names} == {"appendix-clock"}  # which shows the clock's rates


def test_the_old_name_of_the_virtual_gpus_says_the_new_one():
    with pytest.raises(ImportError, match="from virtual_gpus import"):
        importlib.import_module("mgpu_lib.virtual")
    with pytest.raises(SystemExit, match=r"python -m virtual_gpus$"):
        runpy.run_module("mgpu_lib.virtual", run_name="__main__")
