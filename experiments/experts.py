"""Layers of experts on 8 to 64 H100s, by dry runs: how long a step of one layer is, and how much of it is exchange.

    python -m experiments.experts

writes mgpu_lib/recorded/experts.json. A layer is attention and a MoE with its experts shared out among all GPUs; a step
is its forward and its backward pass, in bfloat16, with 4,096 tokens on each GPU. No optimizer, and no gradients that
are averaged. A dry run has no values, so it can't know who chooses whom: all experts are taken to be equally popular.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import mgpu_lib as mgpu
from experiments import study
from mgpu_lib.experts import AssumedLoad, MoE
from mgpu_lib.transformer import Attention, FeedForward, rotary_angles

TOKENS = 4096  # of a GPU
COUNTS = 8, 16, 32, 64
PER_NODE = 8
# Jiang et al. 2024 (arXiv:2401.04088), table 1; DeepSeek-AI 2024 (arXiv:2412.19437), section 4.2. The second one's
# attention, which compresses keys and values, is replaced by Llama's with as many numbers in all heads as the width.
SIZES = {
    "Mixtral 8x7B": {"width": 4096, "heads": 32, "kv_heads": 8, "inner": 14_336, "experts": 8, "k": 2, "shared": 0},
    "DeepSeek-V3": {"width": 7168, "heads": 56, "kv_heads": 8, "inner": 2048, "experts": 256, "k": 8, "shared": 1},
}
SAMPLE = ("Mixtral 8x7B, 8 GPUs", "DeepSeek-V3, 16 GPUs")


class Layer(nn.Module):
    """Attention, then experts, and perhaps some more that every token goes to: X (1, tokens, width) → the same."""

    def __init__(self, width, heads, kv_heads, inner, experts, k, shared, group):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, kv_heads)
        self.moe = AssumedLoad(MoE(width, inner, experts, k), [1] * experts, group)
        self.shared = FeedForward(width, shared * inner) if shared else None

    def forward(self, X, angles):
        X = X + self.attention(self.norms[0](X), angles)
        H = self.norms[1](X)[0]
        Y = self.moe(H)
        return X + (Y if self.shared is None else Y + self.shared(H))


def program(sizes, one_per_node):
    """What each rank runs: it sets the layer up, and returns the step. All ranks share experts, or one of each node."""
    n, rank = dist.get_world_size(), dist.get_rank()
    group = None
    if one_per_node:
        groups = [dist.new_group(list(range(first, n, PER_NODE))) for first in range(PER_NODE)]
        group = groups[rank % PER_NODE]
    with torch.device("meta"):
        layer = Layer(**sizes, group=group)
    layer = layer.bfloat16().to_empty(device="cuda")
    X = torch.zeros(1, TOKENS, sizes["width"], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    head_width = sizes["width"] // sizes["heads"]
    angles = rotary_angles(TOKENS, head_width, X.device, X.dtype)

    def step():
        layer(X, angles).sum().backward()
        layer.zero_grad()
        X.grad = None

    return step


def cases():
    """{what a case is called: arguments of `record`}. Mixtral's eight experts: in a node, and one in each of eight."""
    mixtral = {"Mixtral 8x7B, 8 GPUs": ("Mixtral 8x7B", 8, False)}
    mixtral["Mixtral 8x7B, 64 GPUs, one per node"] = "Mixtral 8x7B", 64, True
    return mixtral | {f"DeepSeek-V3, {n} GPUs": ("DeepSeek-V3", n, False) for n in COUNTS}


def recipe():
    return {"sizes": SIZES, "tokens": TOKENS}


def record(model, n_gpus, one_per_node):
    """What a dry run says; `exchange` is the part of the step in which a rank exchanges rows and runs no kernel."""
    made = mgpu.dry_run(partial(program, SIZES[model], one_per_node), n_gpus, "H100")
    return {
        "model": model,
        "gpus": n_gpus,
        "one_per_node": one_per_node,
        "seconds": round(made.seconds, 6),
        "exchange": round(made.exposed, 4),
        "bytes": [event.nbytes for event in made.timeline if event.kind == "collective"],
        "mfu": round(made.mfu, 4),
    }


def summary(runs):
    """{case: seconds that it exchanges for each that it computes}."""
    return {name: round(run["exchange"] / (1 - run["exchange"]), 3) for name, run in runs.items()}


def main():
    study.run("experts", cases(), record, recipe(), summary)


if __name__ == "__main__":
    main()
