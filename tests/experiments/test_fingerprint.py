"""Fingerprints of studies: they stay where code means the same, and change where what ran means something else."""

import ast
import importlib
import json
import re
import shutil

import pytest

from experiments import fingerprint
from experiments.syntax import Form, Module, bound
from mgpu_lib.recorded import RESULTS

# A made-up study, in files as text

STUDY = '''
"""Its docstring."""
import math
from torch.nn import functional as F
from experiments import shared
from mgpu_lib import layers as parts
from mgpu_lib.layers import SIZE

TARGET, OTHER = 0.75, 1
LATE = [shared.unused]

def record(seed):
    """What a run does."""
    data = [parts.double(x) for x in range(SIZE)]  # comment
    shared = sum(data)  # hides the module
    if shared > TARGET:
        raise ValueError(f"{shared} is more")
    return Network(seed).run(math.exp(shared)), F.relu

class Network(parts.Base):
    def __init__(self, seed):
        self.seed = seed
        self.net = None

    def run(self, x):
        return x * factorial(self.seed)

def factorial(n):
    return n * factorial(n - 1) if n else 1

def summary(runs):
    return OTHER
'''
SHARED = """
def unused(x):
    local = x + 1
    return local
"""
LAYERS = '''
from mgpu_lib.virtual import gpus, rates

SIZE = 4

def double(x):
    return 2 * x + rates.RATE

class Base:
    """A class counts with all its methods."""
    def helper(self):
        return gpus(1)
'''
RATES = """
import json
from pathlib import Path
RATE = json.loads((Path(__file__).parent / "rates.json").read_text())["rate"]
"""
FILES = {
    "experiments/__init__.py": "",
    "experiments/study.py": STUDY,
    "experiments/shared.py": SHARED,
    "mgpu_lib/__init__.py": "from mgpu_lib.layers import double\n",
    "mgpu_lib/layers.py": LAYERS,
    "mgpu_lib/virtual/__init__.py": "from mgpu_lib.virtual.machine import Machine as gpus\n",
    "mgpu_lib/virtual/machine.py": "class Machine:\n    limit = 1\n",
    "mgpu_lib/virtual/rates.py": RATES,
    "mgpu_lib/virtual/rates.json": '{"rate": 1.5, "provenance": {"date": "today"}}',
}
MACHINE = ("mgpu_lib.virtual.machine",)


