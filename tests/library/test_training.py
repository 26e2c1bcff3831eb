"""The training loop learns, repeats itself, says when it diverges; the run that is validated is the recorded grid's."""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from common import CPU, in_order, lenet_of_modules, some_devices
from torch import nn
from torch.nn import functional as F

from experiments import tuning as grid
from experiments import tuning_runs
from mgpu_lib import training
from mgpu_lib.data import Data, batches, hold_out, load_digits
from mgpu_lib.models import BatchNorm, lenet, lenet_params
from mgpu_lib.parallel import get_params, max_divergence, train_batch
from mgpu_lib.training import evaluate, lenet_program, run_steps, train, validated_steps, validation_steps
from mgpu_lib.virtual import virtual_gpus


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture
def few(digits):
    """A hundred images: enough to see that numbers are right, not to learn."""
    name, X_train, y_train, X_test, y_test = digits
    return Data(name, X_train[:100], y_train[:100], X_test[:50], y_test[:50])


@pytest.mark.parametrize("kind", ["cpu", "virtual"])
@pytest.mark.sweep(2)
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
        ["epoch", "train_loss", "test_accuracy", "max_divergence", "diverged"]
    ] * 2
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

    (entry,) = train(1, 32, 0.1, num_epochs=1, data=few, devices=[CPU], step=still)
    whole = torch.nn.functional.cross_entropy(lenet(few.X_train, lenet_params()), few.y_train).item()
    assert entry["train_loss"] == pytest.approx(whole, abs=1e-5)
    right = (lenet(few.X_test, lenet_params()).argmax(1) == few.y_test).float().mean().item()
    assert entry["test_accuracy"] == pytest.approx(right)


def test_divergence_between_replicas_is_recorded(few):
    def one_sided(X, y, device_params, devices, lr):
        return train_batch(X, y, device_params[:1], devices[:1], lr)

    (entry,) = train(2, 32, 0.1, num_epochs=1, data=few, devices=[CPU] * 2, step=one_sided)
    assert entry["max_divergence"] > 1e-3 and not entry["diverged"]


def test_a_loss_that_is_not_finite_stops_training_and_is_said(few, capsys):
    seen = []
    history = train(
        1, 10, 1e6, num_epochs=4, data=few, devices=[CPU], on_epoch=lambda history: seen.append(len(history))
    )
    assert len(history) == len(seen) < 4
    assert history[-1]["diverged"] is True and history[-1]["train_loss"] is None
    assert json.dumps(history, allow_nan=False)
    assert "diverged in epoch" in capsys.readouterr().out


def test_training_stops_at_the_step_that_diverged(few):
    losses = iter([1.0, math.nan, 1.0])
    (entry,) = train(1, 10, 0.1, data=few, devices=[CPU], step=lambda X, y, **rest: next(losses))
    assert entry["diverged"] and next(losses) == 1.0


def test_on_epoch_gets_the_history_so_far(few):
    seen = []
    history = train(
        1, 50, 0.1, num_epochs=3, data=few, devices=[CPU], on_epoch=lambda history: seen.append(list(history))
    )
    assert seen == [history[:1], history[:2], history]


def test_devices_come_from_use_gpus_and_data_from_the_loader(few, monkeypatch):
    asked = []
    monkeypatch.setattr(training, "use_gpus", lambda n: asked.append(n) or [CPU] * n)
    monkeypatch.setattr(training, "load_fashion_mnist", lambda: asked.append("data") or few)
    assert len(train(3, 50, 0.1, num_epochs=1)) == 1
    assert asked == [3, "data"]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"num_gpus": 1.5}, "num_gpus is 1.5"),
        ({"batch_size": -4}, "batch_size is -4"),
        ({"batch_size": "256"}, "batch_size is '256'"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"devices": [CPU] * 2}, "num_gpus is 1 but 2 devices"),
        ({"lr": 0}, "lr is 0"),
        ({"lr": -0.1}, "lr is -0.1"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": math.inf}, "lr is inf"),
    ],
)
def test_numbers_that_make_no_sense_are_named(few, wrong, message):
    arguments = {"num_gpus": 1, "batch_size": 8, "lr": 0.1, "num_epochs": 1, "data": few, "devices": [CPU], **wrong}
    with pytest.raises(ValueError, match=message):
        train(**arguments)


# The loop


