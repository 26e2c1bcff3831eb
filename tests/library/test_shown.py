"""What a chapter shows of a module is what the library ships, docstrings, types and layout apart."""

import ast
import copy
import inspect

import pytest
from pages import DEFINITIONS, PAGES, cells, statements

import mgpu_lib
from experiments import large_scaling
from mgpu_lib import splitting, tensor_parallel

CHAPTER_4 = "lenet_params lenet get_params allreduce split_batch sgd train_batch max_divergence".split()
CHAPTER_14 = "split sharded trained grid program".split()


def definitions(nodes):
    """The functions and classes among `nodes` by name, as text."""
    found = {node.name: copy.deepcopy(node) for node in nodes if isinstance(node, DEFINITIONS)}
    for node in found.values():
        for inner in ast.walk(node):
            if isinstance(inner, DEFINITIONS) and ast.get_docstring(inner) is not None:
                inner.body = inner.body[1:]
            if isinstance(inner, ast.arg):
                inner.annotation = None
            if isinstance(inner, ast.FunctionDef):
                inner.returns = None
    return {name: ast.dump(node) for name, node in found.items()}


def shipped_by(*parts):
    source = "\n".join(inspect.getsource(part).replace(", Tensor)", ", torch.Tensor)") for part in parts)
    return definitions(ast.parse(source).body)


def on_ranks(page):
    """The definitions in its cells that run on all ranks."""
    sources = [cell.source.partition("\n") for cell in cells(page) if cell.cell_type == "code"]
    return definitions(node for head, _, code in sources if head == "%%ranks" for node in ast.parse(code).body)


@pytest.mark.parametrize("page", PAGES)
def test_a_function_with_the_name_of_a_public_one_is_that_one(page):
    """What is meant to be wrong has another name. A cell tagged `library` holds nothing but such functions, so that a
    function renamed in the library is missed here."""
    public = {name: getattr(mgpu_lib, name) for name in mgpu_lib.__all__}
    public = {name: f for name, f in public.items() if inspect.isfunction(f) and f.__module__.startswith("mgpu_lib")}
    shown = definitions(node for _, node in statements(page) if isinstance(node, ast.FunctionDef))
    same = shipped_by(*(public[name] for name in shown if name in public))
    assert {name: text for name, text in shown.items() if name in public} == same
    tagged = {cell.id for cell in cells(page) if "library" in cell.metadata.get("tags", [])}
    assert {node.name for where, node in statements(page) if where in tagged and hasattr(node, "name")} <= public.keys()


@pytest.mark.parametrize(
    "page, parts, whole",
    [
        ("04", [getattr(mgpu_lib, name) for name in CHAPTER_4], {*CHAPTER_4}),
        ("10", (splitting,), {"layer_wise"}),
        ("11", (tensor_parallel,), {"f", "g", "gather", "vocabulary_embedding"}),
        ("14", [getattr(large_scaling, name) for name in CHAPTER_14], {*CHAPTER_14}),
    ],
    ids=["04", "10", "11", "14"],
)
def test_a_chapter_shows_what_the_library_ships(page, parts, whole):
    shipped, shown = shipped_by(*parts), definitions(node for _, node in statements(page)) | on_ranks(page)
    assert whole <= shown.keys() and whole <= shipped.keys()
    assert [name for name in shown if name in shipped and shown[name] != shipped[name]] == []
