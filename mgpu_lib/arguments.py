"""Checks of numbers that a caller passed, in one wording for the whole library."""

import math
from numbers import Integral, Real


def check_count(name, value, least=1):
    """`value`, if it is a whole number and `least` or more. Else ValueError, which says what `name` was."""
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} is {value!r}: pass a whole number, {least} or more")
    return value


def check_rate(name, value):
    """`value`, if it is a positive, finite number. Else ValueError, which says what `name` was."""
    if not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: pass a positive, finite number")
    return value
