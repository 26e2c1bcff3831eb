"""Algorithms for all-reduce, each as a *schedule*, plain data: a list of rounds, each a list of sends.

In one round every GPU sends at most one piece and receives at most one, so a round takes as long as its largest piece.
The sends of a round happen at once: what is sent is what the source held before the round.
"""

from collections import Counter
from typing import NamedTuple

import torch

from virtual_gpus import round_seconds


class Send(NamedTuple):
    """GPU `source` sends piece `chunk` of its tensor to GPU `target`, which adds it to its own or puts it in its place.

    A tensor has as many chunks as there are GPUs; chunk None is the whole tensor.
    """

    source: int
    target: int
    chunk: int | None
    reduce: bool


def star(k):
    """All-reduce on `k` GPUs through GPU 0, as `parallel.allreduce` does it: 2(k-1) rounds, each of a whole tensor."""
    others = range(1, _positive(k))
    return [[Send(i, 0, None, True)] for i in others] + [[Send(0, i, None, False)] for i in others]


def ring(k):
    """All-reduce on `k` GPUs in a ring: 2(k-1) rounds, in each of which every GPU sends one chunk to the next GPU.

    Each GPU sends 2(k-1)/k tensors in all, and no all-reduce can do with less (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009).
    """
    gpus, rounds = range(_positive(k)), range(k - 1)
    # A chunk travels once around and collects every GPU's share; GPU i then has the sum of chunk i + 1 ...
    reduce_scatter = [[Send(i, (i + 1) % k, (i - r) % k, True) for i in gpus] for r in rounds]
    # ... which travels around once more.
    all_gather = [[Send(i, (i + 1) % k, (i + 1 - r) % k, False) for i in gpus] for r in rounds]
    return reduce_scatter + all_gather


def tree(k):
    """All-reduce on `k` GPUs along a binary tree: 2⌈log2 k⌉ rounds, in each of which whole tensors travel."""
    steps = [2**n for n in range((_positive(k) - 1).bit_length())]
    up = [[Send(i + step, i, None, True) for i in range(0, k - step, 2 * step)] for step in steps]
    down = [[Send(target, source, None, False) for source, target, _, _ in sends] for sends in reversed(up)]
    return up + down


def _positive(k):
    if k < 1:
        raise ValueError(f"a schedule for {k} GPUs: there must be at least 1")
    return k


@torch.no_grad()
def execute(schedule, data):
    """Run `schedule` on `data`, one tensor per GPU, all of one shape and type, in place.

    A tensor's chunks are those of `tensor_split` of the flattened tensor: their sizes differ by at most one number, and
    with fewer numbers than GPUs the last are empty. Raises ValueError, before anything is sent, when tensors differ in
    shape or type, or when the schedule names a GPU or a chunk that isn't there.
    """
    _check(schedule, data)
    flat = [tensor.reshape(-1) for tensor in data]
    pieces = [dict(enumerate(tensor.tensor_split(len(data)))) | {None: tensor} for tensor in flat]
    for sends in schedule:
        arrived = [pieces[source][chunk].to(data[target].device, copy=True) for source, target, chunk, _ in sends]
        for (_, target, chunk, reduce), values in zip(sends, arrived):
            mine = pieces[target][chunk]
            mine.add_(values) if reduce else mine.copy_(values)
    for tensor, result in zip(data, flat):
        if not tensor.is_contiguous():  # then `reshape` made a copy
            tensor.copy_(result.view_as(tensor))


def _check(schedule, data):
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in data}
    if len(kinds) > 1:
        raise ValueError(f"these tensors differ in shape or type, so they have no sum: {sorted(map(str, kinds))}")
    there = range(len(data))
    for send in (send for sends in schedule for send in sends):
        if send.source not in there or send.target not in there or send.chunk not in (None, *there):
            raise ValueError(f"{send}: with {len(data)} tensors, GPUs and chunks go from 0 to {len(data) - 1}")


def star_allreduce(data):
    """Replace every tensor in `data` (one per GPU, all of one shape) by the sum of all, in place, through GPU 0."""
    execute(star(len(data)), data)


def ring_allreduce(data):
    """Replace every tensor in `data` (one per GPU, all of one shape) by the sum of all, in place, around a ring."""
    execute(ring(len(data)), data)


def tree_allreduce(data):
    """Replace every tensor in `data` (one per GPU, all of one shape) by the sum of all, in place, along a tree."""
    execute(tree(len(data)), data)


def bytes_per_link(schedule, nbytes, k, itemsize=4):
    """Bytes that `schedule` sends from GPU to GPU, {(source, target): bytes}, where each of `k` GPUs holds `nbytes`.

    `itemsize` is that of one number, in bytes: chunks hold whole numbers. Raises ValueError if `nbytes` doesn't.

    >>> bytes_per_link(ring(2), nbytes=8, k=2)
    {(0, 1): 8, (1, 0): 8}
    """
    sizes = chunk_sizes(nbytes, k, itemsize)
    links = Counter()
    for send in (send for sends in schedule for send in sends):
        links[send.source, send.target] += nbytes if send.chunk is None else sizes[send.chunk]
    return dict(links)


def seconds(schedule, nbytes, k, link, itemsize=4):
    """Modelled seconds that `schedule` takes over `link` (a specs.Link, such as `machine.link`), a round at a time.

    Each of `k` GPUs holds `nbytes`; a round takes as long as its largest piece. Raises as `bytes_per_link` does.
    """
    sizes = dict(enumerate(chunk_sizes(nbytes, k, itemsize))) | {None: nbytes}
    return sum(round_seconds(max(sizes[send.chunk] for send in sends), link) for sends in schedule)


def chunk_sizes(nbytes, k, itemsize=4):
    """Bytes of each of the `k` chunks of a tensor of `nbytes`, as `tensor_split` cuts it.

    >>> chunk_sizes(nbytes=40, k=4)
    [12, 12, 8, 8]
    """
    numbers, rest = divmod(nbytes, itemsize)
    if rest or numbers < 0:
        raise ValueError(f"{nbytes} bytes are no whole number of items of {itemsize} bytes")
    return [itemsize * (numbers // k + (chunk < numbers % k)) for chunk in range(k)]


def buckets(grads, bucket_bytes):
    """Places in the list `grads`, from the last to the first, in lists of at most `bucket_bytes` of one type."""
    filled, room = [], 0
    for i in reversed(range(len(grads))):
        if not filled or grads[i].nbytes > room or grads[i].dtype != grads[filled[-1][-1]].dtype:
            filled.append([])
            room = bucket_bytes
        filled[-1].append(i)
        room -= grads[i].nbytes
    return filled
