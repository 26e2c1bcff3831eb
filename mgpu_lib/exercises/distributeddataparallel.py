"""Checks for "DistributedDataParallel": a script on two machines, collectives of a step, buckets, an evaluation.

None starts a process. A script runs as each of its ranks in turn, and one rank is enough to model a step.
"""

import math

import torch
from torch import nn

from mgpu_lib.collectives import buckets
from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.exercises.one_rank import IMAGES, arrivals, ddp_step, run_as
from mgpu_lib.models import resnet18
from mgpu_lib.prediction import predict
from virtual_gpus import GPUS, find_link, ring_seconds

# A script on two machines


@exercise
def check_mended_script(answer):
    """mended_script(data): trains for two epochs in each of many processes, on one machine or several."""
    shares = []
    with torch.random.fork_rng(devices=[]):
        for machines, gpus in [(1, 1), (1, 2), (2, 2)]:
            ran = [run_as(answer, rank, machines, gpus) for rank in range(machines * gpus)]
            where = f"on {machines} machine{'s' * (machines > 1)} with {gpus} GPU{'s' * (gpus > 1)}"
            where += " each" * (machines > 1)
            check_training(ran, where, gpus)
            check_epochs(ran, where, machines)
            shares.append(len(ran[0].rows) // 2)
    one, two, four = shares
    return f"an epoch gives one GPU all {one} images, each of two GPUs {two}, and each of four on two machines {four}"


def check_training(ran, where, gpus):
    """Each rank has trained on its own GPU, and all have called the same collectives."""
    for rank, did in enumerate(ran):
        expect(did.rows, f"{where}, rank {rank} never looks at the data")
        expect(did.calls, f"{where}, rank {rank} calls no collective, so its network is trained apart from the others'")
        expect(
            did.gpus == {rank % gpus},
            f"{where}, rank {rank} works on GPU {', '.join(map(str, sorted(did.gpus)))} of its machine, and its own is "
            f"{rank % gpus}",
        )
        expect(
            did.calls == ran[0].calls,
            f"{where}, rank 0 calls {len(ran[0].calls)} collectives and rank {rank} others, {len(did.calls)} of them: "
            "they would wait for each other forever",
        )


def check_epochs(ran, where, machines):
    """In each of two epochs every row is looked at once, by one rank, and in another order."""
    epochs = [[did.rows[: len(did.rows) // 2] for did in ran], [did.rows[len(did.rows) // 2 :] for did in ran]]
    seen = [row for rows in epochs[0] for row in rows]
    expect(
        machines == 1 or len(seen) != 2 * IMAGES or len({*seen}) != IMAGES,
        f"on one machine all is well, but {where} an epoch takes as many steps as on one machine, and {len(seen)} "
        f"images instead of {IMAGES}. What did the second machine get to do?",
    )
    for rows in epochs:
        never = IMAGES - len({row for part in rows for row in part})
        expect(
            not never,
            f"{where}, {never} of {IMAGES} images are never looked at in an epoch. Whose number and how many of them "
            "the sampler gets must fit together: on this machine, or on all",
        )
    expect(
        len(seen) == IMAGES,
        f"{where}, {len(seen)} images are looked at in an epoch, and there are {IMAGES}: the ranks should share them",
    )
    expect(epochs[0] != epochs[1], f"{where}, every epoch has the same order: what does the sampler have to know?")


# Collectives of a step


@exercise
def check_ddp_collectives(answer):
    """ddp_collectives(grads, buffers, first, cap): how many collectives DistributedDataParallel calls in a step."""
    for case, net, X, caps in collective_cases():
        grads, buffers, calls = ddp_step(net, X, None if caps == (1, 25) else caps[1])
        first, cap = (int(size * 2**20) for size in caps)
        got = filled(answer(list(grads), list(buffers), first, cap))
        if got != len(calls):
            sent = ", ".join(f"{name} of {nbytes:,} bytes" for name, nbytes in calls)
            hint = collectives_slip(got, grads, buffers, first, cap)
            expect(False, f"{case}: {got!r} instead of {len(calls)} collectives ({sent}). {hint}")
    return f"four modelled steps call as many; ResNet-18 has {len(grads)} gradients and needs {len(calls)} collectives"


def collective_cases():
    """(what it is, network, its input, MiB of the first and of the other buckets); (1, 25) is PyTorch's default."""
    wide, images = torch.empty(4, 512), torch.empty(4, 1, 28, 28)
    with torch.device("meta"):  # where making a network draws no random numbers
        alike, two_types = nn.Sequential(*linear_layers(5)), nn.Sequential(*layers_of_two_types())
        norms, resnet = nn.Sequential(*linear_layers(1), nn.BatchNorm1d(384), nn.BatchNorm1d(384)), resnet18()
    return [
        ("five gradients of 0.75 MiB, buckets of 2 MiB", alike, wide, (2, 2)),
        ("one gradient of 0.75 MiB and two batch norms", norms, wide, (1, 25)),
        ("gradients of two types in turn, buckets of 0.5 MiB", two_types, wide, (0.5, 0.5)),
        ("ResNet-18 with PyTorch's buckets of 1 and 25 MiB", resnet, images, (1, 25)),
    ]


def linear_layers(n):
    """`n` linear layers of 0.75 MiB."""
    return [nn.Linear(*((512, 384) if i % 2 == 0 else (384, 512)), bias=False) for i in range(n)]


class To(nn.Module):
    """Numbers of another type."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, X):
        return X.to(self.dtype)


def layers_of_two_types():
    """Layers of 0.75 MiB in float32 and of half as much in bfloat16, in turn."""
    first, second, third, fourth = linear_layers(4)
    half = To(torch.bfloat16), To(torch.float32)
    return [first, half[0], second.bfloat16(), half[1], third, half[0], fourth.bfloat16()]


def collectives_slip(got, grads, buffers, first, cap):
    """What may be wrong with a number of collectives."""
    broadcasts = len({buffer.dtype for buffer in buffers})
    full, left = buckets_of(grads, first, cap)
    at_most = len(buckets(grads[::-1], cap))
    for other, hint in [
        (full + left, "What happens to the buffers before the forward pass?"),
        (full + left + len(buffers), "Buffers of one type travel in one broadcast"),
        (len(grads) + broadcasts, "Gradients travel together until a bucket is full"),
        (sum(buckets_of(grads, cap, cap)) + broadcasts, "The first bucket has a cap of its own"),
        (full + broadcasts, "What is left in a bucket when the last gradient has come is sent, too"),
        (at_most + broadcasts, "A bucket of PyTorch's may hold more than its cap: it is sent when it has reached it"),
        (sum(buckets_of(grads, first, first)) + broadcasts, "Only the first bucket has the cap `first`"),
        (sum(buckets_of([g.flatten().view(torch.uint8) for g in grads], first, cap)) + broadcasts, ONE_TYPE),
    ]:
        if got == other:
            return hint
    return "Count the broadcasts, one for each type of buffer, then the buckets that get full, then those left over"


ONE_TYPE = "A bucket holds gradients of one type, and each type has an open bucket of its own"


def buckets_of(grads, first, cap):
    """How many buckets get full, and how many are left over."""
    held, full, caps = {}, 0, {}
    for grad in grads:
        held[grad.dtype] = held.get(grad.dtype, 0) + grad.nbytes
        if held[grad.dtype] >= caps.get(grad.dtype, first):
            del held[grad.dtype]
            full, caps[grad.dtype] = full + 1, cap
    return full, len(held)


# A bucket size for a link


@exercise
def check_best_cap(answer):
    """best_cap(ready, nbytes, latency, bandwidth, caps): the bucket size with which the last all-reduce ends first."""
    caps = [1, 4, 8, 100]
    for given in [
        ([1, 2, 3, 5, 9, 10], [1, 2, 8, 2, 4, 4], 2, 2),
        ([1, 2, 3, 4], [4, 4, 4, 4], 5, 4),
        ([3, 6, 9, 12], [2, 2, 2, 2], 0, 2),
        ([1, 6, 8, 9, 11], [4, 1, 8, 1, 6], 1, 4),
    ]:
        ready, nbytes, latency, bandwidth = given
        got = filled(answer(list(ready), list(nbytes), latency, bandwidth, list(caps)))
        check_cap(got, given, caps, f"ready {ready}, nbytes {nbytes}, latency {latency}, bandwidth {bandwidth}")
    return on_pcie(answer)


def check_cap(got, given, caps, case, unit=1):
    """`got` is that of `caps` with which the last all-reduce ends first; times are printed in `unit`."""
    expect(got in caps, f"{case}: {got!r} is none of the caps {caps}")
    ends = {cap: last_end(*given, cap) for cap in caps}
    right = min(ends, key=ends.get)
    table = ", ".join(f"{end / unit:.4g} with {cap}" for cap, end in ends.items())
    expect(
        got == right,
        f"{case}: {got} instead of {right}; the last all-reduce ends at {table}. "
        + (TOO_SMALL if got < right else TOO_LARGE),
    )


TOO_SMALL = (
    "Every bucket pays the latency, and all-reduces take turns: one starts when its bucket is full and the one before "
    "has ended"
)
TOO_LARGE = "A large bucket waits for its last gradient, and meanwhile the link has nothing to do"


def last_end(ready, nbytes, latency, bandwidth, cap):
    """When the last all-reduce ends."""
    end, held = 0, 0
    for i, (time, size) in enumerate(zip(ready, nbytes, strict=True)):
        held += size
        if held >= cap or i == len(ready) - 1:
            end = max(time, end) + latency + held / bandwidth
            held = 0
    return end


def on_pcie(answer):
    """The same for ResNet-18 with 8 images on each of four V100, and what the step takes with this cap, modelled."""
    with torch.device("meta"):
        net, shard, X = resnet18(), torch.empty(8, 1, 28, 28), torch.empty(32, 1, 28, 28)
    link, caps = find_link("pcie", GPUS["V100"]), [mib * 2**20 for mib in (1, 4, 25, 1000)]
    latency = ring_seconds(0, 4, link)
    bandwidth = 2**20 / (ring_seconds(2**20, 4, link) - latency)
    ready, nbytes = arrivals(net, shard, "V100")
    got = filled(answer(list(ready), list(nbytes), latency, bandwidth, list(caps)))
    given = ready, nbytes, latency, bandwidth
    check_cap(got, given, caps, "ResNet-18 on four V100 with PCIe, modelled, in ms and bytes", 1e-3)
    ours, one = (
        1e3 * predict(net, X, "V100", 4, "ddp", link="pcie", bucket_cap_mb=cap / 2**20).seconds
        for cap in (got, caps[-1])
    )
    return (
        f"with buckets of {got // 2**20} MiB, ResNet-18's step on four V100 with PCIe takes {ours:.1f} ms, with one "
        f"for all {one:.1f} ms (modelled)"
    )


# An evaluation


@exercise
def check_count_correct(answer):
    """count_correct(net, X, y, rank, world_size): (correct, images) of this rank, which add up to those of all."""
    for n, world_size in [(10, 4), (9, 2), (8, 4), (3, 4), (5, 1)]:
        X, y, net = torch.arange(float(n))[:, None], torch.arange(n) % 3, Remembering()
        right, counts, rows = int((net(X).argmax(1) == y).sum()), [], []
        net.taken()
        for rank in range(world_size):
            counts.append(pair(filled(answer(net, X, y, rank, world_size))))
            rows.append(net.taken())
        check_counts(counts, rows, right, n, f"{n} images, {world_size} rank{'s' * (world_size > 1)}")
    return "every image counts once, on any number of ranks"


class Remembering(nn.Module):
    """Takes images that hold their row's number, is right about two of three, and remembers whom it was shown."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, X):
        rows = X[:, 0].long()
        self.rows += rows.tolist()
        return nn.functional.one_hot((rows + (rows % 4 == 1)) % 3, 3).float()

    def taken(self):
        rows, self.rows = self.rows, []
        return rows


def pair(value):
    """The two numbers that an answer is."""
    try:
        correct, images = (float(number) for number in value)
    except (TypeError, ValueError):
        expect(
            False,
            f"{value!r} for a rank: return two numbers, how many images are classified correctly, and of how many",
        )
    return correct, images


def check_counts(counts, rows, right, n, case):
    """The (correct, images) of the ranks, who were shown `rows`, add up to `right` of `n`."""
    correct, images = (sum(numbers) for numbers in zip(*counts))
    shown = [row for part in rows for row in part]
    if images != n:
        expect(
            images != len(rows) or correct > len(rows),
            f"{case}: the ranks give {[tuple(round(number, 3) for number in part) for part in counts]}. A mean of the "
            "ranks' accuracies isn't the accuracy of all: return counts, which can be added up",
        )
        expect(len(shown) != n * len(rows), f"{case}: every rank counts all of them. Each should look at its own share")
        twice, never = sorted(row for row in {*shown} if shown.count(row) > 1), sorted({*range(n)} - {*shown})
        expect(
            not twice or images < n,
            f"{case}: {images:g} are counted, and those in rows {twice} twice. So that all ranks have equally many, "
            "DistributedSampler fills up with rows that it has given out already",
        )
        expect(not never, f"{case}: {images:g} are counted, and those in rows {never} never")
        expect(False, f"{case}: {images:g} are counted")
    expect(not math.isnan(correct), f"{case}: a rank says nan. What is the mean over no images?")
    expect(
        correct == right,
        f"{case}: {correct:g} are said to be correct, and {right} are: compare each with its own label",
    )
    most = max(len(part) for part in rows)
    expect(
        most <= -(-n // len(rows)),
        f"{case}: the sum is right, but one rank looks at {most} images while others wait: give each about as many",
    )
