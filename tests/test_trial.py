"""The run behind the Train button: it is the recorded grid's run, on any number of GPUs, and PyTorch's own step."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mgpu_lib as mgpu
from experiments import tuning as grid
from experiments import tuning_runs
from mgpu_lib import trial
from mgpu_lib.data import Data, load_digits
from mgpu_lib.virtual import virtual_gpus

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def few():
    """200 images to train on and to hold out from, 40 to test."""
    name, X_train, y_train, X_test, y_test = load_digits()
    return Data(name, X_train[:240], y_train[:240], X_test[:40], y_test[:40])


def measurements(progress):
    return [at for at in progress if at.accuracy is not None]


# The same run as the grid's


@pytest.mark.parametrize("net", ["lenet", "lenet_bn"])
@pytest.mark.parametrize("batch_size, lr, epochs", [(64, 0.05, 3), (7, 0.01, 1)])
def test_it_is_the_run_that_the_grid_records(few, net, batch_size, lr, epochs):
    """Same images held out, same start, same batches, measured at the same steps: the same numbers within rounding."""
    torch.compiler.set_stance("force_eager")
    try:
        recorded, = tuning_runs.train_runs(net, batch_size, [lr], 0, few, 20, epochs, 12)
    finally:
        torch.compiler.set_stance("default")
    found = measurements(trial.trial(few, batch_size, lr, recorded["step"][-1], [CPU], net == "lenet_bn"))
    early = [at for at in found if at.step <= 8]  # later, rounding has grown
    assert [at.step for at in early] == recorded["step"][:len(early)]
    assert [at.train_loss for at in early] == pytest.approx(recorded["train_loss"][:len(early)], rel=2e-3)
    accuracies = [at.accuracy for at in early]
    assert accuracies == pytest.approx(recorded["validation_accuracy"][:len(early)], abs=0.051)  # an image in 20


@pytest.mark.parametrize("batch_size", grid.BATCH_SIZES)
def test_it_is_measured_when_the_grid_is(batch_size):
    per_epoch = math.ceil(55_000 / batch_size)
    recorded = list(tuning_runs.marks(per_epoch, grid.EPOCHS, grid.STEPS))
    for end in (grid.EPOCHS * per_epoch, grid.STEPS):
        found = trial.marks(per_epoch, end)
        assert found[-1] == end and found == sorted(set(found))
        missing = {step for step in recorded if step <= end} - set(found)
        assert missing <= {grid.STEPS}, "the end of the other budget"
        assert len(found) <= 50


def test_the_grid_and_the_trial_hold_out_the_same_images(few):
    whole = few._replace(X_train=torch.arange(60_000), y_train=torch.arange(60_000))
    X, y, X_validation, y_validation = trial.hold_out(whole)
    assert (len(X), len(y)) == (60_000 - grid.VALIDATION,) * 2
    assert X_validation[0] == y_validation[0] == 55_000


def test_every_step_is_reported_and_losses_are_means_since_the_last_measurement(few):
    progress = list(trial.trial(few, 100, 0.05, 7, [CPU]))
    assert [at.step for at in progress] == list(range(1, 8))
    assert [at.images for at in progress] == [100, 200, 220, 320, 420, 440, 540]  # 220 to train on
    assert [at.step for at in measurements(progress)] == [2, 3, 4, 5, 6, 7]  # half epochs 2, 3, 5, 6 and the end
    params, losses = [mgpu.get_params(mgpu.lenet_params(), CPU)], []
    generator = torch.Generator().manual_seed(0)
    for X, y in mgpu.batches(few.X_train[:220], few.y_train[:220], 100, generator):
        losses.append((len(X), mgpu.train_batch(X, y, params, [CPU], 0.05)))
    first = sum(n * loss for n, loss in losses[:2]) / 200
    assert measurements(progress)[0].train_loss == pytest.approx(first)
    assert measurements(progress)[1].train_loss == pytest.approx(losses[2][1])


# On several GPUs


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_several_gpus_are_one(few, k, batch_size):
    alone = measurements(trial.trial(few, batch_size, 0.02, 5, [CPU]))
    with virtual_gpus(k) as machine:
        together = measurements(trial.trial(few, batch_size, 0.02, 5, machine.devices))
    assert [at.step for at in together] == [at.step for at in alone]
    assert [at.train_loss for at in together] == pytest.approx([at.train_loss for at in alone], rel=1e-4)


class LeNetBN(nn.Module):
    """The same network from PyTorch's modules."""

    def __init__(self):
        super().__init__()
        params = trial.lenet_bn_params()[0]
        self.conv1, self.conv2, self.full1, self.full2 = (
            nn.Conv2d(1, 20, 3), nn.Conv2d(20, 50, 5), nn.Linear(800, 128), nn.Linear(128, 10))
        self.norm1, self.norm2 = nn.BatchNorm2d(20), nn.BatchNorm2d(50)
        with torch.no_grad():
            for p, value in zip(self.in_order(), params, strict=True):
                p.copy_(value if p.dim() != 2 else value.T)

    def in_order(self):
        layers = (self.conv1, self.conv2, self.full1, self.full2, self.norm1, self.norm2)
        return [p for layer in layers for p in (layer.weight, layer.bias)]

    def statistics(self):
        return [s for norm in (self.norm1, self.norm2) for s in (norm.running_mean, norm.running_var)]

    def forward(self, X):
        H = F.avg_pool2d(F.relu(self.norm1(self.conv1(X))), 2)
        H = F.avg_pool2d(F.relu(self.norm2(self.conv2(H))), 2)
        return self.full2(F.relu(self.full1(H.flatten(1))))


