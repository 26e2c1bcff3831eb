"""Checks for "Long sequences and experts": attention in blocks, what a rank sends, and what travels to an expert."""

import math
from itertools import pairwise

import torch

from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_merged(answer):
    """merged(out, lse, other_out, other_lse): (output, lse) of queries that have seen both blocks of keys."""
    for shift, what in ((0.0, ""), (1000.0, "large "), (-1000.0, "very small ")):
        whole, blocks = attention_in_blocks(shift)
        given = [t for block in blocks for t in block]
        out, lse = pair(answer(*[t.clone() for t in given]))
        check_merge(out, lse, whole, blocks, what)
    nothing = torch.zeros_like(blocks[0][0]), torch.full_like(blocks[0][1], -torch.inf)
    out, lse = pair(answer(*nothing, *blocks[1]))
    expect(
        torch.allclose(out, blocks[1][0]) and torch.allclose(lse, blocks[1][1]),
        "merged with a block that holds no keys, whose output is 0 and lse -inf, a block must stay as it is",
    )
    return "the softmax over both blocks, for large scores, too, and for a first block without keys"


def attention_in_blocks(shift):
    """((out, lse) of three queries over seven keys, [the same over the first five, over the other two])."""
    generator = torch.Generator().manual_seed(0)
    S, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 7), (7, 4)))
    S = S + shift

    def attend(keys):
        return S[:, keys].softmax(-1) @ v[keys], S[:, keys].logsumexp(-1, keepdim=True)

    return attend(slice(0, 7)), [attend(slice(0, 5)), attend(slice(5, 7))]


def pair(value):
    value = filled(value)
    expect(isinstance(value, tuple | list) and len(value) == 2, "return two tensors, the output and the lse")
    return filled(value[0]), filled(value[1])


def check_merge(out, lse, whole, blocks, what):
    (first, first_lse), (second, second_lse) = blocks
    expect(
        bool(torch.isfinite(out).all() and torch.isfinite(lse).all()),
        f"with {what}scores there is a nan or an inf: torch.exp of a large lse overflows, of a very small one it is 0. "
        "Take the exponential of differences only; torch.logaddexp has the sum",
    )
    expect(not torch.allclose(lse, first_lse + second_lse), "add the exponentials of the two lse, not the lse")
    expect(not torch.allclose(lse, torch.maximum(first_lse, second_lse)), "the larger lse is not that of both together")
    expect(torch.allclose(lse, whole[1]), "the lse isn't that of both blocks: log(exp(lse) + exp(other_lse))")
    expect(not torch.allclose(out, first + second), "the outputs are weighted: together the weights make 1")
    expect(
        not torch.allclose(out, (first + second) / 2),
        "the blocks don't count equally: a block's weight is its share of the sum of exponentials",
    )
    expect(torch.allclose(out, whole[0]), "the lse is right, the output isn't: weigh each with exp(its lse - new lse)")


@exercise
def check_zigzag_positions(answer):
    """zigzag_positions(tokens, rank, ranks): the positions of this rank's tokens in the text, in the rank's order."""
    for tokens, ranks in ((16, 4), (12, 1), (60, 3), (40, 2)):
        for rank in reversed(range(ranks)):
            found = answer(tokens, rank, ranks)
            found = [int(position) for position in filled(found)]
            check_positions(found, tokens, rank, ranks)
    return "each rank's two pieces, each in the order of the text"


def check_positions(found, tokens, rank, ranks):
    size = tokens // (2 * ranks)
    front, back = (list(range(piece * size, (piece + 1) * size)) for piece in (rank, 2 * ranks - 1 - rank))
    where = f"{tokens} tokens on {ranks} ranks, rank {rank}: "
    expect(
        len(found) == 2 * size,
        f"{where}{len(found)} positions instead of {2 * size}; each rank has two pieces of {size}",
    )
    expect(
        ranks == 1 or found != list(range(rank * 2 * size, (rank + 1) * 2 * size)),
        f"{where}these are neighbors, cut in order: the rank has one piece from the front and one from the back",
    )
    expect(rank == 0 or found != list(range(2 * size)), f"{where}every rank begins at position 0")
    expect(found != front + back[::-1], f"{where}the second piece is reversed; only the order of the ranks is")
    expect(found != back + front, f"{where}the front piece comes first")
    expect(found == front + back, f"{where}{found} instead of {front + back}")


