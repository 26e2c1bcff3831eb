"""What a chapter shows of a module is what the library ships, docstrings and layout apart."""

import ast
import copy
import inspect

import pytest
from pages import DEFINITIONS, statements

from mgpu_lib import primitives, splitting, tensor_parallel, traffic


def definitions(nodes):
    """The functions and classes among `nodes` by name, as text."""
    found = {node.name: copy.deepcopy(node) for node in nodes if isinstance(node, DEFINITIONS)}
    for node in found.values():
        for inner in ast.walk(node):
            if isinstance(inner, DEFINITIONS) and ast.get_docstring(inner) is not None:
                inner.body = inner.body[1:]
    return {name: ast.dump(node) for name, node in found.items()}


@pytest.mark.parametrize(
    "page, parts, whole",
    [
        ("05", (primitives, primitives.tensors_in), {"tensors_in", "check_rows", "check_parallel", "data_parallel"}),
        (
            "11",
            (splitting, tensor_parallel, traffic),
            {"layer_wise", "summed", "SumGradients", "SumOutputs", "together", "in_layer", "VocabularyPart"},
        ),
    ],
)
def test_a_chapter_shows_what_the_library_ships(page, parts, whole):
    source = "\n".join(inspect.getsource(part).replace(", Tensor)", ", torch.Tensor)") for part in parts)
    shipped, shown = definitions(ast.parse(source).body), definitions(node for _, node in statements(page))
    assert whole <= shown.keys() and whole <= shipped.keys()
    assert page != "05" or whole == shipped.keys(), "all of the module"
    assert [name for name in shown if name in shipped and shown[name] != shipped[name]] == []
