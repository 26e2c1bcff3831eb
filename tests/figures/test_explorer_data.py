"""The recorded grid of batch sizes and learning rates as the explorers get it: short enough for a page."""

import copy
import itertools
import math
import statistics

import pytest

from experiments import tuning
from mgpu_lib import recorded
from mgpu_lib.widgets import explorer_data

IMAGES, SIZES = 55_000, (1, 256, 4096)


@pytest.fixture(scope="module")
def grid():
    """Three batch sizes of the recorded grid."""
    whole = recorded.study("tuning")
    return {**whole, "runs": [run for run in whole["runs"] if run["batch_size"] in SIZES]}


@pytest.fixture(scope="module")
def data(grid):
    return explorer_data.explorer_data(grid)


@pytest.fixture(scope="module")
def loop(grid):
    return explorer_data.explorer_data(grid, nets=("lenet",), budgets=("epochs",), strategy="manual")


def test_a_grid_that_is_none_is_refused(grid):
    with pytest.raises(ValueError, match="KeyError: 'train_loss'"):
        broken = copy.deepcopy(grid)
        del broken["runs"][0]["train_loss"]
        explorer_data.explorer_data(broken)
    with pytest.raises(ValueError, match="isn't what"):
        explorer_data.explorer_data(None)
    with pytest.raises(ValueError, match="no grid has a run of resnet8"):
        explorer_data.explorer_data(grid, nets=("resnet8",))


def test_cells_hold_what_was_recorded(grid, data):
    """Finals, divergence and best cells, found once more from the records themselves."""
    for key, name in (("lenet", "LeNet"), ("lenet_bn", "LeNet with batch norm")):
        net = data["nets"][name]
        for budget, b in itertools.product(("epochs", "steps"), SIZES):
            means = {}
            end = 215 if budget == "steps" else 4 * math.ceil(IMAGES / b)
            for lr in tuning.learning_rates(b):
                runs = [run for run in grid["runs"] if (run["net"], run["batch_size"], run["lr"]) == (key, b, lr)]
                ends = [run["diverged_at_step"] or run["dead_at_step"] or math.inf for run in runs]
                there = explorer_data.cell(net, b, lr, budget)
                assert (there.end, there.seeds) == (end, 3)
                assert sorted(there.diverged) == sorted(at for at in ends if at <= end)
                finals = [
                    recorded.numbers(run["validation_accuracy"])[recorded.numbers(run["step"]).index(end)]
                    for run, at in zip(runs, ends, strict=True)
                    if at > end
                ]
                assert there.finals == sorted(round(10_000 * final) for final in finals)
                if len(finals) == 3:
                    means[lr] = statistics.mean(finals)
            assert means[explorer_data.best(net, budget, b)[1]] == pytest.approx(max(means.values()))


def test_times_are_those_of_predict(data, loop):
    for strategy, there in (("ddp", data), ("manual", loop)):
        net = there["nets"]["LeNet"]
        for b, k in ((256, 4), (4096, 2)):
            steps, epochs = net["times"][net["batch_sizes"].index(b)]
            step = explorer_data.step_seconds("lenet", b, k, strategy)
            rest = explorer_data.step_seconds("lenet", IMAGES % b, k, strategy)
            column = there["counts"].index(k)
            assert steps[column] == pytest.approx(step / 1e-8, abs=1)
            assert epochs[column] * 1e-8 == pytest.approx(IMAGES // b * step + rest, rel=1e-4)
        one, *more = net["times"][0][0]
        assert all(ticks == one for ticks in more), "of one image, one GPU can work"
