"""Two things more that the worked example of chapter 8 needs: its sweep of rates, and longer trainings on four GPUs.

    python -m experiments.example_sweep

writes mgpu_lib/recorded/example_sweep.json. The sweep trains 200 steps with each of five rates; a rate above the old
one begins at the old one, and rises during the first epoch. The longer trainings are those of `experiments.example`,
with the rate that the sweep finds best, and ten seeds: with three, a difference of four points was undecided. Half of
that rate, which was level after four epochs, has five.
"""

import itertools
import math
import statistics

from experiments import example, study
from mgpu_lib import training
from mgpu_lib import tuning as rules
from mgpu_lib.data import endless
from virtual_gpus import virtual_gpus

BATCH_SIZE = example.GPUS * example.BATCH_SIZE
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
STEPS, LAST = 200, 20  # steps of the sweep, and those at its end whose mean loss counts
BEST, LONGER = 0.8, (14,)  # the rate, and the epochs that fit in the time of four on one GPU
SEEDS = {BEST: range(10), BEST / 2: range(5)}
SAMPLE, TOLERANCE = {"sweep/0.2": {"steps": 60}}, 0.05  # after steps that rounding had a part in


def cases():
    """{key: arguments of `record`}: sweep/lr, and num_gpus/batch_size/lr/epochs/seed as in `experiments.example`."""
    found = {f"sweep/{lr}": (lr, None, 0) for lr in RATES}
    longer = ((lr, epochs, seed) for lr, seeds in SEEDS.items() for seed in seeds for epochs in LONGER)
    return found | {"/".join(map(str, (example.GPUS, BATCH_SIZE, *case))): case for case in longer}


def record(lr, epochs, seed, steps=STEPS):
    return example.record(example.GPUS, BATCH_SIZE, lr, epochs, seed) if epochs else sweep(lr, seed, steps)


def sweep(lr, seed, steps):
    """The loss of each step as text, and the validation accuracy at the end (None: it ended before, or is dead)."""
    X, y, X_validation, y_validation = study.split()
    losses, accuracy, dead = [], None, False
    with virtual_gpus(example.GPUS) as machine:
        step, net = training.lenet_program(machine.devices, seed=seed)
        rising = (
            rules.warmup(number, math.ceil(len(X) / BATCH_SIZE), lr, min(lr, example.LR))
            for number in itertools.count()
        )
        shuffled = itertools.islice(endless(X, y, BATCH_SIZE, seed), steps)
        for at in training.run_steps(lambda X, y: step(X, y, lr=next(rising)), shuffled):
            dead = at.diverged
            losses += [] if dead else [round(at.loss, 4)]
        if not dead:
            accuracy, dead = training.validate(net, X_validation, y_validation, machine.devices[0])
    return {"loss": study.text(losses), "validation_accuracy": None if dead else round(accuracy, 5)}


def recipe():
    return {"rates": RATES, "steps": STEPS, "longer": {"lr": BEST, "epochs": LONGER}, "example": example.recipe()}


def summary(runs):
    """{"sweep": {lr: (mean loss of the LAST steps, validation accuracy)}, and what `experiments.example` says}."""
    found = {}
    for lr in RATES:
        if run := runs.get(f"sweep/{lr}"):
            found[str(lr)] = statistics.fmean(study.numbers(run["loss"])[-LAST:]), run["validation_accuracy"]
    longer = {key: run for key, run in runs.items() if not key.startswith("sweep")}
    return {"sweep": found, **example.summary(longer)}


if __name__ == "__main__":
    study.run("example_sweep", cases(), record, recipe(), summary)
