"""Checks for "Long sequences and experts": attention in blocks, the tokens of a rank, and what it sends."""

import math

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
    found = answer("ulysses", 16, 65536, 32, 8, 128)
    expect(found == math.inf, f"ulysses, 16 ranks, 8 heads of keys: {found}. A head can't be cut: return math.inf")
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