def test_the_loop_reports_every_step_and_means_where_they_are_due():
    """Batches of 3, 3 and 2 rows, whose losses are 1, 2, 3, …: a mean over rows, since the last one that was due."""
    shuffled, losses = [(torch.zeros(rows), None) for rows in (3, 3, 2, 3)], iter([1.0, 2.0, 3.0, 4.0])
    progress = list(run_steps(lambda X, y: next(losses), shuffled, due={1, 3}))
    assert [at.step for at in progress] == [1, 2, 3, 4] and [at.images for at in progress] == [3, 6, 8, 11]
    assert [at.loss for at in progress] == [1, 2, 3, 4] and not any(at.diverged for at in progress)
    assert [at.train_loss for at in progress] == [1, None, (3 * 2 + 2 * 3) / 5, None]


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_the_loop_ends_with_a_loss_that_is_not_finite(lost):
    losses = iter([1.0, lost, 1.0])
    *_, last = run_steps(lambda X, y: next(losses), [(torch.zeros(1), None)] * 3, due={2})
    assert last.diverged and last.step == 2 and last.train_loss is None and next(losses) == 1.0


def test_the_loop_takes_a_step_when_it_is_asked():
    """So that whoever consumes it can look between two steps, and stop."""
    taken = []
    progress = run_steps(lambda X, y: taken.append(X) or 1.0, [(torch.zeros(1), None)] * 3)
    assert taken == [] and next(progress).step == 1 and len(taken) == 1


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
@pytest.mark.sweep(2)
def test_progress_is_shown_unless_disabled(disabled):
    """tqdm reads its variables when it is imported, so each case is a process of its own; it shows every step, as it
    wouldn't in a run that is over within a tenth of a second."""
    code = """
import torch
from mgpu_lib.data import Data
from mgpu_lib.training import train
X, y = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.long)
train(1, 2, 0.1, num_epochs=2, data=Data("zeros", X, y, X, y), devices=[torch.device("cpu")])"""
    settings = {"TQDM_DISABLE": disabled, "TQDM_MININTERVAL": "0"}
    env = {**os.environ, **settings, "PYTHONPATH": str(Path(training.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "" and ("epoch 2/2" in done.stderr) == (not disabled)


# Validated at the steps at which the grid is


@pytest.fixture(scope="module")
def held(digits):
    """220 images to train on, 20 to hold out, 40 to test."""
    name, X_train, y_train, X_test, y_test = digits
    return Data(name, X_train[:240], y_train[:240], X_test[:40], y_test[:40])


def measurements(progress):
    return [at for at in progress if at.accuracy is not None]


@pytest.mark.parametrize("net", ["lenet", "lenet_bn"])
@pytest.mark.parametrize("batch_size, lr, epochs", [(64, 0.05, 3), (7, 0.01, 1)])
@pytest.mark.sweep(2)
def test_it_is_the_run_that_the_grid_records(held, net, batch_size, lr, epochs):
    """Same images held out, same start, same batches, measured at the same steps: the same numbers within rounding."""
    torch.compiler.set_stance("force_eager")
    try:
        (recorded,) = tuning_runs.train_runs(net, batch_size, [lr], 0, held, 20, epochs, 12)
    finally:
        torch.compiler.set_stance("default")
    found = measurements(validated_steps(held, batch_size, lr, recorded["step"][-1], [CPU], net == "lenet_bn"))
    early = [at for at in found if at.step <= 8]  # later, rounding has grown
    assert [at.step for at in early] == recorded["step"][: len(early)]
    assert [at.train_loss for at in early] == pytest.approx(recorded["train_loss"][: len(early)], rel=2e-3)
    accuracies = [at.accuracy for at in early]
    assert accuracies == pytest.approx(recorded["validation_accuracy"][: len(early)], abs=0.051)  # an image in 20


@pytest.mark.parametrize("batch_size", grid.BATCH_SIZES)
def test_it_is_measured_when_the_grid_is(batch_size):
    per_epoch = math.ceil(55_000 / batch_size)
    recorded = list(tuning_runs.marks(per_epoch, grid.EPOCHS, grid.STEPS))
    for end in (grid.EPOCHS * per_epoch, grid.STEPS):
        found = validation_steps(per_epoch, end)
        assert found[-1] == end and found == sorted(set(found))
        missing = {step for step in recorded if step <= end} - set(found)
        assert missing <= {grid.STEPS}, "the end of the other budget"
        assert len(found) <= 50


def test_the_grid_and_the_trial_hold_out_the_same_images(held):
    whole = held._replace(X_train=torch.arange(60_000), y_train=torch.arange(60_000))
    X, y, X_validation, y_validation = hold_out(whole)
    assert (len(X), len(y)) == (60_000 - grid.VALIDATION,) * 2
    assert X_validation[0] == y_validation[0] == 55_000


def test_every_step_is_reported_and_losses_are_means_since_the_last_measurement(held):
    progress = list(validated_steps(held, 100, 0.05, 7, [CPU]))
    assert [at.step for at in progress] == list(range(1, 8))
    assert [at.images for at in progress] == [100, 200, 220, 320, 420, 440, 540]  # 220 to train on
    assert [at.step for at in measurements(progress)] == [2, 3, 4, 5, 6, 7]  # half epochs 2, 3, 5, 6 and the end
    params, losses = [get_params(lenet_params(), CPU)], []
    generator = torch.Generator().manual_seed(0)
    for X, y in batches(held.X_train[:220], held.y_train[:220], 100, generator):
        losses.append((len(X), train_batch(X, y, params, [CPU], 0.05)))
    first = sum(n * loss for n, loss in losses[:2]) / 200
    assert measurements(progress)[0].train_loss == pytest.approx(first)
    assert measurements(progress)[1].train_loss == pytest.approx(losses[2][1])


# On several GPUs


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_several_gpus_are_one(held, k, batch_size):
    alone = measurements(validated_steps(held, batch_size, 0.02, 5, [CPU]))
    with virtual_gpus(k) as machine:
        together = measurements(validated_steps(held, batch_size, 0.02, 5, machine.devices))
    assert [at.step for at in together] == [at.step for at in alone]
    assert [at.train_loss for at in together] == pytest.approx([at.train_loss for at in alone], rel=1e-4)


# Batch norm


def steps_of_modules(X, y, devices, steps, lr):
    """Training with nn.DataParallel: (the network, losses)."""
    net = lenet_of_modules(lenet_params(batch_norm=True)).to(devices[0])
    wrapped = nn.DataParallel(net, device_ids=devices) if len(devices) > 1 else net
    optimizer, losses = torch.optim.SGD(net.parameters(), lr), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(X.to(devices[0])), y.to(devices[0]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


@pytest.mark.parametrize("k, rows", [(1, 9), (2, 16), (4, 16)])
def test_a_step_with_batch_norm_is_that_of_dataparallel(held, k, rows):
    """Statistics of each GPU's own shard; those of the first GPU are kept, and used to evaluate."""
    X, y = held.X_train[:rows], held.y_train[:rows]
    with some_devices("cpu" if k == 1 else "virtual", k) as devices:
        expected_net, expected = steps_of_modules(X, y, devices, 3, 0.05)
        step, net = lenet_program(devices, batch_norm=True)
        assert [step(X, y, lr=0.05) for _ in range(3)] == pytest.approx(expected, rel=1e-4)
        device_params = step.keywords["device_params"]
        assert max_divergence(device_params) == 0
        for p, q in zip(device_params[0], in_order(expected_net), strict=True):
            expected = (q.T if q.dim() == 2 else q).detach().cpu()
            torch.testing.assert_close(p.detach().cpu(), expected, atol=1e-5, rtol=1e-4)
        test = held.X_test.to(devices[0])  # with the statistics, too
        found, expected = (each(test).detach().cpu() for each in (net, expected_net.eval()))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_with_batch_norm_a_gpu_without_images_takes_the_same_step(held):
    with virtual_gpus(3) as machine:
        replicas = [get_params(lenet_params(batch_norm=True), device) for device in machine.devices]
        norm = BatchNorm()
        for X, y in zip(held.X_train.split(1)[:3], held.y_train.split(1)):
            train_batch(X, y, replicas, machine.devices, 0.01, net=partial(lenet, batch_norm=norm.by_batch))
        assert max_divergence(replicas) == 0
        for scale in replicas[2][8::2]:
            mean, variance = norm.statistics[scale]
            assert bool((mean == 0).all()) and bool((variance == 1).all())


# Ends


def test_a_loss_that_is_not_finite_ends_it(held):
    *_, last = validated_steps(held, 7, 1e30, 100, [CPU])
    assert last.diverged and last.step < 100 and last.accuracy is None


def test_a_network_that_is_dead_ends_it(held):
    """All its ReLUs are closed: a finite loss that no image changes."""
    *_, last = validated_steps(held, 50, 5.0, 100, [CPU])
    assert last.diverged and last.step < 100
    if last.accuracy is not None:
        assert math.isfinite(last.train_loss) and last.accuracy < 0.3


@pytest.mark.parametrize(
    "values, message",
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"lr": 0}, "lr is 0"),
        ({"lr": math.inf}, "lr is inf"),
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
    ],
)
def test_impossible_numbers_are_named(held, values, message):
    with pytest.raises(ValueError, match=message):
        next(validated_steps(**{"data": held, "batch_size": 8, "lr": 0.1, "steps": 2, "devices": [CPU], **values}))
