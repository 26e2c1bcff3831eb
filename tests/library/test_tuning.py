"""Scaling rules and noise scale; and the grid: many runs at once equal one at a time, and none is lost."""

import itertools
import json
import math
import os

import pytest
import torch
from common import CPU, some_digits
from hypothesis import given
from hypothesis import strategies as st

from experiments import tuning as grid
from experiments import tuning_runs
from mgpu_lib.data import endless
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import get_params, train_batch
from mgpu_lib.tuning import (
    gradient_noise,
    linear_scaling,
    noise_from_norms,
    noise_scale,
    sqrt_scaling,
    warmup,
)

sizes = st.integers(1, 10_000)
rates = st.floats(1e-6, 1e3)
pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(scope="module")
def few():
    """A hundred images to train on; `runs` keeps fifty more to validate with."""
    return some_digits(150, 60)


# mgpu_lib.tuning


@given(rates, sizes, sizes)
def test_scaling_rules(lr, batch_size, new):
    k = new / batch_size
    assert linear_scaling(lr, batch_size, new) == pytest.approx(k * lr)
    assert sqrt_scaling(lr, batch_size, new) ** 2 == pytest.approx(lr * linear_scaling(lr, batch_size, new))
    for rule in (linear_scaling, sqrt_scaling):
        assert rule(rule(lr, batch_size, new), new, batch_size) == pytest.approx(lr)


def test_warmup_is_a_straight_line():
    assert [warmup(step, 4, 0.8, 0.2) for step in range(6)] == pytest.approx([0.2, 0.35, 0.5, 0.65, 0.8, 0.8])
    assert warmup(0, 0, 0.8, 0.2) == 0.8


def test_noise_scale_of_a_quadratic_with_known_noise():
    """Rows x ~ N(0, diag(sigma²)), loss |w - x|²/2: the gradient of a shard is w - mean(x), its noise tr Σ / rows."""
    generator, sigma, w = torch.Generator().manual_seed(1), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.0, 1.0])
    shards = 1, 5, 2

    def gradient(rows):
        return [w - (sigma * torch.randn(rows, 3, generator=generator)).mean(dim=0)]

    found = [gradient_noise([gradient(rows) for rows in shards], shards) for _ in range(3000)]
    assert noise_scale(found) == pytest.approx(14 / 5, rel=0.1)
    assert noise_from_norms(3 + 70 / 7, 3 + 70 / 35, 7, 35) == pytest.approx((3, 70))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: linear_scaling(0, 1, 2), "lr is 0"),
        (lambda: sqrt_scaling(0.1, 0, 2), "batch_size is 0"),
        (lambda: warmup(-1, 5, 0.1, 0), "step is -1"),
        (lambda: warmup(0, 5, 0.1, 0.2), "start is 0.2"),
        (lambda: gradient_noise([[torch.ones(1)]], [4]), "at least 2"),
        (lambda: noise_from_norms(1, 1, 8, 8), "must be larger"),
        (lambda: noise_from_norms(1, -1, 8, 9), "not negative"),
        (lambda: noise_scale([]), "no estimates"),
        (lambda: noise_scale([(-1, 2), (0.5, 2)]), "must be positive"),
        (lambda: noise_scale([(1, -2), (1, 1)]), "can't be negative"),
    ],
)
def test_what_makes_no_sense_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# experiments.tuning


def runs(few, lrs):
    """LeNet's, of two epochs of a hundred images and of five steps."""
    return tuning_runs.train_runs("lenet", 16, lrs, 1, few, 50, 2, 5)


def test_a_diverged_run_ends_and_the_others_go_on(few):
    (good, bad), (alone,) = runs(few, lrs=(0.05, 1e8)), runs(few, lrs=[0.05])
    assert good["diverged_at_step"] is None and good["step"] == alone["step"]
    assert good["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-4)
    params = [get_params(lenet_params(1), CPU)]
    shuffled = endless(few.X_train[:100], few.y_train[:100], 16, 1)
    losses = [train_batch(X, y, params, [CPU], 1e8) for X, y in itertools.islice(shuffled, 6)]
    assert bad["diverged_at_step"] == 1 + [math.isfinite(loss) for loss in losses].index(False)
    assert max(bad["step"], default=0) < bad["diverged_at_step"] and bad["test_accuracy"] == {}
    assert json.dumps(bad, allow_nan=False)


def test_a_dead_run_ends(few, monkeypatch):
    """All ReLUs of the third layer closed: every image has the same logits, and no gradient opens them again."""
    params = lenet_params()
    params[5] -= 1e6
    monkeypatch.setattr(tuning_runs, "lenet_params", lambda seed: params)
    (dead,) = runs(few, lrs=[0.01])
    assert (dead["dead_at_step"], dead["step"], dead["diverged_at_step"]) == (2, [2], None)
    assert lenet(few.X_test, params).std(dim=0).max() < 1e-6


def test_the_grid_is_about_fashion_mnist():
    with pytest.raises(ValueError, match="MGPU_DATA=digits"):
        grid.fashion_mnist()


def test_an_interrupted_grid_goes_on_where_it_was(few, tmp_path, monkeypatch, capsys):
    """First some seeds only, then an interruption; and a part of another recipe is recorded anew."""
    done, limit = [], [2]

    def record(*part):  # (net, batch size, seed, rates, epochs, steps)
        done.append(part[:4])
        assert len(done) <= limit[0], "the interruption"
        return part[:4], [{"lr": part[3][0], "train_loss": [2.5, 1.5]}]

    made = {"BATCH_SIZES": (32,), "SEEDS": (0, 1), "OUT": tmp_path / "tuning.json", "record": record}
    for name, value in (made | {"fashion_mnist": lambda: few}).items():
        monkeypatch.setattr(grid, name, value)
    for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):  # main sets them for its workers
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    parallel = grid.joblib.Parallel  # in this process, because a worker would know nothing of it
    monkeypatch.setattr(grid.joblib, "Parallel", lambda n_jobs, **rest: parallel(n_jobs=1, **rest))
    parts = grid.grid((0, 1))
    path = grid.part_file(*parts[0])
    path.parent.mkdir()
    path.write_text(json.dumps({"recipe": {**grid.recipe(), "steps": 5}, "runs": []}))
    with pytest.raises(AssertionError, match="the interruption"):
        grid.main(["--seeds", "0"])
    interrupted, limit[0] = done.pop(), math.inf
    grid.main(["--seeds", "0"])
    assert sorted(done) == sorted(grid.grid((0,))) and interrupted in done[2:], "each part once"
    assert not grid.OUT.exists() and "6 of 12 parts are still to come" in capsys.readouterr().err
    grid.main([])
    result = json.loads(grid.OUT.read_text())
    assert result["recipe"] == grid.recipe() and {run["train_loss"] for run in result["runs"]} == {"2.5 1.5"}
    assert [(run["net"], run["batch_size"], run["seed"], run["lr"]) for run in result["runs"]] == [
        (*part, lrs[0]) for *part, lrs in parts
    ]
    grid.main([])
    assert sorted(done) == sorted(parts) and not path.exists() and "up to date" in capsys.readouterr().out
