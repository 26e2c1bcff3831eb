"""The clock against published figures: records are whole, and within the bounds that they promise."""

import functools
import json
import math

import pytest
import ranks
import torch

from calibration import (
    attention_fit,
    clock_fit,
    clock_validation,
    collective_fit,
    collective_validation,
    ddp_scaling,
    kernels,
    published,
    published_collectives,
    published_scaling,
    run_validation,
    sheets,
    transformer_fit,
    transformer_validation,
    trial,
)
from calibration.halves import digest
from calibration.record import HERE, RECORDED
from virtual_gpus import GPUS, virtual_gpus
from virtual_gpus.clock import nccl, rates
from virtual_gpus.clock.machine_types import MACHINES

VALIDATIONS = clock_validation, transformer_validation, collective_validation, ddp_scaling, trial, run_validation
RECORDS = {module: json.loads((RECORDED / f"{module.__name__[12:]}.json").read_text()) for module in VALIDATIONS}
CLOCK, TRANSFORMERS, COLLECTIVES, SCALING, TRIAL, RUNS = RECORDS.values()
ROWS = CLOCK["rows"]
PUBLISHED = {row["id"]: row for row in published.rows()}
COUNTED = {key: row for key, (row,) in transformer_validation.cases().items()}
TABLES = {table["key"]: table for table in SCALING["tables"]}
SCALED = {key: table for key, (table,) in ddp_scaling.cases().items()}


def half(name):
    return [row for row in ROWS if row["half"] == name]


# The records


LATE = [row for group in TRANSFORMERS["excluded"] for row in group["late"]]
SAID = {row["id"]: row["predicted"] for row in [*ROWS, *TRANSFORMERS["rows"], *LATE]}


def of_row(row):
    return SAID.get(row["id"]) or published.seconds(row)  # what a rule leaves out is recorded in sum only


def of_scaling(table, gpus):
    return next(row["time"]["modelled"] for row in TABLES[table["key"]]["rows"] if row["gpus"] == gpus)


def of_trial(row, layout=torch.contiguous_format):
    found = TRIAL["rows"][list(trial.cases().values()).index((row,))]
    return found["now" if layout == torch.contiguous_format else "now, channels last"]["predicted"]


def plain(data):
    return json.loads(json.dumps(data))


