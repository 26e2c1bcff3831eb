"""Who imports whom: the layers of virtual/, its public face, and the arrows of the whole library."""

import ast
import importlib
import json
import pkgutil
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mgpu_lib
import mgpu_lib.virtual

ROOT = Path(__file__).parents[2]

# Each module may import those of the layers above its own, and those of its own layer as long as there is no circle.
LAYERS = {
    "facts": "attention batch_norm rms_norm files importing specs topology rates memory history snapshot timeline "
    "nests rules running known unknown turns",
    "words and costs": "errors costs nccl",
    "time": "clock shapes",
    "streams": "streams",
    "a GPU": "gpu",
    "a tensor": "tensor",
    "processes": "meeting communicator collectives",
    "PyTorch": "dispatch patches patches.autocast patches.checkpoint patches.comm patches.cuda patches.distributed "
    "patches.dtensor patches.factories patches.functional patches.functions patches.gradients patches.legacy "
    "patches.memory patches.methods patches.modules patches.objects patches.properties patches.recomputation "
    "patches.script patches.sharing patches.staging",
    "outside": "machine reporting inheriting cluster places dry launch __main__",
}
FACE = "mgpu_lib.virtual"  # the package itself, which imports from all of them

# The arrows of the library point down this list: a module may import those of its own row and of the rows below it.
ROWS = [
    "__init__",  # the public names
    "widgets exercises",
    "training tuning prediction timing footprint traffic checks checkpoints plots evidence launching ranks mesh "
    "planning plan_rates tensor_parallel rank_process ddp zero",
    "parallel primitives splitting collectives models transformer data",
    "devices table arguments recorded text",
    "virtual",
]


def modules(package):
    """The names of all modules of a package, and its own."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return {package.__name__, *(module.name for module in found)}


LIBRARY = modules(mgpu_lib)


def imports(source, known=LIBRARY):
    """The modules among `known` that Python code names in an import, wherever it stands: at the top, hidden in a
    function, under TYPE_CHECKING, or as importlib.import_module("...")."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are banned, so that this test can read them"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (name for name in [whole if whole in known else node.module] if name in known)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and arg.value in known)


def graph(package):
    """{module: the modules of the library that it imports} for a package."""
    found = {}
    for name in modules(package):
        path = Path(importlib.util.find_spec(name).origin)
        found[name] = set(imports(path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "from mgpu_lib.virtual import clock",
        "import mgpu_lib.virtual.clock as c",
        "def f():\n    from mgpu_lib.virtual.clock import Clock",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mgpu_lib.virtual.clock",
        "import importlib\nimportlib.import_module('mgpu_lib.virtual.clock')",
        "try:\n    from mgpu_lib.virtual.clock import Clock\nexcept ImportError:\n    pass",
    ],
)
def test_hidden_imports_are_found(source):
    assert list(imports(source)) == ["mgpu_lib.virtual.clock"]


def test_no_import_in_virtual_has_a_name_that_is_made_up_as_it_runs():
    for path in (ROOT / "mgpu_lib" / "virtual").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import_module(" not in text and "__import__(" not in text, path


def test_every_module_of_virtual_has_a_layer():
    listed = [name for layer in LAYERS.values() for name in layer.split()]
    assert {FACE} | {f"{FACE}.{name}" for name in listed} == modules(mgpu_lib.virtual)
    assert len(listed) == len(set(listed))


def test_no_arrow_in_virtual_points_upwards():
    height = {f"{FACE}.{name}": n for n, layer in enumerate(LAYERS.values()) for name in layer.split()}
    for module, imported in graph(mgpu_lib.virtual).items():
        for other in imported:
            assert module == FACE or height.get(other, len(LAYERS)) <= height[module], f"{module} imports {other}"


def test_virtual_has_no_circle_and_imports_nothing_else_of_the_library():
    arrows = graph(mgpu_lib.virtual)
    assert {name for imported in arrows.values() for name in imported} <= modules(mgpu_lib.virtual)
    TopologicalSorter(arrows).prepare()  # CycleError, with the circle, if there is one
    assert not any(top in imported for imported in arrows.values() for top in (FACE, f"{FACE}.__main__"))


def row_of(module):
    part = module.split(".")[1] if "." in module else "__init__"
    found = [n for n, names in enumerate(ROWS) if part in names.split()]
    assert len(found) == 1, f"{module} must stand in one of ROWS"
    return found[0]


def test_the_arrows_of_the_library_point_one_way():
    listed = {name for row in ROWS for name in row.split()} - {"__init__"}
    assert listed == {module.split(".")[1] for module in LIBRARY if "." in module}
    for module, imported in graph(mgpu_lib).items():
        for other in imported:
            assert row_of(module) <= row_of(other), f"{module} imports {other}"


def test_only_chapters_import_widgets():
    for module, imported in graph(mgpu_lib).items():
        if not module.startswith("mgpu_lib.widgets"):
            assert not any(name.startswith("mgpu_lib.widgets") for name in imported), module


def test_the_library_has_no_circle():
    TopologicalSorter(graph(mgpu_lib)).prepare()


FIT_THE_CLOCK = {
    "clock_fit",
    "clock_validation",
    "collective_fit",
    "collective_validation",
    "ddp_scaling",
    "published",
    "published_runs",
    "published_scaling",
    "run_validation",
    "sheets",
    "transformer_fit",
    "appendix-clock",
}


def cells(chapter):
    """The code of a chapter, without the lines that only Jupyter understands."""
    for cell in json.loads(chapter.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            yield "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def programs():
    """(path, source) of all that may see of virtual/ only its public face."""
    for folder in ("mgpu_lib", "experiments", "benchmarks", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ROOT / "mgpu_lib" / "virtual" not in path.parents:
                yield path, path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        for source in cells(path):
            yield path, source


def test_nobody_outside_imports_deeper_than_the_public_face():
    seen = 0
    for path, source in programs():
        if path.stem not in FIT_THE_CLOCK:
            deep = {name for name in imports(source) if name.startswith(f"{FACE}.")}
            assert not deep, f"{path.relative_to(ROOT)} imports {', '.join(sorted(deep))}: take it from {FACE}"
            seen += FACE in set(imports(source))
    assert seen >= 10  # modules, programs and cells


def test_the_public_face_is_what_it_says():
    for name in mgpu_lib.virtual.__all__:
        assert getattr(mgpu_lib.virtual, name).__doc__
    used = set()
    for _, source in programs():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module == FACE:
                used |= {alias.name for alias in node.names}
    assert used <= set(mgpu_lib.virtual.__all__) | {"costs", "rates", "clock", "nccl"}  # the last are for FIT_THE_CLOCK
