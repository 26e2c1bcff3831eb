"""A small grid for ResNet-18: batch sizes and learning rates, on a GPU where there is one, else on a subset.

    python -m experiments.resnet_grid

writes mgpu_lib/recorded/resnet_grid.json, which says how many images were trained on and on which device. On one core
ResNet-18 takes some 70 images per second: there it sees 3,000 images, two times. On a GPU it sees all of them.
"""

import itertools
import math
import statistics
import time

import torch
from torch.nn import functional as F

from experiments import study, tuning
from mgpu_lib import models, training
from mgpu_lib.data import endless

BATCH_SIZES, LRS = (16, 64, 256), (0.025, 0.1, 0.4, 1.6)
EPOCHS = 2
SUBSET = {"train": 3_000, "validation": 1_000, "test": 2_000}  # images, without a GPU
SEEDS = (0, 1)
SAMPLE = ("256/0.1/0",)


def device():
    """A real GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def images():
    """The grid's images, or the first of each part: {"train": (X, y), "validation": …, "test": …}."""
    X, y, *validation = study.split()
    whole = {"train": (X, y), "validation": validation, "test": tuning.fashion_mnist()[3:]}
    limits = SUBSET if device().type == "cpu" else dict.fromkeys(whole)
    return {part: tuple(tensor[: limits[part]] for tensor in tensors) for part, tensors in whole.items()}


def cases():
    return {
        f"{batch_size}/{lr}/{seed}": (batch_size, lr, seed)
        for seed in SEEDS
        for batch_size in BATCH_SIZES
        for lr in LRS
    }


def record(batch_size, lr, seed):
    """One run with plain SGD: images trained on; train_loss (mean over the steps) and validation_accuracy after each
    epoch, test_accuracy at the end; seconds of training. A run ends at `diverged_at_step`, the first step whose loss
    isn't finite.
    """
    parts, where = images(), device()
    torch.manual_seed(seed)
    net = models.resnet18().to(where, memory_format=torch.channels_last)  # a seventh faster
    optimizer = torch.optim.SGD(net.parameters(), lr)
    shuffled = endless(*parts["train"], batch_size, seed)
    run = {
        "images": len(parts["train"][0]),
        "diverged_at_step": None,
        "train_loss": [],
        "validation_accuracy": [],
        "test_accuracy": None,
        "seconds": 0.0,
    }
    steps = math.ceil(run["images"] / batch_size)
    for epoch in range(EPOCHS):
        began = time.perf_counter()
        losses = train(net, optimizer, itertools.islice(shuffled, steps), where)
        run["seconds"] = round(run["seconds"] + time.perf_counter() - began, 1)
        if not math.isfinite(losses[-1]):
            run["diverged_at_step"] = epoch * steps + len(losses)
            return run
        run["train_loss"].append(round(statistics.fmean(losses), 5))
        run["validation_accuracy"].append(accuracy(net, parts["validation"], where))
    run["test_accuracy"] = accuracy(net, parts["test"], where)
    return run


def train(net, optimizer, shuffled, where):
    """One step for each batch: the losses, up to the first that isn't finite."""
    net.train()

    def step(X, y):
        loss = F.cross_entropy(net(X.to(where, memory_format=torch.channels_last)), y.to(where))
        if loss.isfinite():
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    return [at.loss for at in training.run_steps(step, shuffled)]


def accuracy(net, part, where):
    net.eval()
    return round(training.evaluate(net, *part, where, batch_size=250), 5)


def recipe():
    """The device is part of it: what was recorded on a GPU isn't mixed with what was recorded without."""
    gpu = device().type == "cuda"
    return {
        "sha256": study.fingerprint("resnet_grid"),
        "device": torch.cuda.get_device_name() if gpu else "CPU, one core",
        "images": "all" if gpu else SUBSET,
        "epochs": EPOCHS,
        "batch_sizes": BATCH_SIZES,
        "lrs": LRS,
    }


def summary(runs):
    """{batch_size/lr: test_accuracy, a list over the seeds that are there (None: diverged), and its mean}."""
    found = {}
    for name, keys in itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0]):
        accuracies = [runs[key]["test_accuracy"] for key in keys]
        done = [each for each in accuracies if each is not None]
        found[name] = {"test_accuracy": accuracies, "mean": round(statistics.fmean(done), 5) if done else None}
    return found


if __name__ == "__main__":
    study.run("resnet_grid", cases(), record, recipe(), summary)
