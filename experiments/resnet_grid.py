"""A second network, trained as in practice: ResNet-8 with momentum, warm-up and a cosine, and with one of three norms.

    python -m experiments.resnet_grid

writes mgpu_lib/recorded/resnet_grid.json. All of Fashion-MNIST, four epochs, five seeds. The rate rises from 0 in the
first twentieth of the steps and then falls to 0 along a cosine. Rates are a factor of 4 apart, so that the linear rule
for four times the batch leads from one to the next. On a real GPU, where `experiments.on_a_gpu` runs these cases, the
network is ResNet-18, which one core would train for days. There is no sample: an epoch takes minutes.
"""

import itertools
import math
import statistics

import torch
from torch import nn
from torch.nn import functional as F

from experiments import study, tuning
from mgpu_lib import models, training
from mgpu_lib.data import endless

EPOCHS, SEEDS = 4, range(5)
MOMENTUM, WARM_UP = 0.9, 1 / 20  # of SGD; part of the steps
LRS = {
    ("batch", 16): (0.00625, 0.025, 0.1),
    ("batch", 64): (0.025, 0.1, 0.4),
    ("batch", 256): (0.025, 0.1, 0.4, 1.6),
    ("batch", 1024): (0.1, 0.4, 1.6),
    ("group", 64): (0.1, 0.4),
    ("group", 1024): (0.1, 0.4, 1.6),
    ("none", 64): (0.025, 0.1, 0.4),
    ("none", 1024): (0.025, 0.1, 0.4, 1.6),
}  # {(norm, batch size): rates}; a run or two set the ends


def cases():
    """{key: (norm, batch_size, lr, seed)}: key norm/batch_size/lr/seed, one seed after the other."""
    return {
        f"{norm}/{batch_size}/{lr}/{seed}": (norm, batch_size, lr, seed)
        for seed in SEEDS
        for (norm, batch_size), lrs in LRS.items()
        for lr in lrs
    }


def device():
    """A real GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def network(norm):
    """ResNet-8, or ResNet-18 on a GPU, with batch norm ("batch"), with group norm in its place ("group"), or without
    any ("none").
    """
    net = models.resnet18() if device().type == "cuda" else models.resnet8()
    for name, layer in list(net.named_modules()):
        if norm != "batch" and isinstance(layer, nn.BatchNorm2d):
            net.set_submodule(name, group_norm(layer.num_features) if norm == "group" else nn.Identity())
    return net.to(device(), memory_format=torch.channels_last)  # a seventh faster


def group_norm(channels):
    """The usual 32 groups, or fewer, of two channels each: in a group of one the norm would see a single channel."""
    return nn.GroupNorm(min(32, channels // 2), channels)


def record(norm, batch_size, lr, seed):
    """One run: train_loss (mean over the steps) and validation_accuracy after each epoch, test_accuracy at the end. It
    ends at `diverged_at_step`, the first step whose loss isn't finite.
    """
    X, y, *validation = study.split()
    torch.manual_seed(seed)
    net, per_epoch = network(norm), math.ceil(len(X) / batch_size)
    step = Step(net, lr, EPOCHS * per_epoch)
    shuffled = endless(X, y, batch_size, seed)
    run = {"diverged_at_step": None, "train_loss": [], "validation_accuracy": [], "test_accuracy": None}
    for _ in range(EPOCHS):
        net.train()
        losses = [at.loss for at in training.run_steps(step, itertools.islice(shuffled, per_epoch))]
        if not math.isfinite(losses[-1]):
            return {**run, "diverged_at_step": step.taken}
        run["train_loss"].append(round(statistics.fmean(losses), 5))
        run["validation_accuracy"].append(accuracy(net, *validation))
    return {**run, "test_accuracy": accuracy(net, *tuning.fashion_mnist()[3:])}


class Step:
    """step(X, y): one step of SGD with momentum, at the rate of its place among so many `steps`: the loss."""

    def __init__(self, net, lr, steps):
        self.net, self.lr, self.steps, self.taken = net, lr, steps, 0
        self.optimizer = torch.optim.SGD(net.parameters(), lr, MOMENTUM, foreach=True)

    def __call__(self, X, y):
        loss = F.cross_entropy(self.net(X.to(device(), memory_format=torch.channels_last)), y.to(device()))
        self.optimizer.param_groups[0]["lr"] = self.lr * share((self.taken + 0.5) / self.steps)
        self.taken += 1
        if loss.isfinite():
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


def share(done):
    """Of the full rate, when so much of the run is done: it rises in a straight line, then falls along a cosine."""
    return min(1, done / WARM_UP) * (1 + math.cos(math.pi * done)) / 2


def accuracy(net, X, y):
    net.eval()
    return round(training.evaluate(net, X, y, device(), batch_size=250), 5)


def recipe():
    """The device is part of it: what was recorded on a GPU isn't mixed with what was recorded without."""
    return {
        "device": torch.cuda.get_device_name() if device().type == "cuda" else "CPU, one core",
        "images": 60_000 - tuning.VALIDATION,
        "epochs": EPOCHS,
    }


def summary(runs):
    """{norm/batch_size/lr: {"validation_accuracy", "test_accuracy"}}: at the end, a list over the seeds that are there;
    None: diverged."""
    found = {}
    for name, keys in itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0]):
        each = [runs[key] for key in keys]
        ends = [None if run["diverged_at_step"] else run["validation_accuracy"][-1] for run in each]
        found[name] = {"validation_accuracy": ends, "test_accuracy": [run["test_accuracy"] for run in each]}
    return found


if __name__ == "__main__":
    study.run("resnet_grid", cases(), record, recipe(), summary)
