"""Checks for "Data parallelism from scratch": the accuracy of all replicas, uneven shards, a ring, a test of steps."""

import torch
from torch.nn import functional as F

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import allreduce, get_params, sgd, split_batch, train_batch
from virtual_gpus import virtual_gpus


@exercise
def check_accuracy_of_each(answer):
    """accuracy_of_each(device_params, devices, X, y): the accuracy of every replica on all of X."""
    y = torch.tensor([0, 0, 1, 0, 2, 0, 1, 0, 2, 0, 3, 1])  # six of class 0, three of 1, two of 2, one of 3
    X = torch.zeros(len(y), 1, 28, 28)
    for classes in ([1, 0, 2], [3, 0], [0]):  # what each replica sees in every image
        right = [(y == c).double().mean().item() for c in classes]
        with virtual_gpus(len(classes)) as machine:
            replicas = [get_params(always(c), device) for c, device in zip(classes, machine.devices)]
            found = filled(answer(replicas, machine.devices, X, y))
        expect(
            hasattr(found, "__len__") and len(found) == len(classes),
            f"{found!r} for {len(classes)} replicas: return a list with one accuracy for each",
        )
        found = [float(accuracy) for accuracy in found]
        if max(abs(ours - oracle) for ours, oracle in zip(found, right)) > 1e-6:
            expect(False, accuracy_slip(found, right, len(y)))
    return "one accuracy for each replica, on all images"


def always(c):
    """LeNet's parameters with a bias that makes class `c` win on any image."""
    params = lenet_params()
    params[-1].data[c] = 1000.0
    return params


def accuracy_slip(found, right, rows):
    """What is wrong with these accuracies of the replicas, on `rows` images."""
    seen = f"you say {[round(a, 3) for a in found]}, and the replicas are right in {[round(a, 3) for a in right]}"
    if len(set(found)) == 1:
        return f"{seen}. Is it the same replica each time?"
    if sorted(round(a, 6) for a in found) == sorted(round(a, 6) for a in right):
        return f"{seen}. The accuracy of replica i belongs at place i"
    if any(max(abs(a - scale * b) for a, b in zip(found, right)) < 1e-4 for scale in (100, rows)):
        return f"{seen}. An accuracy is a share, between 0 and 1"
    return f"{seen} of the images. Use X and y, and all of their {rows} rows for every replica, no shards"


def allreduced(answer, k, numbers):
    """Bytes per link, {(source, target): bytes}, after `answer(data)` has all-reduced `numbers` numbers on `k` GPUs."""
    with virtual_gpus(k) as machine:
        data = [torch.arange(1.0, numbers + 1).to(device) * 4**i for i, device in enumerate(machine.devices)]
        before, right = data[0].cpu(), torch.arange(1.0, numbers + 1) * sum(4**i for i in range(k))
        given = list(data)
        with machine.counting() as traffic:
            answer(data)
        results = [tensor.cpu() for tensor in given]
    case = f"{k} GPUs, {numbers} numbers"
    for gpu, result in enumerate(results):
        if torch.equal(result, right):
            continue
        expect(
            not torch.equal(result, before * 4**gpu),
            f"{case}: GPU {gpu} still has its own numbers. Write into its tensor (copy_, add_, or [:] =): "
            "data[i] = … changes the list only",
        )
        done = int((result == right).sum())
        expect(not done, f"{case}: GPU {gpu} has the sum in {done} of {numbers} places. Who brings it the others?")
        expect(False, f"{case}: GPU {gpu} doesn't have the sum. (Is some number added twice?)")
    expect_no_detour(traffic)
    return {
        (int(source[5:]), int(target[5:])): nbytes for (source, target), nbytes in traffic.items() if target != "cpu"
    }


def expect_no_detour(traffic):
    """GPUs get nothing from the CPU. (It may get something from them: answers may print.)"""
    fed = [target for source, target in traffic if source == "cpu"]
    expect(not fed, f"the sums are right, but {', '.join(fed)} got numbers from the CPU. Send from GPU to GPU")


