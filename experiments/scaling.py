"""Batches 4 and 16 times as large: which learning rate, and does it need warm-up?

    python -m experiments.scaling

writes mgpu_lib/recorded/scaling.json. A rate that suits batches of 256 is kept, multiplied by the square root of the
factor, or by the factor. The two larger ones are tried from the first step on, and with a first epoch in which the rate
rises from that of 256. All runs take four epochs. Curves and endings are those of the grid, `experiments.tuning`.
"""

import itertools
import math
import statistics

import torch

from experiments import study, tuning, tuning_runs
from experiments.tuning_runs import accuracies, marks, new_run, note, stacked, start, stepper, train_until
from mgpu_lib.data import endless
from mgpu_lib.tuning import linear_scaling, sqrt_scaling, warmup

BATCH_SIZE, LR = 256, 0.16  # a rate of the grid
LARGER = (1024, 4096)
EPOCHS, WARMUP_EPOCHS = tuning.EPOCHS, 1
SEEDS = (0, 1, 2)
RULES = {"kept": lambda lr, batch_size, new: lr, "square root": sqrt_scaling, "linear": linear_scaling}
SAMPLE, TOLERANCE = {"lenet/1024/square root, warm-up/0": {"measured": 2}}, 1e-3


def cases():
    """{key: (net, batch_size, rule, warmed, seed)}: key net/batch_size/rule/seed, one seed after the other."""
    settings = [(BATCH_SIZE, "kept", False)] + [
        (size, rule, warmed)
        for size in LARGER
        for rule in RULES
        for warmed in (False, True)
        if not (rule == "kept" and warmed)
    ]
    return {
        f"{net}/{size}/{rule}{', warm-up' * warmed}/{seed}": (net, size, rule, warmed, seed)
        for seed in SEEDS
        for net in tuning_runs.NETS
        for size, rule, warmed in settings
    }


def record(net, batch_size, rule, warmed, seed, measured=None):
    """A run as in `tuning_runs.train_runs`, with its one budget of epochs; `lr` is the rate after warm-up. It ends
    after so many measurements, if `measured` says so."""
    lr = RULES[rule](LR, BATCH_SIZE, batch_size)
    X, y, X_validation, y_validation = study.split()
    per_epoch = math.ceil(len(X) / batch_size)
    params, running = (stacked(tensors, 1) for tensors in start(net, seed))
    run = {**new_run(lr), "test_accuracy": None}
    step = Scheduled(stepper(net), WARMUP_EPOCHS * per_epoch * warmed, lr)
    shuffled = enumerate(endless(X, y, batch_size, seed), 1)
    for mark in itertools.islice(marks(per_epoch, EPOCHS, EPOCHS * per_epoch), measured):
        params, running, (loss,) = train_until(mark, shuffled, step, params, running, torch.ones(1), [run])
        if run["diverged_at_step"]:
            break
        (accuracy,), (dead,) = accuracies(net, params, running, X_validation, y_validation)
        note(run, mark, loss, accuracy, dead)
        if dead:
            break
    else:
        test = tuning.fashion_mnist()
        run["test_accuracy"] = accuracies(net, params, running, test.X_test, test.y_test)[0][0]
    return {name: study.text(value) if isinstance(value, list) else value for name, value in run.items()}


class Scheduled:
    """The step of `tuning_runs.stepper` at a rate that rises from LR to `lr` in `warmup_steps` steps."""

    def __init__(self, step, warmup_steps, lr):
        self.step, self.warmup_steps, self.lr, self.taken = step, warmup_steps, lr, 0

    def __call__(self, params, running, X, y, ones):
        lr = warmup(self.taken, self.warmup_steps, self.lr, LR)
        self.taken += 1
        return self.step(params, running, X, y, lr * ones)


def recipe():
    return {
        "batch_size": BATCH_SIZE,
        "lr": LR,
        "larger": LARGER,
        "rules": list(RULES),
        "epochs": EPOCHS,
        "warmup_epochs": WARMUP_EPOCHS,
        "validation": tuning.VALIDATION,
    }


def summary(runs):
    """{net/batch_size/rule: lr, and over the seeds that are there test_accuracy after the epochs (mean, min, max), and
    ended_at_step}. A run that diverged or died ended early: it counts there, and not in the accuracies.
    """
    found = {}
    for name, keys in itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0]):
        group = [runs[key] for key in keys]
        done = [run["test_accuracy"] for run in group if run["test_accuracy"] is not None]
        found[name] = {
            "lr": group[0]["lr"],
            "ended_at_step": [
                run["diverged_at_step"] or run["dead_at_step"] for run in group if run["test_accuracy"] is None
            ],
        }
        if done:
            found[name]["test_accuracy"] = [round(of(done), 5) for of in (statistics.fmean, min, max)]
    return found


if __name__ == "__main__":
    study.run("scaling", cases(), record, recipe(), summary)
