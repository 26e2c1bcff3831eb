"""A layer of experts, on one device and with its experts shared out among ranks (expert parallelism).

Shazeer et al. 2017 (arXiv:1701.06538) and Lepikhin et al. 2020 (arXiv:2006.16668). No token is dropped, as in
MegaBlocks (Gale et al. 2023, arXiv:2211.15841): how many rows travel is up to the router.
"""

import math
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import nn

from mgpu_lib.transformer import FeedForward


def choose(logits, k, bias=0.0):
    """(weights, experts) of each token, both (tokens, k), from the router's `logits` (tokens, experts).

    The weights of a token's k experts sum to 1. `bias` (experts,) has a say in who is chosen, not in the weights: Wang
    et al. 2024 (arXiv:2408.15664).
    """
    probabilities = logits.softmax(dim=1)
    chosen = (probabilities + bias).topk(k).indices
    weights = probabilities.gather(1, chosen)
    return weights / weights.sum(dim=1, keepdim=True), chosen


def auxiliary_loss(logits, chosen, share=None):
    """1 if all experts are equally popular, and up to their number if one has all tokens (Fedus et al. 2022, eq. 4).

    `share` (experts,): of all choices, how many each expert has; None: those of `chosen`. With several ranks it must be
    the share over all of them, or the ranks' mean is not the loss of the whole batch.
    """
    experts = logits.shape[1]
    if share is None:
        share = chosen.flatten().bincount(minlength=experts) / chosen.numel()
    return experts * (share * logits.softmax(dim=1).mean(dim=0)).sum()


class MoE(nn.Module):
    """`experts` feed-forward networks, of which each token takes k: X (tokens, width) → (tokens, width).

    bias  (experts,), a buffer: added to the router's probabilities when experts are chosen, see `choose`
    """

    def __init__(self, width, inner, experts, k):
        super().__init__()
        self.k, self.router = k, nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, inner) for _ in range(experts))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, X):
        weights, chosen = choose(self.router(X), self.k, self.bias)
        Y = torch.zeros_like(X)
        for e, expert in enumerate(self.experts):
            token, place = (chosen == e).nonzero(as_tuple=True)
            Y = Y.index_add(0, token, weights[token, place, None] * expert(X[token]))
        return Y


class Exchange(torch.autograd.Function):
    """Rows to other ranks: sends[r] rows of X go to rank r, and receives[r] rows come from it, in this order.

    On the way back the gradient of each row goes to the rank that the row came from.
    """

    @staticmethod
    def forward(ctx, X, sends, receives, group):
        ctx.back = receives, sends, group
        Y = X.new_empty(sum(receives), *X.shape[1:])
        dist.all_to_all_single(Y, X.contiguous(), receives, sends, group=group)
        return Y

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.back), None, None, None


def by_expert(experts, X, pieces):
    """What `experts` make of X, whose rows came in `pieces` of these sizes: from each rank, one for each expert."""
    parts, n = list(X.split(pieces)), len(experts)
    for e, expert in enumerate(experts):
        Y = expert(torch.cat(parts[e::n]))  # one product for the rows of all ranks
        parts[e::n] = Y.split(pieces[e::n])
    return torch.cat(parts)


class ExpertParallel(nn.Module):
    """This rank's part of a MoE: the whole router, and some of the experts, as many on each rank of `group` as can be.

    X (tokens, width), as many as this rank has, perhaps none → (tokens, width). An expert's gradient is the sum over
    the tokens of all ranks in `group`: of the router's, each rank has its own tokens' part, see `average_gradients`.
    ValueError for fewer experts than ranks.
    """

    def __init__(self, moe, group=None):
        super().__init__()
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if len(moe.experts) < ranks:
            raise ValueError(f"{len(moe.experts)} experts on {ranks} ranks: each rank needs one at least")
        whole, rest = divmod(len(moe.experts), ranks)
        self.shares = [whole + (r < rest) for r in range(ranks)]  # experts of each rank
        self.group, self.own, self.first = group, self.shares[rank], sum(self.shares[:rank])
        self.k, self.router = moe.k, moe.router
        self.register_buffer("bias", moe.bias)
        self.experts = nn.ModuleList(list(moe.experts)[self.first : self.first + self.own])

    def forward(self, X):
        weights, chosen = choose(self.router(X), self.k, self.bias)
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        sends, receives, pieces = self.split_sizes(chosen)
        Y = Exchange.apply(X[order // self.k], sends, receives, self.group)
        Y = by_expert(self.experts, Y, pieces)
        Y = Exchange.apply(Y, receives, sends, self.group)
        Y = weights.flatten()[order, None] * Y
        return torch.zeros_like(X).index_add(0, order // self.k, Y)

    def split_sizes(self, chosen):
        """Rows to each rank, rows from each rank, and the pieces of these: from each rank, one for each expert."""
        rows = chosen.flatten().bincount(minlength=sum(self.shares))
        pieces = rows.new_empty(len(self.shares) * self.own)
        dist.all_to_all_single(pieces, rows, [self.own] * len(self.shares), self.shares, group=self.group)
        sends = [part.sum().item() for part in rows.split(self.shares)]
        return sends, pieces.view(-1, self.own).sum(dim=1).tolist(), pieces.tolist()


class AssumedLoad(ExpertParallel):
    """The same for dry runs: without values nobody knows which experts are chosen, so the caller says it.

    popularity[e]: how many rows expert e gets from each rank, as a multiple of its equal share. Their mean must be 1.
    """

    def __init__(self, moe, popularity, group=None):
        super().__init__(moe, group)
        if len(popularity) != len(moe.experts) or not math.isclose(sum(popularity), len(popularity)):
            raise ValueError(f"popularity: {len(moe.experts)} numbers with the mean 1, one for each expert")
        self.popularity = popularity

    def split_sizes(self, chosen):
        share = chosen.numel() / len(self.popularity)
        bounds = [round(share * total) for total in accumulate(self.popularity, initial=0)]
        rows = [end - start for start, end in pairwise(bounds)]
        own, ranks = slice(self.first, self.first + self.own), len(self.shares)
        sends = [sum(rows[sum(self.shares[:r]) : sum(self.shares[: r + 1])]) for r in range(ranks)]
        return sends, [sum(rows[own])] * ranks, rows[own] * ranks


def average_gradients(layer, replicas=None):
    """Make the gradients of an ExpertParallel those of the mean of all ranks' losses; call it on all ranks.

    `replicas` is the group of ranks that hold the same experts; None: no other rank holds them. An expert's gradients
    have come from all ranks of the layer's group, and are still divided by the number of *all* ranks.
    """
    ranks = dist.get_world_size()
    for p in layer.router.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    for p in layer.experts.parameters():
        if replicas is not None:
            dist.all_reduce(p.grad, group=replicas)
        p.grad /= ranks
