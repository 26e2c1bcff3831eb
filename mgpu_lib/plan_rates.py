"""What the formulas of a plan know of GPUs and networks: rates, measured on virtual GPUs."""

import functools

import torch
import torch.distributed as dist
from torch.nn import functional as F

from mgpu_lib.plan_formulas import LARGEST, PER_NODE
from virtual_gpus import collective_channels, collective_seconds, dry_run, find_gpu, virtual_gpus

NODES = {"A100-80": "DGX A100", "H100": "DGX H100", "H200": "DGX H100"}  # the machine with eight of each GPU
SHORT, LONG = 2**24, 2**30  # bytes of the two messages that say what all take


@functools.cache
def constants(gpu, network):
    """What the formulas know of a GPU and of a network: plain numbers, measured on virtual GPUs.

    Rates in FLOP and bytes per second, "fixed" in seconds of each kernel. "collectives": for so many GPUs of each node
    times so many nodes, [seconds, seconds per byte] of an all-gather (or reduce-scatter), and of an all-reduce;
    "channels": for so many of each node how many multiprocessors these take, in one node and between nodes; "send": as
    of an all-gather, of a message within a node and between nodes.
    """
    spec = find_gpu(gpu)
    plain = {"peak": spec.bf16, "memory": spec.memory, "multiprocessors": spec.sm_count}
    return {**plain, **kernel_rates(gpu), **of_contention(gpu), "collectives": groups(gpu, network)}


@functools.cache
def kernel_rates(gpu):
    """What GPUs of this kind take for kernels, in bfloat16."""
    with virtual_gpus(1, gpu, backing="meta") as machine:

        def numbers(*shape):
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=False)

        def timed(function, *args):
            torch.cuda.synchronize()
            start = machine.elapsed()
            function(*args)
            torch.cuda.synchronize()
            return sum(e.end - e.start for e in machine.timeline.since(start) if e.gpu is not None)

        return {**of_products(numbers, timed), **of_attention(numbers, timed), **of_memory(numbers, timed)}


def of_products(numbers, timed):
    """A product with r results takes fixed + flops / rate · (1 + half / r) seconds."""
    fixed = timed(torch.mm, numbers(1, 1), numbers(1, 1))
    few, many, wide = 256, 4096, 2**18
    slow = (timed(torch.mm, numbers(few, wide), numbers(wide, few)) - fixed) / (2 * few * few * wide)
    fast = (timed(torch.mm, numbers(many, wide), numbers(wide, many)) - fixed) / (2 * many * many * wide)
    half = (slow - fast) / (fast / few**2 - slow / many**2)
    return {"rate": (1 + half / many**2) / fast, "half": half, "fixed product": fixed}


def of_attention(numbers, timed):
    """Causal attention of sequences of n tokens takes flops / rate · (1 + half / n) seconds, forward as backward."""

    def each(length):
        q = numbers(2**16 // length, 64, length, 128)
        return timed(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)) / (2 * 64 * 2**16 * length * 128)

    few, many = 1024, 8192
    slow, fast = each(few), each(many)
    half = (slow - fast) / (fast / few - slow / many)
    return {"attention": (1 + half / many) / fast, "attention half": half}


def of_memory(numbers, timed):
    """Bytes per second of the kinds of kernels that move numbers, and the fixed time of each."""
    X, small, n = numbers(2**14, 2**14), numbers(1), 2**29
    fixed, table = timed(torch.neg, small), numbers(2**14, 2**14)
    rows = torch.empty(2**14, dtype=torch.long, device="cuda")
    to_table = torch.ops.aten.embedding_dense_backward
    return {
        "fixed": fixed,
        "pointwise": 2 * n / (timed(torch.neg, X) - fixed),
        "norm": 2 * n / (timed(F.rms_norm, X, (2**14,)) - fixed),
        "gather": 2 * n / (timed(F.embedding, rows, table) - fixed),
        "scatter": 2 * n / (timed(to_table, X, rows, 2**14, -1, False) - fixed),
        "lists": 2 * n / (timed(torch._foreach_mul_, [X], 2.0) - fixed),
    }


def of_contention(gpu):
    """Beside a collective a product with r results takes longer by the larger of "taken", multiprocessors that the
    collective takes for each that it leaves, and min("most", "waiting" / r); a kernel that moves numbers by the part of
    "taken" that "beside" has for its kind. "taken" is 0 for what has no collective beside it."""

    def shape(*sizes):
        return [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]

    many, few = 2**12, 2**7  # rows and columns of results
    least = slowed(gpu, lambda: F.rms_norm(*shape((many, many)), (many,)))
    middle = slowed(gpu, lambda: torch.mm(*shape((many, many), (many, many))))
    most = slowed(gpu, lambda: torch.mm(*shape((few, 2**18), (2**18, few))))
    part = slowed(gpu, lambda: torch.neg(*shape((many, many)))) / least
    waiting = middle * many * many if middle > 1.01 * least else 0.0  # those of an A100 do not wait
    parts = {"norm": 1.0, "gather": 1.0, "scatter": 1.0, "pointwise": part, "lists": part}
    return {"taken": 0.0, "most": most, "waiting": waiting, "beside": parts}


def slowed(gpu, function):
    """How much longer the last kernel of function() takes beside an all-reduce of one node, as a part of its time."""

    def program():
        gradients = torch.empty(SHORT * 32, device="cuda")

        def step():
            work = dist.all_reduce(gradients, async_op=True)
            function()
            work.wait()
            torch.cuda.synchronize()
            function()

        return step

    events = dry_run(program, PER_NODE, gpu, link=NODES[gpu]).timeline.on(0)
    kernels = [e.end - e.start for e in events if e.kind != "collective"]
    beside, alone = kernels[len(kernels) // 2 - 1], kernels[-1]
    return beside / alone - 1


def groups(gpu, network):
    """{"m × n": {"gather": [...], "reduce": [...]}, "channels": {m: [...]}, "send": {...}}: see `constants`."""
    topology = virtual_gpus(1, gpu, NODES[gpu], "meta", network).topology

    def line(name, gpus, here):  # the other GPUs of a node do the same, in groups of their own
        short, long = (collective_seconds(name, size, gpus, topology, PER_NODE / here) for size in (SHORT, LONG))
        each = (long - short) / (LONG - SHORT)
        return [short - SHORT * each, each]

    found = {"channels": {}}
    for here in (1, 2, 4, 8):
        members = [
            [node * PER_NODE + i * PER_NODE // here for node in range(nodes) for i in range(here)]
            for nodes in (2**i for i in range(12))
        ]
        found["channels"][here] = [collective_channels(gpus, topology) for gpus in members[:2]]
        for gpus in members:
            if 1 < len(gpus) <= LARGEST:
                both = {"gather": line("all_gather", gpus, here), "reduce": line("all_reduce", gpus, here)}
                found[f"{here} × {len(gpus) // here}"] = both
    return found | {"send": {"near": line("send", [0, 1], 1), "far": line("send", [0, PER_NODE], 1)}}
