"""Answers to the book's exercises for tests: a reader's function, and the line that its check prints."""

import inspect
import textwrap

from mgpu_lib import exercises

PRELUDE = """
import copy
from functools import partial
import torch
from torch import nn
from torch.nn import functional as F
import mgpu_lib as mgpu
from mgpu_lib import lenet
"""


def answer(name, program, prelude=""):
    """The function `name` that `program` defines, as a reader would in a cell."""
    names = {}
    exec("\n".join([PRELUDE, prelude, textwrap.dedent(program)]), names)
    return names[name]


def said(capsys, name, program, prelude=""):
    """The one line that the check of exercise `name` prints about an answer."""
    check = getattr(exercises, f"check_{name}")
    check(answer(name, program, prelude))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return lines[0]


def function(name, parameters, body):
    """The program of a function with this body, whose lines are indented as those of a docstring may be."""
    return f"def {name}({parameters}):\n" + textwrap.indent(inspect.cleandoc(body), "    ")


def changed(program, before, after):
    assert program.count(before) == 1, before
    return program.replace(before, after)


def variants(name, right, *changes):
    """Wrong answers to the exercise `name`: each of (before, after, phrase) is a change of the `right` one."""
    return [(name, changed(right, before, after), phrase) for before, after, phrase in changes]


def checks_of(module):
    """The names of the exercises that `module` checks."""
    return {
        name.removeprefix("check_")
        for name in exercises.__all__
        if getattr(exercises, name).__module__ == module.__name__
    }


# Tests of any chapter's exercises: a module with SIGNATURES, WRONG and RIGHT imports them (see tests/book/conftest.py).
# Answers are programs, or bodies of the function that the exercise asks for.


def program_of(name, body, module):
    whole = f"def {name}(" in body or f"import {name}" in body
    return body if whole else function(name, module.SIGNATURES[name], body)


def test_a_wrong_answer_is_explained(wrong_answer, request, capsys):
    name, body, phrase = wrong_answer
    line = said(capsys, name, function(name, request.module.SIGNATURES[name], body))
    assert line.startswith("not yet: ") and phrase in line, line


def test_other_right_answers(right_answer, request, capsys):
    name, body = right_answer
    line = said(capsys, name, program_of(name, body, request.module))
    assert line.startswith("right: "), line


def test_every_exercise_of_the_page_has_wrong_answers(request):
    page = request.module.__name__.removeprefix("test_exercises_")
    asked = checks_of(getattr(exercises, page)) - {
        "aliases",
        "largest",
    }  # a set and a number, which no function computes
    assert {name for name, *_ in request.module.WRONG} == set(request.module.SIGNATURES) == asked
