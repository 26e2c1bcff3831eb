"""The exercises of all pages: each has a check, which takes the solution shown, explains, and never raises."""

import os
import re
import textwrap

import pytest
import torch
import torch.distributed as dist
from pages import PAGES, cells, solutions
from wrong_answers import RIGHT, WRONG, changed

from mgpu_lib import exercises
from mgpu_lib.exercises.framework import exercise, expect, filled

FUNCTIONS = sorted({name.removeprefix("check_") for name in exercises.__all__} - {"aliases", "cheapest", "longest"})
PRELUDE = """
import copy
from functools import partial
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
import mgpu_lib as mgpu
from mgpu_lib import get_params, lenet, lenet_params, max_divergence
from mgpu_lib.tensor_parallel import f, g
"""
CALLED = {
    "clipped_step": ("museum", "right-step"),
    "own_bug": ("museum", "right-step"),
    "is_wrong": ("04-data-parallelism-from-scratch", "single-device"),
}


def shown_solutions():
    """(exercise, its solution, the page that shows it)."""
    for page in PAGES:
        code = "\n".join(cell.source for cell in cells(page) if cell.cell_type == "code")
        for program in solutions(page):
            for name, function in re.findall(r"check_(\w+)\((\w+)\)", code):
                if re.search(rf"^def {function}\(", program, re.M):
                    yield name, program, page


SHOWN = {name: program for name, program, _ in shown_solutions()}


def program_of(name, answer):
    """The program that an answer stands for: (the body of a function,) or changes of the solution shown."""
    if len(answer) > 1:
        return changed(SHOWN[name], *answer)
    if f"import {name}" in answer[0]:
        return answer[0]
    signature = re.search(rf"^def {name}\(.*\):\n", SHOWN[name], re.M)[0]
    return signature + textwrap.indent(textwrap.dedent(answer[0]).strip(), "    ")


def answer(name, program):
    """The function `name` that `program` defines, as a reader would in a cell. Some call a function of their page."""
    page, wanted = CALLED.get(name, ("museum", None))
    names, prelude = {}, [cell.source for cell in cells(page) if cell.id == wanted]
    exec("\n".join([PRELUDE, *prelude, program]), names)
    return names[name]


def said(capsys, name, program):
    """The one line that the check of exercise `name` prints about an answer."""
    getattr(exercises, f"check_{name}")(answer(name, program))
    [line] = capsys.readouterr().out.splitlines()
    return line


@pytest.mark.parametrize("name, program, page", [*shown_solutions()], ids=lambda value: value.partition("\n")[0])
def test_the_solution_shown_is_right(name, program, page, capsys):
    """And checks on many processes leave environment, groups and random numbers alone."""
    environment, state = dict(os.environ), torch.get_rng_state()
    assert said(capsys, name, program).startswith("right: ")
    if page == "09-distributeddataparallel":
        assert (dict(os.environ), dist.is_initialized()) == (environment, False)
        assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize("name, wrong", [(name, wrong) for name, all in WRONG.items() for wrong in all])
def test_a_wrong_answer_is_explained(name, wrong, capsys):
    line = said(capsys, name, program_of(name, wrong[:-1]))
    assert line.startswith("not yet: ") and wrong[-1] in line, line


@pytest.mark.parametrize("name, right", [(name, right) for name, all in RIGHT.items() for right in all])
def test_other_right_answers(name, right, capsys):
    line = said(capsys, name, program_of(name, (right,) if isinstance(right, str) else right))
    assert line.startswith("right: "), line


def test_every_exercise_has_wrong_answers():
    assert sorted(WRONG) == sorted(SHOWN) == FUNCTIONS


EXERCISE = r'^> <a id="(ex-[\w-]+)"></a>\*\*Exercise (\S+) \(.+\)\*\*(?: ★+)?\n'


def steps(page):
    """What a page says about its exercises, in order: ("exercise", number), ("check", name), ("solution", number)."""
    for cell in cells(page):
        if cell.cell_type == "code":
            yield from (("check", name) for name in re.findall(r"exercises\.(check_\w+)\(", cell.source))
        else:
            either = rf"{EXERCISE}|^<details><summary>Solution to exercise (\S+)</summary>$"
            for _, exercise, solution in re.findall(either, cell.source, re.M):
                yield ("exercise", exercise) if exercise else ("solution", solution)


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("appendix")])
def test_every_exercise_has_a_check_and_then_a_solution(page):
    found = list(steps(page))
    assert found, "a page without an exercise"
    assert [kind for kind, _ in found] == ["exercise", "check", "solution"] * (len(found) // 3)
    assert [number for _, number in found[::3]] == [number for _, number in found[2::3]]
    assert len(found) // 3 == sum(cell.source.count("**Exercise ") for cell in cells(page)), "one is of another form"


# What all checks share


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("odd", [3, "text", lambda: 1, lambda *args: object(), lambda *args: args[0]])
def test_no_answer_makes_a_check_raise(name, odd, capsys):
    getattr(exercises, f"check_{name}")(odd)
    assert capsys.readouterr().out.startswith("not yet: ")


def test_the_three_lines(capsys):
    @exercise
    def check(answer):
        """Doubles."""
        got = filled(answer(2))
        expect(got == 4, f"{got} isn't twice 2")
        return "doubled"

    for given in (None, lambda x: None, lambda x: x, lambda x: 2 * x, lambda: 0, lambda x: x + "1"):
        check(given)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["yours to fill in", "yours to fill in", "not yet: 2 isn't twice 2", "right: doubled"]
    assert lines[4].startswith("not yet: the check can't use your answer: TypeError: ")
    assert lines[5].startswith("not yet: your code raises TypeError: ")
    assert check.__doc__ == "Doubles."
