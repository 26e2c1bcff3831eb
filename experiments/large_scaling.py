"""Strong and weak scaling of Llama 3 8B and 70B on up to 1,024 GPUs, by dry runs; and LLaMA 65B as it was trained.

    python -m experiments.large_scaling

writes mgpu_lib/recorded/large_scaling.json: for each plan the modelled seconds of a step and the most memory of a GPU,
in all and by kind, or None for one that doesn't fit. A plan is a model, a number of GPUs, how it is split over them,
and a batch. Nothing is fitted; `run_validation` says how far off such dry runs are.

The program is what chapter 14 shows, except for `monday`. A step of many micro-batches is not run whole: each more of
them is taken to last as much longer as two do than one.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mgpu_lib as mgpu
from experiments import planner_validation, study
from mgpu_lib import planning
from mgpu_lib.tensor_parallel import check_heads
from virtual_gpus import GPUS

SIZES = mgpu.LLAMA | {
    "70B, 16 key heads": mgpu.LLAMA["70B"] | {"kv_heads": 16},  # 8 of them don't go into 16 parts
    # Touvron et al. 2023 (arXiv:2302.13971), table 2. The inner width, which it leaves out, is that of the published
    # weights.
    "65B": {"vocab": 32_000, "width": 8192, "layers": 80, "heads": 64, "inner": 22_016},
    "13B": {"vocab": 32_000, "width": 5120, "layers": 40, "heads": 40, "inner": 13_824},  # Llama 2 13B
}
NETWORKS = ("InfiniBand NDR", "RoCE 100", "Ethernet 100")
COUNTS = 8, 16, 32, 64, 128, 256, 512, 1024
ROWS = {"8B": 4, "70B": 1}  # sequences of 4,096 tokens of a GPU in a micro-batch, for weak scaling
BATCHES = {"8B": 1024, "70B": 256}  # sequences in a step, for strong scaling
SAMPLE = ("8B, 8 GPUs, 1 x 8 x 1, 1 of 4 x 4096, InfiniBand NDR", "8B, 256 GPUs, 32 x 8 x 1, 1 of 1 x 4096, RoCE 100")


# The program, as chapter 14 has it


def split(net, mesh):
    """Share every matrix among the ranks of a mesh: tensor parallelism."""
    columns, rows, whole = ColwiseParallel(), RowwiseParallel(), Replicate()
    plan = {f"attention.{name}": columns for name in ("query", "key", "value")}
    plan |= {"feed_forward.gate": columns, "feed_forward.up": columns}
    plan |= {"attention.out": rows, "feed_forward.down": rows}
    # columns of one input share it, so that their gradients are added up once
    plan["attention"] = PrepareModuleInput(input_layouts=(whole, None), desired_input_layouts=(whole, None))
    plan["feed_forward"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
    for layer in net.layers:
        parallelize_module(layer, mesh, plan)
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    ends = {"embedding": RowwiseParallel(input_layouts=whole), "head": logits}
    parallelize_module(net, mesh, ends)


def sharded(net, mesh, recompute):
    """ZeRO-3 over the ranks of a mesh, in bfloat16. `recompute`: the part of the layers whose activations aren't kept,
    from the first one on."""
    bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.layers[: round(recompute * len(net.layers))]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, mp_policy=bf16)
    fully_shard(net, mesh=mesh, mp_policy=bf16)
    return net.to_empty(device="cuda")


def trained(net, tokens, micro_batches):
    """A function that takes a step."""
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)  # parameters lie on different meshes
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()

    def step():
        for _ in range(micro_batches):
            with loss_parallel():
                loss = F.cross_entropy(net(inputs).flatten(0, 1), targets)
                (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def grid(copies, tensor, turned):
    """The ranks in `copies` of the model, each in parts of `tensor` ranks that share matrices."""
    n = dist.get_world_size()
    if n % (copies * tensor):
        raise ValueError(f"copies={copies} × tensor={tensor} does not divide {n} ranks")
    sizes = {"copies": copies, "parts": n // (copies * tensor), "tensor": tensor}
    names = ["tensor", "copies", "parts"] if turned else ["copies", "parts", "tensor"]
    return init_device_mesh("cuda", [sizes[name] for name in names], mesh_dim_names=names)


def program(sizes, copies=1, tensor=1, rows=1, tokens=4096, micro_batches=1, recompute=True, turned=False):
    """What each rank runs: it sets everything up, and returns the step."""
    mesh = grid(copies, tensor, turned)
    with torch.device("meta"):
        net = mgpu.Transformer(**sizes)
    if tensor > 1:
        check_heads(net.layers[0].attention, tensor)
        split(net, mesh["tensor"])
    over = mesh["copies", "parts"] if copies > 1 else mesh["parts"]
    net = sharded(net, over, recompute)
    tokens = torch.zeros(rows, tokens + 1, dtype=torch.long, device="cuda")
    return trained(net, tokens, micro_batches)


# The plans


def plan(model, n_gpus, network="InfiniBand NDR", gpu="H100", **options):
    """(what it is called, arguments of `record`)."""
    values = {"copies": 1, "tensor": 1, "rows": 1, "tokens": 4096, "micro_batches": 1} | options
    copies, tensor = values["copies"], values["tensor"]
    split = f"{copies} x {n_gpus // copies // tensor} x {tensor}"
    batch = f"{values['micro_batches']} of {values['rows']} x {values['tokens']}"
    recompute = options.get("recompute", True)
    extra = [] if recompute is True else [f"{recompute:.0%} recomputed" if recompute else "all kept"]
    extra += ["turned"] if "turned" in options else []
    return ", ".join([model, f"{n_gpus} GPUs", split, batch, network, *extra]), (model, n_gpus, network, gpu, options)


def weak():
    """As many tokens on every GPU, whatever their number."""
    yield from (plan("8B", n, rows=4) for n in COUNTS)
    yield from (plan("70B", n) for n in COUNTS[1:])


def strong():
    """One batch. Where a GPU has several micro-batches: steps with two of them, besides those of `weak`."""
    yield from (plan("8B", n, rows=4, micro_batches=2) for n in (8, 16, 32, 64, 128))
    yield from (plan("8B", n, rows=1024 // n) for n in (512, 1024))
    yield from (plan("70B", n, micro_batches=2) for n in (32, 64, 128))
    yield from (plan("70B", n, tensor=n // 256) for n in (512, 1024))


def tensors():
    """Tensor parallelism with as many tokens per GPU, beside each other and across nodes."""
    yield from (plan("70B", 256, tensor=k, rows=k) for k in (2, 4, 8))
    yield plan("70B, 16 key heads", 256, tensor=16, rows=8)
    yield from (plan("70B", 256, tensor=k, rows=k, turned=True) for k in (2, 8))


def networks():
    """Slower networks, with little to do for each GPU: a copy in each node, more tokens."""
    yield from (plan("8B", 256, network, rows=1) for network in NETWORKS)
    yield from (plan("8B", 256, network, rows=1, copies=32) for network in NETWORKS)
    yield from (plan("70B", 256, network) for network in NETWORKS)
    yield from (plan("70B", 256, network, rows=4) for network in NETWORKS)


def published():
    """LLaMA 65B on 2,048 A100, with the batch of its paper, in three splits of ours."""
    for options in ({}, {"recompute": False}, {"tensor": 8, "rows": 8}):
        yield plan("65B", 2048, "InfiniBand HDR", "A100-80", tokens=2048, **options)


def offered():
    """A 13B model on 64 H100 with cards of 100 Gb/s and at most 2 million tokens in a step: chapter 14's open task."""
    for rows, recompute, micro_batches in ((8, True, 1), (4, False, 1), (2, False, 1), (2, False, 4), (1, False, 8)):
        options = {"rows": rows, "micro_batches": micro_batches} | ({} if recompute else {"recompute": False})
        yield plan("13B", 64, "RoCE 100", **options)


