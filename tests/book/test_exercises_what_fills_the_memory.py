"""The check of "What fills the memory": the largest batch."""

import numpy
import pytest

from mgpu_lib import exercises


@pytest.mark.parametrize(
    "largest, line",
    [
        (None, "yours to fill in"),
        (64, "right: 64 fits, and 128 doesn't"),
        (32, "not yet: twice that, 64, fits too"),
        (numpy.int64(64), "right: 64 fits, and 128 doesn't"),
        (128, "not yet: 128 is too large"),
        (100, "not yet: 100 is no power of two"),
        (0, "not yet: 0 is no power of two"),
        ("64", "not yet: '64' is no power of two"),
    ],
)
def test_the_largest_batch(largest, line, capsys):
    exercises.check_largest(largest, lambda batch_size: batch_size <= 100)
    assert capsys.readouterr().out == line + "\n"
