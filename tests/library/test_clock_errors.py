"""How far off the clock is: what the appendix's tables, which nbval compares, don't show."""

import pytest

from mgpu_lib import clock_errors
from mgpu_lib.recorded import study


def test_an_efficiency_counts_as_the_time_that_it_stands_for():
    slowest = max(
        row["efficiency"]["modelled"] / row["efficiency"]["published"]
        for _, row in clock_errors.scaling_rows(study("ddp_scaling"))
        if row["nodes"] > 1
    )
    slowdowns = clock_errors.by_regime()["a link"]["slowdown of DDP between nodes"]
    assert min(slowdowns) == pytest.approx(1 / slowest, abs=1e-3)


def test_a_verdict_follows_its_rule():
    row = clock_errors.verdict("a step", [-0.1, 0.004, 0.3], "add a tenth")
    assert list(row.values()) == ["a step", "10%", "67%", 3, "with care", "add a tenth"]
    assert clock_errors.verdict("a step", [0.004], "")["typical error"] == "0.4%"
    wrong = {n: [-0.25] * (10 - n) + [0.26] * n for n in (1, 2, 5, 6)}
    verdicts = {n: clock_errors.verdict("", errors, "")["rely on it?"] for n, errors in wrong.items()}
    assert verdicts == {1: "yes", 2: "with care", 5: "with care", 6: "no"}
