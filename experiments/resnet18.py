"""ResNet-18 for whole epochs: 256 images at a rate of 0.1 on one GPU against 512 at 0.2 on two, with nn.DataParallel.

    python -m experiments.resnet18

writes mgpu_lib/recorded/resnet18.json. All of Fashion-MNIST, three epochs of plain SGD at a constant rate, as in the
lecture notes, on virtual GPUs. Convolutions compute in bfloat16, with which a CPU that has AMX is six times as fast as
in 32 bits: there a run takes a quarter of an hour on two cores, elsewhere half an hour.
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
from virtual_gpus import virtual_gpus

SETTINGS = ((1, 256, 0.1), (2, 512, 0.2))  # (GPUs, batch size, rate), of the lecture notes
EPOCHS, SEEDS, THREADS = 3, range(4), 2


def cases():
    """{key: (num_gpus, batch_size, lr, seed)}: key num_gpus/batch_size/lr/seed, one seed after the other."""
    return {"/".join(map(str, (*setting, seed))): (*setting, seed) for seed in SEEDS for setting in SETTINGS}


class InBFloat16(nn.Module):
    """`net` under autocast. In its forward, because the threads of DataParallel would take float16 from outside."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, X):
        with torch.autocast("cuda", torch.bfloat16):
            return self.net(X).float()


def record(num_gpus, batch_size, lr, seed):
    """One run: train_loss (mean over the steps) and test_accuracy after each epoch. It ends at `diverged_at_step`, the
    first step whose loss isn't finite.
    """
    torch.set_num_threads(THREADS)
    X, y, X_test, y_test = tuning.fashion_mnist()[1:]
    per_epoch, shuffled = math.ceil(len(X) / batch_size), endless(X, y, batch_size, seed)
    run = {"diverged_at_step": None, "train_loss": [], "test_accuracy": []}
    with virtual_gpus(num_gpus) as machine:
        torch.manual_seed(seed)
        net = InBFloat16(models.resnet18()).to(machine.devices[0], memory_format=torch.channels_last)
        step = program(net, machine.devices, lr)
        for epoch in range(EPOCHS):
            net.train()
            losses = [at.loss for at in training.run_steps(step, itertools.islice(shuffled, per_epoch))]
            if not math.isfinite(losses[-1]):
                return {**run, "diverged_at_step": epoch * per_epoch + len(losses)}
            net.eval()
            run["train_loss"].append(round(statistics.fmean(losses), 5))
            run["test_accuracy"].append(round(training.evaluate(net, X_test, y_test, machine.devices[0]), 5))
    return run


def program(net, devices, lr):
    """step(X, y): one step of DataParallel on `devices`, with SGD at the rate `lr`: the loss."""
    parallel, optimizer = nn.DataParallel(net, device_ids=devices), torch.optim.SGD(net.parameters(), lr)

    def step(X, y):
        X = X.to(devices[0], memory_format=torch.channels_last)
        loss = F.cross_entropy(parallel(X), y.to(devices[0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def recipe():
    return {"epochs": EPOCHS, "images": 60_000}


def summary(runs):
    """{num_gpus/batch_size/lr: {"train_loss", "test_accuracy"}}: after each epoch, a list for each seed that is there;
    None: diverged.
    """
    found = {}
    for name, keys in itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0]):
        each = [None if runs[key]["diverged_at_step"] else runs[key] for key in keys]
        found[name] = {of: [run and run[of] for run in each] for of in ("train_loss", "test_accuracy")}
    return found


if __name__ == "__main__":
    study.run("resnet18", cases(), record, recipe(), summary)
