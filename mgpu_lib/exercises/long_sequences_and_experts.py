"""Checks for "Long sequences and experts": a hidden ring, packed texts, what ranks send, gradients of experts."""

import math
from itertools import pairwise

import torch

from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_hidden_from(answer):
    """hidden_from(flops, bandwidth, heads, kv_heads, causal, backward): tokens of a rank that hide the ring."""
    flops, bandwidth, kv_heads = 500e12, 450e9, 8
    for backward, causal, heads in ((False, False, 32), (False, True, 32), (True, True, 16), (True, False, 8)):
        found = filled(answer(flops, bandwidth, heads, kv_heads, causal, backward))
        sharing = heads / kv_heads
        right = (12 / 5 if backward else 2) * flops / (bandwidth * sharing) / (1 if causal else 2)
        case = f"{heads} heads on {kv_heads}, causal={causal}, backward={backward}: "
        for factor, words in hiding_slips(sharing, causal, backward):
            expect(not math.isclose(found, factor * right), f"{case}{found:,.0f} tokens. Look again: {words}")
        expect(math.isclose(found, right), f"{case}{found:,.0f} tokens instead of {right:,.0f}")
    return "the more heads of queries share keys, the shorter the text that hides the ring"


def hiding_slips(sharing, causal, backward):
    """(what a wrong answer is, over the right one; what may be wrong with it)."""
    if sharing > 1:
        yield sharing, "the products are those of `heads` heads, the messages those of `kv_heads`"
        yield sharing**2, "the more heads share keys, the more products there are to each message"
    if backward:
        for factor in (2 / 3, 1 / 3):
            yield factor, "keys and values travel again, 2 bytes a number, and with them their gradients, 4 bytes each"
        for factor in (5 / 2, 5 / 4):
            yield factor, "five products take the place of two"
    elif causal:
        yield 1 / 2, "with a causal mask two of a step's four blocks are computed"
    else:
        yield 2, "without a mask all four blocks of a step are computed, and a block takes two products"
        yield 1 / 2, "both keys and values travel, and adding a product is a second operation"


@exercise
def check_balanced(answer):
    """balanced(lengths, ranks): for each rank the positions of its tokens in a text packed of documents."""
    for lengths, ranks in (([16], 4), ([8, 4], 2), ([6, 6, 6, 18], 3), ([8, 40, 8], 4), ([6, 2], 1)):
        given = [[int(position) for position in own] for own in filled(answer(list(lengths), ranks))]
        check_shares(given, lengths, ranks)
    return "all ranks have as many tokens, and as many pairs to compute"


def check_shares(given, lengths, ranks):
    case, total = f"documents of {lengths} tokens on {ranks} ranks: ", sum(lengths)
    expect(len(given) == ranks, f"{case}{len(given)} lists instead of one for each rank")
    expect(
        sorted(position for own in given for position in own) == list(range(total)),
        f"{case}each of the positions 0 to {total - 1} must be with one rank, and only once",
    )
    counts = [len(own) for own in given]
    expect(len(set(counts)) == 1, f"{case}the ranks have {counts} tokens; all tensors must have one size")
    keys = [key for length in lengths for key in range(1, length + 1)]  # that a token's query looks at
    pairs = [sum(keys[position] for position in own) for own in given]
    expect(
        len(set(pairs)) == 1,
        f"{case}the ranks compute {pairs} pairs of a query and a key, and the ring waits for the busiest. "
        f"{balance_slip([sorted(own) for own in given], total, ranks)}",
    )


def balance_slip(given, total, ranks):
    """What may be wrong with shares of unequal work."""
    pieces = [list(range(total * i // (2 * ranks), total * (i + 1) // (2 * ranks))) for i in range(2 * ranks)]
    if given == [pieces[r] + pieces[-1 - r] for r in range(ranks)]:
        return (
            "A zigzag over the whole text is fair only to a single document: a query looks no further back than its own"
        )
    if given == [pieces[2 * r] + pieces[2 * r + 1] for r in range(ranks)]:
        return "Cut in order, whoever has the end of a long document has most to do"
    if given == [list(range(r, total, ranks)) for r in range(ranks)]:
        return "Dealt out one by one, each token of a rank is later than the one of the rank before it"
    return "How many keys does a query look at? Make it equal within each document"


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
def check_rows_sent(answer):
    """rows_sent(chosen, shares): rows to each rank, if a token's row travels to each rank once at most."""
    cases = [(6, 4, 1, [2, 2]), (9, 5, 2, [2, 2, 1]), (8, 6, 3, [3, 3]), (5, 6, 3, [1, 2, 3]), (0, 4, 2, [2, 2])]
    for seed, (tokens, experts, k, shares) in enumerate(cases):
        chosen = choices(tokens, experts, k, seed)
        found = torch.as_tensor(filled(answer(chosen.clone(), list(shares)))).tolist()
        ends = torch.tensor([0, *shares]).cumsum(0).tolist()
        held = [(chosen >= start) & (chosen < end) for start, end in pairwise(ends)]
        right = [own.any(dim=1).sum().item() for own in held]
        case = f"{tokens} tokens that choose {k} of {experts} experts, on ranks with {shares}: {found} rows"
        expect(
            found == right or found != [own.sum().item() for own in held],
            f"{case}. These are choices: a token that chose two experts of a rank sends it one row",
        )
        expect(
            len(found) == len(shares),
            f"{case}. Return one number for each of the {len(shares)} ranks, also for those that get no row",
        )
        expect(
            found == right, f"{case} instead of {right}. Rank r has shares[r] experts, lower ranks the lower numbers"
        )
    return "a rank that holds several of a token's experts gets its row once"


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
def check_squared_part(answer):
    """squared_part(own, ranks, copies): a rank's part of the gradient's squared norm; all ranks' parts are added up."""
    generator = torch.Generator().manual_seed(0)
    for holders in ([[0, 1], [2, 3], [0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1, 2], [3], [4]], [[0, 1], [0, 1]]):
        names = ["router", *(f"expert {e}" for e in sorted({e for own in holders for e in own}))]
        grads = {name: torch.randn(5, generator=generator, dtype=torch.float64) for name in names}
        copies = sum(own == holders[0] for own in holders)
        mine = [{"router": grads["router"], **{f"expert {e}": grads[f"expert {e}"] for e in own}} for own in holders]
        parts = [answer({n: g.clone() for n, g in own.items()}, len(holders), copies) for own in mine]
        found = sum(float(filled(part)) for part in parts)
        router, *experts = (grad.square().sum().item() for grad in grads.values())
        case = f"{len(holders)} ranks that hold the experts {holders}: "
        check_norm(case, found, router, sum(experts), len(holders), copies)
    return "every parameter counts once, however many ranks hold it"


def check_norm(case, found, router, experts, ranks, copies):
    slips = {
        ranks * router + copies * experts: f"the router is counted {ranks} times, and each expert {copies} times",
        router + copies * experts: f"each expert is counted {copies} times",
        ranks * router + experts: f"the router is counted {ranks} times",
        router + copies * experts / ranks: f"{copies} of the {ranks} ranks hold an expert, not all of them",
        router / ranks + experts / copies: "the square is divided, not the gradient: that would divide twice",
    }
    right = router + experts
    for wrong, words in slips.items():
        expect(math.isclose(wrong, right) or not math.isclose(found, wrong), f"{case}{words}")
    expect(
        math.isclose(found, right),
        f"{case}the squares of all parameters, each counted once, add up to {right:.2f}, and the ranks' parts to "
        f"{found:.2f}",
    )
