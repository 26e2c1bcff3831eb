"""Do large batches on little data make the accuracy jump? LeNet on 500 to 55,000 images, batches of 64 to 1024.

    python -m experiments.little_data

writes mgpu_lib/recorded/little_data.json. All runs take the same number of steps at the same rate, that of
`experiments.oscillation`. A batch is never larger than the images there are: 1024 of 500 are all of them.
"""

import itertools
import statistics

import torch

from experiments import study
from experiments.oscillation import LR, spread
from experiments.tuning_runs import accuracies, stacked, start, stepper, train_until
from mgpu_lib.data import endless

NET = "lenet"
IMAGES, BATCH_SIZES, SEEDS = (500, 2_000, 10_000, 55_000), (64, 256, 1024), range(3)
WHOLE = 9_984  # 39 batches of 256: of 10,000 images, 16 are left over for a batch of their own
STEPS, EVERY = 640, 20  # measured after each EVERY
LATE = slice(16, 32)  # the measurements that make a spread: those of the second half
SAMPLE, TOLERANCE = {"500/64/0": {"steps": EVERY}}, 1e-2


def cases():
    """{key: (images, batch_size, seed)}: key images/batch_size/seed, one seed after the other."""
    pairs = [*itertools.product(IMAGES, BATCH_SIZES), (WHOLE, 256)]
    return {f"{images}/{size}/{seed}": (images, size, seed) for seed in SEEDS for images, size in pairs}


def record(images, batch_size, seed, steps=STEPS):
    """Validation accuracy and mean training loss at each measurement, up to the one at which the run has died."""
    X, y, X_validation, y_validation = study.split()
    params, running = (stacked(tensors, 1) for tensors in start(NET, seed))
    run, measured, losses, rates = {"diverged_at_step": None}, [], [], torch.tensor([LR])
    shuffled = enumerate(endless(X[:images], y[:images], batch_size, seed), 1)
    for mark in range(EVERY, steps + 1, EVERY):
        params, running, (loss,) = train_until(mark, shuffled, stepper(NET), params, running, rates, [run])
        (accuracy,), (dead,) = accuracies(NET, params, running, X_validation, y_validation)
        if dead or run["diverged_at_step"]:
            break
        measured.append(accuracy)
        losses.append(round(loss, 5))
    return {"accuracy": study.text(measured), "train_loss": study.text(losses)}


def recipe():
    return {"lr": LR, "steps": STEPS, "every": EVERY}


def summary(runs):
    """{images/batch_size: figures of each seed's run, a list; None for a run that died}.

    Figures of the second half: spread of the accuracy around its straight line, as `oscillation` has it; accuracy, the
    mean. train_loss is that of the last EVERY steps.
    """
    found = {}
    for name, keys in itertools.groupby(runs, key=lambda key: key.rpartition("/")[0]):
        for key in keys:
            found.setdefault(name, []).append(figures(runs[key]))
    return found


def figures(run):
    accuracy, losses = (study.numbers(run[name]) for name in ("accuracy", "train_loss"))
    if len(accuracy) < STEPS // EVERY:
        return None
    late = accuracy[LATE]
    return {"spread": round(spread(late), 6), "accuracy": round(statistics.fmean(late), 5), "train_loss": losses[-1]}


if __name__ == "__main__":
    study.run("little_data", cases(), record, recipe(), summary)
