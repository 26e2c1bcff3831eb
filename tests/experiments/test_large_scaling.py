"""Dry runs of large plans. tests/library/test_shown.py: the chapter shows the program that ran."""

from functools import partial

import pytest

import mgpu_lib as mgpu
from experiments import large_scaling
from mgpu_lib import recorded

STUDY = recorded.study("large_scaling")
RUNS = STUDY["runs"]


def test_what_does_not_fit_says_so(monkeypatch):
    monkeypatch.setitem(large_scaling.SIZES, "two layers", mgpu.LLAMA["405B"] | {"layers": 2})
    found = large_scaling.record("two layers", 2, None, "H100", {})
    assert found["seconds"] is None and "out of memory" in found["error"]
    stored = RUNS[large_scaling.plan("70B", 16)[0]]
    assert stored["seconds"] is None and "in the backward pass" in stored["error"]


@pytest.mark.slow
def test_micro_batches_add_up():
    """Three steps of a small model, with one, two and five micro-batches."""
    small = {"vocab": 1024, "width": 2048, "layers": 2, "heads": 16}
    seconds = {}
    for count in (1, 2, 5):
        run = partial(large_scaling.program, small, micro_batches=count)
        seconds[count] = mgpu.dry_run(run, 16, "H100").seconds
    assert seconds[1] + 4 * (seconds[2] - seconds[1]) == pytest.approx(seconds[5], rel=0.01)
    one, two = (RUNS[large_scaling.plan("8B", 8, rows=4, micro_batches=m)[0]]["seconds"] for m in (1, 2))
    assert large_scaling.whole(RUNS, "8B", 8) == pytest.approx(one + 31 * (two - one))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"copies": 3}, "copies=3 × tensor=1 does not divide 16 ranks"),
        ({"copies": 2, "tensor": 16}, "copies=2 × tensor=16 does not divide 16 ranks"),
        ({"tensor": 16}, "8 heads with 8 key-value heads can't be split over 16 devices"),
    ],
)
def test_a_wrong_split_names_the_numbers(options, words):
    small = {"vocab": 1024, "width": 2048, "layers": 2, "heads": 8}
    with pytest.raises(ValueError, match=words):
        mgpu.dry_run(partial(large_scaling.program, small, **options), 16)


@pytest.mark.slow
def test_a_mesh_that_is_turned_has_its_pairs_across_nodes():
    small = {"vocab": 1024, "width": 2048, "layers": 2, "heads": 16}
    options = {"tensor": 8, "rows": 8}
    near, far = (
        mgpu.dry_run(partial(large_scaling.program, small, turned=turned, **options), 64) for turned in (False, True)
    )
    assert far.seconds > 2 * near.seconds and far.peak_memory == near.peak_memory and far.flops == near.flops