def leaves(data, at=""):
    """(where, value) for each number and word in nested lists and dicts."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, (dict, list)):
            yield from leaves(value, f"{at}/{key}")
        else:
            yield f"{at}/{key}", value


@pytest.mark.parametrize(
    ("module", "seconds"),
    [
        (clock_validation, of_row),
        (transformer_validation, of_row),
        (ddp_scaling, of_scaling),
        (trial, of_trial),
        (collective_validation, None),
    ],
)
def test_a_record_is_what_its_program_writes_of_these_predictions(module, seconds, monkeypatch):
    """All published rows are there or left out by a rule, and errors and their sums follow from them."""
    if seconds:
        monkeypatch.setattr(module, "seconds", seconds)
    written, stored = plain(module.result()), plain(RECORDS[module])
    del stored["provenance"]
    assert written.keys() == stored.keys()
    if module is clock_validation:
        for record in (written, stored):
            del record["summary"]["held out, and what late rules left out"]
            record["excluded"] = [[group[key] for key in ("rule", "meaning", "all")] for group in record["excluded"]]
    new, old = dict(leaves(written)), dict(leaves(stored))
    assert new.keys() == old.keys()
    rounded = 2e-4 if seconds else 0  # predictions are recorded rounded
    for at, value in old.items():
        follows = any(word in at for word in ("/error", "/efficiency", "summary"))  # from them
        tolerance = rounded if follows else min(rounded, 1e-6)
        number = type(value) in (int, float)
        assert new[at] == (pytest.approx(value, rel=tolerance, abs=tolerance) if number else value), at


def test_late_rules_are_owned_up_to():
    late = [row for row in PUBLISHED.values() if published.late(row)]
    assert late and all(row["excluded"] for row in late) and LATE
    assert CLOCK["summary"]["held out, and what late rules left out"]["rows"] == len(half("held out")) + len(late)


# Samples: where one fails, the code has a fault, or what it models has changed. Then record the validation anew.


def rows_of(module):
    """{key of a case: what the record of a validation holds of it}."""
    record = RECORDS[module]
    if module is trial:
        return dict(zip(trial.cases(), record["rows"], strict=True))
    if "runs" in record:
        return record["runs"]
    return {row["id"]: row for row in record["rows"]} if "rows" in record else TABLES


SAMPLES = [(module, case) for module in VALIDATIONS if hasattr(module, "SAMPLE") for case in module.SAMPLE]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "case"), SAMPLES, ids=[case for _, case in SAMPLES])
def test_a_sample_comes_out_as_it_was_recorded(module, case):
    assert plain(module.record(*module.cases()[case])) == rows_of(module)[case]


# The bounds


HELD_OUT = "held out"
RUN_TIMES = RUNS["summary"]["time"][HELD_OUT]


@pytest.mark.parametrize(
    ("found", "rows", "median", "worst"),
    [
        (CLOCK["summary"][HELD_OUT], 20, 0.15, 0.40),
        (CLOCK["summary"]["held out, and what late rules left out"], 20, 0.15, 9),  # its worst is in the appendix
        (TRANSFORMERS["summary"][HELD_OUT], 30, 0.12, 9),
        (SCALING["summary"]["one node"]["efficiency"], 30, 0.03, 0.12),
        (SCALING["summary"]["several nodes"]["efficiency"], 30, 0.065, 0.27),
        (RUN_TIMES["all"], 30, 0.15, 0.52),  # the worst is of DeepSpeed's ZeRO-3 on 768 GPUs
        *((COLLECTIVES["summary"][HELD_OUT][name], 30, 0.10, 9) for name in ("DGX-1V", "DGX A100", "DGX H100")),
        (COLLECTIVES["summary"][HELD_OUT]["InfiniBand"], 30, 0.10, 9),
    ],
)
def test_how_far_off_it_is_on_what_was_not_fitted_to(found, rows, median, worst):
    assert found["rows"] >= rows and found["median"] <= median and found["worst"] <= worst


def test_bounds_of_parts():
    assert sum(source["rows"] > 0 for source in RUN_TIMES["sources"].values()) >= 5
    assert all(found["rows"] for found in RUN_TIMES["strategies"].values())
    for where in ("one node", "several nodes"):
        found, perfect = (SCALING["summary"][where][name] for name in ("efficiency", "if it were perfect"))
        assert found["median"] < 0.6 * perfect["median"] and found["worst"] < perfect["worst"]
    missed = {name for name, errors in COLLECTIVES["summary"][HELD_OUT].items() if errors["median"] > 0.15}
    assert missed == {
        "RoCE",
        "EFA",
        "Slingshot",
    }  # one table of RoCE; of the others some are as fast with half the cards


def test_the_held_out_rows_are_of_every_sort():
    rows = half(HELD_OUT)
    assert len({row["sheet"] for row in rows}) >= 4 and len({row["source"] for row in rows}) >= 6
    assert {row["mode"] for row in rows} == {"train", "infer"}
    assert {1, 2, 4, 8} <= {row["n_gpus"] for row in rows}
    assert {"fp32", "tf32", "fp16", "amp"} == {row["precision"] for row in rows}
    assert min(row["batch_per_gpu"] for row in rows) == 1 and max(row["batch_per_gpu"] for row in rows) >= 256
    assert 0.4 < len(half("fit")) / len(ROWS) < 0.6


# The predictions


def test_a_row_does_not_depend_on_what_others_did_to_their_network():
    row = PUBLISHED["pycls-v100-resnet50-infer-b64"]
    before = clock_validation.seconds(row)
    published.build(row["model"]).to(memory_format=torch.channels_last)
    assert clock_validation.seconds(row) == before


def test_machines_of_the_studies_are_not_the_book_s():
    ddp_scaling.seconds(SCALED["csc-puhti-fp32"], 1)
    assert not set(published_scaling.OTHERS) & set(MACHINES)
    assert not (set(published_scaling.LARGER) | set(sheets.SHEETS)) & set(GPUS)
    assert published_scaling.OTHERS["Puhti"].nvlinks[0, 3] == 2 and published_scaling.OTHERS["Mahti"].nics == 1


def test_a_step_has_the_flops_of_its_network():
    """6 for each parameter of a product and each word, and attention: 12 * width * tokens, half of it if causal."""
    row = COUNTED["FlashAttention/12x768/A100-80/bf16/2048 tokens/32 on each of 8"]
    [(_, log)] = transformer_fit.logs_of(row)
    products = 12 * 12 * 768**2 + 768 * math.ceil(50257 / 8) * 8
    attention = 12 * 3.5 / 3 * 12 * 768 * 2048 / 2  # FlashAttention computes the scores once more on the way back
    words = 32 * 2048
    assert log.flops.sum() == pytest.approx(words * (6 * products + attention), rel=0.01)


# The fits


def test_the_rates_are_those_of_the_fit():
    tables = clock_fit.tables(rates.FITTED["settings"])
    assert {name: rates.FITTED[name] for name in tables} == plain(tables)
    assert set(rates.FITTED["settings"]) == set(clock_fit.START)
    fitted_to = [row for row in clock_fit.used(PUBLISHED.values()) if row["half"] == "fit"]
    assert rates.FITTED["provenance"]["rows"] == len(fitted_to) > 2 * len(clock_fit.START)


def rows_to_fit():
    return transformer_fit.used([row for row in COUNTED.values() if row["half"] == "fit"])


def tables_to_fit():
    return [table for table in published_collectives.tables() if table.get("half") == "fit"]


def test_the_constants_are_those_of_the_fit():
    assert rates.TRANSFORMERS["provenance"]["rows"] == len(rows_to_fit())
    assert nccl.NCCL["provenance"]["tables"] == len(tables_to_fit())
    for stored, fitted in ((rates.TRANSFORMERS, transformer_fit.START), (nccl.NCCL, collective_fit.START)):
        tables = {table: values for table, values in stored.items() if table != "provenance"}
        assert {place for place, _ in leaves(tables)} == {"/" + "/".join(place) for place in fitted}
    assert nccl.NCCL["network"]["TCP"] == collective_fit.START["network", "TCP"][0]  # of which no table says anything
    assert all(0.3 < part <= 1 for table in ("link", "network", "tree") for part in nccl.NCCL[table].values())


@pytest.mark.slow
def test_new_fits_find_the_same_constants():
    rows = rows_to_fit()
    transformers = transformer_fit.fit(rows, [transformer_fit.logs_of(row) for row in rows])
    for stored, found in ((nccl.NCCL, collective_fit.fit(tables_to_fit())), (rates.TRANSFORMERS, transformers)):
        for place, value in found.items():
            assert functools.reduce(dict.__getitem__, place, stored) == pytest.approx(value, rel=0.02)


def test_the_fits_replay_what_the_clock_does():
    rows = [row for row in clock_fit.used(PUBLISHED.values()) if row["half"] == "fit"]
    for row in sorted(rows, key=lambda row: digest(row["id"]))[:4]:  # the same few every time, of all sources
        log = clock_fit.record(row)
        said = clock_fit.replay(log, sheets.find(row["sheet"]), rates.TABLES)
        assert said == pytest.approx(clock_validation.seconds(row), rel=0.02)
        start = clock_fit.tables({name: value for name, (value, _, _) in clock_fit.START.items()})
        start = rates.merged(start, rates.TRANSFORMERS)
        assert clock_fit.replay(log, sheets.find(row["sheet"]), start) != pytest.approx(said, rel=1e-3)
    row = COUNTED["Lambda, SQuAD/12x768/A100-80/tf32/384 tokens/172 on each of 1"]
    clock = transformer_validation.seconds(row)
    assert transformer_fit.said(row, transformer_fit.logs_of(row), rates.TABLES) == pytest.approx(clock, rel=0.01)
    assert SAID[row["id"]] == pytest.approx(clock, abs=1e-6)


def test_settings_are_possible():
    for kind, part in {**rates.TENSOR, **rates.MEMORY, **rates.CORES}.items():
        assert 0 < part <= (2.25 if kind.startswith("conv3x3") else 1), kind  # Winograd takes fewer operations
    assert all(0.5e-6 <= seconds <= 80e-6 for times in rates.HOST.values() for seconds in times)
    assert all(1e-6 <= seconds <= 20e-6 for seconds in rates.FIXED.values())
    # A GPU without figures is taken for its like.
    assert rates.FACTOR["products"]["Blackwell"] == rates.FACTOR["products"]["Hopper"]
    assert rates.FACTOR["products"]["Ada"] == rates.FACTOR["tensor cores"]["Ada"]


FITS = """
import sys

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).rpartition("/")[2] == "trial.json":
        sys.exit("somebody has opened the trial's rows")

