"""The noise in the gradient along training: it predicts the critical batch size, which `experiments.critical` observes.

    python -m experiments.noise

writes mgpu_lib/recorded/noise.json. LeNet trains with batches of 256 on 4 virtual GPUs, and each GPU's own gradient
before the all-reduce gives an estimate of the noise: at every step, and at some moments from 50 more batches while the
weights stand still. With batch norm there would be no such number: there the gradient of an image depends on the other
images of its shard.
"""

import itertools
import math

import torch
from torch.nn import functional as F

from experiments import study, tuning
from mgpu_lib import parallel, training
from mgpu_lib import tuning as rules
from mgpu_lib.data import endless
from mgpu_lib.models import lenet, lenet_params
from virtual_gpus import virtual_gpus

GPUS, BATCH_SIZE, LR = 4, 256, 0.16
MOMENTS = (0, 10, 50, 215, 430, 860)  # steps; an epoch has 215
BATCHES = 50  # at each moment
RESAMPLED = 1000
SEEDS = (0, 1, 2)
SAMPLE, TOLERANCE = {"0": {"moments": MOMENTS[:2]}}, 1e-2


def cases():
    return {str(seed): (seed,) for seed in SEEDS}


def record(seed, moments=MOMENTS):
    """What was estimated at every step ("steps"), and at each of MOMENTS at weights that stand still ("moments").

    `signal` and `noise` are `mgpu_lib.tuning.gradient_noise`'s estimates of |G|² and tr Σ, one per batch, as text. Both
    scatter widely, |G|² below 0 too.
    """
    X, y, X_validation, y_validation = study.split()
    along, still = [], []
    shuffled, others = endless(X, y, BATCH_SIZE, seed), endless(X, y, BATCH_SIZE, seed + 1000)
    with virtual_gpus(GPUS) as machine:
        devices = machine.devices
        replicas = [parallel.get_params(lenet_params(seed), device) for device in devices]

        def measured_step(X, y):
            along.append(rules.gradient_noise(*replica_gradients(X, y, replicas, devices)))
            return parallel.train_batch(X, y, replicas, devices, LR)

        for before, step in zip((0, *moments), moments):
            list(training.run_steps(measured_step, itertools.islice(shuffled, step - before)))
            estimates = [
                rules.gradient_noise(*replica_gradients(*batch, replicas, devices))
                for batch in itertools.islice(others, BATCHES)
            ]
            right = training.evaluate(lambda X: lenet(X, replicas[0]), X_validation, y_validation, devices[0])
            still.append({"step": step, "validation_accuracy": round(right, 5), **packed(estimates)})
    return {"steps": packed(along), "moments": still}


def packed(estimates):
    signal, noise = (study.text(f"{value:.4g}" for value in column) for column in zip(*estimates))
    return {"signal": signal, "noise": noise}


def replica_gradients(X, y, replicas, devices):
    """Each replica's gradient of the mean loss over its shard, and the shards' sizes: no all-reduce, no step."""
    X_shards, y_shards = parallel.split_batch(X, y, devices)
    losses = [
        F.cross_entropy(lenet(X_shard, params), y_shard)
        for X_shard, y_shard, params in zip(X_shards, y_shards, replicas)
    ]
    return [torch.autograd.grad(loss, params) for loss, params in zip(losses, replicas)], [len(s) for s in X_shards]


def recipe():
    return {
        "gpus": GPUS,
        "batch_size": BATCH_SIZE,
        "lr": LR,
        "moments": MOMENTS,
        "batches": BATCHES,
        "validation": tuning.VALIDATION,
    }


# What the runs say


def summary(runs):
    """For each seed two lists, the noise scale in images with its interval (see `scale`).

    moments    at weights that stand still: step, validation_accuracy
    windows    over all steps between two moments: after, to_step. Weights and |G|² move much within one, and steps
               that follow each other are alike: there the interval is too narrow
    """
    found = {}
    for key, run in runs.items():
        along = pairs(run["steps"])
        found[key] = {
            "moments": [
                {"step": moment["step"], "validation_accuracy": moment["validation_accuracy"], **scale(pairs(moment))}
                for moment in run["moments"]
            ],
            "windows": [
                {"after": after, "to_step": step, **scale(along[after:step])}
                for after, step in itertools.pairwise(MOMENTS)
            ],
        }
    return found


def pairs(record):
    return list(zip(study.numbers(record["signal"]), study.numbers(record["noise"])))


def scale(estimates):
    """The noise scale of many (|G|², tr Σ), in images, and where 95 % of its values lie when batches are drawn anew.

    The interval comes from the batches themselves, RESAMPLED times as many drawn from them with replacement (Efron's
    bootstrap). None where the mean |G|² isn't positive: then the scale is larger than these batches can tell.
    """
    given = torch.tensor(estimates, dtype=torch.double)
    drawn = torch.randint(len(given), (RESAMPLED, len(given)), generator=torch.Generator().manual_seed(0))
    signal, noise = given[drawn].mean(dim=1).T
    values = torch.where(signal > 0, noise / signal, math.inf)
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.double), interpolation="nearest").tolist()
    middle = given.mean(dim=0)
    return {
        "noise_scale": rounded(rules.noise_scale(estimates) if middle[0] > 0 else math.inf),
        "from": rounded(low),
        "to": rounded(high),
    }


def rounded(value):
    return float(f"{value:.3g}") if math.isfinite(value) else None


if __name__ == "__main__":
    study.run("noise", cases(), record, recipe(), summary)
