"""Programs that split a network in several ways: for a dry run, and with values under torchrun.

    torchrun --nproc-per-node 4 -m virtual_gpus split.py NAME ...

Each rank says for each, as a line of JSON, how long the third step took it, and the most that its GPU has held.
"""

import gc
import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from virtual_gpus import current

WIDTH, TOKENS, VOCAB = 96, 40, 101
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Module):
    """Causal attention with 4 heads of 24 numbers, 2 of which have keys and values, and a gated feed-forward network;
    or with a part of the heads and of the hidden numbers."""

    def __init__(self):
        super().__init__()
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 256, bias=False) for _ in range(2))
        self.down, self.norms = nn.Linear(256, WIDTH, bias=False), nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, X):  # (sequences, tokens, WIDTH)
        Y = self.norms[0](X)
        heads = [layer(Y).unflatten(2, (-1, 24)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        X = X + self.out(attended.transpose(1, 2).flatten(2))
        Y = self.norms[1](X)
        return X + self.down(F.silu(self.gate(Y)) * self.up(Y))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(3)), nn.RMSNorm(WIDTH)

    def forward(self, tokens):
        X = self.embedding(tokens)
        for layer in self.layers:
            X = layer(X)
        return self.head(self.norm(X))


def network():
    torch.manual_seed(0)
    return Transformer()


def training(net, optimizer):
    """A step of a language model on two sequences of tokens a rank."""
    tokens = torch.zeros(2, TOKENS, dtype=torch.long, device="cuda")

    def step():
        loss = F.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp():
    net = network().cuda()
    net = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.1)
    return training(net, torch.optim.AdamW(net.parameters(), 1e-3))


def fsdp(recompute=False, **options):
    net, mesh = network(), dist.init_device_mesh("cuda", (dist.get_world_size(),))
    for i, layer in enumerate(net.layers):
        net.layers[i] = fully_shard(checkpoint_wrapper(layer) if recompute else layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return training(net, torch.optim.AdamW(net.parameters(), 1e-3))


def tensor_parallel():
    net, mesh = network().cuda(), dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    ways = {name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
    for layer in net.layers:
        parallelize_module(layer, mesh["tp"], ways | {name: RowwiseParallel() for name in ("out", "down")})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return training(net, torch.optim.SGD(net.parameters(), 0.1, foreach=False))


def pipeline(schedule=Schedule1F1B, chunks=1, width=WIDTH, batch=64):
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(n * chunks)]
    mine = [layers[rank + i * n].cuda() for i in range(chunks)]
    stages = [PipelineStage(part, rank + i * n, n * chunks, torch.device("cuda")) for i, part in enumerate(mine)]
    run = schedule(stages[0] if chunks == 1 else stages, 8, loss_fn=F.l1_loss)
    optimizer = torch.optim.SGD([p for part in mine for p in part.parameters()], 0.1)

    def step():
        X = torch.zeros(batch, width, device="cuda")
        if rank == 0:
            run.step(X)
        else:
            run.step(**({"target": X} if rank == n - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


PROGRAMS = {
    "ddp": ddp,
    "fsdp_in_half_precision": partial(fsdp, mp_policy=HALF, recompute=True),
    "fsdp_that_keeps": partial(fsdp, reshard_after_forward=False),
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "interleaved_pipeline": partial(pipeline, ScheduleInterleaved1F1B, chunks=2),
}


def started(program):
    """What a dry run calls."""

    def call():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return program()

    return call


def measured(step):
    """Seconds of the third step; as a dry run does, all streams are waited for between steps."""
    machine = current()
    for _ in range(3):
        torch.cuda.synchronize()
        start = machine.elapsed()
        step()
    torch.cuda.synchronize()
    return machine.elapsed() - start


def main(names):
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in names:
        dist.init_process_group("nccl", store=dist.PrefixStore(name, store), rank=rank, world_size=n)
        torch.cuda.reset_peak_memory_stats()
        seconds = measured(started(PROGRAMS[name])())
        found = {"program": name, "rank": rank, "seconds": seconds, "peak": torch.cuda.max_memory_allocated()}
        print(json.dumps(found) + "\n", end="", flush=True)
        dist.destroy_process_group()
        gc.collect()  # hooks and what they are attached to refer to each other


if __name__ == "__main__":
    main(sys.argv[1:])
