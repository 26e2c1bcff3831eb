"""Llama in plain PyTorch, as IBM's foundation-model-stack had it when FMS FSDP was measured (commit 464c4ca): norms and
rotations are chains of operations in FP32.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BASE = 10_000.0  # of the angles by which positions rotate queries and keys (Su et al. 2021, arXiv:2104.09864)


class Attention(nn.Module):
    """Causal self-attention, (N, tokens, width) → (N, tokens, width); `kv_heads` have keys and values of their own."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, X, angles):
        projected = [layer(X) for layer in (self.query, self.key, self.value)]
        q, k, v = (part.unflatten(2, (-1, self.head_width)) for part in projected)
        q, k, v = (t.transpose(1, 2) for t in (turn(q, angles), turn(k, angles), v))  # N, heads, tokens, head_width
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(attended.transpose(1, 2).flatten(2))


def turn(X: Tensor, matrices: Tensor) -> Tensor:
    """X (N, tokens, heads, head_width), each pair of neighbors times its matrix (tokens, head_width / 2, 2, 2)."""
    pairs = X.float().unflatten(3, (-1, 2)).unsqueeze(-2)
    return matrices[:, None].mul(pairs).sum(5).flatten(3).type_as(X)


def rotate(X: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """X (N, heads, tokens, head_width), each pair of numbers rotated by its angle: (cos, sin), (tokens, head_width)."""
    cos, sin = angles
    first, second = X.chunk(2, dim=-1)
    return X * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_angles(tokens: int, head_width: int, device=None, dtype=None) -> tuple[Tensor, Tensor]:
    """(cos, sin) for positions 0 to tokens - 1, as `rotate` takes them."""
    rates = BASE ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.outer(torch.arange(tokens, device=device), rates).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Norm(nn.Module):
    """RMS norm, operation by operation."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, X):
        wide = X.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(X)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, X):
        return self.down(F.silu(self.gate(X)) * self.up(X))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int):
        super().__init__()
        self.attention_norm, self.attention = Norm(width), Attention(width, heads, kv_heads)
        self.feed_forward_norm, self.feed_forward = Norm(width), FeedForward(width, inner)

    def forward(self, X, angles):
        X = X + self.attention(self.attention_norm(X), angles)
        return X + self.feed_forward(self.feed_forward_norm(X))


class Transformer(nn.Module):
    """Tokens (N, tokens) → logits (N, tokens, vocab)."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, kv_heads: int, inner: int):
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        X = self.embedding(tokens)
        matrices = torch.empty(X.shape[1], self.head_width // 2, 2, 2, device=X.device)
        for layer in self.layers:
            X = layer(X, matrices)
        return self.head(self.norm(X))
