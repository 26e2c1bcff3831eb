"""What all checks share: one printed line, and never an exception."""

import dis
import functools
import traceback


class Unfilled(Exception):
    """The cell has not been filled in yet."""


def exercise(check):
    """Make a reader's check out of `check(answer, …)`, which returns what to praise, or calls `expect`.

    The result prints one line: "yours to fill in" when the answer, or what it returns, is None, `...`, or a function
    of nothing more; "right: …"; or "not yet: …", also for an exception, and whether the answer raises it or does not
    fit the check.
    """

    @functools.wraps(check)
    def show(answer=None, *given):
        try:
            line = f"right: {check(filled(answer), *given)}"
        except Unfilled:
            line = "yours to fill in"
        except AssertionError as error:
            line = f"not yet: {error}"
        except Exception as error:
            what = "your code raises" if comes_from(answer, error) else "the check can't use your answer:"
            line = f"not yet: {what} {type(error).__name__}: {error}"
        print(line)

    return show


def comes_from(answer, error):
    """Whether `error` was raised in the function `answer`, or in what it called; True if it is no plain function."""
    code = getattr(answer, "__code__", None)
    return code is None or any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def filled(value):
    """`value`, an answer or what it returned."""
    if value is None or value is ... or is_blank(value):
        raise Unfilled
    return value


def is_blank(value):
    """Whether it is a function that holds nothing but `...` and a docstring."""

    def blank(): ...

    return hasattr(value, "__code__") and steps(value) == steps(blank)


def steps(function):
    return [(step.opname, step.argval) for step in dis.get_instructions(function)]


def expect(condition, message):
    """Say what is wrong with the answer unless `condition` holds."""
    if not condition:
        raise AssertionError(message)
