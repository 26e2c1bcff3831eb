"""Checks for "DistributedDataParallel": a script on two machines, collectives of a step, buckets, resuming, evaluation.

No process is started. A script runs as each of the ranks in turn, on virtual GPUs that hold shapes only, where
collectives need no partner.
"""

import copy
import io
import math
import os
import pickle
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from mgpu_lib.collectives import buckets
from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.models import resnet18
from mgpu_lib.prediction import predict, process_group
from mgpu_lib.virtual import GPUS, find_link, ring_seconds, virtual_gpus

MIB = 2**20


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
            check_rows(ran, where, machines)
            shares.append(len(ran[0].rows) // 2)
    one, two, four = shares
    return f"an epoch gives one GPU all {one} images, each of two GPUs {two}, and each of four on two machines {four}"


IMAGES = 32


class Images(Dataset):
    """Images and labels that remember who was looked at."""

    def __init__(self):
        self.rows = []

    def __len__(self):
        return IMAGES

    def __getitem__(self, row):
        self.rows.append(int(row))
        return torch.zeros(1, 28, 28), row % 10


class Ran(NamedTuple):
    """What a script did on one rank."""

    rows: list  # of the data, in order
    gpus: set  # that have worked
    calls: list  # (name, bytes) of the collectives, in order


def run_as(script, rank, machines, gpus):
    """What `script` does as one rank of many, alone: its GPUs hold shapes only, and collectives come to nothing."""
    world_size, data = machines * gpus, Images()
    names = {"RANK": rank, "LOCAL_RANK": rank % gpus, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": gpus}
    names |= {"GROUP_RANK": rank // gpus, "GROUP_WORLD_SIZE": machines}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        virtual_gpus(gpus, backing="meta") as machine,
        in_place_of_ranks(rank, world_size),
    ):
        filled(script(data), in_place=True)
        events = list(machine.timeline)
    calls = [(event.name, event.nbytes) for event in events if event.kind == "collective"]
    return Ran(data.rows, {event.gpu for event in events}, calls)


@contextmanager
def in_place_of_ranks(rank, world_size):
    """Inside, init_process_group makes a group in which this process is `rank`, and nobody is waited for.

    To PyTorch the rank is always 0. It warns of a process whose rank changes, and a dry run never looks at it.
    """
    begin = dist.init_process_group

    def init_process_group(*args, **kwargs):
        begin("nccl", store=dist.HashStore(), rank=0, world_size=world_size)

    expect(not dist.is_initialized(), "this notebook is in a process group: call dist.destroy_process_group() first")
    try:
        with (
            mock.patch.object(dist, "init_process_group", init_process_group),
            mock.patch.object(dist, "get_rank", lambda group=None: rank),
        ):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


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


def check_rows(ran, where, machines):
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
        first, cap = (int(size * MIB) for size in caps)
        got = filled(answer(list(grads), list(buffers), first, cap))
        if got != len(calls):
            sent = ", ".join(f"{name} of {nbytes:,} bytes" for name, nbytes in calls)
            hint = collectives_slip(got, grads, buffers, first, cap)
            expect(False, f"{case}: {got!r} instead of {len(calls)} collectives ({sent}). {hint}")
    return f"four modelled steps call as many; ResNet-18 has {len(grads)} gradients and needs {len(calls)} collectives"


def collective_cases():
    """(what it is, network, its input, MiB of the first and of the other buckets); (1, 25) is PyTorch's default."""
    wide = torch.empty(4, 512)
    with torch.device("meta"):
        yield "five gradients of 0.75 MiB, buckets of 2 MiB", nn.Sequential(*layers(5)), wide, (2, 2)
        norms = [nn.BatchNorm1d(384), nn.BatchNorm1d(384)]
        yield "one gradient of 0.75 MiB and two batch norms", nn.Sequential(*layers(1), *norms), wide, (1, 25)
        yield "gradients of two types in turn, buckets of 0.5 MiB", nn.Sequential(*mixed()), wide, (0.5, 0.5)
        yield "ResNet-18 with PyTorch's buckets of 1 and 25 MiB", resnet18(), torch.empty(4, 1, 28, 28), (1, 25)


def layers(n):
    """`n` linear layers of 0.75 MiB."""
    return [nn.Linear(*((512, 384) if i % 2 == 0 else (384, 512)), bias=False) for i in range(n)]


class To(nn.Module):
    """Numbers of another type."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, X):
        return X.to(self.dtype)


def mixed():
    """Layers of 0.75 MiB in float32 and of half as much in bfloat16, in turn."""
    first, second, third, fourth = layers(4)
    half = To(torch.bfloat16), To(torch.float32)
    return [first, half[0], second.bfloat16(), half[1], third, half[0], fourth.bfloat16()]


def ddp_step(net, X, bucket_cap_mb):
    """(gradients in the order in which they come, buffers, (name, bytes) of each collective) of a modelled step."""
    came = []
    with virtual_gpus(2, backing="meta") as machine, process_group(2):
        net, X = net.to_empty(device="cuda:0"), X.to("cuda:0")
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(came.append)
        model = DistributedDataParallel(net, device_ids=[0], bucket_cap_mb=bucket_cap_mb)
        for _ in range(3):  # the first has one bucket, the second begins with the ranks agreeing on others
            came.clear()
            torch.cuda.synchronize()
            start = machine.elapsed()
            model(X).sum().backward()
        torch.cuda.synchronize()
        step = machine.timeline.since(start)
    grads, buffers = ([torch.empty_like(t, device="meta") for t in tensors] for tensors in (came, net.buffers()))
    return grads, buffers, [(event.name, event.nbytes) for event in step if event.kind == "collective"]


def collectives_slip(got, grads, buffers, first, cap):
    """What may be wrong with a number of collectives."""
    broadcasts = len({buffer.dtype for buffer in buffers})
    full, left = buckets_of(grads, first, cap)
    at_most = len(buckets(grads[::-1], cap))
    for other, hint in [
        (full + left, "What happens to the buffers before the forward pass?"),
        (full + left + len(buffers), "Buffers of one type travel in one broadcast"),
        (len(grads) + broadcasts, "Gradients travel together until a bucket is full"),
        (full + broadcasts, "What is left in a bucket when the last gradient has come is sent, too"),
        (sum(buckets_of(grads, cap, cap)) + broadcasts, "The first bucket has a cap of its own"),
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
        f"{case}: {got} instead of {right}; the last all-reduce ends at {table}. {cap_slip(got, *given, caps)}",
    )


def sent_at(ready, nbytes, cap):
    """(when it is full, its bytes) for each bucket."""
    held, found = 0, []
    for i, (time, size) in enumerate(zip(ready, nbytes, strict=True)):
        held += size
        if held >= cap or i == len(ready) - 1:
            found.append((time, held))
            held = 0
    return found


def last_end(ready, nbytes, latency, bandwidth, cap):
    end = 0
    for full, size in sent_at(ready, nbytes, cap):
        end = max(full, end) + latency + size / bandwidth
    return end


def cap_slip(got, ready, nbytes, latency, bandwidth, caps):
    """What may be wrong with a cap."""

    def alone(cap):
        return max(full + latency + size / bandwidth for full, size in sent_at(ready, nbytes, cap))

    if got == max(caps):
        return "One bucket pays the latency once, but nothing of it travels while the backward pass runs"
    if got == min(caps, key=lambda cap: last_end(ready, nbytes, 0, bandwidth, cap)):
        return "Each all-reduce has the latency, however small it is"
    if got == min(caps, key=alone):
        return "All-reduces take turns: one starts when its bucket is full and the one before has ended"
    return "A bucket is sent when it has reached the cap, by its last gradient; what is left at the end is sent, too"


def on_pcie(answer):
    """The same for ResNet-18 with 8 images on each of four V100, and what the step takes with this cap, modelled."""
    net, link, caps = resnet18(), find_link("pcie", GPUS["V100"]), [MIB, 4 * MIB, 25 * MIB, 1000 * MIB]
    latency = ring_seconds(0, 4, link)
    bandwidth = MIB / (ring_seconds(MIB, 4, link) - latency)
    given = *arrivals(net, torch.empty(8, 1, 28, 28), "V100"), latency, bandwidth
    got = filled(answer(*map(list, given[:2]), *given[2:], list(caps)))
    check_cap(got, given, caps, "ResNet-18 on four V100 with PCIe, modelled", 1e-3)
    X = torch.empty(32, 1, 28, 28, device="meta")
    ours, one = (
        1e3 * predict(net, X, "V100", 4, "ddp", link="pcie", bucket_cap_mb=cap / MIB).seconds for cap in (got, caps[-1])
    )
    return (
        f"with buckets of {got // MIB} MiB, ResNet-18's step on four V100 with PCIe takes {ours:.1f} ms, with one for "
        f"all {one:.1f} ms (modelled)"
    )


def arrivals(net, X, gpu):
    """When each gradient is there, in modelled seconds from the beginning of the backward pass, and its bytes."""
    came = []
    with virtual_gpus(1, gpu, backing="meta"):
        net, X = copy.deepcopy(net).to("cuda:0"), X.to("cuda:0")

        def arrived(p):
            came.append((event(), p.nbytes))

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(arrived)
        loss = net(X).sum()
        torch.cuda.synchronize()
        start = event()
        loss.backward()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for end, _ in came], [nbytes for _, nbytes in came]


def event():
    """The time at which the GPU comes to here."""
    now = torch.cuda.Event(enable_timing=True)
    now.record()
    return now


# Resuming to the bit


@exercise
def check_resumable(answer):
    """resumable(net, X, y, sampler, checkpoint, save): trains for three epochs; goes on from what it gave to save."""
    with torch.random.fork_rng(devices=[]):
        whole = training(answer, seed=0)
        expect(whole.rows == right_rows(), "without a checkpoint, the rows differ from those of the loop given")
        expect(
            len(whole.saved) == len(whole.rows),
            f"save was called {len(whole.saved)} times for {len(whole.rows)} steps: call it at the end of every step",
        )
        for done in sorted(range(1, len(whole.rows)), key=lambda done: done != TELLING):
            again = training(answer, seed=done, checkpoint=loaded(whole.saved[done - 1]))
            check_resumed(again, whole, done)
    return f"after whichever of its {len(whole.rows)} steps the run died, resumed it ends with the same bits"


EPOCHS, SHARE, ROWS = 3, 12, 4  # epochs, rows of this rank in an epoch, rows of a step
PLAIN = "save state dicts, tensors and numbers, not the objects themselves"
TELLING = 5  # after so many steps, to start over, to repeat an epoch and to repeat a step are three different things


class Trained(NamedTuple):
    """What a run of training did."""

    rows: list  # of each step
    params: list  # all of them in one tensor, before each step and after the last
    draws: list  # the state of the random numbers before each forward pass
    saved: list  # the bytes of each checkpoint


def training(answer, seed, checkpoint=None):
    """Let `answer` train in what is to it a new process: another network, and random numbers from another `seed`."""
    torch.manual_seed(seed)
    net, run = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3)), Trained([], [], [], [])
    X = torch.linspace(-1, 1, 2 * SHARE)[:, None] ** torch.arange(6)
    y = torch.arange(2 * SHARE) % 3

    def look(module, inputs):
        run.rows.append([(row == X).all(1).nonzero().item() for row in inputs[0]])
        run.params.append(flat(module))
        run.draws.append(torch.get_rng_state())

    def save(content):
        file = io.BytesIO()
        try:
            torch.save(filled(content), file)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            expect(False, f"the checkpoint can't be written ({error}): {PLAIN}")
        run.saved.append(file.getvalue())

    net.register_forward_pre_hook(look)
    filled(answer(net, X, y, DistributedSampler(X, 2, 1), checkpoint, save), in_place=True)
    run.params.append(flat(net))
    return run


def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def loaded(saved):
    """A checkpoint as a new process reads it."""
    try:
        return torch.load(io.BytesIO(saved), weights_only=True)
    except pickle.UnpicklingError:
        expect(False, f"the checkpoint can't be loaded with weights_only=True: {PLAIN}")


def right_rows():
    sampler, rows = DistributedSampler(range(2 * SHARE), 2, 1), []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        rows += [order[i : i + ROWS] for i in range(0, SHARE, ROWS)]
    return rows


def check_resumed(again, whole, done):
    """`again`, resumed after `done` steps, did what `whole` did from there on."""
    case, steps = f"resumed after step {done} of {len(whole.rows)}", SHARE // ROWS
    expect(again.rows, f"{case}, the run takes no step")
    expect(
        again.rows != whole.rows,
        f"{case}, the run starts over: it takes all {len(whole.rows)} steps again",
    )
    if again.rows[0] != whole.rows[done]:
        begins = whole.rows[done // steps * steps]
        expect(
            again.rows[0] != begins,
            f"{case}, the run repeats the epoch from its start. How many of its steps are done?",
        )
        expect(
            again.rows[0] != whole.rows[done - 1],
            f"{case}, the run takes step {done} again: what you save is how many steps are done, and one has just been",
        )
        expect(
            False,
            f"{case}, the next rows are {again.rows[0]} instead of {whole.rows[done]}: which epoch is it, and which "
            "step in it?",
        )
    expect(
        again.rows == whole.rows[done:],
        f"{case}, the first rows are right, and {len(again.rows)} steps follow instead of {len(whole.rows) - done}, or "
        "with other rows. Are steps skipped in the first epoch only, and does the sampler know each epoch?",
    )
    expect(
        again.params[0].equal(whole.params[done]),
        f"{case}, the network doesn't have the parameters that it had",
    )
    expect(
        again.draws[0].equal(whole.draws[done]),
        f"{case}, rows and parameters are right, but dropout draws other random numbers: torch.get_rng_state()",
    )
    expect(
        again.params[1].equal(whole.params[done + 1]),
        f"{case}, everything is as it was up to the first update, which is another one. What does the optimizer "
        "remember of the steps before?",
    )
    expect(
        again.params[-1].equal(whole.params[-1]),
        f"{case}, the first step is the same to the bit, and a later one isn't. Whose step was lost: which learning "
        "rate comes next?",
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