def partly():
    """Chapter 14's own run with the activations of 29 layers kept: as many as fill seven tenths of a GPU, by napkin."""
    yield plan("70B", 1024, recompute=51 / 80)


def monday():
    """Chapter 14's own run, our split of it and the one that the planner finds, as the planner's programs."""
    for tensor, zero, micro_batch, recompute in ((1, 3, 1, True), (2, 3, 2, True)):
        options = {"tensor": tensor, "zero": zero, "micro_batch": micro_batch, "recompute": recompute}
        words = ", ".join(f"{name} {value}" for name, value in options.items())
        yield f"70B, 1024 GPUs, as planned: {words}", ("70B", 1024, "InfiniBand NDR", "H100", options)


def cases():
    """{what a plan is called: arguments of `record`}."""
    return dict(
        each for group in (weak, published, offered, strong, tensors, networks, partly, monday) for each in group()
    )


def recipe():
    return {"sizes": {model: SIZES[model] for model, *_ in cases().values()}}


def record(model, n_gpus, network, gpu, options):
    """What a dry run says; seconds are None if it doesn't fit, and "error" is PyTorch's word on it."""
    found = {"model": model, "n_gpus": n_gpus, "network": network, "gpu": gpu, **options}
    if "zero" in options:
        sequences = {"batch": n_gpus, "seq_len": 4096}
        return found | as_planned(planning.TrainingRun(SIZES[model], gpu, n_gpus, network, **sequences, **options))
    try:
        made = mgpu.dry_run(partial(program, SIZES[model], **options), n_gpus, gpu, network=network)
    except torch.OutOfMemoryError as error:
        return found | {"seconds": None, "error": str(error)}
    return found | {
        "seconds": round(made.seconds, 6),
        "gib": round(max(made.peak_memory) / 2**30, 2),
        "memory": {kind: round(nbytes / 2**30, 2) for kind, nbytes in made.memory[0].items()},
        "exposed": round(made.exposed, 4),
        "flops": made.flops,
    }


