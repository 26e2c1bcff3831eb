"""The studies beside the grid: what is recorded is what one run alone does, and what is computed from runs is right."""

import contextlib
import importlib
import itertools
import json
import math
import statistics

import pytest
import torch
from common import CPU, some_digits
from torch import nn

from experiments import (
    critical,
    example,
    museum,
    noise,
    oscillation,
    resnet18,
    resnet_grid,
    scaling,
    small_lm,
    study,
    ten_seeds,
    tuning,
)
from mgpu_lib import evidence, models
from mgpu_lib.data import endless
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import get_params, train_batch
from virtual_gpus import virtual_gpus

pytestmark = pytest.mark.usefixtures("uncompiled")
STUDIES = (
    "alice centred critical digits diloco example example_sweep large_scaling limits little_data museum noise "
    "oscillation positions resnet18 resnet_grid same_step scaling small_lm small_muon ten_seeds"
).split()


@pytest.fixture
def few(monkeypatch):
    """A thousand images to train on and 500 more to validate with, in the place of Fashion-MNIST."""
    digits = some_digits(1500)
    monkeypatch.setattr(tuning, "fashion_mnist", lambda: digits)
    return digits


# What is recorded


@pytest.mark.parametrize("name", STUDIES)
def test_a_recorded_study_has_all_its_cases_and_their_summary(name):
    module = importlib.import_module(f"experiments.{name}")
    stored = json.loads((study.RESULTS / f"{name}.json").read_text())
    assert stored["recipe"] == study.plain(module.recipe()) and stored["runs"].keys() == module.cases().keys()
    assert stored["summary"] == study.plain(module.summary(stored["runs"])), f"sum it up: python -m experiments.{name}"


def test_the_results_are_small():
    sizes = {path.name: path.stat().st_size for path in study.RESULTS.rglob("*.json")}
    assert sizes and sum(sizes.values()) <= 3_000_000, sizes


# What the studies share


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    return tmp_path


def count(until=None, recipe=(1, 2), summary=lambda runs: [run["1"] for run in runs.values()]):
    """Record the study "counting", or a part of it: run `until` is interrupted. The runs that were made."""
    made = []

    def record(number):
        if number == until:
            raise KeyboardInterrupt
        made.append(number)
        return {1: 2 * number}

    with contextlib.suppress(KeyboardInterrupt):
        study.run("counting", {str(i): (i,) for i in range(4)}, record, recipe, summary)
    return made


def test_an_interrupted_study_goes_on(results, capsys):
    """Runs from the file have text as keys. The others get it too, before the summary reads them."""
    part, whole = results / "counting.unfinished.json", results / "counting.json"
    assert count(2) == [0, 1] and json.loads(part.read_text())["summary"] == [0, 2] and not whole.exists()
    assert count() == [2, 3] and not part.exists()
    found = json.loads(whole.read_text())
    assert found["runs"] == {str(i): {"1": 2 * i} for i in range(4)} and found["summary"] == [0, 2, 4, 6]
    assert found["provenance"]["command"] == "python -m experiments.counting"
    assert count() == [] and "up to date" in capsys.readouterr().out
    assert count(summary=lambda runs: "another") == [] and json.loads(whole.read_text())["summary"] == "another"


def test_a_record_names_the_commit_of_the_runs_that_it_gained(results):
    """Also where it was interrupted after the last of them, before the whole was written."""
    count()
    part, whole = results / "counting.unfinished.json", results / "counting.json"
    found = json.loads(whole.read_text())
    part.write_text(json.dumps({"recipe": [1, 2], "runs": {"3": found["runs"].pop("3")}}))
    whole.write_text(json.dumps({**found, "provenance": {"commit": "an earlier one"}}))
    assert count() == [] and json.loads(whole.read_text())["provenance"]["command"] == "python -m experiments.counting"


def test_a_study_with_another_recipe_is_recorded_anew_and_replaced_when_complete(results):
    count()
    before = (results / "counting.json").read_text()
    assert count(2, recipe=(1, 3)) == [0, 1] and (results / "counting.json").read_text() == before


def test_what_two_processes_model_is_kept_until_all_of_it_is_there(results, capsys):
    """Its worker processes import what they call, so it is a function of a library: int("10") is 10."""
    (results / "counting.json").write_text(json.dumps({"recipe": ["another"], "cells": {"9": "old"}}))
    (results / "counting.unfinished.json").write_text(json.dumps({"recipe": [1], "runs": {"10": "kept"}}))
    found = study.modelled("counting", ["9", "10", "11"], int, [1])
    assert found == {"9": 9, "10": "kept", "11": 11}
    study.finish("counting", [1], {"cells": found})
    assert [path.name for path in results.iterdir()] == ["counting.json"]
    assert study.modelled("counting", ["9"], int, [1]) is None and "up to date" in capsys.readouterr().out