@exercise
def check_ring_allreduce(answer):
    """ring_allreduce(data): sums one tensor per GPU, in place; each sends to the next GPU only, 2(k-1)/k tensors."""
    for k, numbers in [(2, 4), (3, 6), (4, 10), (4, 3), (1, 4)]:
        for (source, target), nbytes in allreduced(answer, k, numbers).items():
            expect(
                target == (source + 1) % k,
                f"{k} GPUs: the sums are right, but GPU {source} sends to GPU {target}; "
                "in a ring each sends to the next one only",
            )
            limit = 2 * (k - 1) * -(-numbers // k) * 4
            expect(
                nbytes <= limit,
                f"{k} GPUs, {numbers} numbers: the sums are right, but GPU {source} sends {nbytes} "
                f"bytes, and {limit} will do. Send one chunk in each round, not the whole tensor",
            )
    return "the sum on every GPU, and each sends 2(k-1)/k tensors to its neighbor"


@exercise
def check_uneven_weights(answer):
    """uneven_weights(sizes): what to multiply the GPUs' mean losses with, so that they add up to the batch's mean."""
    for sizes in ([3, 2, 2], [5], [20, 20, 20, 4], [1, 1, 0], [4, 4]):
        weights, right = list(filled(answer(list(sizes)))), [size / sum(sizes) for size in sizes]
        case = f"shards of {sizes} rows: {[round(float(w), 3) for w in weights]}"
        expect(len(weights) == len(sizes), f"{case}; one weight for each shard")
        if all(abs(weight - share) < 1e-6 for weight, share in zip(weights, right)):
            continue
        expect(
            len(set(weights)) > 1,
            f"{case}; equal weights are right for equal shards only: a row of a small shard "
            "would count more than a row of a large one",
        )
        expect(
            abs(sum(weights) - 1) < 1e-6,
            f"{case}; they add up to {sum(weights):.3g}, not to 1, so losses of 1 "
            "would not give a mean of 1: divide by the rows of the whole batch",
        )
        expect(False, f"{case}; each row should count as much as any other: {[round(share, 3) for share in right]}")
    return "every row counts the same, wherever it is"


# Steps for the reader's test. The wrong ones are what a program could do by mistake.


def last_gpu_first(X, y, replicas, devices, lr):
    """Right, and it rounds in another way than train_batch."""
    train_batch(X, y, replicas, devices, lr, reduce=lambda data: allreduce(data[::-1]))


def rebinding(X, y, replicas, devices, lr):
    def reduce(data):
        for grad in data[1:]:
            data[0] += grad.to(data[0].device)

    train_batch(X, y, replicas, devices, lr, reduce=reduce)


def never_zeroed(X, y, replicas, devices, lr):
    @torch.no_grad()
    def update(params, lr, batch_size):
        for p in params:
            p -= lr * p.grad / batch_size

    train_batch(X, y, replicas, devices, lr, update=update)


def zeroed_on_gpu_0_only(X, y, replicas, devices, lr):
    never_zeroed(X, y, replicas, devices, lr)
    for p in replicas[0]:
        p.grad.zero_()


def divided_by_the_shard(X, y, replicas, devices, lr):
    train_batch(X, y, replicas, devices, lr * len(devices))


def means_averaged(X, y, replicas, devices, lr):
    for X_shard, y_shard, params in zip(*split_batch(X, y, devices), replicas):
        F.cross_entropy(lenet(X_shard, params), y_shard).backward()
    for grads in zip(*[[p.grad for p in params] for params in replicas]):
        allreduce(list(grads))
    for params in replicas:
        sgd(params, lr, batch_size=len(devices))


def gpu_0_alone(X, y, replicas, devices, lr):
    train_batch(X, y, replicas[:1], devices[:1], lr)


def rest_dropped(X, y, replicas, devices, lr):
    rows = max(len(X) // len(devices), 1) * len(devices)
    train_batch(X[:rows], y[:rows], replicas, devices, lr)


def rows_repeated(X, y, replicas, devices, lr):
    rest = -len(X) % len(devices)
    train_batch(torch.cat([X, X[:rest]]), torch.cat([y, y[:rest]]), replicas, devices, lr)


WRONG_STEPS = {
    rebinding: "sums the gradients on GPU 0 and leaves the others as they are: do you look at all replicas?",
    never_zeroed: "never zeroes the gradients, so its first step is right: how many steps do you take?",
    zeroed_on_gpu_0_only: "zeroes the gradients on GPU 0 only, so its first step is right: how many steps do you take?",
    means_averaged: "averages the means of the shards, which is right for equal shards: do the GPUs divide your batch?",
    divided_by_the_shard: "divides by the rows of a shard, so it goes k times as far: do you compare with one device?",
    gpu_0_alone: "trains GPU 0 with the whole batch, and no other: do you look at all replicas?",
    rest_dropped: "drops the rows that are left over when all shards are equal: do the GPUs divide your batch?",
    rows_repeated: "repeats rows until all shards are equal: do the GPUs divide your batch?",
}


@exercise
def check_is_wrong(answer):
    """is_wrong(step): whether `step(X, y, replicas, devices, lr)` computes anything but what one device computes."""
    for step in (train_batch, last_gpu_first):
        with virtual_gpus(4):
            accused = filled(answer(step))
        expect(
            not accused,
            "you accuse a right program, which adds up in another order: let gaps of rounding pass, some 1e-7",
        )
    for step, hint in WRONG_STEPS.items():
        with virtual_gpus(4):
            expect(answer(step), f"your test lets a program pass that {hint}")
    return f"two right programs pass, and {len(WRONG_STEPS)} wrong ones don't"
