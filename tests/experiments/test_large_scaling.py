"""Dry runs of large plans. tests/library/test_shown.py: the chapter shows the program that ran."""

from functools import partial

import pytest

import mgpu_lib as mgpu
from experiments import large_scaling
from mgpu_lib import planning, recorded

RUNS = recorded.study("large_scaling")["runs"]
SMALL = {"vocab": 1024, "width": 2048, "layers": 2, "heads": 16}


def test_what_does_not_fit_says_so(monkeypatch):
    monkeypatch.setitem(large_scaling.SIZES, "two layers", mgpu.LLAMA["405B"] | {"layers": 2})
    found = large_scaling.record("two layers", 2, None, "H100", {})
    assert found["seconds"] is None and "out of memory" in found["error"]
    stored = RUNS[large_scaling.plan("70B", 16)[0]]
    assert stored["seconds"] is None and "in the backward pass" in stored["error"]


@pytest.mark.slow
def test_micro_batches_add_up():
    """Three steps of a small model, with one, two and five micro-batches."""
    runs = {count: partial(large_scaling.program, SMALL, micro_batches=count) for count in (1, 2, 5)}
    seconds = {count: mgpu.dry_run(run, 16, "H100").seconds for count, run in runs.items()}
    assert seconds[1] + 4 * (seconds[2] - seconds[1]) == pytest.approx(seconds[5], rel=0.01)
    one, two = (RUNS[large_scaling.plan("8B", 8, rows=4, micro_batches=m)[0]]["seconds"] for m in (1, 2))
    assert large_scaling.whole(RUNS, "8B", 8) == pytest.approx(one + 31 * (two - one))


@pytest.mark.parametrize("options", [{"copies": 3, "tensor": 1}, {"copies": 2, "tensor": 16}])
def test_a_wrong_split_names_the_numbers(options):
    """Heads that can't be split: test_tensor_parallel.py."""
    words = "copies={copies} × tensor={tensor} does not divide 16 ranks".format(**options)
    with pytest.raises(ValueError, match=words):
        mgpu.dry_run(partial(large_scaling.program, SMALL, **options), 16)


@pytest.mark.slow
def test_a_mesh_that_is_turned_has_its_pairs_across_nodes():
    runs = [partial(large_scaling.program, SMALL, turned=turned, tensor=8, rows=8) for turned in (False, True)]
    near, far = (mgpu.dry_run(run, 64) for run in runs)
    assert far.seconds > 2 * near.seconds and far.peak_memory == near.peak_memory and far.flops == near.flops


def planned(model, n_gpus, network, gpu, options):
    sizes, batch = large_scaling.SIZES[model], {"batch": n_gpus, "seq_len": 4096}
    return planning.plan(planning.TrainingRun(sizes, gpu, n_gpus, network, **batch, **options))


def test_mondays_plans_compare_as_the_planner_says():
    """Chapter 14: its best split is faster than ours, by as much."""
    cases = dict(large_scaling.monday())
    ours, best = (planned(*arguments) for arguments in cases.values())
    dry_ours, dry_best = (RUNS[name] for name in cases)
    assert dry_best["seconds"] / dry_ours["seconds"] == pytest.approx(best.step / ours.step, abs=0.02)
    for made, dry in ((ours, dry_ours), (best, dry_best)):
        assert dry["gib"] == pytest.approx(made.held / 2**30, rel=0.05)


def test_a_plan_is_run_by_the_planners_program(monkeypatch):
    monkeypatch.setitem(large_scaling.SIZES, "small", SMALL | {"kv_heads": 16, "inner": 8192})
    case = "small", 16, "InfiniBand NDR", "H100", {"tensor": 2, "zero": 3, "micro_batch": 1, "recompute": True}
    found = large_scaling.record(*case)
    assert found["gib"] == pytest.approx(planned(*case).held / 2**30, rel=0.25)
