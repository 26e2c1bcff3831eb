"""The program of the grid on the digits: a small grid that a test can retrain on any machine, in seconds.

    python -m experiments.digits

writes mgpu_lib/recorded/digits.json: one epoch of 1,200 images, with 20 seeds. These figures are there for the sample,
which needs no download, and not for the book.
"""

import statistics

from experiments import study, tuning_runs
from mgpu_lib import data

LRS = {16: (0.004, 0.01, 0.025), 64: (0.01, 0.025, 0.063)}  # for each batch size; none near those that diverge
VALIDATION, EPOCHS, STEPS = 300, 1, 8
SEEDS = range(20)
SAMPLE, TOLERANCE = {"lenet_bn/64/0": {}}, 0.03


def cases():
    return {
        f"{net}/{batch_size}/{seed}": (net, batch_size, seed)
        for seed in SEEDS
        for net in tuning_runs.NETS
        for batch_size in LRS
    }


def record(net, batch_size, seed):
    """{learning rate: [the training loss in the last half of the epoch, validation accuracy at its end]}."""
    runs = tuning_runs.train_runs(net, batch_size, LRS[batch_size], seed, data.load_digits(), VALIDATION, EPOCHS, STEPS)
    return {run["lr"]: [run["train_loss"][-1], run["validation_accuracy"][-1]] for run in runs}


def recipe():
    return {
        "lrs": LRS,
        "validation": VALIDATION,
        "epochs": EPOCHS,
        "steps": STEPS,
    }


def summary(runs):
    """{net/batch_size/lr: [[mean, standard deviation] of the loss, the same of the accuracy]} over the seeds."""
    values = {}
    for key, run in runs.items():
        for lr, figures in run.items():
            values.setdefault(f"{key.rpartition('/')[0]}/{lr}", []).append(figures)
    return {
        name: [[round(statistics.fmean(column), 5), round(statistics.stdev(column), 5)] for column in zip(*each)]
        for name, each in values.items()
        if len(each) > 1
    }


if __name__ == "__main__":
    study.run("digits", cases(), record, recipe(), summary)