def as_planned(run):
    """The same of a `planning.TrainingRun`, by its own program."""
    seconds, held = planner_validation.dry_run(run, run.micro_batches)
    return {"seconds": round(seconds, 6), "gib": round(held / 2**30, 2)}


# Summing up


def whole(runs, model, n_gpus):
    """Seconds of a step with the batch of BATCHES, or None: from steps with one and with two micro-batches, if several
    are what each GPU has of it."""
    rows, sequences = ROWS[model], BATCHES[model]
    if rows * n_gpus < sequences:
        few = [runs.get(plan(model, n_gpus, rows=rows, micro_batches=m)[0]) for m in (1, 2)]
        if not all(run and run["seconds"] for run in few):
            return None
        one, two = (run["seconds"] for run in few)
        return one + (sequences / (rows * n_gpus) - 1) * (two - one)
    tensor = max(1, n_gpus // sequences)
    run = runs.get(plan(model, n_gpus, rows=tensor * sequences // n_gpus, tensor=tensor)[0])
    return run and run["seconds"]


def rate(seconds, n_gpus, sequences, flops):
    """What a step of so many sequences says; flops: of a token."""
    each = 4096 * sequences / seconds / n_gpus
    return {"seconds": round(seconds, 4), "tokens": round(each, 1), "mfu": round(each * flops / GPUS["H100"].bf16, 4)}


def summary(runs):
    """{model: {"weak" and "strong": {GPUs: seconds of a step, tokens per second and GPU, MFU}}}, of plans that fit."""
    found = {}
    for model, rows in ROWS.items():
        same = {n: runs.get(plan(model, n, rows=rows)[0]) for n in COUNTS}
        same = {n: run for n, run in same.items() if run and run["seconds"]}
        batch = {n: whole(runs, model, n) for n in COUNTS}
        if not same:
            continue
        flops = next(iter(same.values()))["flops"] / (4096 * rows)
        found[model] = {
            "flops of a token": flops,
            "weak": {n: rate(run["seconds"], n, rows * n, flops) for n, run in same.items()},
            "strong": {n: rate(seconds, n, BATCHES[model], flops) for n, seconds in batch.items() if seconds},
        }
    return found


def main():
    study.run("large_scaling", cases(), record, recipe(), summary)


if __name__ == "__main__":
    main()
