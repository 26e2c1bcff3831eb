"""Each study's sample, run again, comes out as it was recorded: modelled times to the last digit, training nearly so.

Where one fails, either the code has a fault, or what it models or trains has changed: then delete the study's file and
record it anew.
"""

import contextlib
import functools
import importlib
import inspect
import os

import pytest
import torch

from experiments import study, tuning
from mgpu_lib import recorded
from mgpu_lib.data import damaged_files, data_folder, load_digits, read_fashion_mnist
from virtual_gpus.state import current

ON_FASHION_MNIST = "centred critical example example_sweep limits little_data noise same_step scaling tuning".split()
OTHERS = (
    "ddp_step experts large_scaling planner_validation why_slower alice digits diloco museum positions small_lm "
    "small_muon"
).split()
SAMPLES = [
    (name, case, short if isinstance(sample, dict) else {})
    for name in OTHERS + ON_FASHION_MNIST
    for sample in [importlib.import_module(f"experiments.{name}").SAMPLE]
    for case, short in (sample.items() if isinstance(sample, dict) else dict.fromkeys(sample).items())
]


def stored(name):
    """{case: what the record of a study holds of it}."""
    found = recorded.study(name)
    if name == "why_slower":
        return found["cells"]
    if name == "ddp_step":
        several = {case: case.count("/") > 1 for case in found["cells"]}  # alone, a GPU sends nothing
        sent = {case: found["bytes"][case.split("/")[0]] if several[case] else [""] for case in several}
        return {case: {"cells": cells, "bytes": sent[case]} for case, cells in found["cells"].items()}
    if name == "tuning":
        runs = {(run["net"], run["batch_size"], run["seed"], run["lr"]): run for run in found["runs"]}
        parts = study.plain(tuning.cases()).items()
        return {case: [part, [runs[(*part[:3], lr)] for lr in part[3]]] for case, part in parts}
    return found["runs"]


def differences(new, old, tolerance, begun, at=""):
    """Where a new value is not the recorded one. Of a run that was cut short only lists count, as far as they go."""
    if tolerance and isinstance(old, str) and numbers(old):
        new, old = numbers(new), numbers(old)
    if isinstance(new, dict) and isinstance(old, dict):
        for key in new.keys() & old.keys() if tolerance else new.keys() | old.keys():
            yield from differences(new.get(key), old.get(key), tolerance, begun, f"{at}/{key}")
    elif isinstance(new, list) and isinstance(old, list):
        if not (len(new) == len(old) or (begun and len(new) < len(old))):
            yield f"{at}: {len(new)} values, {len(old)} recorded"
        for i, pair in enumerate(zip(new, old)):
            yield from differences(*pair, tolerance, begun and isinstance(pair[1], (dict, list)), f"{at}/{i}")
    elif begun:
        return
    elif tolerance and isinstance(new, float) and isinstance(old, float):
        if not abs(new - old) <= tolerance * max(1, abs(old)):
            yield f"{at}: {new}, recorded {old}"
    elif new != old:
        yield f"{at}: {new!r}, recorded {old!r}"


def numbers(text):
    """Those that a curve is made of, which may be written as text; None for words."""
    with contextlib.suppress(ValueError):
        return recorded.numbers(text)


@pytest.fixture(autouse=True)
def as_recorded(monkeypatch, uncompiled):
    """One thread, and the images where they are.

    conftest.py sets MGPU_DATA for all tests, and keeps what it was before in MGPU_DATA_GIVEN.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(tuning, "fashion_mnist", lambda: images() or load_digits())
    if not images():
        monkeypatch.setattr(tuning, "VALIDATION", 300)
    yield
    while current():  # the museum's cells turn virtual GPUs on and leave them so
        current().stop()
    torch.set_num_threads(threads)


@functools.cache
def images():
    """All of Fashion-MNIST, where it lies on this machine, for tests fetch nothing; or None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_DATA", os.environ.get("MGPU_DATA_GIVEN", ""))
        folder = data_folder()
    return None if str(folder) == "digits" or damaged_files(folder) else read_fashion_mnist(folder, full=True)


def form(found):
    """The names in a run, or in each of several, and whether its steps are written as text."""
    return [(run.keys(), type(run.get("step"))) for run in (found if isinstance(found, list) else [found])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case", "short"), SAMPLES, ids=[f"{name}-{case}" for name, case, _ in SAMPLES])
def test_a_sample_comes_out_as_it_was_recorded(name, case, short):
    """Where Fashion-MNIST isn't there, something of the same form comes out of the digits."""
    if name in ("noise", "tuning") and not images():
        pytest.skip("Fashion-MNIST is not here (MGPU_DATA), and on the digits this takes long or has another form")
    module = importlib.import_module(f"experiments.{name}")
    if name in ON_FASHION_MNIST and not images() and "steps" in short:
        short = {"steps": min(short["steps"], 3)}  # enough for a form
    arguments = inspect.signature(module.record).bind(*module.cases()[case]).arguments
    found, expected = study.plain(module.record(**arguments | short)), stored(name)[case]
    if name in ON_FASHION_MNIST and not images():
        assert form(found) == form(expected)
        return
    gaps = list(differences(found, expected, getattr(module, "TOLERANCE", 0), begun=bool(short)))
    assert not gaps, "\n".join(gaps[:20])