@pytest.fixture
def of(tmp_path, monkeypatch):
    """of(changed files, stop=...): the fingerprint of the made-up study with them."""
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)

    def of(files=None, stop=MACHINE):
        shutil.rmtree(tmp_path)
        for name, text in (FILES | (files or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return fingerprint.of(["experiments.study.record"], stop)

    return of


def changed(name, old, new):
    assert old in FILES[name]
    return {name: FILES[name].replace(old, new)}


MOVED = {
    "experiments/study.py": STUDY.replace(
        "def factorial(n):\n    return n * factorial(n - 1) if n else 1\n", ""
    ).replace(
        "from mgpu_lib.layers import SIZE", "from mgpu_lib.layers import SIZE\nfrom mgpu_lib.numbers import factorial"
    ),
    "mgpu_lib/numbers.py": "def factorial(n):\n    return n * factorial(n - 1) if n else 1\n",
}
SAME = {
    "a comment": changed("experiments/study.py", "# comment", "# another"),
    "a docstring": changed("experiments/study.py", "What a run does.", "Something else."),
    "no docstring": changed("experiments/study.py", '    """What a run does."""\n', ""),
    "formatting": changed("experiments/study.py", "self.seed = seed\n", "(self\n            .seed) = (seed)\n"),
    "quotes": changed("experiments/study.py", 'f"{shared} is more"', "f'{shared} is' ' more'"),
    "a local variable in another module": changed("experiments/shared.py", "local", "other"),
    "a function that is not used": changed("experiments/study.py", "return OTHER", "return 2"),
    "a constant that is not used": changed("experiments/study.py", "0.75, 1", "0.75, 2"),
    "a function that moved": MOVED,
    "another way to import": {
        **changed("experiments/study.py", "from mgpu_lib import layers as parts", "import mgpu_lib as mgpu"),
        "experiments/study.py": STUDY.replace("from mgpu_lib import layers as parts", "import mgpu_lib as mgpu")
        .replace("parts.double", "mgpu.double")
        .replace("parts.Base", "mgpu.layers.Base"),
    },
    "another way to import from a library": {
        "experiments/study.py": STUDY.replace("from torch.nn import functional as F", "import torch").replace(
            "F.relu", "torch.nn.functional.relu"
        )
    },
    "what is not looked into": changed("mgpu_lib/virtual/machine.py", "limit = 1", "limit = 2"),
    "provenance of data": changed("mgpu_lib/virtual/rates.json", "today", "tomorrow"),
    "layout of data": changed("mgpu_lib/virtual/rates.json", ": 1.5", " :  1.50"),
    "a function renamed": {"experiments/study.py": STUDY.replace("factorial", "product")},
}
OTHER = {
    "an operator": changed("experiments/study.py", "n * fac", "n + fac"),
    "a constant": changed("experiments/study.py", "0.75", "0.8"),
    "a whole number for a fraction": changed("experiments/study.py", "(n - 1)", "(n - 1.0)"),
    "a constant of another module": changed("mgpu_lib/layers.py", "SIZE = 4", "SIZE = 5"),
    "a constant that is set again": changed("mgpu_lib/layers.py", "SIZE = 4", "SIZE = 4\nSIZE += 1"),
    "a statement beside": changed("mgpu_lib/layers.py", "SIZE = 4", "SIZE = 4\nprint(SIZE)"),
    "a function of another module": changed("mgpu_lib/layers.py", "2 * x", "x * 2"),
    "the order of operations": changed("mgpu_lib/layers.py", "2 * x + rates.RATE", "rates.RATE + 2 * x"),
    "a method": changed("experiments/study.py", "return x * factorial", "return factorial"),
    "a method of a base class": changed("mgpu_lib/layers.py", "gpus(1)", "gpus(2)"),
    "a default": changed("experiments/study.py", "def record(seed)", "def record(seed=0)"),
    "what a name of a library is": changed("experiments/study.py", "import math", "import cmath as math"),
    "what a name of the library is": changed(
        "mgpu_lib/layers.py", "import gpus, rates", "import gpus\nimport time as rates"
    ),
    "which of two functions": changed("experiments/study.py", "self.net = None", "self.net = summary"),
    "None": changed("experiments/study.py", "self.net = None", "self.net = ()"),
    "the text of an error": changed("experiments/study.py", "is more", "is too much"),
    "a number in the data": changed("mgpu_lib/virtual/rates.json", "1.5", "1.6"),
}


@pytest.mark.parametrize("what", SAME)
def test_what_means_the_same_is_fresh(of, what):
    assert of(SAME[what]) == of()


@pytest.mark.parametrize("what", OTHER)
def test_what_means_something_else_is_stale(of, what):
    assert of(OTHER[what]) != of()


def test_where_it_stops_is_chosen(of):
    other = changed("mgpu_lib/virtual/machine.py", "limit = 1", "limit = 2")
    assert of(other, stop=()) != of(stop=())
    assert of({"mgpu_lib/virtual/rates.py": "RATE = 1\n"}, stop=("mgpu_lib.virtual",)) == of(stop=("mgpu_lib.virtual",))
    assert of({"mgpu_lib/layers.py": ""} | changed("experiments/study.py", "SIZE)", "4)"), stop=("mgpu_lib",))


def test_swapped_functions_of_one_name_are_told_apart(of):
    """Their module's name does not count, but which of them is called where does."""
    two = "from experiments import {} as a, {} as b\ndef record(x):\n    return a.f(x) - b.f(x)\n"
    files = {"experiments/one.py": "def f(x):\n    return x\n", "experiments/two.py": "def f(x):\n    return -x\n"}
    found = [of(files | {"experiments/study.py": two.format(*names)}) for names in (("one", "two"), ("two", "one"))]
    assert found[0] != found[1]


def test_what_cannot_be_told_is_refused(of):
    for line in ("from experiments.shared import *", "from .shared import unused"):
        with pytest.raises(ValueError, match=re.escape(line)):
            of({"experiments/study.py": line + STUDY})
    with pytest.raises(ValueError, match=r"mgpu_lib\.layers\.half is not in"):
        of(changed("experiments/study.py", "parts.double", "parts.half"))
    with pytest.raises(ValueError, match=r"experiments\.study\.nothing is not in"):
        of() and fingerprint.of(["experiments.study.nothing"])
    with pytest.raises(ValueError, match=r"torch\.relu is no module, nor a function"):
        fingerprint.of(["torch.relu"])


def test_a_module_that_is_handed_on_counts_whole(of):
    whole = changed("experiments/study.py", "self.net = None", "self.net = parts")
    more = {"mgpu_lib/layers.py": LAYERS + "\ndef half(x):\n    return x / 2\n"}
    assert of(more) == of() and of(whole | more) != of(whole)


# Scopes, and what Pythons say differently


def names_bound(code):
    return sorted(name for statement in ast.parse(code).body for name, _ in bound(statement))


def test_names_that_a_function_binds():
    assert names_bound("a = b\nfor c, (d, *e) in f: g += 1\nwith h as i: pass\nimport j.k, l as m\ndel n") == [
        *"acdegijmn"
    ]
    assert names_bound("try: pass\nexcept E as a: pass\ndef b(c=1): d = 1\nclass e: f = 1\n[g := h for i in j]") == [
        *"abeg"
    ]
    assert names_bound(
        "match a:\n  case [b, *c] | {'d': e, **f} if g: pass\n  case h() as i: pass\nj.k = l[m] = 1"
    ) == [*"bcefi"]
    assert names_bound("f = lambda a: (b := a)") == ["f"]


@pytest.mark.parametrize(
    "code, reached",
    [
        ("def record(x):\n    return x.double", False),
        ("def record(double):\n    return double(1)", False),
        ("def record(x):\n    double = x\n    return lambda: double(1)", False),
        ("def record(x):\n    return [double for double in x]", False),
        ("def record(x):\n    return [x for x in double]", True),
        ("def record(x):\n    return [double for double in x], double", True),
        ("def record(x):\n    y = lambda double: double\n    return double", True),
        ("def record(x):\n    def inner():\n        double = x\n    return double", True),
        ("def record(x=double):\n    double = x", True),
        ("class record:\n    double = 1\n    def run(self):\n        return double", True),
        ("def record():\n    global double\n    double = 2", True),
        ("def record(x):\n    from mgpu_lib.layers import double as d\n    return d(x)", True),
        ("def record(x):\n    from experiments import study\n    return study.double(x)", True),
        ("@double\ndef record(x):\n    pass", True),
        ("def record(x):\n    match x:\n        case double: return double", False),
        ("record = {'by name': double}", True),
        ("record, other = 1, double", False),
        ("record, other = double", True),
    ],
)
def test_scopes(of, code, reached):
    of({"experiments/study.py": f"from mgpu_lib.layers import double\n{code}\n"})
    code = fingerprint.Code(fingerprint.ROOT, ())
    code.number(("experiments.study", "record"))
    code.forms()
    assert (("mgpu_lib.layers", "double") in code.reached) == reached


@pytest.fixture
def form(tmp_path):
    (tmp_path / "empty.py").write_text("")
    return Form(Module("empty", tmp_path / "empty.py"), None).of


def test_a_field_that_newer_pythons_have_changes_nothing(form):
    """Python 3.12 gave functions and classes `type_params`, empty lists where there are none; 3.13 lets them out."""

    class FunctionDef(ast.FunctionDef):
        _fields = (*ast.FunctionDef._fields, "type_params")

    (old,) = ast.parse("def f(x, /, *, y=1): return x").body
    fields = {name: getattr(old, name) for name in ast.FunctionDef._fields}
    assert form(FunctionDef(**fields, type_params=[])) == form(old)
    del old.type_comment, old.decorator_list
    assert form(FunctionDef(**fields)) == form(old)


def test_texts_are_cut_alike(form):
    """Of f-strings; and u"" is "", as the tree of Python 3.8 and later doesn't say."""
    (cut,) = ast.parse("f'ab{x}'").body
    cut.value.values[:1] = [ast.Constant("a"), ast.Constant(""), ast.Constant("b")]
    assert form(cut) == form(*ast.parse("'a' f'b{x}'").body) != form(*ast.parse("f'a{x}'").body)
    empty = ast.parse("f'{x:}'").body[0]
    empty.value.values[0].format_spec = ast.JoinedStr([ast.Constant("")])
    assert form(empty) == form(*ast.parse("f'{x:}'").body)
    assert form(ast.parse("[u'a']").body[0]) == form(ast.parse("['a']").body[0])


def test_constants_are_told_apart(form):
    texts = ("0", "0.0", "-0.0", "False", "None", "''", "b''", "...", "0j", "()", "[]", "{}", "'None'", "{**None}")
    assert len({form(*ast.parse(f"x = {text}").body) for text in texts}) == len(texts)
    assert form(*ast.parse("def f(*, a, b=1): pass").body) != form(*ast.parse("def f(*, a=1, b): pass").body)


def test_text_is_written_in_ascii(form):
    """Else what can be printed, which differs between Pythons, would decide."""
    assert form(*ast.parse("x = 'ü\U0001fae8'").body).isascii()


# The book's own studies

TRAINED = [
    *("centred", "critical", "digits", "example", "little_data", "museum", "noise", "oscillation", "resnet18"),
    *("resnet_grid", "same_step", "scaling", "ten_seeds", "unseen"),
]
TIMES = {
    "ddp_scaling",
    "ddp_step",
    "large_scaling",
    "planner_validation",
    "run_validation",
    "why_slower",
    "clock_validation",
    "transformer_validation",
    "trial",
}
LENETS = {*TRAINED, "tuning"}
STUDIES = [*TRAINED, "tuning", "alice", "small_lm", *sorted(TIMES)]
TRANSFORMERS = {
    "alice",
    "small_lm",
    "large_scaling",
    "planner_validation",
    "run_validation",
}  # that check their networks' sizes
STACKED = {  # trained by tuning_runs
    *("centred", "critical", "digits", "little_data", "oscillation", "scaling", "ten_seeds", "unseen", "tuning")
}


def recipes():
    return {name: importlib.import_module(f"experiments.{name}").recipe()["sha256"] for name in STUDIES}


@pytest.fixture(scope="module")
def today():
    return recipes()


@pytest.fixture
def stale(tmp_path, monkeypatch, today):
    """stale((file, old text, new text), …): the studies that are no longer fresh with these changes."""
    for package in fingerprint.PACKAGES:
        shutil.copytree(
            fingerprint.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("recorded", "*.js")
        )
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)

    def stale(*changes):
        for name, old, new in changes:
            path = tmp_path / name
            text = path.read_text()
            assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
            path.write_text(text.replace(old, new))
        return {name for name, found in recipes().items() if found != today[name]}

    return stale


@pytest.mark.parametrize("name", STUDIES)
def test_a_recorded_study_is_that_of_the_present_code(name, today):
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    assert stored["recipe"]["sha256"] == today[name], (
        f"record it anew, python -m experiments.{name}, or show that it does the same: see experiments.restamp"
    )
    assert "sha256" not in stored["provenance"]


def test_comments_docstrings_and_what_moves_leave_all_fresh(stale):
    folder = fingerprint.ROOT / "mgpu_lib"
    text = (folder / "models.py").read_text()
    lenet = text[text.index("def lenet(") : text.index("class BatchNorm")]
    nets = (
        lenet.replace("F.", "functional.").replace("# 28 -> 26", "# from 28 to 26").replace("Logits (N", "Numbers (N")
    )
    (folder / "nets.py").write_text(f"from torch.nn import functional\n\n\n{nets}")
    assert (
        stale(
            ("mgpu_lib/models.py", lenet, ""),
            ("mgpu_lib/models.py", "from mgpu_lib.data", "from mgpu_lib.nets import lenet  # noqa\nfrom mgpu_lib.data"),
            ("mgpu_lib/footprint.py", "\ndef footprint(", "\nASKED = []\n\n\ndef footprint("),
            ("mgpu_lib/plots.py", "    from cycler import cycler\n", "    from cycler import cycler as other\n"),
            ("mgpu_lib/plots.py", "cycler(color", "other(color"),
            ("experiments/tuning_runs.py", "mean loss of each run since then", "losses"),
            (
                "experiments/tuning_runs.py",
                "    shuffled = enumerate(endless(",
                "    shuffled = enumerate(  # from 1\n        endless(",
            ),
        )
        == set()
    )


@pytest.mark.parametrize(
    "change, those",
    [
        (("mgpu_lib/models.py", "return H @ W4 + b4", "return H @ W4 - b4"), LENETS - {"resnet18", "resnet_grid"}),
        (("mgpu_lib/arguments.py", "value < least", "value <= least"), LENETS | TRANSFORMERS),
        (("mgpu_lib/data.py", "SLICE = (6_000", "SLICE = (7_000"), LENETS - {"digits", "museum"}),
        (
            ("mgpu_lib/parallel.py", "p -= lr * p.grad / batch_size", "p -= lr / batch_size * p.grad"),
            {"example", "museum", "noise", "same_step"},
        ),
        (("mgpu_lib/zero.py", "STAGES = 1, 2, 3", "STAGES = 3, 2, 1"), {"alice"}),
        (
            ("mgpu_lib/tuning.py", "(lr - start) * step /", "(step + 1) * (lr - start) /"),
            {"example", "scaling", "ten_seeds"},
        ),
        (("experiments/tuning_runs.py", "EPSILON = 0.1, 1e-5", "EPSILON = 0.1, 1e-6"), STACKED),
        (("experiments/oscillation.py", "AVERAGED = 100", "AVERAGED = 99"), {"oscillation"}),
        (
            ("mgpu_lib/models.py", "net.maxpool = nn.Identity()", "pass"),
            {"ddp_step", "resnet18", "resnet_grid", "why_slower"},
        ),
        (("mgpu_lib/virtual/costs.py", "return 2 * nbytes / bandwidth", "return 3 * nbytes / bandwidth"), TIMES),
        (("mgpu_lib/virtual/topology.py", '("Ethernet 25", "TCP", 25, 1', '("Ethernet 25", "TCP", 26, 1'), TIMES),
        (("mgpu_lib/virtual/rates.json", '"half": 3230.0,\n "settings"', '"half": 3231.0,\n "settings"'), TIMES),
        (("experiments/published.json", '"value": 243.93', '"value": 243.94'), {"clock_validation"}),
        (
            ("experiments/published_transformers.json", '"measured": 245000', '"measured": 245001'),
            {"transformer_validation", "ddp_scaling"},
        ),
        (("experiments/published_scaling.json", "[1, 2, [701]]", "[1, 2, [702]]"), {"ddp_scaling"}),
        (("mgpu_lib/virtual/topology.py", "AMD = 6e9, 22e9, 16e9", "AMD = 6e9, 22e9, 17e9"), TIMES),
        (("experiments/trial.json", '"images_per_second": 367,', '"images_per_second": 368,'), {"trial"}),
    ],
)
@pytest.mark.sweep(4)
def test_what_ran_makes_the_right_studies_stale(stale, change, those):
    assert stale(change) == those
