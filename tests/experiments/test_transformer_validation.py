"""The clock against published figures of transformers: the record is whole, and within what it promises."""

import json
import math

import pytest

from experiments import published_transformers, transformer_fit, transformer_validation
from experiments.clock_validation import summary
from mgpu_lib.virtual import rates

RESULT = json.loads(transformer_validation.OUT.read_text())
ROWS = published_transformers.rows()
COUNTED = {row["id"]: row for row in ROWS if not row["excluded"]}


def test_every_row_is_there_or_left_out_by_a_rule():
    there = [row["id"] for row in RESULT["rows"]]
    left_out = [name for group in RESULT["excluded"] for name in group["ids"]]
    assert sorted(there + left_out) == sorted(row["id"] for row in ROWS) and len(set(there)) == len(there)
    assert all(row["source_url"].startswith("https://") and row["quote"] for row in RESULT["rows"])


def test_kept_sources_are_not_among_the_rows():
    """MosaicML's and torchtitan's tables are another trial's."""
    text = published_transformers.PATH.read_text().lower()
    assert not [name for name in ("mosaicml", "llm-foundry", "torchtitan", "resnet50v1.5") if name in text]


def test_the_half_that_was_not_fitted_to():
    errors = {half: [row["error"] for row in RESULT["rows"] if row["half"] == half] for half in ("held out", "fit")}
    late = [row["error"] for group in RESULT["excluded"] for row in group["late"] if row["half"] == "held out"]
    assert {half: RESULT["summary"][half] for half in errors} == {half: summary(errors[half]) for half in errors}
    assert RESULT["summary"]["held out, and what late rules left out"] == summary(errors["held out"] + late)
    assert RESULT["summary"]["held out"]["rows"] >= 30 and RESULT["summary"]["held out"]["median"] <= 0.12
    assert RESULT["first look"] == transformer_validation.FIRST and late


def test_a_curve_is_in_one_half():
    halves = {}
    for row in COUNTED.values():
        halves.setdefault(row["curve"], set()).add(row["half"])
    assert all(len(found) == 1 for found in halves.values()) and len(halves) >= 20


def test_seconds_of_a_row():
    row = COUNTED["DeepLearningExamples, pre-training/24x1024/A100-80/fp16/128 tokens/256 on each of 1"]
    assert published_transformers.seconds(row) == pytest.approx(256 * 32 / 580)  # 32 micro-batches, 580 sequences/s
    row = COUNTED["FlashAttention/24x1536/A100-80/bf16/2048 tokens/16 on each of 8"]
    assert published_transformers.seconds(row) == pytest.approx(8 * 16 * 2 * 2048 / 245_000)
    row = COUNTED["Lambda, SQuAD/12x768/H100/fp16/384 tokens/320 on each of 1"]
    assert published_transformers.seconds(row) == pytest.approx(320 / 877, rel=0.05)


def test_what_the_fit_computes_is_what_the_clock_says():
    row = COUNTED["Lambda, SQuAD/12x768/A100-80/tf32/384 tokens/172 on each of 1"]
    logs = transformer_fit.logs_of(row)
    clock = transformer_validation.seconds(row)
    assert transformer_fit.said(row, logs, rates.TABLES) == pytest.approx(clock, rel=0.01)
    [recorded] = [found for found in RESULT["rows"] if found["id"] == row["id"]]
    assert recorded["predicted"] == pytest.approx(clock, abs=1e-6)


def test_a_step_has_the_flops_of_its_network():
    """6 for each parameter of a product and each word, and attention: 12 * width * tokens, half of it if causal."""
    row = COUNTED["FlashAttention/12x768/A100-80/bf16/2048 tokens/32 on each of 8"]
    [(_, log)] = transformer_fit.logs_of(row)
    products = 12 * 12 * 768**2 + 768 * math.ceil(50257 / 8) * 8
    attention = 12 * 3.5 / 3 * 12 * 768 * 2048 / 2  # FlashAttention computes the scores once more on the way back
    words = 32 * 2048
    assert log.flops.sum() == pytest.approx(words * (6 * products + attention), rel=0.01)


def test_the_constants_are_those_of_the_fit():
    found = {(table, key) for table, values in rates.TRANSFORMERS.items() if table != "provenance" for key in values}
    assert found == set(transformer_fit.START)
    fitted = [row for row in COUNTED.values() if row["half"] == "fit"]
    assert rates.TRANSFORMERS["provenance"]["rows"] == len(transformer_fit.used(fitted))


def test_a_gpu_without_figures_is_taken_for_its_like():
    assert rates.FACTOR["products"]["Blackwell"] == rates.FACTOR["products"]["Hopper"]
    assert rates.FACTOR["products"]["Ada"] == rates.FACTOR["tensor cores"]["Ada"]


@pytest.mark.slow
def test_a_new_fit_finds_the_same_constants():
    rows = transformer_fit.used([row for row in COUNTED.values() if row["half"] == "fit"])
    found = transformer_fit.fit(rows, [transformer_fit.logs_of(row) for row in rows])
    for (table, key), value in found.items():
        assert rates.TRANSFORMERS[table][key] == pytest.approx(value, rel=0.02)
