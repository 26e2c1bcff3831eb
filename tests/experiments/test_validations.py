"""The clock and the planner: what chapters say of records, and predictions of the book's own programs."""

import dataclasses
import statistics
from unittest.mock import patch

import pytest
import torch
import torchvision

import mgpu_lib as mgpu
from calibration import clock_validation, ddp_scaling, published, sheets
from experiments import planner_validation, study
from mgpu_lib import recorded
from virtual_gpus import GPUS

CLOCK, SCALING, PLANNER = map(recorded.study, ("clock_validation", "ddp_scaling", "planner_validation"))
ROWS = CLOCK["rows"]
PUBLISHED = {row["id"]: row for row in published.rows()}
TABLES = {table["key"]: table for table in SCALING["tables"]}
SCALED = {key: table for key, (table,) in ddp_scaling.cases().items()}
HELD_OUT = "held out"


def half(name):
    return [row for row in ROWS if row["half"] == name]


# The planner


def test_the_planner_s_record_is_whole():
    runs = PLANNER["runs"]
    assert PLANNER["recipe"] == planner_validation.recipe() and list(runs) == list(planner_validation.cases())
    found = study.plain(planner_validation.summary(runs))
    for what in ("time", "memory"):
        assert found[what] == pytest.approx(PLANNER["summary"][what], rel=1e-6)


@pytest.mark.parametrize(("what", "worst"), [("time", 0.15), ("memory", 0.25)])
def test_how_far_off_the_formulas_are(what, worst):
    """But for one setting, with heads of 16 numbers, whose time is 21 % off, not for the host; why isn't known. Three
    that share narrow products on Hopper are 14 or 15 % off."""
    found = PLANNER["summary"][what]
    *others, last = sorted(abs(row[what]["error"]) for row in PLANNER["summary"]["rows"].values())
    assert found["rows"] == 60 and found["median"] <= 0.1
    assert others[-1] <= worst and last <= 0.25


# What the appendix says


def test_what_the_appendix_says_of_partners_in_the_other_half():
    """measurements: held-out rows whose network is in the other half too, only run forward instead of trained."""

    def network(row):
        return tuple(row[key] for key in ("source", "sheet", "model", "precision", "memory_format", "n_gpus"))

    fitted = {network(row) for row in half("fit")}
    pairs = [row["error"] for row in half(HELD_OUT) if network(row) in fitted]
    others = [row["error"] for row in half(HELD_OUT) if network(row) not in fitted]
    assert len(pairs) == 36
    assert [round(clock_validation.summary(errors)["median"], 3) for errors in (pairs, others)] == [0.048, 0.08]


def test_what_the_appendix_says_of_several_gpus():
    """groups-why: nine of ten are ResNeXts, and most of their error is there with one GPU; one network has 1 to 8."""
    rows = [row for row in half(HELD_OUT) if row["n_gpus"] > 1]
    assert len(rows) == 10 and sum("resnext" in row["model"] for row in rows) == 9
    assert statistics.median(row["error"] for row in rows) < 0
    same = "source", "gpu", "model", "mode", "precision", "memory_format"
    for row in rows:
        alone = [r["error"] for r in half(HELD_OUT) if r["n_gpus"] == 1 and all(r[key] == row[key] for key in same)]
        assert not alone or -0.05 <= row["error"] - min(alone) <= 0.01
    small = [(row["source"], row["model"], row["mode"]) for row in half(HELD_OUT) if row["batch_per_gpu"] <= 8]
    assert small == 4 * [("ait", "vit_b_16", "infer")]


def test_what_the_appendix_says_of_scaling():
    """scaling-load-why: mostly too high; worst in half precision over sockets; too low on an A100, small batch."""
    for several, count, too_high, median in ((False, 51, 44, 0.0226), (True, 30, 27, 0.0643)):
        errors = [row["efficiency"]["error"] for row in ddp_scaling.compared(SCALING["tables"], several)]
        assert (len(errors), sum(error > 0 for error in errors)) == (count, too_high)
        assert round(statistics.median(errors), 4) == median
    found = {key: [row["efficiency"] for row in table["rows"]] for key, table in TABLES.items()}
    errors = {key: [row["error"] for row in rows] for key, rows in found.items()}
    worst = sorted((error, key) for key, each in errors.items() for error in each)[-3:]
    assert {key for _, key in worst} == {"ray-nodes-amp"} and worst[0][0] > 0.19
    assert max(map(abs, errors["ray-nodes-fp32"])) < 0.012
    early, late = found["pytorch-fcb7371"], found["pytorch-05140f0"]
    assert [round(rows[4]["published"], 2) for rows in (early, late)] == [0.89, 0.93]
    assert [round(early[-1][of], 2) for of in ("published", "modelled")] == [0.86, 0.96]
    assert {key for key, each in errors.items() if min(each) < -0.03} == {"csc-mahti-fp32", "csc-mahti-amp"}
    [strong] = [key for key in TABLES if "strong scaling" in key]
    assert max(map(abs, errors[strong])) < 0.0125 and TABLES[strong]["rows"][-1]["gpus"] == 256


@pytest.mark.slow
def test_what_the_appendix_says_of_other_networks_and_processors():
    """scaling-load-why: a slower network puts neither of Ray's tables right; a faster host does CSC's A100s."""
    for key, worse in (("ray-nodes-fp32", -0.005), ("ray-nodes-amp", 0.10)):
        real = TABLES[key]["rows"][1]["efficiency"]["published"]
        slow = {**SCALED[key], "network": "Ethernet 25"}
        error = ddp_scaling.seconds(slow, 8) / ddp_scaling.seconds(slow, 16) / real - 1
        assert error < worse if worse < 0 else error > worse
    with torch.device("meta"):
        net, X = torchvision.models.resnet50(), torch.empty(4 * 32, 3, 224, 224)
    for precision, wanted in (("tf32", 0.96), ("amp", 0.92)):
        shared = {"gpu": "A100-40", "strategy": "ddp", "precision": precision, "host": 0.33}
        alone, four = (mgpu.predict(net, X[: 32 * k], n_gpus=k, link="HGX A100 4-GPU", **shared) for k in (1, 4))
        assert alone.seconds / four.seconds == pytest.approx(wanted, abs=0.005)


# The predictions


@pytest.mark.parametrize(
    "name",
    ["ddp-v100-resnet50-n1-noddp-b32", "pycls-v100-resnet50-infer-b64", "timm-rtx-3090-resnet50-train-amp-nhwc-b512"],
)
@pytest.mark.sweep(3)
def test_rows_and_predict_agree(name):
    """A row that needs nothing special takes what mgpu.predict says. The model's memory isn't what is tested."""
    row = PUBLISHED[name]
    layout = torch.channels_last if row["memory_format"] == "nhwc" else torch.contiguous_format
    net = published.build(row["model"]).to(memory_format=layout)
    X = torch.empty(published.batch_shape(row), device="meta").to(memory_format=layout)
    roomy = dataclasses.replace(sheets.find(row["sheet"]), memory=10**15)
    with sheets.added(), patch.dict(GPUS, {row["sheet"]: roomy}):
        said = mgpu.predict(net, X, row["sheet"], precision=row["precision"], training=row["mode"] == "train").seconds
    assert said == pytest.approx(clock_validation.seconds(row), rel=0.02)