sys.addaudithook(refuse)
from calibration import clock_fit, collective_fit, transformer_fit
from calibration import published, published_collectives, published_transformers

assert clock_fit.used(published.rows()) and published_collectives.tables()
rows = transformer_fit.used([row for row in published_transformers.rows() if not row["excluded"]])
transformer_fit.logs_of(next(row for row in rows if row["layers"] == 12))
assert not [name for name in sys.modules if name.endswith(".trial")]
print("the fits are done")
import calibration.trial
calibration.trial.cases()
"""


@pytest.mark.slow
def test_no_fit_can_read_the_rows_of_the_trial():
    """The last line does, and it is seen."""
    done = ranks.python("-c", FITS, folder=HERE.parent, fork=False, check=False)
    assert done.stdout == "the fits are done\n" and "opened the trial's rows" in done.stderr, done.stderr


def test_attention_s_fit_is_what_its_program_makes_of_the_curves_for_it():
    fitted = json.loads(rates.ATTENTION_PATH.read_text())
    del fitted["provenance"]
    assert attention_fit.fit_all() == fitted
    errors = attention_fit.report(fitted)
    assert errors["fit"]["rows"] + errors["held out"]["rows"] > 180 and errors["held out"]["median"] < 0.12
    assert errors["measured on an H100: FlashAttention 2, forward"]["median"] < 0.06
    assert errors["measured on an H100: cuDNN, backward"]["median"] < 0.11


# What one H100 said


def test_each_kernel_was_measured_on_an_h100():
    stored = json.loads(kernels.OUT.read_text())
    assert stored["gpu"].startswith("NVIDIA H100") and stored["kernels"].keys() == kernels.cases().keys()
    rows = [row for ways in stored["kernels"].values() for row in ways.values()]
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in rows)
    beside = stored["contention"]["work"]["product of width 8192, forward"]
    assert beside["alone"] < beside["16/2048"] < beside["64/2048"]


def test_what_was_measured_can_be_asked_of_a_virtual_gpu():
    stored, cases = json.loads(kernels.OUT.read_text())["kernels"], kernels.cases()
    with virtual_gpus(1, "H100", backing="meta"):
        for key in ("linear/2048/4096/4096", "attention/512/1536/64/FLASH_ATTENTION", "layer_norm/1536", "host/add"):
            modelled = kernels.row(*cases[key])
            assert modelled.keys() == stored[key].keys()
            assert all(0.1 < row["median"] / stored[key][way]["median"] < 2 for way, row in modelled.items())
