"""Checks for "Sharding": how many GPUs a network needs, what a step sends, shards for other ranks, groups of a mesh.

None starts a process: what a step sends is counted in a modelled one.
"""

import math
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.zero import ZeRO
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


# What a step sends


@exercise
def check_sent_bytes(answer):
    """sent_bytes(parameters, k, stage, micro_batches): bytes that one rank sends for a step, around rings."""
    for stage in (1, 2, 3):
        for k, micro_batches in [(2, 1), (4, 1), (4, 3)]:
            parameters, right = sent_by_model(k, stage, micro_batches)
            got = filled(answer(parameters, k, stage, micro_batches))
            times = f"{micro_batches} micro-batch" + "es" * (micro_batches > 1)
            case = f"{parameters:,} parameters, {k} ranks, stage {stage}, {times}: {got!r} instead of {right:,} bytes"
            expect(
                not isinstance(got, bool) and isinstance(got, (int, float)) and abs(got - right) < 1,
                f"{case} in a modelled step. {sent_slip(got, parameters, k, stage, micro_batches, right)}",
            )
    return "nine modelled steps send as much"


def sent_by_model(k, stage, micro_batches):
    """(parameters, bytes that rank 0 sends) of a modelled step of a small network."""
    with rank_0_of(k) as machine, torch.random.fork_rng(devices=[]):
        net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
        zero = ZeRO(net, partial(torch.optim.Adam, lr=0.001), stage, net)
        torch.cuda.synchronize()
        start = machine.elapsed()
        for _ in range(micro_batches):
            zero(torch.empty(1, 32, device="cuda")).sum().backward()
        zero.step()
        torch.cuda.synchronize()
        events = [e for e in machine.timeline.since(start) if e.kind == "collective"]
    return 3 * 32 * 32, sum(event.nbytes for event in events) * (k - 1) // k


@contextmanager
def rank_0_of(k):
    """A machine that holds shapes only, in a process that is rank 0 of `k`; nobody is waited for."""
    expect(not dist.is_initialized(), "this notebook is in a process group: call dist.destroy_process_group() first")
    with virtual_gpus(k, backing="meta") as machine:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=k)
        try:
            yield machine
        finally:
            dist.destroy_process_group()


def sent_slip(got, parameters, k, stage, micro_batches, right):
    """What may be wrong with a number of bytes."""
    if not isinstance(got, (int, float)) or not got:
        return "Return a number"
    one = 4 * parameters * (k - 1) / k  # of a collective
    rounds, expected = got / one, right / one
    if abs(got * (k - 1) / k - right) < 1 or abs(got / k * (k - 1) - right) < 1:
        return "Around a ring, a rank sends (k - 1)/k of what is gathered or scattered: one part is its own"
    if abs(got * 4 - right) < 1:
        return "A parameter has 4 bytes"
    if micro_batches > 1 and stage == 1:
        return "In stage 1 gradients add up where they are, and are scattered once, in step()"
    if micro_batches > 1:
        return (
            "Which collectives belong to a backward pass, so that each micro-batch calls them, and which to the step?"
        )
    return f"That is {rounds:.3g} times a network's worth, and {expected:.3g} are sent: name each collective"


# Shards for another number of ranks


@exercise
def check_reshard(answer):
    """reshard(shards, numel, ranks): the shards that so many ranks have of the same parameters."""
    for numel, before, after in [(12, 3, 4), (12, 4, 2), (10, 4, 3), (10, 3, 4), (7, 1, 5), (3, 2, 6), (9, 6, 1)]:
        values = torch.arange(1.0, numel + 1)
        shards, right = cut(values, before), cut(values, after)
        got = filled(answer([shard.clone() for shard in shards], numel, after))
        case = f"{numel} numbers, from {before} rank{'s' * (before > 1)} to {after}"
        expect(len(got) == after, f"{case}: {len(got)} shards instead of {after}")
        expect(all(isinstance(shard, torch.Tensor) for shard in got), f"{case}: return a list of tensors")
        expect(
            all(torch.equal(mine, theirs) for mine, theirs in zip(got, right)),
            f"{case}: {listed(got)} instead of {listed(right)}. {reshard_slip(got, shards, numel, after)}",
        )
    return "all shards are as if the parameters had been cut for that many ranks from the start"


def cut(values, ranks):
    """`values`, with as many zeros behind them as it takes, in equal shards."""
    return list(torch.cat([values, values.new_zeros(-len(values) % ranks)]).chunk(ranks))


def listed(shards):
    return " | ".join(" ".join(f"{x:g}" for x in shard.flatten().tolist()) or "nothing" for shard in shards)


def reshard_slip(got, shards, numel, after):
    """What may be wrong with shards."""
    joined = torch.cat([shard.flatten() for shard in got])
    if len(joined) - numel >= after:
        return "The zeros at the end of the old shards are padding for the old ranks, not parameters"
    if len({len(shard) for shard in got}) > 1:
        return "All shards have the same size: a collective wants that"
    if not torch.equal(joined[:numel], torch.cat(shards)[:numel]):
        return "The numbers have changed, or their order"
    return "Behind the numbers there are zeros, as few as make the shards equal"


# Groups of a mesh


@exercise
def check_mesh_groups(answer):
    """mesh_groups(rank, ranks, tensor): (the ranks that share layers with it, those that average gradients with it)."""
    for ranks, tensor in [(8, 2), (8, 4), (16, 8), (4, 1), (6, 6), (12, 3)]:
        for rank in range(ranks):
            got = filled(answer(rank, ranks, tensor))
            case = f"rank {rank} of {ranks}, {tensor} to a layer"
            expect(isinstance(got, (tuple, list)) and len(got) == 2, f"{case}: {got!r}. Return two lists of ranks")
            together, across = (sorted(int(other) for other in group) for group in got)
            first = rank - rank % tensor
            right = list(range(first, first + tensor)), list(range(rank % tensor, ranks, tensor))
            expect(
                (together, across) == right,
                f"{case}: {together} and {across} instead of {right[0]} and {right[1]}. "
                + mesh_slip(together, across, right, rank),
            )
    return "every layer stays on neighboring GPUs, and any two ranks meet in at most one group"


def mesh_slip(together, across, right, rank):
    """What may be wrong with the groups of a rank."""
    if (across, together) == right:
        return "The other way round: first those that share layers"
    if rank not in together or rank not in across:
        return "A rank is in both of its groups itself"
    if len(together) != len(right[0]):
        return f"{len(right[0])} ranks share a layer"
    if together != right[0]:
        return "Those that share layers talk most, and should sit side by side: their numbers follow each other"
    return "Gradients are averaged among the ranks that have the same part of each layer: one of every group"