@exercise
def check_forward_bytes(answer):
    """forward_bytes(way, ranks, tokens, heads, kv_heads, width): what a rank sends in one attention's forward pass."""
    for ranks, tokens, heads, kv_heads, width in ((4, 32768, 24, 8, 128), (8, 65536, 8, 8, 64), (3, 96, 6, 6, 8)):
        own = 2 * tokens // ranks * width  # bytes of one head of this rank's tokens
        keys, others = 2 * kv_heads * own, ranks - 1
        for way in ("gather", "ring"):
            found, right = answer(way, ranks, tokens, heads, kv_heads, width), others * keys
            check_bytes(f"{way}, {ranks} ranks: ", filled(found), right, others * 2 * heads * own, ranks)
        found = filled(answer("ulysses", ranks, tokens, heads, kv_heads, width))
        check_swapped(f"ulysses, {ranks} ranks: ", found, (2 * heads * own + keys) * others / ranks, keys, ranks)
    for ranks in (16, 6):
        found = answer("ulysses", ranks, 98304, 32, 8, 128)
        case = f"ulysses, {ranks} ranks, 8 heads of keys: {found}"
        expect(found == math.inf, f"{case}. A head can't be cut, and all ranks need equally many: return math.inf")
    return "gathered or around, the same bytes; Ulysses sends fewer, as far as there are heads"


def check_bytes(where, found, right, with_all_heads, ranks):
    expect(
        right == with_all_heads or found != with_all_heads,
        f"{where}keys and values have `kv_heads` heads; only queries have `heads`",
    )
    expect(found != right / 2, f"{where}half of it. Both keys and values travel, and a number has 2 bytes")
    expect(found != right * ranks / (ranks - 1), f"{where}a rank's part makes ranks - 1 hops, not one for each rank")
    expect(found != right * ranks, f"{where}a rank has tokens / ranks of the text's tokens")
    expect(found == right, f"{where}{found} bytes instead of {right}")


def check_swapped(where, found, right, keys, ranks):
    expect(found != right * ranks / (ranks - 1), f"{where}of each tensor, the part 1 / ranks stays at home")
    expect(found != keys * (ranks - 1) / ranks, f"{where}queries and outputs are swapped, too")
    expect(found == right, f"{where}{found} bytes instead of {right}: four tensors are swapped, q, k, v and the output")


# Experts


