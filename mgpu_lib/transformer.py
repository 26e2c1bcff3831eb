"""A language model as they are built today (that of Llama): small enough to read, and of any size."""

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.arguments import check_count

BASE = 10_000.0  # of the angles by which positions turn queries and keys (Su et al. 2021, arXiv:2104.09864)


class Attention(nn.Module):
    """Causal self-attention with `heads` heads; `kv_heads` of them have keys and values of their own.

    X (N, tokens, width) → (N, tokens, width). How many heads there are is read from what the projections give, so that
    it also works with a part of the heads (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).
    """

    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, X, angles):
        q, k, v = (by_heads(layer(X), self.head_width) for layer in (self.query, self.key, self.value))
        q, k = turned(q, angles), turned(k, angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(attended.transpose(1, 2).flatten(2))


def by_heads(X, head_width):
    """(N, tokens, heads × head_width) → (N, heads, tokens, head_width)."""
    return X.unflatten(2, (-1, head_width)).transpose(1, 2)


def turned(X, angles):
    """X (N, heads, tokens, head_width) with each pair of numbers, i and i + head_width/2, turned by its angle.

    angles: the cosine and the sine of each, both (tokens, head_width).
    """
    cos, sin = angles
    first, second = X.chunk(2, dim=-1)
    return X * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_angles(tokens, head_width, device=None, dtype=None):
    """(cos, sin) of the angles for positions 0 to tokens - 1, each (tokens, head_width), as `turned` takes them.

    The angles of float64 have all its digits. Those of 16-bit numbers are rounded last: bfloat16 can't tell position
    257 from 256.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    rates = BASE ** (-torch.arange(0, head_width, 2, device=device, dtype=exact) / head_width)
    angles = torch.outer(torch.arange(tokens, device=device), rates).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class FeedForward(nn.Module):
    """Two layers with a gate (SwiGLU, Shazeer 2020, arXiv:2002.05202): X (..., width) → (..., width)."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, X):
        return self.down(F.silu(self.gate(X)) * self.up(X))


class Layer(nn.Module):
    """Attention, then the feed-forward part, each on a normalized input and added to it."""

    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads, kv_heads)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(width), FeedForward(width, inner)

    def forward(self, X, angles):
        X = X + self.attention(self.attention_norm(X), angles)
        return X + self.feed_forward(self.feed_forward_norm(X))


class Transformer(nn.Module):
    """Tokens (N, tokens), whole numbers below `vocab`, → logits (N, tokens, vocab) of the token after each.

    width     numbers of a token between layers; a multiple of `heads`, and width / heads is even
    layers    how many, each an attention and a feed-forward part
    kv_heads  None: as many as `heads`; else a divisor of it (Ainslie et al. 2023, arXiv:2305.13245)
    inner     numbers inside the feed-forward part; None: 8/3 of the width, in whole 64s, and so about as many
              parameters as two layers without a gate that go to four times the width
    Raises ValueError for sizes that don't go together. `LLAMA` has those of Llama 3.
    """

    def __init__(self, vocab, width, layers, heads, kv_heads=None, inner=None):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"vocab": vocab, "width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads}
        for name, size in sizes.items():
            check_count(name, size)
        if width % (2 * heads) or heads % kv_heads:
            raise ValueError(
                f"width={width}, heads={heads}, kv_heads={kv_heads}: width must be an even multiple of heads, and "
                "heads a multiple of kv_heads"
            )
        inner = -(-8 * width // 3 // 64) * 64 if inner is None else check_count("inner", inner)
        self.head_width = width // heads
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        X = self.embedding(tokens)
        angles = rotary_angles(X.shape[1], self.head_width, X.device, X.dtype)
        for layer in self.layers:
            X = layer(X, angles)
        return self.head(self.norm(X))


# What Transformer takes, for the sizes of Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, table 3)
LLAMA = {
    "8B": {"vocab": 128_256, "width": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "inner": 14_336},
    "70B": {"vocab": 128_256, "width": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "inner": 28_672},
    "405B": {"vocab": 128_256, "width": 16_384, "layers": 126, "heads": 128, "kv_heads": 8, "inner": 53_248},
}
