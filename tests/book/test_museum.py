"""The museum's bugs: what the page shows is what is tested. The checks named find each; the fix shown passes them."""

import re
from pathlib import Path

import nbformat
import pytest

import mgpu_lib as mgpu

NOTEBOOK = Path(__file__).resolve().parents[2] / "chapters" / "museum.ipynb"
CELLS = nbformat.read(NOTEBOOK, as_version=4).cells
BUGS = {cell.id: cell.source for cell in CELLS if "exhibit" in cell.metadata.get("tags", [])}
TEXTS = {cell.id: cell.source for cell in CELLS}
# The cells before the first exhibit, and the one that makes the networks of room 3.
SETUP = ["setup", "right-step", "train", "one-device", "ask", "show", "exhibit", "modules", "split-in-layer"]
STEP = "assert_step_matches_single_device"
FOUND_BY = {
    "rebinding": {"assert_replicas_equal", STEP},
    "aliased": {"assert_no_aliasing", STEP},
    "born-different": {"assert_replicas_equal", STEP},
    "stale": {"assert_gradients_fresh", STEP},
    "mean-of-means": {STEP},
    "sum-loss": {STEP},
    "shard-size": {STEP},
    "early-step": {"assert_replicas_equal", STEP},
    "reduced-parameters": {STEP},
    "unwrapped": {"assert_every_gpu_works"},
    "buffers": {"assert_buffers_equal"},
    "dropout": {"assert_draws_agree"},
    "shuffle": {"assert_every_row_once"},
    "padded": {"assert_every_row_once"},
}


def fixed(source, diff):
    """`source` after the fix that the page shows: a diff of whole lines, which fits in one place only."""
    lines = [(line[0], line[1:]) for line in diff.splitlines()]
    old = "".join(text + "\n" for mark, text in lines if mark in " -")
    new = "".join(text + "\n" for mark, text in lines if mark in " +")
    assert source.count(old) == 1, f"the fix doesn't fit, or in several places:\n{old}"
    return source.replace(old, new)


def fix_of(name):
    [diff] = re.findall(r"^```diff\n(.*?)^```$", TEXTS[f"{name}-why"], re.M | re.S)
    return diff


@pytest.fixture(scope="module")
def museum():
    """The page's own functions, with two steps in place of two epochs: the checks look at no more."""
    names = {}
    for cell in SETUP:
        exec(TEXTS[cell], names)

    def two_steps(step, replicas, devices=names["devices"], lr=0.1, order=names["shuffled"]):
        for rows in order(0)[:2]:
            step(names["X_train"][rows], names["y_train"][rows], replicas, devices, lr)

    names["run_epochs"] = two_steps
    yield names
    if machine := mgpu.current_machine():  # the page's; other tests expect none
        machine.stop()


def findings(museum, program):
    names = dict(museum, catalog={})
    names["exhibit"] = rebound(museum["exhibit"], names)
    names["show"] = rebound(museum["show"], names)
    exec(program, names)
    [(_, _, found)] = names["catalog"].values()
    return set(found)


def rebound(function, names):
    """`function` with `names` for its globals: exhibits must not see what another one defined."""
    return type(function)(function.__code__, names, function.__name__, function.__defaults__)


def test_every_exhibit_is_tested():
    assert BUGS.keys() == FOUND_BY.keys()
    assert len(BUGS) >= 12


@pytest.mark.parametrize("name", FOUND_BY)
@pytest.mark.sweep(3)
def test_the_checks_find_the_bug_and_pass_its_fix(museum, name, capsys):
    assert findings(museum, BUGS[name]) == FOUND_BY[name]
    assert findings(museum, fixed(BUGS[name], fix_of(name))) == set()


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_fix_is_one_line_or_two(name):
    marks = [line[0] for line in fix_of(name).splitlines()]
    assert 1 <= max(marks.count("-"), marks.count("+")) <= 2


@pytest.mark.parametrize("name", FOUND_BY)
def test_every_exhibit_has_a_prediction_and_a_heading(name):
    assert "\n> **Predict.** " in TEXTS[f"{name}-intro"]
    assert TEXTS[f"{name}-intro"].startswith("### "), "other chapters link to it"
    assert re.fullmatch(r'caught\("(.+)"\)', TEXTS[f"{name}-caught"]).group(1) in BUGS[name]


def test_the_right_program_passes(museum, capsys):
    assert findings(museum, TEXTS["right"].splitlines()[0]) == set()
