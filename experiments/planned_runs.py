"""The training runs that a plan of `mgpu_lib.planning` is about, as programs that `mgpu.dry_run` can take.

The model is that of Llama 3, built of the parts of large_programs, which are held against published runs. Tokens are
split over the GPUs that share matrices ("sequence parallel"), and attention is one kernel. ZeRO's stages 0 and 1 are
Megatron-LM's, with 16-bit parameters and gradients that add up in FP32; 2 and 3 are PyTorch's `fully_shard`, with FP32
parameters that travel in 16 bits, and gradients that are reduce-scattered after each micro-batch.
"""

import os
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import mgpu_lib as mgpu
from calibration.large_programs import ROOMY, Adam, Column, Llama, Part, Split, all_layers, by_heads, peak_of, pipeline
from mgpu_lib.transformer import rotary_angles, turned


class Grouped(Llama):
    """With fewer keys and values than heads. GPUs that share matrices have at least one of them each."""

    def __init__(self, row, split):
        super().__init__(row, split)
        self.kv_heads = -(-row["kv_heads"] // split.parts)
        columns = row["width"] + 2 * self.kv_heads * split.parts * self.head_width
        self.qkv = Column(row["width"], columns, split, bias=False)

    def forward(self, X):
        sizes = [n * self.head_width for n in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(self.norms[0](X)).split(sizes, -1)
        q, k, v = (by_heads(t, size // self.head_width) for t, size in zip(parts, sizes, strict=True))
        angles = rotary_angles(q.shape[2], self.head_width, q.device, q.dtype)
        q, k = turned(q, angles), turned(k, angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        X = X + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        gate, up = self.up(self.norms[1](X)).chunk(2, -1)
        return X + self.down(F.silu(gate) * up)


def row_of(plan):
    """What large_programs wants to know of a run."""
    sizes = plan.sizes
    return {
        **{"width": sizes["width"], "heads": sizes["heads"], "kv_heads": sizes["kv_heads"], "ffn": sizes["inner"]},
        **{"vocab": sizes["vocab"], "seq_len": plan.seq_len, "micro_batch": plan.micro_batch, "gated": True},
        **{"pipeline": plan.pipeline, "virtual_stages": 1, "recomputation": "full" if plan.recompute else "none"},
    }


def made(plan, split, stage):
    """The layers of a stage, in 16 bits for ZeRO's stages 0 and 1."""
    row, count = row_of(plan), plan.sizes["layers"] // plan.pipeline
    with torch.device("meta"):
        part = Part(row, split, 0, stage == 0, stage == plan.pipeline - 1)
        part.layers = nn.ModuleList(Grouped(row, split) for _ in range(count))
    return part.to(torch.bfloat16) if plan.zero < 2 else part


def program(plan, micro_batches, peaks):
    """What a dry run calls: it sets all up, and returns a step of so many micro-batches of each GPU.

    peaks: gets {rank: the most bytes held in the passes, and in the optimizer's step}.
    """

    def started():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        for ledger in mgpu.current_machine().ledgers:
            ledger.capacity = ROOMY  # what doesn't fit is planned, too, to see by how much
        sizes = plan.pipeline, plan.data, plan.tensor
        mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("pipeline", "data", "tensor"))
        split = Split(mesh["tensor"].get_group(), plan.tensor, plan.tensor > 1)
        build = whole if plan.zero < 2 else sharded
        parts = build(plan, micro_batches, mesh, split)
        return lambda: peaks.update({torch.distributed.get_rank(): [peak_of(part) for part in parts]})

    return started


def whole(plan, micro_batches, mesh, split):
    """(passes, optimizer's step) where each GPU has all parameters of its stage, and its part of matrices."""
    stages = mesh["pipeline"].get_group()
    net = made(plan, split, stages.rank()).to_empty(device="cuda")
    optimizer = Adam(net.parameters(), mesh["data"].get_group(), plan.zero == 1, torch.float32)
    tokens = torch.empty(micro_batches * plan.micro_batch, plan.seq_len, dtype=torch.long, device="cuda")
    if plan.pipeline == 1:
        return partial(all_layers, net, tokens.split(plan.micro_batch)), optimizer.step
    run = pipeline(row_of(plan), {stages.rank(): net}, stages, micro_batches).step
    first = [tokens] if stages.rank() == 0 else []
    return partial(run, *first, target=tokens, return_outputs=False), optimizer.step


def sharded(plan, micro_batches, mesh, split):
    """The same with parameters in parts over all GPUs that have the same part of matrices."""
    options = {"mesh": mesh["data"], "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    net = made(plan, split, 0)
    for layer in net.layers:
        fully_shard(layer, reshard_after_forward=plan.zero == 3, **options)
    net = fully_shard(net, reshard_after_forward=False, **options).to_empty(device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    tokens = torch.empty(plan.micro_batch, plan.seq_len, dtype=torch.long, device="cuda")

    def passes():
        for i in range(micro_batches):
            net.set_reshard_after_backward(plan.zero == 3 or i == micro_batches - 1)
            net(tokens).backward()

    def update():
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return passes, update
