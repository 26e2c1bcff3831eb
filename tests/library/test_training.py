"""The training loop learns, repeats itself, says when it diverges; the run that is validated is the recorded grid's."""

import json
import math
from functools import partial

import pytest
import torch
import tqdm.auto
from common import CPU, in_order, lenet_of_modules, some_devices, some_digits
from torch import nn
from torch.nn import functional as F

from experiments import tuning as grid
from experiments import tuning_runs
from mgpu_lib import training
from mgpu_lib.data import load_digits
from mgpu_lib.models import lenet_bn_params
from mgpu_lib.parallel import max_divergence, train_batch
from mgpu_lib.training import evaluate, lenet_program, run_steps, train, validate, validated_steps, validation_steps
from virtual_gpus import virtual_gpus


@pytest.fixture(scope="module")
def few():
    return some_digits(100)


def test_it_learns_the_digits_and_says_how_far_it_is(monkeypatch):
    """The history is plain data, the same each time; devices come from use_gpus and data from the loader."""
    seen, asked, digits = [], [], load_digits()
    with virtual_gpus(2) as machine:
        monkeypatch.setattr(training, "use_gpus", lambda n: asked.append(n) or machine.devices)
        monkeypatch.setattr(training, "load_fashion_mnist", lambda: asked.append("data") or digits)
        history = train(2, 64, 0.1, num_epochs=2, on_epoch=lambda history: seen.append(list(history)))
    assert asked == [2, "data"] and seen == [history[:1], history]
    assert [entry["epoch"] for entry in history] == [1, 2] and history[-1]["test_accuracy"] > 0.5
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert all(entry["max_divergence"] == 0.0 and not entry["diverged"] for entry in history)
    assert json.loads(json.dumps(history, allow_nan=False)) == history


