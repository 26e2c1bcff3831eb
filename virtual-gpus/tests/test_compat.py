"""The private names of PyTorch's that the package uses are all in `compat`, and this PyTorch has them."""

import ast
import inspect
from pathlib import Path

import pytest

import virtual_gpus
from virtual_gpus import compat
from virtual_gpus.patches.patch import PATCHES

PACKAGE = Path(virtual_gpus.__file__).parent
OTHERS = set(  # Python's own
    "_replace _asdict _fields _getframe _current_frames _bootstrap _module_locks _Popen _exit _actions".split()
)


@pytest.mark.parametrize("owner", compat.ATTRIBUTES, ids=lambda owner: owner.__name__)
def test_this_pytorch_has_the_attributes(owner):  # the names themselves, if `compat` could be imported
    assert [name for name in compat.ATTRIBUTES[owner].split() if not hasattr(owner, name)] == []


def test_this_pytorch_has_what_patches_call():
    functions = [patch for patch in PATCHES if inspect.isfunction(patch[2])]
    wraps = [patch for patch in functions if "original" in inspect.signature(patch[2]).parameters]
    assert [(owner, name) for owner, name, _ in wraps if not hasattr(owner, name)] == []


def test_no_other_module_uses_a_private_name():
    known = OTHERS.union(compat.LATER.split(), *map(str.split, compat.ATTRIBUTES.values()))
    others = (path for path in PACKAGE.rglob("*.py") if path != Path(compat.__file__))
    assert [(path.name, text) for path in others for text in private_names(path, known)] == []


def private_names(path, known):
    """What `path` imports of PyTorch's private modules, or reads of what isn't `known` or begins with torch."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}  # of its classes
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from filter(is_private, (f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch") and is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            text = ast.unparse(node)
            operation = text.startswith(("torch.ops.", "aten."))
            if not operation and (node.attr not in known or text.startswith("torch.")):
                yield text


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
