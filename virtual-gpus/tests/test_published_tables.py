"""Figures of others that the clock will be held against: each row has a source, and is what its own numbers say."""

import hashlib
import json
from pathlib import Path

import pytest

import calibration
from calibration import published, published_collectives, published_runs, published_scaling, published_transformers
from virtual_gpus.clock.machine_types import NETWORKS
from virtual_gpus.clock.specs import GPUS

FOLDER = Path(calibration.__file__).parent
COLLECTIVES = json.loads((FOLDER / "published_collectives.json").read_text())["tables"]
SCALING = json.loads((FOLDER / "published_scaling.json").read_text())["tables"]
TRANSFORMERS = json.loads((FOLDER / "published_transformers.json").read_text())["rows"]
RUNS = json.loads((FOLDER / "published_runs.json").read_text())["rows"]
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
    for row in [*TRANSFORMERS, *RUNS]:
        assert row["source_url"].startswith("https://") and row["quote"] and row["measured"]
    for row in published.rows():
        assert row["url"].startswith("https://") and row["where"] and row["quote"]
    assert all(table["url"].startswith("https://") and table["quote"] for table in published_scaling.tables())


@pytest.mark.parametrize("module", [published, published_collectives, published_runs, published_transformers])
def test_rows_are_chosen_and_halved_by_rules_alone(module):
    """A curve is in one half."""
    rows = module.tables() if module is published_collectives else module.rows()
    assert {row["excluded"] for row in rows} == {None, *module.RULES}
    halves = {}
    for row in rows:
        late = module is published_transformers and module.late(row)
        assert ("half" in row) == bool(row["excluded"] is None or row.get("remembers") or late), row
        if "half" in row:
            halves.setdefault(row["curve"], set()).add(row["half"])
    assert len(halves) >= 20 and all(len(found) == 1 for found in halves.values())


@pytest.mark.parametrize("table", COLLECTIVES, ids=lambda table: f"{table['key']}-{table['collective']}")
def test_bandwidths_follow_from_times(table):
    for nbytes, microseconds, bandwidth in table["rows"]:
        expected = nbytes / microseconds / 1e3 * BUS[table["collective"]](table["gpus"])
        assert bandwidth == pytest.approx(expected, rel=0.02, abs=0.02)


def test_what_is_kept_for_trials_is_in_no_table():
    text = json.dumps([COLLECTIVES, SCALING, TRANSFORMERS, RUNS]).lower()
    assert not any(word in text for word in ("llm-foundry", "torchtitan", "mosaicml"))
    assert "resnet" not in json.dumps(TRANSFORMERS).lower()
    assert "deeplearningexamples" not in json.dumps(SCALING).lower()
    assert "resnet50v1.5" not in published.PATH.read_text()
    for row in published.rows():
        if "DeepLearningExamples" in row["url"]:
            assert row["model"].startswith("resnext101_32x4d") and "resnext101-32x4d" in row["url"]


def choice_of_collectives():
    return [(table["key"], table["collective"], table.get("half", "")) for table in published_collectives.tables()]


def choice_of_scaling():
    keys = "key excluded sheet machine network precision bucket_mib".split()
    return [
        [*(str(table[key]) for key in keys), *row[:2]] for table in published_scaling.tables() for row in table["rows"]
    ]


def choice_of_runs():
    return [[row["id"], str(row["excluded"]), row["remembers"], row.get("half", "")] for row in published_runs.rows()]


@pytest.mark.parametrize(
    "choice, count, digest",
    [
        (choice_of_collectives, 67, "a23a75cc449d966b"),
        (choice_of_scaling, 177, "d7451d367a44c1a4"),
        (choice_of_runs, 342, "2b7c6bdd5f1b7167"),
    ],
)
def test_rows_are_chosen_and_halved_as_it_was_decided_before_anything_was_predicted(choice, count, digest):
    rows = sorted(choice())
    assert len(rows) == len({str(row) for row in rows}) == count
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest


def counted_runs():
    return [row for row in published_runs.rows() if row["excluded"] is None]


def short_ends(row, stages):
    """Whether the first and the last stage have a layer less, as these sources say of their programs."""
    said = row["source"] == "Zero Bubble" or "Rebalancing layers" in row["note"]
    return said and (row["layers"] + 2) % stages == 0


def test_runs_have_machines_and_sizes_that_fit_together():
    for row in counted_runs():
        machine, network = published_runs.ALL_MACHINES[row["machine"]], row["network key"]
        assert row["sheet"] in GPUS and machine.gpus == row["gpus_per_node"]
        networks = NETWORKS | published_runs.OTHER_NETWORKS if row["n_gpus"] > machine.gpus else {None}
        assert network in networks
        assert row["n_gpus"] == row["tensor"] * row["pipeline"] * row["context"] * row["data"]
        assert row["global_batch"] % (row["micro_batch"] * row["data"]) == 0
        stages = row["pipeline"] * row["virtual_stages"]
        assert row["layers"] % stages == 0 or short_ends(row, stages)


def test_seconds_of_runs_follow_from_what_is_printed():
    rows = counted_runs()
    # "each iteration takes around 32 seconds resulting in 138 teraFLOPs per GPU"
    [example] = [row for row in rows if row["source"] == "Megatron-LM README"]
    assert published_runs.seconds(example) == pytest.approx(32, abs=0.5)
    per_gpu = {"measured": 3700, "unit": "tokens/s per GPU", "n_gpus": 128, "global_batch": 256, "seq_len": 4096}
    assert published_runs.seconds(per_gpu) == pytest.approx(2 * 4096 / 3700)
    of_all = per_gpu | {"measured": 128 * 3700, "unit": "tokens/s"}
    assert published_runs.seconds(of_all) == published_runs.seconds(per_gpu)


@pytest.mark.parametrize(
    "layers, model, hardware", [(48, 0.415, 0.437), (96, 0.514, 0.528), (105, 0.560, 0.570), (128, 0.563, 0.570)]
)
def test_seconds_that_were_read_second_hand_agree_with_the_authors(layers, model, hardware):
    """Megatron-LM's README prints the utilization of FLOPs of the runs whose times and settings are Calculon's."""
    wanted = {"source": "Megatron-LM 2022", "layers": layers, "recomputation": "selective"}
    row = next(row for row in counted_runs() if wanted.items() <= row.items())
    tokens, width = row["global_batch"] * row["seq_len"], row["width"]
    for passes, used in ((6, model), (3, hardware)):  # attention's products a second time
        parts = 1 + row["seq_len"] / (passes * width) + row["vocab"] / (12 * layers * width)
        rate = 72 * tokens * layers * width**2 * parts / published_runs.seconds(row)
        assert rate / row["n_gpus"] / 312e12 == pytest.approx(used, abs=0.002)
