"""Four ranks learn handwritten digits: how right, and how sure, are networks whose ranks seldom talk?

    python -m experiments.diloco

writes mgpu_lib/recorded/diloco.json. Network, images and steps are chapter 13's, in float64; four replicas in one
process stand for its four ranks. They average each gradient, or their parameters every 20 steps (local SGD), or let an
outer optimizer take what a round has changed (DiLoCo, with its authors' momentum and with less), or never talk.
"""

import math
import statistics
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from experiments import study
from mgpu_lib.data import load_digits

RANKS, ROWS, STEPS, ROUND = 4, 8, 200, 20  # images of a rank in a step; steps of a run and of a round
SEEDS = range(12)
sgd = torch.optim.SGD
nesterov = partial(sgd, lr=0.7, nesterov=True)
OUTER = {
    "parameters": partial(sgd, lr=1),
    "DiLoCo": partial(nesterov, momentum=0.9),
    "DiLoCo, momentum 0.5": partial(nesterov, momentum=0.5),
}
WAYS = ("never", "gradients", *OUTER)
SAMPLE, TOLERANCE = ("DiLoCo/0",), 1e-6


def cases():
    return {f"{way}/{seed}": (way, seed) for way in WAYS for seed in SEEDS}


def record(way, seed):
    """Of rank 0's network, on test images: {"accuracy", "test_loss", "sure": the mean of the highest probabilities,
    "spread": the standard deviation of the logits}."""
    X, y, X_test, y_test = images()
    nets = [digit_net(seed) for _ in range(RANKS)]
    params = [list(net.parameters()) for net in nets]
    inner = [torch.optim.AdamW(each, lr=0.001) for each in params]
    common = [p.detach().clone() for p in params[0]]
    outer = OUTER[way](common) if way in OUTER else None
    own = [own_rows(seed, rank, len(X)) for rank in range(RANKS)]
    for step in range(STEPS):
        for net, optimizer, rows in zip(nets, inner, own):
            optimizer.zero_grad()
            F.cross_entropy(net(X[rows[step]]), y[rows[step]]).backward()
        if way == "gradients":
            for same in zip(*params):
                mean = torch.stack([p.grad for p in same]).mean(dim=0)
                for p in same:
                    p.grad = mean.clone()
        for optimizer in inner:
            optimizer.step()
        if outer and (step + 1) % ROUND == 0:
            finish_round(params, common, outer)
    with torch.no_grad():
        logits = nets[0](X_test)
    highest, answers = logits.softmax(dim=1).max(dim=1)
    return {
        "accuracy": (answers == y_test).double().mean().item(),
        "test_loss": F.cross_entropy(logits, y_test).item(),
        "sure": highest.mean().item(),
        "spread": logits.std().item(),
    }


def images():
    """(X, y, X_test, y_test): the digits, in float64, with mean 0 and variance 1."""
    _, X, y, X_test, y_test = load_digits()
    mean, std = X.double().mean(), X.double().std()
    return (X.double() - mean) / std, y, (X_test.double() - mean) / std, y_test


def digit_net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def own_rows(seed, rank, count):
    """(STEPS, ROWS) of the rank's quarter of so many images."""
    torch.manual_seed(RANKS * seed + rank)
    quarter = torch.arange(count)[rank::RANKS]
    return quarter[torch.randint(len(quarter), (STEPS, ROWS))]


@torch.no_grad()
def finish_round(params, common, outer):
    """An outer step from `common`, from which all ranks then go on."""
    for start, *same in zip(common, *params):
        start.grad = start - torch.stack(same).mean(dim=0)
    outer.step()
    for start, *same in zip(common, *params):
        for p in same:
            p.copy_(start)


def recipe():
    return {"ranks": RANKS, "rows": ROWS, "steps": STEPS, "round": ROUND}


def summary(runs):
    """{way: {"accuracy", "test_loss", "sure", "spread", "gain": accuracy beyond that of the same seed with averaged
    gradients}}, each with its mean over the seeds and the standard error of this mean."""
    by_way = {way: [runs[key] for key in cases() if key in runs and key.startswith(f"{way}/")] for way in WAYS}
    return {way: means(several, by_way["gradients"]) for way, several in by_way.items() if len(several) > 1}


def means(runs, others):
    gains = [run["accuracy"] - other["accuracy"] for run, other in zip(runs, others)]
    measured = {name: [run[name] for run in runs] for name in runs[0]} | {"gain": gains}
    return {
        name: [statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))]
        for name, values in measured.items()
        if len(values) > 1
    }


def main():
    study.run("diloco", cases(), record, recipe(), summary)


if __name__ == "__main__":
    main()