def choices(tokens, experts, k, seed):
    """(tokens, k): of each token k different experts, the lower numbers more often."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator) - torch.arange(experts) / (2 * experts)
    return scores.topk(k).indices


@exercise
def check_dispatch(answer):
    """dispatch(chosen, shares): (order of the choices in which their rows travel, rows to each rank)."""
    cases = [(6, 4, 1, [2, 2]), (9, 5, 2, [2, 2, 1]), (8, 6, 3, [3, 3]), (5, 3, 2, [1, 1, 1]), (0, 4, 2, [2, 2])]
    for seed, (tokens, experts, k, shares) in enumerate(cases):
        chosen = choices(tokens, experts, k, seed)
        order, sends = filled(answer(chosen.clone(), list(shares)))
        order, sends = torch.as_tensor(order).tolist(), torch.as_tensor(sends).tolist()
        case = f"{tokens} tokens that choose {k} of {experts} experts, on ranks with {shares}"
        expect(
            sorted(order) == list(range(tokens * k)),
            f"{case}: order = {order}. It must name each of the {tokens * k} choices, 0 to {tokens * k - 1}, once: "
            "number c is choice c % k of token c // k",
        )
        experts_in_order = chosen.flatten()[order].tolist()
        expect(
            experts_in_order == sorted(experts_in_order),
            f"{case}: the rows are for the experts {experts_in_order} in turn. A rank's rows must follow each other, "
            "and in them those of an expert: sort by expert",
        )
        ends = torch.tensor([0, *shares]).cumsum(0).tolist()
        right = [sum(start <= e < end for e in experts_in_order) for start, end in pairwise(ends)]
        expect(sends == right, f"{case}: sends = {sends} instead of {right}. {sends_slip(sends, chosen, shares)}")
    return "rows leave by expert, and every rank is told how many it gets"


def sends_slip(sends, chosen, shares):
    """What may be wrong with the rows to each rank."""
    if len(sends) == sum(shares) != len(shares):
        return "These are rows of each expert; a rank gets those of all of its experts together"
    if sum(sends) != chosen.numel():
        return f"They must add up to all {chosen.numel()} choices"
    return "Rank r has shares[r] experts, and the experts of lower ranks come first"


@exercise
def check_within_capacity(answer):
    """within_capacity(chosen, experts, capacity): (tokens, k), which choices their experts still have room for."""
    cases = [(8, 4, 1, 2), (8, 4, 2, 3), (10, 5, 3, 4), (6, 3, 2, 6), (7, 3, 2, 1)]
    for seed, (tokens, experts, k, capacity) in enumerate(cases):
        chosen = choices(tokens, experts, k, seed)
        right, taken = torch.zeros(tokens, k, dtype=torch.bool), [0] * experts
        for slot in range(k):
            for token in range(tokens):
                e = chosen[token, slot].item()
                right[token, slot] = taken[e] < capacity
                taken[e] += 1
        got = filled(answer(chosen.clone(), experts, capacity))
        case = f"{tokens} tokens that choose {k} of {experts} experts, with room for {capacity} rows each"
        expect(
            isinstance(got, torch.Tensor) and got.shape == chosen.shape and got.dtype == torch.bool,
            f"{case}: return a tensor of bool, ({tokens}, {k}), one for each choice",
        )
        expect(torch.equal(got, right), f"{case}: {capacity_slip(got, chosen, experts, capacity)}")
    return "no expert takes more than its capacity, and first choices come first"


def capacity_slip(got, chosen, experts, capacity):
    """What may be wrong with a choice of rows."""
    rows = chosen[got].bincount(minlength=experts)
    if rows.max() > capacity:
        return f"expert {rows.argmax()} takes {rows.max()} rows"
    possible = chosen.flatten().bincount(minlength=experts).clamp(max=capacity)
    if (rows < possible).any():
        e = (possible - rows).argmax()
        return f"expert {e} takes {rows[e]} rows, and {possible[e]} of those that chose it would fit"
    return (
        "right numbers of rows, but the wrong ones. All first choices come before any second one; else the first token"
    )


@exercise
def check_average_experts(answer):
    """average_experts(grads): grads[r] is a dict of rank r's gradients by name; the averaged ones, in the same form."""
    torch.manual_seed(0)
    for holders in ([[0, 1], [2, 3]], [[0, 1], [2, 3], [0, 1], [2, 3]], [[0, 1, 2], [3], [4]], [[0], [0], [0]]):
        grads = [
            {"router": torch.randn(2, 3), **{f"expert {e}": torch.randn(2) for e in experts}} for experts in holders
        ]
        copies = [{name: grad.clone() for name, grad in own.items()} for own in grads]
        got = filled(answer(copies))
        case = f"{len(holders)} ranks that hold the experts {holders}"
        expect(
            isinstance(got, (list, tuple)) and [dict(g).keys() for g in got] == [g.keys() for g in grads],
            f"{case}: return a list with one dictionary per rank, and the names that the rank came with",
        )
        for rank, own in enumerate(grads):
            for name in own:
                having = [g[name] for g in grads if name in g]
                right = sum(having) / len(grads)
                if not torch.allclose(got[rank][name], right):
                    slip = average_slip(got[rank][name], own[name], having, len(grads))
                    expect(False, f"{case}: {name} on rank {rank} is wrong. {slip}")
    return "every gradient is that of the mean of all ranks' losses, whoever holds the parameter"


def average_slip(got, own, having, ranks):
    """What may be wrong with one gradient."""
    if torch.allclose(got, sum(having) / len(having)):
        return f"{len(having)} of {ranks} ranks hold it, but the mean is over the losses of all {ranks}"
    if torch.allclose(got, sum(having)):
        return f"It is the sum; the loss is a mean over {ranks} ranks"
    if torch.allclose(got, own) or torch.allclose(got, own / ranks):
        return "Other ranks hold it, too, and their gradients belong to it"
    return "Add up what is of the same parameter, on all ranks that hold it, and divide by the number of ranks"
