"""The worked example of chapter 8: batches of 256 at a rate of 0.2 on one GPU, and what becomes of that on four.

    python -m experiments.example

writes mgpu_lib/recorded/example.json. The book's own loop trains LeNet on virtual GPUs: the same batch on four; then
four times the batch, at the old rate and at rates around the one that the linear rule says, with a first epoch in which
the rate rises from the old one; and once for twice as many epochs.
"""

import itertools
import math
import statistics

from experiments import study, tuning
from mgpu_lib import training
from mgpu_lib import tuning as rules
from mgpu_lib.data import endless
from virtual_gpus import virtual_gpus

BATCH_SIZE, LR, GPUS = 256, 0.2, 4  # of the lecture notes
EPOCHS = tuning.EPOCHS
SEEDS = (0, 1, 2)
SAMPLE, TOLERANCE = {"4/1024/0.2/4/0": {"epochs": 1}}, 0.05  # after 54 steps that rounding had a part in


def cases():
    """{key: (num_gpus, batch_size, lr, epochs, seed)}: key num_gpus/batch_size/lr/epochs/seed."""
    linear = rules.linear_scaling(LR, BATCH_SIZE, GPUS * BATCH_SIZE)
    settings = [
        (1, BATCH_SIZE, LR, EPOCHS),
        (GPUS, BATCH_SIZE, LR, EPOCHS),
        *((GPUS, GPUS * BATCH_SIZE, lr, EPOCHS) for lr in (LR, linear / 2, linear, 2 * linear)),
        (GPUS, GPUS * BATCH_SIZE, linear / 2, 2 * EPOCHS),
    ]
    return {"/".join(map(str, (*setting, seed))): (*setting, seed) for seed in SEEDS for setting in settings}


def record(num_gpus, batch_size, lr, epochs, seed):
    """Validation accuracy after each epoch, and on the test images at the end; or the step whose loss isn't finite, or
    at the end of whose epoch all images get the same logits.
    """
    X, y, X_validation, y_validation = study.split()
    test, per_epoch = tuning.fashion_mnist(), math.ceil(len(X) / batch_size)
    run = {"validation_accuracy": [], "test_accuracy": None, "ended_at_step": None}
    with virtual_gpus(num_gpus) as machine:
        step, net = training.lenet_program(machine.devices, seed=seed)
        rates = (rules.warmup(number, per_epoch, lr, LR) for number in itertools.count())
        shuffled = itertools.islice(endless(X, y, batch_size, seed), epochs * per_epoch)
        for at in training.run_steps(lambda X, y: step(X, y, lr=next(rates)), shuffled):
            dead = at.diverged
            if not dead and at.step % per_epoch == 0:
                accuracy, dead = training.validate(net, X_validation, y_validation, machine.devices[0])
                run["validation_accuracy"].append(round(accuracy, 5))
            if dead:
                return {**run, "ended_at_step": at.step}
        run["test_accuracy"], _ = training.validate(net, test.X_test, test.y_test, machine.devices[0])
    return run


def recipe():
    return {
        "batch_size": BATCH_SIZE,
        "lr": LR,
        "gpus": GPUS,
        "epochs": EPOCHS,
        "validation": tuning.VALIDATION,
    }


def summary(runs):
    """{num_gpus/batch_size/lr/epochs: over the seeds that are there test_accuracy (mean, min, max) and ended_at_step}.

    A run that ended early counts there, and not in the accuracies.
    """
    found = {}
    for name, keys in itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0]):
        group = [runs[key] for key in keys]
        done = [run["test_accuracy"] for run in group if run["test_accuracy"] is not None]
        found[name] = {
            "ended_at_step": [run["ended_at_step"] for run in group if run["ended_at_step"]],
            "test_accuracy": [round(of(done), 5) for of in (statistics.fmean, min, max)] if done else None,
        }
    return found


if __name__ == "__main__":
    study.run("example", cases(), record, recipe(), summary)
