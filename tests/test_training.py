"""The training loop learns, repeats itself, says when it diverges, and refuses what makes no sense."""

import contextlib
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from mgpu_lib import training
from mgpu_lib.data import Data, load_digits
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import train_batch
from mgpu_lib.training import evaluate, train
from mgpu_lib.virtual import virtual_gpus

CPU = torch.device("cpu")


@contextlib.contextmanager
def some_devices(kind, count):
    """`count` devices: all the same CPU, or virtual GPUs."""
    if kind == "cpu":
        yield [CPU] * count
    else:
        with virtual_gpus(count) as machine:
            yield list(machine.devices)


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture
def few(digits):
    """A hundred images: enough to see that numbers are right, not to learn."""
    name, X_train, y_train, X_test, y_test = digits
    return Data(name, X_train[:100], y_train[:100], X_test[:50], y_test[:50])


@pytest.mark.parametrize("kind", ["cpu", "virtual"])
def test_it_learns_the_digits(digits, kind):
    with some_devices(kind, 2) as devices:
        history = train(2, 64, 0.1, num_epochs=3, data=digits, devices=devices)
    assert history[-1]["test_accuracy"] > 0.7
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert all(entry["max_divergence"] == 0.0 and not entry["diverged"] for entry in history)


def test_the_history_is_plain_and_the_same_each_time(few):
    run = partial(train, 2, 32, 0.1, num_epochs=2, data=few, devices=[CPU] * 2)
    history = run()
    assert [list(entry) for entry in history] == [
        ["epoch", "train_loss", "test_accuracy", "max_divergence", "diverged"]] * 2
    assert [entry["epoch"] for entry in history] == [1, 2]
    assert json.loads(json.dumps(history, allow_nan=False)) == history
    assert run() == history
    assert run(seed=1) != history


@pytest.mark.parametrize("count", [2, 3])
def test_an_epoch_on_several_devices_equals_one_on_one(few, count):
    """100 rows in batches of 32: the last has 4."""
    alone, together = [train(n, 32, 0.1, num_epochs=1, data=few, devices=[CPU] * n)[0] for n in (1, count)]
    assert together["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-5)
    assert together["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.021)  # one image of 50


def test_the_loss_is_the_mean_over_all_rows(few):
    """With a step that learns nothing, it is the loss of the initial parameters, short last batch included."""
    def still(X, y, device_params, devices, lr):
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(lenet(X, device_params[0]), y).item()

    entry, = train(1, 32, 0.1, num_epochs=1, data=few, devices=[CPU], step=still)
    whole = torch.nn.functional.cross_entropy(lenet(few.X_train, lenet_params()), few.y_train).item()
    assert entry["train_loss"] == pytest.approx(whole, abs=1e-5)
    right = (lenet(few.X_test, lenet_params()).argmax(1) == few.y_test).float().mean().item()
    assert entry["test_accuracy"] == pytest.approx(right)


def test_divergence_between_replicas_is_recorded(few):
    def one_sided(X, y, device_params, devices, lr):
        return train_batch(X, y, device_params[:1], devices[:1], lr)

    entry, = train(2, 32, 0.1, num_epochs=1, data=few, devices=[CPU] * 2, step=one_sided)
    assert entry["max_divergence"] > 1e-3 and not entry["diverged"]


def test_a_loss_that_is_not_finite_stops_training_and_is_said(few, capsys):
    seen = []
    history = train(1, 10, 1e6, num_epochs=4, data=few, devices=[CPU],
                    on_epoch=lambda history: seen.append(len(history)))
    assert len(history) == len(seen) < 4
    assert history[-1]["diverged"] is True and history[-1]["train_loss"] is None
    assert json.dumps(history, allow_nan=False)
    assert "diverged in epoch" in capsys.readouterr().out


def test_training_stops_at_the_step_that_diverged(few):
    losses = iter([1.0, math.nan, 1.0])
    entry, = train(1, 10, 0.1, data=few, devices=[CPU], step=lambda X, y, **rest: next(losses))
    assert entry["diverged"] and next(losses) == 1.0


def test_on_epoch_gets_the_history_so_far(few):
    seen = []
    history = train(1, 50, 0.1, num_epochs=3, data=few, devices=[CPU],
                    on_epoch=lambda history: seen.append(list(history)))
    assert seen == [history[:1], history[:2], history]


def test_devices_come_from_use_gpus_and_data_from_the_loader(few, monkeypatch):
    asked = []
    monkeypatch.setattr(training, "use_gpus", lambda n: asked.append(n) or [CPU] * n)
    monkeypatch.setattr(training, "load_fashion_mnist", lambda: asked.append("data") or few)
    assert len(train(3, 50, 0.1, num_epochs=1)) == 1
    assert asked == [3, "data"]


@pytest.mark.parametrize("wrong, message", [
    ({"num_gpus": 0}, "num_gpus is 0"), ({"num_gpus": 1.5}, "num_gpus is 1.5"),
    ({"batch_size": -4}, "batch_size is -4"), ({"batch_size": "256"}, "batch_size is '256'"),
    ({"num_epochs": 0}, "num_epochs is 0"), ({"devices": [CPU] * 2}, "num_gpus is 1 but 2 devices"),
    ({"lr": 0}, "lr is 0"), ({"lr": -0.1}, "lr is -0.1"), ({"lr": "0.1"}, "lr is '0.1'"),
    ({"lr": math.nan}, "lr is nan"), ({"lr": math.inf}, "lr is inf")])
def test_numbers_that_make_no_sense_are_named(few, wrong, message):
    arguments = {"num_gpus": 1, "batch_size": 8, "lr": 0.1, "num_epochs": 1, "data": few, "devices": [CPU], **wrong}
    with pytest.raises(ValueError, match=message):
        train(**arguments)


@pytest.mark.parametrize("kind", ["cpu", "virtual"])
@pytest.mark.parametrize("rows, batch_size", [(7, 3), (3, 7), (1, 1)])
def test_evaluate_counts_every_image_once(kind, rows, batch_size):
    X, y = torch.arange(rows), torch.arange(rows) % 2
    with some_devices(kind, 1) as devices:
        accuracy = evaluate(lambda X: torch.stack([X * 0 + 1.0, X % 3 * 1.0], dim=1), X, y, devices[0], batch_size)
    # argmax is 1 where X % 3 == 2, and 0 elsewhere (the first of equals)
    assert accuracy == sum(int(x % 3 == 2) == x % 2 for x in range(rows)) / rows


def test_evaluate_needs_images():
    with pytest.raises(ValueError, match="0 rows"):
        evaluate(lambda X: X, torch.zeros(0, 1), torch.zeros(0), CPU)


@pytest.mark.parametrize("disabled", ["1", ""])
def test_progress_is_shown_unless_disabled(disabled):
    """tqdm reads TQDM_DISABLE when it is imported, so each case is a process of its own."""
    code = """
import torch
from mgpu_lib.data import Data
from mgpu_lib.training import train
X, y = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.long)
train(1, 2, 0.1, num_epochs=2, data=Data("zeros", X, y, X, y), devices=[torch.device("cpu")])"""
    env = {**os.environ, "TQDM_DISABLE": disabled, "PYTHONPATH": str(Path(training.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "" and ("epoch 2/2" in done.stderr) == (not disabled)
