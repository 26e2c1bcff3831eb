"""Figures of others that the clock will be held against: each row has a source, and is what its own numbers say."""

import hashlib
import json
from pathlib import Path

import pytest

import experiments
from experiments import published_collectives

FOLDER = Path(experiments.__file__).parent
COLLECTIVES = json.loads((FOLDER / "published_collectives.json").read_text())["tables"]
TRANSFORMERS = json.loads((FOLDER / "published_transformers.json").read_text())["rows"]
# nccl-tests' bus bandwidth, of bytes per second: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "sendrecv": lambda n: 1,
}


def test_tables_have_sources_and_names_of_their_own():
    assert len({(table["key"], table["collective"]) for table in COLLECTIVES}) == len(COLLECTIVES)
    assert all(table["source"].startswith("https://") for table in COLLECTIVES)
    assert all(row["source_url"].startswith("https://") and row["quote"] and row["measured"] for row in TRANSFORMERS)


@pytest.mark.parametrize("table", COLLECTIVES, ids=lambda table: f"{table['key']}-{table['collective']}")
def test_bandwidths_follow_from_times(table):
    for nbytes, microseconds, bandwidth in table["rows"]:
        expected = nbytes / microseconds / 1e3 * BUS[table["collective"]](table["gpus"])
        assert bandwidth == pytest.approx(expected, rel=0.02, abs=0.02)


def test_what_is_kept_for_trials_is_in_no_table():
    text = json.dumps([COLLECTIVES, TRANSFORMERS]).lower()
    assert not any(word in text for word in ("llm-foundry", "torchtitan", "mosaicml"))


def test_tables_are_halved_as_it_was_decided_before_anything_was_fitted():
    tables = published_collectives.tables()
    assert len(tables) == 67 and all(("half" in table) != bool(table["excluded"]) for table in tables)
    assert {table["excluded"] for table in tables} == {None, *published_collectives.RULES}
    curves = {(table["curve"], table.get("half")) for table in tables}
    assert len(curves) == len({curve for curve, _ in curves}), "a curve lies in both halves"
    halves = sorted((table["key"], table["collective"], table.get("half", "")) for table in tables)
    assert hashlib.sha256(json.dumps(halves).encode()).hexdigest()[:16] == "a23a75cc449d966b"
