"""The check for "What fills the memory": the largest batch that fits."""

from numbers import Integral

from mgpu_lib.exercises.framework import exercise, expect


@exercise
def check_largest(answer, fits):
    """The largest power of two that is a batch for which `fits(batch_size)` holds."""
    expect(isinstance(answer, Integral) and answer > 0 and answer & (answer - 1) == 0, f"{answer!r} is no power of two")
    expect(fits(answer), f"{answer:,} is too large")
    expect(not fits(2 * answer), f"twice that, {2 * answer:,}, fits too")
    return f"{answer:,} fits, and {2 * answer:,} doesn't"