def test_the_seed_decides_and_the_number_of_devices_does_not(few):
    """100 rows in batches of 32: the last has 4."""
    run = partial(train, batch_size=32, lr=0.1, num_epochs=1, data=few)
    [alone], [again], [other], [together] = (
        run(n, devices=[CPU] * n, seed=seed) for n, seed in [(1, 0), (1, 0), (1, 1), (3, 0)]
    )
    assert alone == again != other
    assert together["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-5)
    assert together["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.021)  # one image of 50


def test_replicas_that_drift_apart_are_recorded(few):
    def one_sided(X, y, device_params, devices, lr):
        return train_batch(X, y, device_params[:1], devices[:1], lr)

    (entry,) = train(2, 32, 0.1, num_epochs=1, data=few, devices=[CPU] * 2, step=one_sided)
    assert entry["max_divergence"] > 1e-3 and not entry["diverged"]


def test_a_loss_that_is_not_finite_stops_training_and_is_said(few, capsys):
    losses = iter([1.0] * 10 + [1.0, math.nan, 1.0])
    history = train(1, 10, 0.1, num_epochs=4, data=few, devices=[CPU], step=lambda X, y, **rest: next(losses))
    assert [entry["diverged"] for entry in history] == [False, True] and next(losses) == 1.0
    assert history[-1]["train_loss"] is None and json.dumps(history, allow_nan=False)
    assert "diverged in epoch 2" in capsys.readouterr().out
    *_, last = train(2, 50, 1e30, num_epochs=2, data=few, devices=[CPU] * 2)
    assert last["diverged"] and last["max_divergence"] is None, "of replicas that are not numbers any more"


@pytest.mark.parametrize(
    "call, given, message",
    [
        ("train", {"num_gpus": 1.5}, "num_gpus is 1.5"),
        ("train", {"num_epochs": 0}, "num_epochs is 0"),
        ("train", {"devices": [CPU] * 2}, "num_gpus is 1 but 2 devices"),
        ("train", {"lr": "0.1"}, "lr is '0.1'"),
        ("validated_steps", {"batch_size": 2.5}, "batch_size is 2.5"),
        ("validated_steps", {"lr": math.inf}, "lr is inf"),
        ("validated_steps", {"steps": 0}, "steps is 0"),
    ],
)
def test_numbers_that_make_no_sense_are_named(few, call, given, message):
    usual = {"batch_size": 8, "lr": 0.1, "data": few, "devices": [CPU]}
    usual |= {"num_gpus": 1, "num_epochs": 1} if call == "train" else {"steps": 2}
    with pytest.raises(ValueError, match=message):
        next(iter(getattr(training, call)(**usual | given)))


# The loop


def test_the_loop_reports_every_step_and_means_where_they_are_due():
    """Batches of 3, 3 and 2 rows, whose losses are 1, 2, 3, …: a mean over rows, since the last one that was due."""
    shuffled, losses = [(torch.zeros(rows), None) for rows in (3, 3, 2, 3)], iter([1.0, 2.0, 3.0, 4.0])
    progress = list(run_steps(lambda X, y: next(losses), shuffled, due={1, 3}))
    assert [at.step for at in progress] == [1, 2, 3, 4] and [at.images for at in progress] == [3, 6, 8, 11]
    assert [at.loss for at in progress] == [1, 2, 3, 4] and not any(at.diverged for at in progress)
    assert [at.train_loss for at in progress] == [1, None, (3 * 2 + 2 * 3) / 5, None]


def test_evaluate_counts_every_image_once():
    """argmax is 1 where x % 3 == 2, and 0 elsewhere (the first of equals)."""
    X, y = torch.arange(7), torch.arange(7) % 2
    accuracy = evaluate(lambda X: torch.stack([X * 0 + 1.0, X % 3 * 1.0], dim=1), X, y, CPU, batch_size=3)
    assert accuracy == sum(int(x % 3 == 2) == x % 2 for x in range(7)) / 7
    with pytest.raises(ValueError, match="0 rows"):
        evaluate(lambda X: X, X[:0], y[:0], CPU)


def test_progress_is_shown(few, monkeypatch, capsys):
    """Every step, as it wouldn't be in a run that is over within a tenth of a second."""
    monkeypatch.setenv("TQDM_DISABLE", "")
    monkeypatch.setattr("tqdm.auto.tqdm", partial(tqdm.auto.tqdm, mininterval=0))
    train(1, 50, 0.1, num_epochs=2, data=few, devices=[CPU])
    said = capsys.readouterr()
    assert said.out == "" and "epoch 2/2" in said.err


# Validated at the steps at which the grid is


@pytest.fixture(scope="module")
def held():
    """220 images to train on, 20 to hold out, 40 to test."""
    return some_digits(240, 40)


def measurements(progress):
    return [at for at in progress if at.accuracy is not None]


@pytest.mark.parametrize("net, batch_size, lr, epochs", [("lenet", 64, 0.05, 3), ("lenet_bn", 7, 0.01, 1)])
def test_it_is_the_run_that_the_grid_records(uncompiled, held, net, batch_size, lr, epochs):
    """Same images held out, same start, same batches, measured at the same steps: the same numbers within rounding."""
    (recorded,) = tuning_runs.train_runs(net, batch_size, [lr], 0, held, 20, epochs, 12)
    found = measurements(validated_steps(held, batch_size, lr, recorded["step"][-1], [CPU], net == "lenet_bn"))
    early = [at for at in found if at.step <= 8]  # later, rounding has grown
    assert [at.step for at in early] == recorded["step"][: len(early)]
    assert [at.train_loss for at in early] == pytest.approx(recorded["train_loss"][: len(early)], rel=2e-3)
    accuracies = [at.accuracy for at in early]
    assert accuracies == pytest.approx(recorded["validation_accuracy"][: len(early)], abs=0.051)  # an image in 20


def test_it_is_measured_when_the_grid_is():
    for batch_size in grid.BATCH_SIZES:
        per_epoch = math.ceil(55_000 / batch_size)
        recorded = {*tuning_runs.marks(per_epoch, grid.EPOCHS, grid.STEPS)}
        for end in (grid.EPOCHS * per_epoch, grid.STEPS):
            found = validation_steps(per_epoch, end)
            assert found[-1] == end and found == sorted(set(found)) and len(found) <= 50
            assert {step for step in recorded if step <= end} - {*found} <= {grid.STEPS}, "the end of the other budget"


def test_every_step_is_reported_whatever_the_number_of_gpus(held):
    """220 images to train on, in batches of 100: measured after half an epoch, which is 2 steps, and at the end."""
    alone = list(validated_steps(held, 100, 0.05, 7, [CPU]))
    assert [at.step for at in alone] == list(range(1, 8))
    assert [at.images for at in alone] == [100, 200, 220, 320, 420, 440, 540]
    assert [at.step for at in measurements(alone)] == [2, 3, 4, 5, 6, 7]
    with virtual_gpus(3) as machine:
        together = list(validated_steps(held, 100, 0.05, 7, machine.devices))
    assert [at.loss for at in together] == pytest.approx([at.loss for at in alone], rel=1e-4)
    first = measurements(alone)[0].train_loss
    assert first == pytest.approx((alone[0].loss + alone[1].loss) / 2)


@pytest.mark.parametrize("lr", [1e30, 5.0])
def test_a_loss_that_is_not_finite_and_a_dead_network_end_it(held, lr):
    """With the smaller rate all ReLUs are closed: the loss is finite, and no image changes it."""
    *_, last = validated_steps(held, 50, lr, 100, [CPU])
    assert last.diverged and last.step < 100 and (last.accuracy is None or math.isfinite(last.train_loss))


def test_dead_is_what_gives_all_images_the_same_logits():
    X, y = torch.rand(4, 3), torch.tensor([0, 0, 1, 2])
    constant, sloped = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([9.0, 0.0, 0.0])
    assert validate(lambda X: constant.expand(len(X), 3), X, y, CPU) == (0.5, True)
    assert validate(lambda X: sloped + X, X, y, CPU) == (0.5, False)


# Batch norm


def steps_of_modules(X, y, devices, steps, lr):
    """Training with nn.DataParallel: (the network, losses)."""
    net = lenet_of_modules(lenet_bn_params()).to(devices[0])
    wrapped = nn.DataParallel(net, device_ids=devices) if len(devices) > 1 else net
    optimizer, losses = torch.optim.SGD(net.parameters(), lr), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(X.to(devices[0])), y.to(devices[0]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


@pytest.mark.parametrize("k, rows", [(1, 9), (4, 16), (4, 3)])
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