# oscillation


@pytest.fixture
def short(few, monkeypatch):
    made = {"EPOCHS": 1, "LATE_EPOCHS": 1, "PER_EPOCH": 3, "SETTLED": 1, "MOMENTA": (0.5,), "RECOMPUTED": 2}
    for name, value in (made | {"SIZES": (250,), "LR": 0.05}).items():
        monkeypatch.setattr(oscillation, name, value)
    oscillation.trunk.cache_clear()
    yield few
    oscillation.trunk.cache_clear()


@pytest.mark.slow
def test_a_way_is_plain_training_at_its_rates(short):
    """From scratch, one step at a time: 4 batches of 256 from 1,000 images, then 4 more at rates of a cosine."""
    X, y, X_validation, y_validation = study.split()
    params = [get_params(lenet_params(1), CPU)]
    for X_batch, y_batch in itertools.islice(endless(X, y, 256, 1), 4):
        train_batch(X_batch, y_batch, params, [CPU], 0.05)
    rates = [0.05 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)]
    losses = [train_batch(*batch, params, [CPU], lr) for batch, lr in zip(endless(X, y, 256, 1001), rates)]
    run = oscillation.record("lenet", "cosine to 0", 1)
    assert run["step"] == "2 3 4" and run["early"]["step"] == "2 3 4"
    *_, last = study.numbers(run["train_loss"])
    assert last == pytest.approx(losses[-1], abs=1e-4)
    accuracy = (lenet(X_validation, params[0]).argmax(dim=1) == y_validation).float().mean().item()
    assert oscillation.accuracy(run)[0][-1] == pytest.approx(accuracy, abs=1.1 / 500)


def test_averages_of_weights():
    averages, values = oscillation.Averages(), [1.0, 5.0, 3.0]
    for value in values:
        averages.add([torch.tensor([value])])
    exponential, mean = (tensors[0].item() for tensors in averages.now().values())
    assert mean == pytest.approx(3)
    assert exponential == pytest.approx((1 * 0.99 + 5 * 0.01) * 0.99 + 3 * 0.01)


def test_spread_around_a_line():
    assert oscillation.spread([0.5, 0.6, 0.7, 0.8]) == pytest.approx(0, abs=1e-12)
    assert oscillation.spread([1, -1, -1, 1]) == pytest.approx(math.sqrt(4 / 2))
    noise = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    assert oscillation.spread((0.01 * torch.arange(2000) + 3 * noise).tolist()) == pytest.approx(3, rel=0.05)
    with pytest.raises(ValueError, match="2 values"):
        oscillation.spread([1, 2])


# noise


def test_the_interval_of_the_noise_scale_holds_the_truth_as_often_as_it_says():
    generator, hits = torch.Generator().manual_seed(0), 0
    for _ in range(200):  # |G|² around 2 and tr Σ around 600, as wide as themselves
        pairs = torch.tensor([2.0, 600.0]) * (1 + torch.randn(100, 2, generator=generator))
        found = noise.scale(pairs.tolist())
        hits += found["from"] <= 300 <= found["to"]
    assert 0.84 < hits / 200 < 0.96
    lost = noise.scale([(-1.0, 5.0), (0.5, 5.0), (0.4, 5.0)])
    assert lost["noise_scale"] is None and lost["to"] is None


# critical


def test_measurements_are_a_tenth_apart():
    found = critical.marks(1000)
    assert found[0] == 20 and found[-1] == 1000
    assert all(before < after <= before * 1.1 + 1 for before, after in itertools.pairwise(found))
    assert critical.marks(15) == [15]


# scaling


@pytest.mark.slow
def test_a_run_that_diverges_ends_at_that_step_without_an_accuracy(few, monkeypatch):
    """What a summary makes of such runs, the recorded ones show."""
    monkeypatch.setitem(scaling.RULES, "linear", lambda *_: 1e8)
    X, y, *_ = study.split()
    params = [get_params(lenet_params(0), CPU)]
    losses = [train_batch(*batch, params, [CPU], 1e8) for batch in itertools.islice(endless(X, y, 1024, 0), 4)]
    run = scaling.record("lenet", 1024, "linear", False, 0)
    assert run["diverged_at_step"] == 1 + [math.isfinite(loss) for loss in losses].index(False)
    other = example.record(2, 256, 1e8, 2, 0)
    assert 1 <= other["ended_at_step"] <= 8 and run["test_accuracy"] is None is other["test_accuracy"]


