"""What is read off the passes of a pipeline. That its stages mark them, chapter 10 shows."""

from types import SimpleNamespace

import pytest

from mgpu_lib.schedules import most_held, passes


@pytest.mark.parametrize(
    "names, most",
    [
        ("F0 F1 F2 B0 B1 B2", 3),
        ("F0 B0 F1 B1", 1),
        ("F0 F1 B0 B1 W0 F2 W1 B2 W2", 2),
        ("F0 F0' B0' W0' B0 W0", 2),
        ("", 0),
    ],
)
def test_most_held(names, most):
    assert most_held(names.split()) == most


def test_passes_last_from_their_first_kernel_to_their_last():
    """What lies between two passes, and messages, which belong to no pass, are left out."""

    def event(phase, start, end, kind="kernel"):
        return SimpleNamespace(phase=phase, start=start, end=end, kind=kind)

    timeline = [
        event("F0", 1, 2),
        event("F0", 3, 4),
        event("F0", 4, 9, "collective"),
        event("", 5, 6),
        event("B0", 6, 7),
    ]
    assert passes(timeline) == [("F0", 1e3, 4e3), ("B0", 6e3, 7e3)]
