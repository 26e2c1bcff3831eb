"""Data parallelism on k GPUs takes the step that one device takes on the same batch. How exactly, and for how long?

    python -m experiments.same_step

writes mgpu_lib/recorded/same_step.json. Four runs go side by side from one start, through the same batches: plain
PyTorch on one device, and `train_batch` on 1, 2 and 4 virtual GPUs. In 64 bits only a mistake could make them differ by
more than 1e-10. In 32 bits sums in another order are rounded in another way, and the runs drift apart. A batch of 1024
on 4 GPUs is 256 on each of them: it is compared with 1024 on one device.
"""

import itertools
import math
from functools import partial

import torch
from torch.nn import functional as F

from experiments import study, tuning
from mgpu_lib import parallel, training
from mgpu_lib.data import endless
from mgpu_lib.models import lenet, lenet_params
from virtual_gpus import virtual_gpus

COUNTS = (1, 2, 4)
BATCH_SIZES = (256, 1024)
LR = 0.16
STEPS = {"float64": 16, "float32": None}  # None: an epoch
SEEDS = (0, 1, 2)
CPU = torch.device("cpu")
SAMPLE, TOLERANCE = {"float64/256/0": {"steps": 4}}, 1e-6


def cases():
    return {
        f"{dtype}/{batch_size}/{seed}": (dtype, batch_size, seed)
        for seed in SEEDS
        for dtype in STEPS
        for batch_size in BATCH_SIZES
    }


def record(dtype, batch_size, seed, steps=None):
    """Losses of one device, and for each number of GPUs how far losses and parameters are from that: lists with an
    entry after each of `step` (1, 2, 4 … and the last). Gaps are absolute: the largest over all parameters, and the
    largest over the steps since the entry before. After an epoch, the accuracy on validation and test set.
    """
    X, y, *_ = study.split()
    start = [p.to(getattr(torch, dtype)) for p in lenet_params(seed)]
    steps = steps or STEPS[dtype] or math.ceil(len(X) / batch_size)
    due = {*(2**i for i in range(steps.bit_length())), steps}
    with virtual_gpus(max(COUNTS)) as machine:
        groups = {k: machine.devices[:k] for k in COUNTS}
        alone = parallel.get_params(start, CPU)
        replicas = {k: [parallel.get_params(start, device) for device in devices] for k, devices in groups.items()}
        run = {"step": [], "loss": [], "gaps": {k: {"loss": [], "parameters": []} for k in COUNTS}}
        worst = dict.fromkeys(COUNTS, 0.0)

        def step(X, y):
            X = X.to(alone[0].dtype)
            loss = plain_step(X, y, alone)
            for k, devices in groups.items():
                worst[k] = max(worst[k], abs(parallel.train_batch(X, y, replicas[k], devices, LR) - loss))
            return loss

        for at in training.run_steps(step, itertools.islice(endless(X, y, batch_size, seed), steps)):
            if at.step in due:
                note(run, at.step, at.loss, worst, {k: distance(alone, replicas[k]) for k in COUNTS})
                worst.update(dict.fromkeys(COUNTS, 0.0))
        if STEPS[dtype] is None:
            run["accuracy"] = {"one device": accuracy(alone, CPU)} | {
                k: accuracy(replicas[k][0], devices[0]) for k, devices in groups.items()
            }
    return run


def plain_step(X, y, params):
    """One step on one device as anyone would write it, with nothing of the book's code but the network: the loss."""
    loss = F.cross_entropy(lenet(X, params), y)
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, grad in zip(params, grads):
            p -= LR * grad
    return loss.item()


@torch.no_grad()
def distance(params, replicas):
    """The largest |difference| of any parameter of any replica from `params`."""
    return max((p - q.cpu()).abs().max().item() for replica in replicas for p, q in zip(params, replica))


def accuracy(params, device):
    *_, X, y = study.split()
    test = tuning.fashion_mnist()
    return {
        name: training.evaluate(partial(lenet, params=params), *images, device)
        for name, images in {"validation": (X, y), "test": (test.X_test, test.y_test)}.items()
    }


def note(run, number, loss, worst, distances):
    run["step"].append(number)
    run["loss"].append(float(f"{loss:.6g}"))
    for k in COUNTS:
        run["gaps"][k]["loss"].append(float(f"{worst[k]:.2g}"))
        run["gaps"][k]["parameters"].append(float(f"{distances[k]:.2g}"))


def recipe():
    return {
        "batch_sizes": BATCH_SIZES,
        "lr": LR,
        "steps": STEPS,
        "counts": COUNTS,
        "validation": tuning.VALIDATION,
    }


def summary(runs):
    """For each precision and batch size, over the seeds that are there.

    gaps         {step: [loss, parameters]}, the largest over numbers of GPUs and seeds
    accuracy     on the test set after an epoch: {"one device" or number of GPUs: one for each seed}
    """
    found = {}
    for name, keys in itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0]):
        group = [runs[key] for key in keys]
        gaps = [gap for run in group for gap in run["gaps"].values()]
        found[name] = {
            "gaps": {
                step: [max(gap[of][i] for gap in gaps) for of in ("loss", "parameters")]
                for i, step in enumerate(group[0]["step"])
            }
        }
        if "accuracy" in group[0]:
            found[name]["accuracy"] = {k: [run["accuracy"][k]["test"] for run in group] for k in group[0]["accuracy"]}
    return found


if __name__ == "__main__":
    study.run("same_step", cases(), record, recipe(), summary)
