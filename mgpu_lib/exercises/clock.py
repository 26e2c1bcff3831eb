"""A check for "How far to trust the clock": whether the faster of two modelled programs is really the faster one."""

import math

from mgpu_lib.clock_errors import errors
from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_order_holds(answer):
    """order_holds(first, second, errors): for which part of all pairs of errors the first is really faster."""
    for first, second, wrong, right, why in [
        (1.0, 2.0, [0.0], 1, "without an error the order holds"),
        (1.0, 1.1, [0.0, 0.25], 0.75, "where only the second's time is a quarter too long, the second is faster"),
        (1.0, 1.1, [0.0, -0.2], 0.75, "where only the first's time is a fifth too short, the first is slower"),
        (1.0, 1.24, [-0.2, 0.0], 0.75, "a modelled second with an error of -0.2 is 1 / 0.8 real seconds, not 1.2"),
        (1.0, 1.02, [-0.5, 0.0, 1.0], 6 / 9, "each of the two may have any error, whatever the other has"),
    ]:
        got = filled(answer(first, second, list(wrong)))
        case = f"{first:g} s and {second:g} s, errors {wrong}"
        expect(isinstance(got, (int, float)), f"{case}: {got!r}. Return a number from 0 to 1")
        expect(math.isclose(got, right, abs_tol=1e-9), f"{case}: {got:.2f} instead of {right:.2f}; {why}")
    known = errors()
    parts = [answer(1.0, more, known[kind]) for more, kind in ((1.1, "images"), (1.25, "images"), (1.5, "LeNet"))]
    return f"the order holds in {parts[0]:.0%}, {parts[1]:.0%} and {parts[2]:.0%} of all pairs of errors"
