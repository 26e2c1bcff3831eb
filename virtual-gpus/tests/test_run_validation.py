"""Dry runs of published runs: few micro-batches say what many take, and FLOPs are those that the authors count."""

import json
from unittest.mock import patch

import pytest
import torch

from calibration import large_programs, published_runs, run_validation
from calibration.record import RECORDED, record_missing
from virtual_gpus import dry_run
from virtual_gpus.clock.machine_types import MACHINES

CASES = run_validation.cases()
STORED = json.loads((RECORDED / "run_validation.json").read_text())
SMALL = {"layers": 4, "width": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "vocab": 51200, "seq_len": 1024}


def small(source, **options):
    """A row of this source, with a small model."""
    row = next(row for (row,) in CASES.values() if row["source"] == source)
    return row | SMALL | {"micro_batch": 2} | options


@pytest.mark.parametrize(
    "row",
    [
        small("Megatron-LM 2022", tensor=8, pipeline=1, data=1, n_gpus=8, global_batch=10, virtual_stages=1),
        small("BigScience", tensor=8, pipeline=4, data=2, n_gpus=64, global_batch=28, virtual_stages=1),
        small("Zero Bubble", layers=10, tensor=1, pipeline=4, data=1, n_gpus=4, global_batch=14),
        small("nanotron", tensor=2, pipeline=2, data=2, n_gpus=8, global_batch=20, sequence_parallel=True),
        small("Megatron-LM 2022", pipeline=2, virtual_stages=2, data=1, n_gpus=16, global_batch=12),
    ],
    ids=["no pipeline", "the last stage has most to do", "another one has", "stages of unequal work", "interleaved"],
)
def test_a_step_of_many_micro_batches_follows_from_steps_of_few(row):
    number = run_validation.micro_batches(row)
    assert max(run_validation.counts(row)) < number
    seconds, held = run_validation.predicted(row)
    whole, peaks = run_validation.dry_run(row, number)
    assert seconds == pytest.approx(whole, rel=2e-3)
    if torch.__version__ >= "2.15":  # older pipelines hold 1 to 2 % more than is predicted
        assert held == pytest.approx(max(map(max, peaks)), rel=1e-2)


def test_a_step_has_the_flops_that_megatron_s_authors_count():
    row = small("Megatron-LM 2021", tensor=8, pipeline=1, n_gpus=8, data=1, global_batch=2, network=None)
    with patch.dict(MACHINES, published_runs.ALL_MACHINES):
        made = dry_run(large_programs.program(row, 1, {}), 8, "A100-80")
    products = 96 * 2 * 1024 * 4 * 1024**2 * (1 + 1024 / (6 * 1024)) + 6 * 2 * 1024 * 1024 * 51200
    assert sum(e.flops for e in made.timeline) == pytest.approx(products / 8, rel=0.01)


def test_nanotron_cuts_by_work():
    """Its output layer has as much to do as 2.45 of these layers."""
    row = small("nanotron", layers=24, width=2048, ffn=4096, vocab=50257)
    assert large_programs.cut_by_work(row, 4) == [7, 7, 6, 4]
    assert large_programs.cut_by_work(row, 8) == [4, 3, 3, 4, 3, 3, 4, 0]


def test_the_record_has_all_cases_and_their_summary():
    assert STORED["recipe"] == run_validation.recipe() and STORED["runs"].keys() == CASES.keys()
    assert STORED["summary"] == json.loads(json.dumps(run_validation.summary(STORED["runs"])))


def test_runs_that_were_interrupted_go_on(tmp_path):
    def run(number):
        if number in done:
            raise AssertionError("run twice")
        if number == 2 and not done:
            raise KeyboardInterrupt
        return {"number": number}

    cases, path, done = {"one": (1,), "two": (2,)}, tmp_path / "unfinished.json", set()
    with pytest.raises(KeyboardInterrupt):
        record_missing(cases, run, path)
    done = {1}
    assert record_missing(cases, run, path) == {"one": {"number": 1}, "two": {"number": 2}}
