"""One of each thing: a public name of the library means one thing, wherever it is defined."""

import ast
import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path

import mgpu_lib

ALLOWED = {
    "patches": "each module of virtual/patches says in a function of this name what it patches",
    "MODULE": "a module of virtual/patches that waits for another one to be imported says in this which",
}


def defined(source):
    """The public names that a module defines at its top level: functions, classes, constants."""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def meanings():
    """{public name: {id of what it means: the module that defines it}}."""
    found = defaultdict(dict)
    for info in pkgutil.walk_packages(mgpu_lib.__path__, "mgpu_lib."):
        module = importlib.import_module(info.name)
        for name in defined(Path(module.__file__).read_text(encoding="utf-8")):
            found[name].setdefault(id(getattr(module, name)), info.name)
    return found


def test_a_public_name_has_one_meaning():
    found = meanings()
    assert {"train", "data_parallel", "lenet", "virtual_gpus"} <= found.keys()
    assert {name: list(of.values()) for name, of in found.items() if len(of) > 1 and name not in ALLOWED} == {}


def test_names_are_found():
    source = "import os\nA, _B = 1, 2\nC: int = 3\ndef f(): pass\nclass D: x = 1\n"
    assert list(defined(source)) == ["A", "C", "f", "D"]
