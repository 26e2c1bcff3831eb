"""Checks for "DistributedDataParallel": a script on two machines, buckets, their size, and who is missing in a hang.

None starts a process. A script runs as each of its ranks in turn, and one rank is enough to model a step.
"""

import contextlib
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.exercises.one_rank import IMAGES, arrivals, run_as
from mgpu_lib.models import resnet18
from mgpu_lib.prediction import predict
from virtual_gpus import GPUS, dry_run, find_link, ring_seconds

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


# Buckets

RANKS = 4  # whose gradients the check stands in for: rank r has r + 1 times those of rank 0
MEAN, SUM = (RANKS + 1) / 2, RANKS * (RANKS + 1) / 2  # over all ranks, in gradients of rank 0


@exercise
def check_bucketed(answer):
    """bucketed(net, bucket_mb): averages gradients in buckets, during the backward pass; returns how to finish."""
    for sizes, frozen, mib in [([8, 8, 8, 8], False, 2**-12), ([16, 4, 9, 5, 7], True, 2**-10), ([6, 3], False, 1)]:
        with torch.random.fork_rng(devices=[]):
            net = nn.Sequential(*[nn.Linear(n, m) for n, m in itertools.pairwise(sizes)]).double()
        net[0].requires_grad_(not frozen)
        ours = OtherRanks()
        with ours.stand_in():
            finish = filled(answer(net, mib))
            for step in ("in the first step", "in the second step"):
                check_buckets(net, finish, ours, mib, f"{len(net)} layers, buckets of {mib * 2**20:.0f} bytes, {step}")
    return bucketed_on_pcie(answer)


class OtherRanks:
    """What has been all-reduced, as (bytes, whether in the backward pass), with the ranks that aren't there."""

    def __init__(self):
        self.sent, self.steps, self.backward = [], 0, False

    @contextlib.contextmanager
    def stand_in(self):
        with (
            mock.patch.object(dist, "all_reduce", self.all_reduce),
            mock.patch.object(dist, "get_world_size", lambda group=None: RANKS),
            mock.patch.object(dist, "get_rank", lambda group=None: 0),
        ):
            yield

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        expect(op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"all_reduce with op={op}: wanted is a sum or a mean")
        self.sent.append((tensor.nbytes, self.backward))
        work = Work(self, tensor, MEAN if op == dist.ReduceOp.AVG else SUM)
        if async_op:
            return work
        expect(not self.backward, "the backward pass stops at each all-reduce: call it with async_op=True")
        return work.wait()


class Work:
    """An all-reduce whose result is there when somebody has waited for it."""

    def __init__(self, ranks, tensor, factor):
        self.ranks, self.step, self.tensor, self.factor = ranks, ranks.steps, tensor, factor

    def wait(self):
        expect(self.step == self.ranks.steps, "a step waits for all-reduces of the step before: forget what has come")
        self.tensor.data.mul_(self.factor)
        self.factor = 1


def check_buckets(net, finish, ours, mib, case):
    """A step sends the buckets that it should, when it should, and leaves the mean in each gradient."""
    params = [p for p in net.parameters() if p.requires_grad]
    X = torch.linspace(-1, 1, 3 * net[0].in_features, dtype=torch.float64).reshape(3, -1)
    own = torch.autograd.grad(net(X).square().sum(), params)
    net.zero_grad()
    ours.sent, ours.steps, ours.backward = [], ours.steps + 1, True
    net(X).square().sum().backward()
    ours.backward = False
    finish()
    check_sent(ours.sent, buckets_of(own[::-1], mib * 2**20), len(params), case)
    for (name, p), before in zip(((n, p) for n, p in net.named_parameters() if p.requires_grad), own, strict=True):
        factor = (p.grad / before).nanmean().item()
        if not torch.allclose(p.grad, MEAN * before, rtol=1e-10, atol=0):
            slip = SLIPS.get(round(factor, 6), "not the mean of all ranks'")
            expect(False, f"{case}: the gradient of {name} is {slip}")


SLIPS = {
    1: "still this rank's own: is it sent, waited for, and copied back?",
    1 / RANKS: "this rank's own, divided by the number of ranks: is it waited for, and copied back?",
    SUM: "the sum of all ranks': divide it by their number",
    MEAN / RANKS: "divided by the number of ranks twice",
}


