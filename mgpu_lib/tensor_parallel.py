"""Tensor parallelism: a part of each layer on every rank (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

All ranks hold the same input, compute the same loss, and go backward together. The default process group is the one
whose ranks share a layer. Two operators stand around each split block, and autograd needs both: it knows nothing of
the copies that other ranks hold.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F


class f(torch.autograd.Function):
    """Before a column-parallel layer. Forward: nothing. Backward: an all-reduce, as each rank has one summand."""

    @staticmethod
    def forward(ctx, X):
        return X.view_as(X)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


class g(torch.autograd.Function):
    """After a row-parallel layer. Forward: an all-reduce of the summands. Backward: nothing, all have the whole."""

    @staticmethod
    def forward(ctx, Y):
        Y = Y.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(Y)
        return Y

    @staticmethod
    def backward(ctx, grad):
        return grad


def all_gather_tokens(X, lengths):
    """The tokens of all ranks: X (rows, lengths[rank], width) → (rows, sum of `lengths`, width)."""
    pieces = [X.new_empty(len(X), n, *X.shape[2:]) for n in lengths]
    dist.all_gather(pieces, X.contiguous())
    return torch.cat(pieces, dim=1)


def reduce_scatter_tokens(X, lengths):
    """This rank's tokens of the sum: X (rows, sum of `lengths`, width) → (rows, lengths[rank], width)."""
    pieces = [piece.contiguous() for piece in X.split(lengths, dim=1)]
    own = torch.empty_like(pieces[dist.get_rank()])
    dist.reduce_scatter(own, pieces)
    return own


class gather(torch.autograd.Function):
    """In place of `f` where each rank has some tokens only. Forward: an all-gather. Backward: a reduce-scatter."""

    @staticmethod
    def forward(ctx, X, lengths):
        ctx.lengths = lengths
        return all_gather_tokens(X, lengths)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_tokens(grad, ctx.lengths), None


class scatter(torch.autograd.Function):
    """In place of `g` where each rank keeps some tokens only. Forward: a reduce-scatter. Backward: an all-gather."""

    @staticmethod
    def forward(ctx, Y, lengths):
        ctx.lengths = lengths
        return reduce_scatter_tokens(Y, lengths)

    @staticmethod
    def backward(ctx, grad):
        return all_gather_tokens(grad, ctx.lengths), None


def vocabulary_cross_entropy(logits, targets, first):
    """Mean cross-entropy where each rank has the logits of a part of the vocabulary; the same on all ranks.

    logits (tokens, this rank's part, from entry `first` on), targets (tokens) → a scalar. Three numbers a token are
    all-reduced: the maximum, the sum of the exponentials, the target's logit. The backward pass sends nothing.
    """
    most = logits.detach().amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    total = g.apply((logits - most[:, None]).exp().sum(-1))
    column = targets - first
    elsewhere = (column < 0) | (column >= logits.shape[1])
    own = logits.gather(1, column.masked_fill(elsewhere, 0)[:, None])[:, 0]
    target = g.apply(own.masked_fill(elsewhere, 0))
    return (most + total.log() - target).mean()


def vocabulary_embedding(tokens, weight, first):
    """The embedding of `tokens` where each rank has some rows of the table, from row `first` on: (..., width)."""
    row = tokens - first
    elsewhere = (row < 0) | (row >= len(weight))
    X = F.embedding(row.masked_fill(elsewhere, 0), weight)
    return g.apply(X.masked_fill(elsewhere.unsqueeze(-1), 0))


def check_heads(attention, num_parts):
    """ValueError unless so many devices can have equally many heads, and the keys and values that belong to them."""
    heads, kv_heads = (layer.out_features // attention.head_width for layer in (attention.query, attention.key))
    if heads % num_parts or kv_heads % num_parts:
        raise ValueError(
            f"{heads} heads with {kv_heads} key-value heads can't be split over {num_parts} devices: "
            f"both numbers must be multiples of {num_parts}"
        )
