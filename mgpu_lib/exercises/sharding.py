"""Checks for "Sharding": how many GPUs a network needs, a hook, what a step sends, files for other ranks, a hang.

None starts a process: what a rank sends is counted in a modelled one.
"""

import itertools
import math
from collections import OrderedDict
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mgpu_lib.exercises.framework import exercise, expect, filled
from virtual_gpus import GPUS, virtual_gpus

LLAMA_70B = 70_553_706_496  # parameters, see tests/library/test_transformer.py

# How many GPUs


@exercise
def check_ranks_needed(answer):
    """ranks_needed(parameters, memory, stage): the fewest GPUs that hold 4 + 4 + 8 bytes for each parameter."""
    cases = [(100, 400, 3), (100, 401, 3), (100, 1000, 1), (100, 1200, 1), (100, 700, 2), (100, 2000, 2)]
    cases += [(100, 799, 1), (100, 400, 2), (1, 16, 3), (10**12, 10**12, 3)]
    for given in cases:
        got, right = filled(answer(*given)), fewest(*given)
        parameters, memory, stage = given
        case = f"{parameters:,} parameters, {memory:,} bytes on each GPU, stage {stage}: {got!r} instead of {right}"
        expect(got == right, f"{case}. {ranks_slip(got, *given)}")
    memory = GPUS["A100-40"].memory
    return f"in stage 3, {answer(LLAMA_70B, memory, 3)} GPUs with 40 GB hold what Adam keeps for Llama 3 70B"


