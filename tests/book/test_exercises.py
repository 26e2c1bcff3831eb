"""The exercises of all pages: each has a check, which takes the solution shown, explains, and never raises.

Wrong answers, and right ones of another kind, are in one file for each module of checks, test_exercises_<module>.py.
"""

import re

import pytest
from answers import said
from pages import PAGES, cells, solutions

from mgpu_lib import exercises
from mgpu_lib.exercises.framework import exercise, expect, filled

# The solutions that the pages show


def shown_solutions():
    """(exercise, solution, its page) for all solutions that the pages show."""
    found = []
    for page in PAGES:
        code = "\n".join(cell.source for cell in cells(page) if cell.cell_type == "code")
        for program in solutions(page):
            for name, function in re.findall(r"check_(\w+)\((\w+)\)", code):
                if re.search(rf"^def {function}\(", program, re.M):
                    found.append(pytest.param(name, program, page, id=f"{page}: {name}"))
    return found


@pytest.mark.parametrize("name, program, page", shown_solutions())
def test_the_solution_shown_is_right(name, program, page, capsys):
    prelude = ""
    if name == "clipped_step":  # it calls a function of its page
        [prelude] = [cell.source for cell in cells(page) if cell.id == "right-step"]
    assert said(capsys, name, program, prelude).startswith("right: ")


EXERCISE = r'^> <a id="(ex-[\w-]+)"></a>\*\*Exercise (\S+) \(.+\)\*\*\n'


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


FUNCTIONS = sorted({name.removeprefix("check_") for name in exercises.__all__} - {"aliases", "largest"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_not_filled_in_is_not_wrong(name, capsys):
    check = getattr(exercises, f"check_{name}")
    for unfilled in (None, lambda *args: NotImplemented):
        check(unfilled)
        assert capsys.readouterr().out == "yours to fill in\n"


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
