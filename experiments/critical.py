"""How many steps each batch size takes to an accuracy, measured often: the critical batch size.

    python -m experiments.critical

writes mgpu_lib/recorded/critical.json. LeNet trains as in the grid, `experiments.tuning`, which measures small
batches too rarely for this: a batch of 1 for the second time after half an epoch. Here a run is measured whenever the
steps have grown by a tenth, and ends when it reaches TARGET.
"""

import itertools
import math

import torch

from experiments import study, tuning
from experiments.tuning_runs import accuracies, new_run, note, stacked, start, stepper, train_until
from mgpu_lib.data import endless

NET, TARGET = "lenet", 0.75
SEEDS = (0, 1, 2)
FIRST, GROWTH = 20, 1.1  # measured after FIRST steps, and whenever they have grown by this factor
# The three or four largest rates of the grid with which LeNet trains: smaller ones for small batches.
RATES = {size: (0.063, 0.16, 0.4) for size in tuning.BATCH_SIZES} | {
    1: (0.004, 0.01, 0.025, 0.063),
    4: (0.01, 0.025, 0.063, 0.16),
}
SAMPLE, TOLERANCE = {"64/0.063/0": {"target": 0}}, 1e-2  # up to the first measurement


def cases():
    """{key: (batch_size, lr, seed)}: key batch_size/lr/seed, one seed after the other."""
    return {f"{size}/{lr}/{seed}": (size, lr, seed) for seed in SEEDS for size in RATES for lr in RATES[size]}


def record(batch_size, lr, seed, target=TARGET):
    """A run as the grid's file holds them, without accuracies on test images."""
    X, y, X_validation, y_validation = study.split()
    params, running = (stacked(tensors, 1) for tensors in start(NET, seed))
    run = {"net": NET, "batch_size": batch_size, "seed": seed, **new_run(lr), "test_accuracy": {}}
    shuffled = enumerate(endless(X, y, batch_size, seed), 1)
    for mark in marks(max(math.ceil(len(X) / batch_size), tuning.STEPS)):
        params, running, (loss,) = train_until(mark, shuffled, stepper(NET), params, running, torch.tensor([lr]), [run])
        if run["diverged_at_step"]:
            break
        (accuracy,), (dead,) = accuracies(NET, params, running, X_validation, y_validation)
        note(run, mark, loss, accuracy, dead)
        if dead or accuracy >= target:
            break
    return {name: study.text(value) if isinstance(value, list) else value for name, value in run.items()}


def marks(last):
    """After which steps to measure: FIRST, a tenth more, and so on, up to `last`."""
    grown = (math.ceil(FIRST * GROWTH**i) for i in itertools.count())
    return [*dict.fromkeys(itertools.takewhile(lambda step: step < last, grown)), last]


def recipe():
    return {
        "target": TARGET,
        "first": FIRST,
        "growth": GROWTH,
        "rates": {str(size): rates for size, rates in RATES.items()},
        "validation": tuning.VALIDATION,
    }


def summary(runs):
    """Nothing: what the runs say is read as the grid is, see `mgpu_lib.evidence.to_target`."""
    return {}


if __name__ == "__main__":
    study.run("critical", cases(), record, recipe(), summary)
