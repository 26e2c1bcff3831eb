"""The book's pages for tests that run what a page shows: its functions, whole cells, its solutions."""

import ast
import re
from functools import cache
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

from experiments.museum import mended

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ROOT / "chapters"
PAGES = sorted(path.stem for path in CHAPTERS.glob("*.ipynb"))
TEXTS = "index", "test-your-own-program", "instructors", "errors", "glossary", "references"
BOOK = [*(f"{name}.md" for name in TEXTS), *(f"chapters/{name}.ipynb" for name in PAGES)]
IMPORTS, DEFINITIONS = (ast.Import, ast.ImportFrom), (ast.FunctionDef, ast.ClassDef)


@cache
def cells(page):
    """All cells of a page; `page` is its file's name or the beginning of it, such as "03" or "museum"."""
    [name] = [page] if page in PAGES else [name for name in PAGES if name.startswith(page)]
    return nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4).cells


@cache
def markdown(name):
    """The pieces of Markdown that a page of BOOK consists of: its cells, or the whole file."""
    if name.endswith(".md"):
        return [(ROOT / name).read_text(encoding="utf-8")]
    return [cell.source for cell in cells(Path(name).stem) if cell.cell_type == "markdown"]


@cache
def statements(page):
    """(id of its cell, statement) for all statements of a page, without %magics and the like."""
    plain_python = TransformerManager().transform_cell
    return [
        (cell.id, node)
        for cell in cells(page)
        if cell.cell_type == "code"
        for node in ast.parse(plain_python(cell.source)).body
    ]


def shown(page, *wanted, run=(), **given):
    """The names that a page defines: its imports, the functions and classes `wanted`, and what the cells `run` do.

    Each of `wanted` must be defined once. Functions find the names `given` where the page has variables.
    """
    chosen = [node for _, node in statements(page) if isinstance(node, IMPORTS)]
    for name in wanted:
        chosen += [node for _, node in statements(page) if isinstance(node, DEFINITIONS) and node.name == name]
    assert len(chosen) == len(wanted) + sum(isinstance(node, IMPORTS) for _, node in statements(page)), wanted
    for cell_id in run:
        chosen += [node for where, node in statements(page) if where == cell_id]
    names = dict(given)
    exec(compile(ast.Module(chosen, type_ignores=[]), page, "exec"), names)
    return names


@cache
def solutions(page):
    """The programs in the solutions that a page shows; a diff is of the program that the exercise gives."""
    found = []
    for cell in cells(page):
        for text in re.findall(r"^<details><summary>Solution to (.*?)^</details>$", cell.source, re.M | re.S):
            found += re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
            found += [mended(left_to_mend(page, cell.id.removesuffix("-solution")), diff) for diff in diffs(text)]
    return found


def left_to_mend(page, exercise):
    """The code of an exercise's cells, without that of its check."""
    mine = [cell for cell in cells(page) if cell.cell_type == "code" and cell.id.startswith(exercise)]
    return "\n".join(cell.source for cell in mine if not cell.id.endswith("-check")) + "\n"


def diffs(text):
    return re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S)
