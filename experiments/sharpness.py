"""How sharp is the valley that LeNet trains in? The largest eigenvalue of the Hessian on the way, at four rates.

    python -m experiments.sharpness

writes mgpu_lib/recorded/sharpness.json. A hundred images, and the exact gradient of all of them in every step, so that
no noise plays a part. Chapter 7 shows the power iteration and compares the sharpness with 2 / rate.
"""

import math

import torch
from torch.nn import functional as F

from experiments import study
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import sgd

IMAGES, STEPS, EVERY, ITERATIONS = 100, 120, 15, 8
RATES, SEEDS = (0.02, 0.1, 0.4, 1.0), range(5)
SAMPLE, TOLERANCE = {"0.02/0": {"steps": 15}}, 1e-2


def cases():
    """{key: (lr, seed)}: key lr/seed, one seed after the other."""
    return {f"{lr}/{seed}": (lr, seed) for seed in SEEDS for lr in RATES}


def record(lr, seed, steps=STEPS):
    """Sharpness and loss before the first step and after each EVERY."""
    X, y, *_ = study.split()
    X, y, params = X[:IMAGES], y[:IMAGES], [p.requires_grad_() for p in lenet_params(seed)]
    found = {"sharpness": [], "loss": []}
    for step in range(steps + 1):
        loss = F.cross_entropy(lenet(X, params), y)
        if step % EVERY == 0:
            found["loss"].append(round(loss.item(), 4))
            found["sharpness"].append(round(sharpness(loss_of(X, y), params), 2))
        loss.backward()
        sgd(params, lr, batch_size=1)  # the loss is a mean already
    return found


def loss_of(X, y):
    return lambda params: F.cross_entropy(lenet(X, params), y)


def sharpness(loss_of, params, iterations=ITERATIONS):
    """The Hessian's largest eigenvalue, by power iteration from a fixed random direction."""
    seeded = torch.Generator().manual_seed(0)
    vector = [torch.randn(p.shape, generator=seeded) for p in params]
    grads = torch.autograd.grad(loss_of(params), params, create_graph=True)
    for _ in range(iterations):
        length = math.sqrt(sum(part.square().sum() for part in vector)) or 1
        vector = torch.autograd.grad(grads, params, [part / length for part in vector], retain_graph=True)
    return math.sqrt(sum(part.square().sum() for part in vector))


def recipe():
    return {"images": IMAGES, "steps": STEPS, "every": EVERY, "iterations": ITERATIONS}


def summary(runs):
    """Nothing: chapter 7 draws the runs."""
    return {}


if __name__ == "__main__":
    study.run("sharpness", cases(), record, recipe(), summary)