def modules(X, y, devices, steps, lr):
    """Training with nn.DataParallel: (the network, losses)."""
    net = LeNetBN().to(devices[0])
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
def test_a_step_with_batch_norm_is_that_of_dataparallel(few, k, rows):
    """Statistics of each GPU's own shard; those of the first GPU are kept, and used to evaluate."""
    X, y = few.X_train[:rows], few.y_train[:rows]
    with virtual_gpus(k) if k > 1 else contextlib.nullcontext() as machine:
        devices = [CPU] if machine is None else machine.devices
        net, expected = modules(X, y, devices, 3, 0.05)
        params, statistics = trial.lenet_bn_params()
        device_params = [mgpu.get_params(params, device) for device in devices]
        device_statistics = [[s.to(device, copy=True) for s in statistics] for device in devices]
        losses = [trial.train_batch_bn(X, y, device_params, device_statistics, devices, 0.05) for _ in range(3)]
        assert losses == pytest.approx(expected, rel=1e-4)
        assert mgpu.max_divergence(device_params) == 0
        for p, q in zip(device_params[0], net.in_order(), strict=True):
            expected = (q.T if q.dim() == 2 else q).detach().cpu()
            torch.testing.assert_close(p.detach().cpu(), expected, atol=1e-5, rtol=1e-4)
        for s, t in zip(device_statistics[0], net.statistics(), strict=True):
            torch.testing.assert_close(s.cpu(), t.cpu(), atol=1e-5, rtol=1e-4)
        test = few.X_test.to(devices[0])
        found = trial.lenet_bn(test, device_params[0], device_statistics[0], training=False).detach().cpu()
        torch.testing.assert_close(found, net.eval()(test).detach().cpu(), atol=1e-4, rtol=1e-3)


def test_with_batch_norm_a_gpu_without_images_takes_the_same_step(few):
    with virtual_gpus(3) as machine:
        params, statistics = trial.lenet_bn_params()
        device_params = [mgpu.get_params(params, device) for device in machine.devices]
        device_statistics = [[s.to(device, copy=True) for s in statistics] for device in machine.devices]
        for i in range(3):
            trial.train_batch_bn(few.X_train[i:i + 1], few.y_train[i:i + 1], device_params, device_statistics,
                                 machine.devices, 0.01)
        assert mgpu.max_divergence(device_params) == 0
        assert all(bool((s.cpu() == start).all()) for s, start in zip(device_statistics[2], statistics))


# Ends


def test_a_loss_that_is_not_finite_ends_it(few):
    *_, last = trial.trial(few, 7, 1e30, 100, [CPU])
    assert last.diverged and last.step < 100 and last.accuracy is None


def test_a_network_that_is_dead_ends_it(few):
    """All its ReLUs are closed: a finite loss that no image changes."""
    *_, last = trial.trial(few, 50, 5.0, 100, [CPU])
    assert last.diverged and last.step < 100
    if last.accuracy is not None:
        assert math.isfinite(last.train_loss) and last.accuracy < 0.3


@pytest.mark.parametrize("values, message", [
    ({"batch_size": 0}, "batch_size is 0"), ({"lr": 0}, "lr is 0"), ({"lr": math.inf}, "lr is inf"),
    ({"steps": 0}, "steps is 0"), ({"batch_size": 2.5}, "batch_size is 2.5")])
def test_impossible_numbers_are_named(few, values, message):
    with pytest.raises(ValueError, match=message):
        next(trial.trial(**{"data": few, "batch_size": 8, "lr": 0.1, "steps": 2, "devices": [CPU], **values}))


# The data


def test_whole_data_are_all_images_or_the_digits(monkeypatch, tmp_path):
    assert trial.whole_data().name == load_digits().name
    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    asked = []
    monkeypatch.setattr(trial, "fetch_if_damaged", lambda folder, check: asked.append(folder))
    monkeypatch.setattr(trial, "read_fashion_mnist", lambda folder, full: (folder, full))
    assert trial.whole_data() == (tmp_path, True) and asked == [tmp_path]

    def no_network(folder, check):
        raise OSError("no network")
    monkeypatch.setattr(trial, "fetch_if_damaged", no_network)
    assert trial.whole_data().name == load_digits().name
