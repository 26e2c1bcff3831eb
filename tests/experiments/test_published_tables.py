"""Figures of others that the clock will be held against: each row has a source, and is what its own numbers say."""

import hashlib
import json
from pathlib import Path

import pytest

import experiments
from experiments import published, published_collectives, published_scaling, published_transformers

FOLDER = Path(experiments.__file__).parent
COLLECTIVES = json.loads((FOLDER / "published_collectives.json").read_text())["tables"]
SCALING = json.loads((FOLDER / "published_scaling.json").read_text())["tables"]
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
    text = json.dumps([COLLECTIVES, SCALING, TRANSFORMERS]).lower()
    assert not any(word in text for word in ("llm-foundry", "torchtitan", "mosaicml"))
    assert (
        "resnet" not in json.dumps(TRANSFORMERS).lower() and "deeplearningexamples" not in json.dumps(SCALING).lower()
    )


def test_tables_are_halved_as_it_was_decided_before_anything_was_fitted():
    tables = published_collectives.tables()
    assert len(tables) == 67 and all(("half" in table) != bool(table["excluded"]) for table in tables)
    assert {table["excluded"] for table in tables} == {None, *published_collectives.RULES}
    curves = {(table["curve"], table.get("half")) for table in tables}
    assert len(curves) == len({curve for curve, _ in curves}), "a curve lies in both halves"
    halves = sorted((table["key"], table["collective"], table.get("half", "")) for table in tables)
    assert hashlib.sha256(json.dumps(halves).encode()).hexdigest()[:16] == "a23a75cc449d966b"


def test_tables_of_scaling_are_chosen_as_it_was_decided_before_anything_was_predicted():
    tables = published_scaling.tables()
    assert {table["excluded"] for table in tables} == {None, *published_scaling.RULES}
    how = [
        [str(table[key]) for key in "key excluded sheet machine network precision bucket_mib".split()]
        for table in tables
    ]
    rows = sorted([*known, *row[:2]] for known, table in zip(how, tables, strict=True) for row in table["rows"])
    assert len(rows) == 177 and len({str(row) for row in rows}) == len(rows)
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "d7451d367a44c1a4"


def test_tables_of_scaling_hold_every_row_of_bert_that_others_hold():
    rows = [row for row in published_transformers.rows() if row["model"].startswith("BERT")]
    tables = [table for table in published_scaling.tables() if "steps" in table]
    assert sum(table["runs"] for table in tables) == len(rows)
    for table in tables:
        for row in table["rows"]:
            alike = [r for r in rows if published_scaling.same(r) == published_scaling.same(table["steps"][row[1]])]
            times = [published_transformers.seconds(r) for r in alike if r["n_gpus"] == row[1]]
            assert min(times) - 1e-9 <= published_scaling.seconds(table, row) <= max(times) + 1e-9


def test_rows_of_scaling_that_stand_in_two_files_agree():
    """PyTorch's benchmark of up to 8 GPUs tested the clock before, in whole milliseconds."""
    [table] = [table for table in published_scaling.tables() if table["key"] == "pytorch-05140f0"]
    before = {row["id"]: row for row in published.rows() if row["source"] == "ddp"}
    for nodes, gpus, rate in table["rows"]:
        if nodes == 1:
            name = f"ddp-v100-resnet50-n{gpus}-{'noddp-' if gpus == 1 else ''}b32"
            here = published_scaling.seconds(table, (nodes, gpus, rate))
            assert here == pytest.approx(published.seconds(before[name]), abs=1e-3)


def test_efficiency():
    table = {"rows": [(1, 2, 100.0), (2, 4, 190.0)]}
    assert published_scaling.efficiency(table, {2: 100.0, 4: 190.0}, 4) == pytest.approx(0.95)
    assert published_scaling.efficiency(table, {2: 100.0, 4: 190.0}, 2) == 1