def fewest(parameters, memory, stage):
    """The least k with whole + shared / k <= memory, or infinity."""
    whole = parameters * (8, 4, 0)[stage - 1]
    shared = 16 * parameters - whole
    return -(-shared // (memory - whole)) if memory > whole else math.inf


def ranks_slip(got, parameters, memory, stage):
    """What may be wrong with a number of GPUs."""
    if fewest(parameters, memory, stage) == math.inf:
        return f"Each GPU keeps {(8, 4)[stage - 1]} bytes per parameter for itself, however many there are"
    if got == fewest(parameters, memory, 3):
        return f"Stage {stage} doesn't share all 16 bytes: which stay whole on every GPU?"
    if got == 16 * parameters // memory or got == fewest(parameters, memory, stage) - 1:
        return "So many are a little too few: round up"
    return "Solve (bytes that stay whole) + (bytes that are shared) / k <= memory for k"


# The hook of stage 2


@exercise
def check_on_gradient(answer):
    """on_gradient(unit, p): reduce-scatter the gradients once all are there, add to the shard's, free the others."""
    for shapes, ranks, passes in [([(2, 2)], 2, 1), ([(3,), (2, 2)], 4, 1), ([(2,), (5,), (3, 1)], 3, 3)]:
        unit, expected = LoneUnit(shapes, ranks), 0
        for number in range(passes):
            grads = [torch.full(shape, i + 1.0 + 10 * number) for i, shape in enumerate(shapes)]
            for i, (p, grad) in enumerate(reversed([*zip(unit.params, grads)])):
                p.grad = grad
                expect(answer(unit, p) is None, "A hook returns nothing: it changes `unit`")
                expect(i == len(shapes) - 1 or len(unit.sent) == number, EARLY)
            expect(len(unit.sent) == number + 1, f"{len(unit.sent)} reduce-scatters after {number + 1} passes")
            check_sent(unit, grads)
            expected = expected + unit.sent[-1].chunk(ranks)[0] * ranks  # as if all ranks had sent the same
            expect(unit.shard.grad is not None, "The shard has no gradient: the optimizer would not move it")
            check_sum(unit.shard.grad, expected, number)
            expect(all(p.grad is None for p in unit.params), "Whole gradients are left: set each p.grad to None")
    return "one reduce-scatter per pass, sums of shards, and no whole gradient is left"


EARLY = "A parameter's gradient isn't there yet: the unit has one reduce-scatter, when all of them are"


class LoneUnit:
    """Parameters of one layer as rank 0 has them; the other ranks send what this one sends."""

    def __init__(self, shapes, ranks):
        self.params, self.ranks, self.sent = [nn.Parameter(torch.zeros(shape)) for shape in shapes], ranks, []
        self.padding = -sum(p.numel() for p in self.params) % ranks
        self.shard = nn.Parameter(torch.zeros((sum(p.numel() for p in self.params) + self.padding) // ranks))

    def joined(self, tensors):
        expect(all(t is not None for t in tensors), EARLY)
        return torch.cat([*(t.detach().flatten() for t in tensors), torch.zeros(self.padding)])

    def reduce_scatter(self, whole):
        expect(not any(p.grad is None for p in self.params), EARLY)
        size = self.ranks * self.shard.numel()
        expect(whole.shape == (size,), f"reduce_scatter of {tuple(whole.shape)} instead of ({size},): join, with zeros")
        self.sent.append(whole.detach().clone())
        return whole.detach().chunk(self.ranks)[0] * self.ranks


def check_sent(unit, grads):
    whole, right = unit.sent[-1], unit.joined(grads) / unit.ranks
    expect(not whole.allclose(right * unit.ranks), "A mean, not a sum: divide by the number of ranks")
    expect(whole.allclose(right), "What is sent must be all gradients of this pass, in the order of `unit.params`")


def check_sum(got, right, number):
    expect(got.shape == right.shape, f"a gradient of shape {tuple(got.shape)} for a shard of {tuple(right.shape)}")
    slip = "The first pass's gradient is lost: add" if number else "Keep what reduce_scatter returns"
    expect(got.allclose(right), f"pass {number + 1}: {listed(got)} instead of {listed(right)}. {slip}")


def listed(tensor):
    return " ".join(f"{x:g}" for x in tensor.flatten().tolist())


# What a step with fully_shard sends


@exercise
def check_fsdp_bytes(answer):
    """fsdp_bytes(parameters, k, passes, sync, keep): bytes that a rank sends in a step, and keeps between passes."""
    for sync, keep, (k, passes) in itertools.product((True, False), (False, True), [(2, 2), (4, 5)]):
        parameters, *right = modelled_bytes(k, passes, sync, keep)
        got = filled(answer(parameters, k, passes, sync, keep))
        case = f"{parameters:,} parameters, {k} ranks, {passes} passes, sync={sync}, keep={keep}"
        expect(isinstance(got, (tuple, list)) and len(got) == 2, f"{case}: {got!r}. Return two numbers")
        for what, mine, theirs in zip(("sent", "kept"), got, right):
            expect(
                not isinstance(mine, bool) and isinstance(mine, (int, float)) and abs(mine - theirs) < 1,
                f"{case}: {mine!r} bytes {what} instead of {theirs:,} in a modelled step. "
                + bytes_slip(what, mine, theirs, parameters, k, passes, sync, keep),
            )
    return "eight modelled steps of fully_shard send and keep as much"


def modelled_bytes(k, passes, sync, keep):
    """(parameters, bytes that rank 0 sends, bytes between passes beside its shards) of a small network's step."""
    with rank_0_of(k) as machine, torch.random.fork_rng(devices=[]):
        net = nn.Sequential(*(nn.Linear(32, 32, bias=False, device="cuda") for _ in range(3)))
        for layer in net:
            fully_shard(layer, reshard_after_forward=not keep)
        fully_shard(net)
        torch.cuda.synchronize()
        start, before = machine.elapsed(), torch.cuda.memory_allocated()
        for i in range(passes):
            last = i == passes - 1
            net.set_requires_gradient_sync(sync or last)
            net.set_reshard_after_backward(last or not keep)
            if i == 1:
                torch.cuda.synchronize()
                kept = torch.cuda.memory_allocated() - before
            net(torch.empty(1, 32, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        events = [e for e in machine.timeline.since(start) if e.kind == "collective"]
    return 3 * 32 * 32, sum(event.nbytes for event in events) * (k - 1) // k, kept


@contextmanager
def rank_0_of(k, backing="meta"):
    """A machine, by default of shapes only, in a process that is rank 0 of `k`; nobody is waited for."""
    expect(not dist.is_initialized(), "this notebook is in a process group: call dist.destroy_process_group() first")
    with virtual_gpus(k, backing=backing) as machine:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=k)
        try:
            yield machine
        finally:
            dist.destroy_process_group()


def bytes_slip(what, got, right, parameters, k, passes, sync, keep):
    """What may be wrong with a number of bytes."""
    if not isinstance(got, (int, float)) or not got:
        return "Return numbers"
    if abs(got * 4 - right) < 1:
        return "A parameter has 4 bytes"
    if what == "kept" and keep and abs(got + 4 * parameters - right) < 1:
        return "The gathered parameters are there, too"
    if what == "kept":
        return "A shard of the gradient" if sync else "Nothing is scattered yet: how much of the gradient is there?"
    if abs(got * (k - 1) / k - right) < 1:
        return "Around a ring, a rank sends (k - 1)/k of what is gathered or scattered: one part is its own"
    one = 4 * parameters * (k - 1) / k  # of a collective
    if keep:
        return "What is kept until the last backward pass need not be gathered again: name each collective"
    if round(right / one) - round(got / one) == passes:
        return "Parameters are freed after the forward pass, too: the backward pass gathers them again"
    return f"That is {got / one:.3g} times a network's worth, and {right / one:.3g} are sent: name each collective"


# Files for another number of ranks


@exercise
def check_pieces(answer):
    """pieces(rows, old, new, rank): what `rank` of `new` reads, [(old rank, first row, number of rows)]."""
    for rows, old, new in [(10, 4, 3), (65, 8, 6), (65, 6, 8), (12, 2, 4), (9, 8, 2), (3, 2, 6), (7, 1, 5), (8, 4, 4)]:
        files, needed = rows_of_ranks(rows, old), rows_of_ranks(rows, new)
        for rank in range(new):
            shared = [[row for row in file if row in needed[rank]] for file in files]
            right = [(file, found[0], len(found)) for file, found in enumerate(shared) if found]
            got = filled(answer(rows, old, new, rank))
            case = f"{rows} rows, from {old} rank{'s' * (old > 1)} to {new}, rank {rank}"
            expect(
                isinstance(got, list) and all(isinstance(piece, tuple) and len(piece) == 3 for piece in got),
                f"{case}: {got!r}. Return a list of (old rank, first row, number of rows)",
            )
            expect(got == right, f"{case}: {got} instead of {right}. {pieces_slip(got, files, needed[rank])}")
    return "each rank opens only the files that have rows of its own, and reads every row once"


def rows_of_ranks(rows, ranks):
    """The rows of each rank, as `fully_shard` cuts a tensor: the last ranks may have fewer, or none."""
    parts = [part.tolist() for part in torch.arange(rows).chunk(ranks)]
    return parts + [[]] * (ranks - len(parts))


def pieces_slip(got, files, needed):
    """What may be wrong with the pieces of a rank."""
    if any(count < 1 for *_, count in got):
        return "A file that has none of this rank's rows need not be opened"
    read = {row: file for file, first, count in got for row in range(first, first + count)}
    if sorted(read) != needed:
        span = f"rows {needed[0]} to {needed[-1]}" if needed else "no rows"
        return f"This rank has {span}: a shard has rows / ranks of them, rounded up, and the last ranks what is left"
    for row, file in read.items():
        if not 0 <= file < len(files) or row not in files[file]:
            return f"Row {row} isn't in the file of rank {file}"
    return "One piece for each file, in the order of the rows"


# A collective for one rank


@exercise
def check_logged_norm(answer):
    """logged_norm(net, rank): the norm of a sharded matrix on rank 0, None elsewhere, with collectives on all ranks."""
    with rank_0_of(4) as machine:
        calls, nbytes = zip(*(calls_of(answer, machine, rank) for rank in (0, 1)))
    expect(calls[0] or calls[1], "Nobody talks to anybody: each rank has only its own rows of the matrix")
    expect(
        calls[0] == calls[1],
        f"rank 0 calls {named(calls[0])}, rank 1 calls {named(calls[1])}. A collective is for all ranks: who calls it "
        "alone waits forever",
    )
    with rank_0_of(1, backing="cpu"):
        net = sharded_head()
        nn.init.constant_(net.head.weight, 0.5)
        here, elsewhere = answer(net, 0), answer(net, 1)
        expect(type(here) is not DTensor, "rank 0 returns a DTensor: all ranks must make an ordinary tensor of it")
        expect(here.numel() == 1, f"rank 0 returns a tensor of {tuple(here.shape)} instead of one number")
        expect(abs(here.item() - 8) < 1e-4, f"the norm is 8, and rank 0 returns {here.item():g}")
        expect(elsewhere is None, "Elsewhere than on rank 0 it returns None")
    sent = f"all ranks call {named(calls[0])}, for {nbytes[0]:,} bytes"
    return sent + (MATRIX if nbytes[0] >= 8 * 32 * 4 else "")


MATRIX = ". Right, but you sent the whole matrix: each rank can send the norm of its own rows instead"


def sharded_head():
    """A network with a `head` of 8 × 32 numbers, sharded over all ranks."""
    return fully_shard(nn.Sequential(OrderedDict(head=nn.Linear(32, 8, bias=False, device="cuda"))))


def calls_of(answer, machine, rank):
    """(names of the collectives that an answer calls as this rank, their bytes), with shapes only."""
    net = sharded_head()
    torch.cuda.synchronize()
    start = machine.elapsed()
    answer(net, rank)
    torch.cuda.synchronize()
    events = [event for event in machine.timeline.since(start) if event.kind == "collective"]
    return [event.name for event in events], sum(event.nbytes for event in events)


def named(calls):
    return " and ".join(calls) or "nothing"
