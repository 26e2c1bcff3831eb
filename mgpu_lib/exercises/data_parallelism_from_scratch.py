"""Checks for "Data parallelism from scratch": the accuracy of all replicas, uneven shards, all-reduces on a budget."""

from collections import Counter

import torch

from mgpu_lib.collectives import bytes_per_link, tree
from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.models import lenet_params
from mgpu_lib.parallel import get_params
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


class Messages(Counter):
    """Bytes per link, as `Machine.traffic`, and the size of each single message."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __setitem__(self, link, total):
        self.sizes.append(total - self[link])
        super().__setitem__(link, total)


def allreduced(answer, k, numbers):
    """Bytes per link, {(source, target): bytes}, after `answer(data)` has all-reduced `numbers` numbers on `k` GPUs."""
    with virtual_gpus(k) as machine:
        data = [torch.arange(1.0, numbers + 1).to(device) * 4**i for i, device in enumerate(machine.devices)]
        before, right = data[0].cpu(), torch.arange(1.0, numbers + 1) * sum(4**i for i in range(k))
        given, start = list(data), Counter(machine.traffic)
        filled(answer(data), in_place=True)
        traffic = machine.traffic - start
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
def check_tree_allreduce(answer):
    """tree_allreduce(data): sums one tensor per GPU, in place; no GPU receives more than log2(k) tensors."""
    for k in (2, 4, 8, 5, 1):
        links = allreduced(answer, k, 3)
        received, allowed = by_target(links), by_target(bytes_per_link(tree(k), 12, k))
        most = max(allowed.values(), default=0)
        for gpu, nbytes in received.items():
            expect(
                nbytes <= most,
                f"{k} GPUs: the sums are right, but GPU {gpu} receives {nbytes // 12} tensors, and "
                f"{most // 12} will do. Add in pairs, then the pairs' sums in pairs, and so on",
            )
        expect(
            sum(received.values()) <= sum(allowed.values()),
            f"{k} GPUs: the sums are right, but {sum(received.values()) // 12} tensors travel in all, and "
            f"{sum(allowed.values()) // 12} will do",
        )
    return "the sum on every GPU, and none receives more than log2(k) tensors, rounded up"


def by_target(links):
    received = Counter()
    for (_, target), nbytes in links.items():
        received[target] += nbytes
    return received


@exercise
def check_bucketed_allreduce(answer):
    """bucketed_allreduce(device_grads, bucket_bytes): sums lists of gradients, in place, many in one all-reduce."""
    shapes, bucket_bytes = [(2, 3), (4,), (3, 2), (30,), *[(2,)] * 12], 48  # 6 + 4 numbers, 6, 30 (too large), 12 + 12
    with virtual_gpus(2) as machine:
        device_grads = [
            [torch.full(shape, float(i + 1), device=device) * (gpu + 1) for i, shape in enumerate(shapes)]
            for gpu, device in enumerate(machine.devices)
        ]
        machine.traffic = messages = Messages()
        filled(answer([list(grads) for grads in device_grads], bucket_bytes), in_place=True)
        sizes, traffic = list(messages.sizes), list(messages)
        results = [[grad.cpu() for grad in grads] for grads in device_grads]
    for gpu, grads in enumerate(results):
        for i, grad in enumerate(grads):
            own, right = (i + 1.0) * (gpu + 1), (i + 1.0) * 3
            expect(
                not bool((grad == own).all()),
                f"gradient {i} of GPU {gpu} still has its own numbers: copy the sums from the bucket back into it",
            )
            expect(
                bool((grad == right).all()),
                f"gradient {i} of GPU {gpu} isn't the sum: are the bucket's pieces in the right order?",
            )
    expect_no_detour(traffic)
    expect_few_messages(sizes, bucket_bytes, len(shapes))
    return f"the sum of every gradient, in {len(sizes)} messages; one by one they are {2 * len(shapes)} or more"


def expect_few_messages(sizes, bucket_bytes, num_gradients):
    """The messages of `sizes` bytes are full buckets, but for the gradient of 120 bytes, which travels alone."""
    expect(
        max(sizes) <= 120,
        f"the sums are right, but one message has {max(sizes)} bytes, and a bucket holds "
        f"{bucket_bytes} (a larger gradient travels alone)",
    )
    large = [size for size in sizes if size > bucket_bytes]  # only the gradient of 120 bytes, whole or in halves
    expect(
        {*large} <= {60, 120},
        f"the sums are right, but some buckets hold more than {bucket_bytes} bytes: one "
        f"message has {max({*large} - {60, 120}, default=0)}",
    )
    expect(
        len(sizes) <= 24,
        f"the sums are right, but {len(sizes)} messages were sent for {num_gradients} gradients. "
        "Put several gradients into one bucket: five buckets will do",
    )


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
