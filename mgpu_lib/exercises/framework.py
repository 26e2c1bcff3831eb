"""What all checks share: one printed line, and never an exception."""

import functools


class Unfilled(Exception):
    """The cell has not been filled in yet."""


def exercise(check):
    """Make a reader's check out of `check(answer, …)`, which returns what to praise, or calls `expect`.

    The result prints one line: "yours to fill in" when the answer, or what it returns, is None or NotImplemented;
    "right: …"; or "not yet: …", also for an exception that the answer raises.
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
            line = f"not yet: your code raises {type(error).__name__}: {error}"
        print(line)
    return show


def filled(value, in_place=False):
    """`value`, an answer or what it returned. A function that works in place returns None when it is filled in."""
    if value is NotImplemented or (value is None and not in_place):
        raise Unfilled
    return value


def expect(condition, message):
    """Say what is wrong with the answer unless `condition` holds."""
    if not condition:
        raise AssertionError(message)
