"""At which learning rate does LeNet stop training, without batch norm and with it? A search for each of eight seeds.

    python -m experiments.limits

writes mgpu_lib/recorded/limits.json. A run makes 16 passes over few images. It survives if its loss stays finite, its
logits are not all equal, and its mean loss in the last pass is below 2; guessing among ten classes gives 2.30. Five
times the interval of rates is halved on a logarithmic scale, so the limit is known to a factor of 1.11.
"""

import itertools
import math
from functools import partial

import torch
from torch.nn import functional as F

from experiments import study
from mgpu_lib.models import BatchNorm, lenet, lenet_bn, lenet_bn_params, lenet_params
from mgpu_lib.parallel import sgd

NETS, BATCH_SIZE, SEEDS = ("lenet", "lenet_bn"), 16, range(8)
STEPS, PASSES = 192, 16  # of a run: 12 batches a pass
LOW, HIGH, HALVINGS = 0.1, 3.2, 5
SAMPLE, TOLERANCE = {"lenet_bn/0": {}}, 0.25  # near the limit, rounding decides


def cases():
    """{key: (net, seed)}: key net/seed, one seed after the other."""
    return {f"{net}/{seed}": (net, seed) for seed, net in itertools.product(SEEDS, NETS)}


def record(net, seed):
    """{"limit": the largest rate that was seen to survive, before the next of the search didn't}."""
    X, y, *_ = study.split()
    images = BATCH_SIZE * STEPS // PASSES
    low, high = LOW, HIGH
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if survives(net, X[:images], y[:images], middle, seed):
            low = middle
        else:
            high = middle
    return {"limit": round(low, 4)}


def survives(net, X, y, lr, seed):
    start = {"lenet": lenet_params, "lenet_bn": lenet_bn_params}[net](seed)
    forward = {"lenet": lenet, "lenet_bn": partial(lenet_bn, normalize=BatchNorm().by_batch)}[net]
    params, losses = [p.requires_grad_() for p in start], []
    for rows in PASSES * torch.arange(len(X)).split(BATCH_SIZE):
        logits = forward(X[rows], params)
        losses.append(F.cross_entropy(logits, y[rows]))
        if not losses[-1].isfinite() or (logits == logits[0]).all():
            return False
        losses[-1].backward()
        sgd(params, lr, batch_size=1)  # the loss is a mean already
    return (sum(losses[-STEPS // PASSES :]) / (STEPS // PASSES)).item() < 2


def recipe():
    return {
        "batch_size": BATCH_SIZE,
        "steps": STEPS,
        "passes": PASSES,
        "from": LOW,
        "to": HIGH,
        "halvings": HALVINGS,
    }


def summary(runs):
    """{net: the limit of each seed}."""
    return {net: [run["limit"] for key, run in runs.items() if key.startswith(f"{net}/")] for net in NETS}


if __name__ == "__main__":
    study.run("limits", cases(), record, recipe(), summary)
