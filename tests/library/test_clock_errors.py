"""How far off the clock is: the errors that the appendix's tables say are those of the studies."""

import statistics

import pytest

from mgpu_lib import clock_errors
from mgpu_lib.recorded import study


def typical(errors):
    return statistics.median(map(abs, errors))


def test_errors_are_those_that_the_studies_summarize():
    errors = clock_errors.errors()
    scaling, runs = study("ddp_scaling")["summary"], study("run_validation")["summary"]
    said = {
        "transformers": study("transformer_validation")["summary"]["held out"],
        "one node": scaling["one node"]["efficiency"],
        "several nodes": scaling["several nodes"]["efficiency"],
        "runs": runs["time"]["both"]["all"],
        "memory of runs": runs["memory"]["both"]["all"],
    }
    for name, summary in said.items():
        assert len(errors[name]) == summary["rows"], name
        assert typical(errors[name]) == pytest.approx(summary["median"], abs=1e-4), name
    groups = study("collective_validation")["summary"]["held out"].values()
    assert len(errors["collectives"]) + len(errors["slow networks"]) == sum(group["rows"] for group in groups)


def test_each_regime_has_the_errors_of_its_own_measurements():
    regimes, errors = clock_errors.by_regime(), clock_errors.errors()
    gpu, host, link = regimes.values()
    assert list(regimes) == ["the GPU", "the host", "a link"]
    assert gpu["image networks, training"] == [1 + error for error in errors["images"]]
    assert {1 + error for error in errors["LeNet"]} < set(host["LeNet, training, on an H200"])
    assert len(clock_errors.h200("resnet18", (256,))["infer"]) == 1 and not clock_errors.h200("lenet", (7,))["train"]
    slowest = max(
        row["efficiency"]["modelled"] / row["efficiency"]["published"]
        for _, row in clock_errors.scaling_rows(study("ddp_scaling"))
        if row["nodes"] > 1
    )
    assert min(link["slowdown of DDP between nodes"]) == pytest.approx(1 / slowest, abs=1e-3)


def test_dots_of_collectives_are_times():
    tables = [table for table in study("collective_validation")["tables"] if table["half"] == "held out"]
    dots = clock_errors.by_regime()["a link"]
    for where, found in (("node or InfiniBand", tables), ("other networks", tables)):
        other = where == "other networks"
        rows = [row for t in found if (t["category"] in ("RoCE", "EFA", "Slingshot")) is other for row in t["rows"]]
        too_fast = sum(bandwidth_error > 0 for *_, bandwidth_error in rows)
        assert sum(dot < 1 for dot in dots[f"collectives, {where}"]) == too_fast != len(rows) / 2
    slowest = max((row for t in tables for row in t["rows"]), key=lambda row: row[1] / row[2])
    assert min(dots["collectives, other networks"]) == pytest.approx(slowest[2] / slowest[1])


def test_a_kernel_beside_a_copy_takes_longer_the_more_of_the_gpu_the_copy_keeps():
    few, many = clock_errors.beside_a_copy(4), clock_errors.beside_a_copy(32)
    assert all(many[kernel] >= 1 and few[kernel] < many[kernel] for kernel in few if "1536" not in kernel)


def test_a_verdict_follows_its_rule():
    row = clock_errors.verdict("a step", [-0.1, 0.004, 0.3], "add a tenth")
    assert list(row.values()) == ["a step", "10%", "67%", 3, "with care", "add a tenth"]
    assert clock_errors.verdict("a step", [0.004], "")["typical error"] == "0.4%"
    wrong = {n: [-0.25] * (10 - n) + [0.26] * n for n in (1, 2, 5, 6)}
    verdicts = {n: clock_errors.verdict("", errors, "")["rely on it?"] for n, errors in wrong.items()}
    assert verdicts == {1: "yes", 2: "with care", 5: "with care", 6: "no"}


def test_the_trial_counts_each_row_once():
    *blind, told = clock_errors.trial_table(study("trial")["rows"])
    assert [row["rows"] for row in blind] == [14, 6, 4] and told["rows"] == 4
    assert sum(row["rows"] for row in blind) == study("trial")["summary"]["then"]["rows"]
