"""Layers, embeddings and losses cut over ranks compute what one device does; the ranks are threads."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mgpu_lib.exercises.rank_threads import on_ranks
from mgpu_lib.tensor_parallel import (
    check_heads,
    f,
    g,
    gather,
    scatter,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from mgpu_lib.transformer import Attention, Layer, rotary_angles

RANKS = st.integers(1, 5)
SIZES = settings(deadline=None, max_examples=15)
CUTS = {"gate": 0, "up": 0, "down": 1}


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def close(found, wanted):
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-9, atol=1e-9)


def cut(layer, rank, k):
    """A Layer with this rank's heads, one of which is 4 columns wide, and its inner columns."""
    part = copy.deepcopy(layer)
    for name, dim in {"query": 0, "key": 0, "value": 0, "out": 1}.items():
        heads = getattr(layer.attention, name).weight.detach().split(4, dim)
        own = [heads[i] for i in torch.arange(len(heads)).tensor_split(k)[rank]]
        getattr(part.attention, name).weight = nn.Parameter(torch.cat(own, dim))
    for name, dim in CUTS.items():
        weight = getattr(layer.feed_forward, name).weight.detach().tensor_split(k, dim)[rank]
        getattr(part.feed_forward, name).weight = nn.Parameter(weight.clone())
    return part


@pytest.mark.parametrize("by_tokens", [False, True], ids=["tensor", "sequence"])
@SIZES
@given(k=RANKS, more=st.integers(0, 3), inner=st.integers(0, 7), tokens=st.integers(1, 9))
def test_a_layer_cut_over_ranks_is_that_of_one_device(by_tokens, k, more, inner, tokens):
    """Heads and inner columns, at least one for each rank, needn't be shared evenly; a rank may have no token."""
    torch.manual_seed(tokens)
    layer = Layer(4 * (k + more), k + more, k + more, k + inner).double()
    X, angles = torch.randn(2, tokens, 4 * (k + more)).double(), rotary_angles(tokens, 4, dtype=torch.float64)
    lengths = [len(piece) for piece in torch.arange(tokens).tensor_split(k)]
    whole = leaf(X)
    out = layer(whole, angles)
    upstream = torch.randn_like(out)
    out.backward(upstream)

    def own(tensor, rank):
        return tensor.split(lengths, 1)[rank] if by_tokens else tensor

    def enter(X):
        return gather.apply(X, lengths) if by_tokens else f.apply(X)

    def leave(Y):
        return scatter.apply(Y, lengths) if by_tokens else g.apply(Y)

    def program(rank):
        part, own_X = cut(layer, rank, k), leaf(own(X, rank))
        H = own_X + leave(part.attention(enter(part.attention_norm(own_X)), angles))
        H = H + leave(part.feed_forward(enter(part.feed_forward_norm(H))))
        H.backward(own(upstream, rank))
        return part, own_X, H

    results, _ = on_ranks(k, program)
    for rank, (_, own_X, H) in enumerate(results):
        close(H, own(out, rank))
        close(own_X.grad, own(whole.grad, rank))
    parts = [part for part, *_ in results]
    for name, dim in CUTS.items():
        grads = [getattr(part.feed_forward, name).weight.grad for part in parts]
        close(torch.cat(grads, dim), getattr(layer.feed_forward, name).weight.grad)
    norms = torch.stack([part.attention_norm.weight.grad for part in parts])
    close(norms.sum(0) if by_tokens else norms[0], layer.attention_norm.weight.grad)


@SIZES
@given(k=RANKS, more=st.integers(0, 9), tokens=st.integers(1, 12), scale=st.sampled_from([1, 1000]))
def test_a_vocabulary_cut_over_ranks(k, more, tokens, scale):
    """Embedding, last layer and loss of `k + more` words; logits of a thousand are no problem."""
    torch.manual_seed(more)
    words = torch.randint(k + more, (tokens,))
    table, H = torch.randn(k + more, 3).double(), scale * torch.randn(tokens, 3).double()
    firsts = [sum(len(piece) for piece in table.tensor_split(k)[:rank]) for rank in range(k)]
    whole_table, whole_H = leaf(table), leaf(H)
    loss = F.cross_entropy(whole_H @ whole_table.T, words) + whole_table[words].square().sum()
    loss.backward()

    def program(rank):
        part, own_H = leaf(table.tensor_split(k)[rank]), leaf(H)
        own = vocabulary_cross_entropy(f.apply(own_H) @ part.T, words, firsts[rank])
        own = own + vocabulary_embedding(words, part, firsts[rank]).square().sum()
        own.backward()
        return own, own_H.grad, part.grad

    results, _ = on_ranks(k, program)
    for rank, (own, grad_H, grad) in enumerate(results):
        close(own, loss)
        close(grad_H, whole_H.grad)
        close(grad, whole_table.grad.tensor_split(k)[rank])


def test_what_is_not_a_number_stays_with_its_token():
    """The rows that stand in for other ranks' tokens are not multiplied by 0, which would keep NaN and infinity."""
    table = torch.full((2, 3), torch.nan)
    [[found]], _ = on_ranks(1, lambda rank: [vocabulary_embedding(torch.tensor([0, 3, 4, 6]), table, 4)])
    assert found.isnan().all(1).tolist() == [False, False, True, False] and found.nan_to_num().sum() == 0


@pytest.mark.parametrize(("heads", "kv_heads", "k"), [(4, 4, 3), (4, 2, 4)])
def test_heads_that_cannot_be_shared_equally_are_refused(heads, kv_heads, k):
    with pytest.raises(ValueError, match=f"{heads} heads with {kv_heads} .* over {k} devices.*multiples of {k}"):
        check_heads(Attention(16, heads, kv_heads), k)
    check_heads(Attention(16, heads, kv_heads), 2)


# The threads


def test_threads_that_call_different_collectives_are_told_so():
    def program(rank):
        if rank:
            dist.all_reduce(torch.ones(1))
        else:
            dist.all_gather([torch.ones(1)] * 2, torch.ones(1))

    with pytest.raises(AssertionError, match="different collectives: all_gather, all_reduce"):
        on_ranks(2, program)


def test_what_a_rank_raises_comes_out():
    def program(rank):
        if rank == 1:
            raise KeyError("of rank 1")
        g.apply(torch.ones(1))

    with pytest.raises(KeyError, match="of rank 1"):
        on_ranks(3, program)