def check_sent(sent, expected, n, case):
    """`sent`, as (bytes, whether in the backward pass), are buckets of these bytes, sent as soon as they are full."""
    sizes = [nbytes for nbytes, _ in sent]
    expect(
        sent, f"{case}: nothing is all-reduced. What is left in a bucket when the backward pass is over is sent then"
    )
    expect(sum(sizes) <= sum(expected), f"{case}: {sum(sizes)} bytes are sent, and there are {sum(expected)}")
    expect(len(sent) < n or len(expected) == n, f"{case}: {len(sent)} all-reduces, one for each gradient")
    expect(
        sum(sizes) == sum(expected),
        f"{case}: {sum(sizes)} bytes are sent, and there are {sum(expected)}. What is left in a bucket when the "
        "backward pass is over?",
    )
    expect(sizes == expected, f"{case}: buckets of {sizes} bytes are sent instead of {expected}")
    full = sum(nbytes >= expected[0] for nbytes in expected[:-1])
    early = sum(in_backward for _, in_backward in sent)
    expect(early >= full, f"{case}: {early} of {len(sent)} buckets are sent during the backward pass: use hooks")


def buckets_of(grads, cap):
    """The bytes of each bucket: it is sent when it holds `cap` bytes, the last at the end."""
    full, held = [], 0
    for grad in grads:
        held += grad.nbytes
        if held >= cap:
            full.append(held)
            held = 0
    return full + [held] * (held > 0)


def bucketed_on_pcie(answer):
    """What ResNet-18's step takes with buckets of 4 MiB and with one for all, modelled."""
    ours, one = (1e3 * predict_with(answer, mib) for mib in (4, 1000))
    return (
        f"each gradient is the mean of all ranks'. ResNet-18's step on four A100s with PCIe takes {ours:.1f} ms with "
        f"buckets of 4 MiB, and {one:.1f} ms with one for all (modelled)"
    )


def predict_with(hook, mib):
    """Seconds of a step of ResNet-18, 32 images on each of four A100s."""
    with torch.device("meta"):  # where making a network draws no random numbers
        network = resnet18()

    def program():
        net, X, y = (
            network.to_empty(device="cuda"),
            torch.empty(32, 1, 28, 28).cuda(),
            torch.empty(32, dtype=torch.long).cuda(),
        )
        finish = hook(net, mib)

        def step():
            net.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            finish()

        return step

    timeline = dry_run(program, RANKS, "A100-80", link="pcie").timeline
    return timeline.end - timeline.start


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


# Who is missing


@exercise
def check_missing_rank(answer):
    """missing_rank(dumps): (rank, number of the collective) where a rank isn't with the others."""
    for case, dumps, right in hangs():
        got = filled(answer({rank: list(calls) for rank, calls in dumps.items()}))
        if got == right:
            continue
        rank, number = right
        shortest = min(dumps, key=lambda rank: len(dumps[rank]))
        expect(
            not (isinstance(got, tuple) and got[:1] == (shortest,)) or shortest == rank,
            f"{case}: {got} instead of {right}. A short list may only mean that the recorder keeps few entries",
        )
        expect(
            not (isinstance(got, tuple) and got[:1] == (rank,)),
            f"{case}: rank {rank} it is, but the first collective at which it is missing is {number}, not {got[1:]}",
        )
        expect(False, f"{case}: {got!r} instead of {right}: compare what each rank has called under one number")
    return "found in each of seven hangs, whatever the recorders still had"


def hangs():
    """(what has happened, the ranks' last collectives, the answer)"""
    steps = ["all_reduce", "all_reduce", "broadcast"] * 4
    calls = list(enumerate(steps, start=40))
    other = [*calls[:5], (45, "all_gather"), *calls[6:8]]
    once_more = [*calls[:5], (45, "all_reduce"), (46, "broadcast")]
    too_few = [*calls[:4], (44, "broadcast"), (45, "all_reduce"), (46, "all_reduce"), (47, "broadcast")]
    return [
        ("rank 1 has left", {0: calls[:4], 1: calls[:3], 2: calls[:4], 3: calls[:4]}, (1, 43)),
        ("rank 0 has left, others have gone on", {0: calls[:5], 1: calls[:9], 2: calls[:8]}, (0, 45)),
        ("rank 3 has left, and rank 0 keeps few", {0: calls[6:8], 1: calls[:8], 2: calls[:8], 3: calls[:7]}, (3, 47)),
        ("rank 2 calls another one", {0: calls[:8], 1: calls[1:7], 2: other, 3: calls[:8]}, (2, 45)),
        ("rank 0 calls one twice", {0: once_more, 1: calls[:8], 2: calls[:6], 3: calls[2:8]}, (0, 45)),
        ("rank 1 leaves one out", {0: calls[:7], 1: too_few, 2: calls[3:6]}, (1, 44)),
        ("rank 1 has left, others keep few", {0: calls[3:5], 1: calls[:2], 2: calls[3:5], 3: calls[4:7]}, (1, 42)),
    ]
