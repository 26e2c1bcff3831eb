"""What lint-imports doesn't read: of the virtual GPUs, pages and programs see what `mgpu_lib.virtual` offers."""

import ast
from pathlib import Path

from pages import PAGES, statements

import mgpu_lib.virtual

ROOT = Path(__file__).parents[2]


def below(tree):
    """What Python code imports from below `mgpu_lib.virtual`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("mgpu_lib.virtual."))
        elif isinstance(node, ast.ImportFrom) and node.module == "mgpu_lib.virtual":
            yield from (alias.name for alias in node.names if alias.name not in mgpu_lib.virtual.__all__)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("mgpu_lib.virtual."):
            yield node.module


def test_pages_and_programs_import_no_deeper_than_mgpu_lib_virtual():
    found = {page: [name for _, node in statements(page) for name in below(node)] for page in PAGES}
    for folder in ("benchmarks", "scripts", "examples"):
        for path in (ROOT / folder).glob("*.py"):
            found[path.name] = list(below(ast.parse(path.read_text(encoding="utf-8"))))
    assert {where for where, names in found.items() if names} == {"appendix-clock"}  # which shows the clock's rates