# resnet_grid


def test_its_rate_rises_and_falls():
    rates = [resnet_grid.share((step + 0.5) / 1000) for step in range(1000)]
    top = rates.index(max(rates))
    assert top == pytest.approx(50, abs=2) and rates[top] == pytest.approx(1, abs=0.02)
    assert sorted(rates[:top]) == rates[:top] and sorted(rates[top:], reverse=True) == rates[top:]
    assert 0 < rates[0] < 0.02 and 0 < rates[-1] < 1e-5


# resnet18


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, images, learns, lost",
    [
        (resnet_grid, 1500, ("batch", 32, 0.02, 0), ("none", 48, 1e30, 0)),
        (resnet18, 256, (2, 32, 0.1, 0), (1, 64, 1e30, 0)),
    ],
    ids=["resnet_grid", "resnet18"],
)
def test_a_resnet_learns_and_a_run_that_diverges_ends(few, monkeypatch, module, images, learns, lost):
    """In the place of ResNet-18 a smaller network, which takes the same images."""
    some = few._replace(X_train=few.X_train[:images], y_train=few.y_train[:images])
    monkeypatch.setattr(tuning, "fashion_mnist", lambda: some)
    monkeypatch.setattr(resnet_grid, "EPOCHS", 2)
    monkeypatch.setattr(resnet18, "THREADS", torch.get_num_threads())
    monkeypatch.setattr(resnet18.models, "resnet18", models.resnet8)
    run, gone = module.record(*learns), module.record(*lost)
    assert run["diverged_at_step"] is None and len(run["train_loss"]) == module.EPOCHS
    assert run["train_loss"][-1] < run["train_loss"][0] < math.log(10)
    assert gone["diverged_at_step"] >= 2 and len(gone["train_loss"]) < module.EPOCHS
    assert json.dumps([run, gone], allow_nan=False)


def test_a_summary_has_none_for_a_run_that_diverged():
    ends = {"train_loss": [2.0], "test_accuracy": [0.5]}
    runs = {f"2/64/0.1/{seed}": ends | {"diverged_at_step": at} for seed, at in enumerate((None, 3))}
    assert resnet18.summary(runs) == {"2/64/0.1": {name: [end, None] for name, end in ends.items()}}


def test_its_replicas_compute_in_bfloat16():
    seen = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda layer, given, found: seen.append((found.device.index, found.dtype)))
    with virtual_gpus(2) as machine:
        net = resnet18.InBFloat16(layer).to("cuda:0")
        assert nn.DataParallel(net, device_ids=machine.devices)(torch.rand(6, 4)).dtype == torch.float32
    assert sorted(seen, key=str) == [(0, torch.bfloat16), (1, torch.bfloat16)]


# museum


def test_a_museum_without_its_settings_is_no_study():
    with pytest.raises(ValueError, match="no 'epochs=2, seed=0'"):
        museum.longer("epochs = 2", 0)
    with pytest.raises(ValueError, match="doesn't fit"):
        museum.mended("a = 1\n", "-b = 1\n+b = 2\n")


# ten_seeds


def test_ten_seeds_go_on_where_the_grid_ends():
    assert ten_seeds.SEEDS[0] == max(tuning.SEEDS) + 1 == max(scaling.SEEDS) + 1 and len(ten_seeds.SEEDS) == 7
    rates = evidence.grid("lenet")
    assert {size: evidence.best_rate(rates[size], "epochs") for size in ten_seeds.BEST} == ten_seeds.BEST


# small_lm


def test_no_step_reads_the_end_of_the_text():
    tokens = torch.arange(10_000)
    rows = small_lm.drawn(tokens, 0)
    assert rows.shape == (8192, 65) and rows.max() <= 9_999 and (rows.diff(dim=1) == 1).all()
    assert torch.equal(rows, small_lm.drawn(tokens, 0)) and not torch.equal(rows, small_lm.drawn(tokens, 1))


def test_the_language_model_s_rates_were_tuned():
    """On the text that no step reads; neighbors are worse at each batch size."""
    found = evidence.study("small_lm")["summary"]
    for size, rates in small_lm.SWEEP.items():
        losses = {lr: statistics.fmean(found[f"{size}/{lr}/0.99"]) for lr in rates}
        best = min(losses, key=losses.get)
        assert best not in (min(rates), max(rates))
        assert size != small_lm.BATCH_SIZE or best == small_lm.LR
