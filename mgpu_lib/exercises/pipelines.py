"""Checks for "Pipelines": cutting a network, and the order of a pipeline."""

from itertools import pairwise

from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_best_cut(answer):
    """best_cut(outputs, work): after which layer to cut, so that the busier GPU has little work, and little is sent."""
    for outputs, work in [
        ([1, 1, 1], [1, 1, 4]),
        ([5, 4, 3, 2, 1], [6, 1, 1, 1, 1]),
        ([9, 1, 1, 9], [1, 3, 3, 1]),
        ([9, 7, 2, 9], [4, 0, 0, 4]),
        ([9, 2, 2, 9], [4, 0, 0, 4]),
        ([8, 8], [1, 3]),
    ]:
        cut, layers = filled(answer(list(outputs), list(work))), len(work)
        case = f"outputs {outputs}, work {work}"
        expect(cut in range(1, layers), f"{case}: {cut!r} leaves one GPU without layers; cut in 1 … {layers - 1}")
        busier = [max(sum(work[:c]), sum(work[c:])) for c in range(layers)]
        expect(
            busier[cut] == min(busier[1:]),
            f"{case}: cut after layer {cut}, the busier GPU has {busier[cut]}, and {min(busier[1:])} is possible. "
            "Work comes first: half of the layers isn't half of the work, and a small output balances nothing",
        )
        best = min(range(1, layers), key=lambda c: (busier[c], outputs[c - 1]))
        expect(
            outputs[cut - 1] == outputs[best - 1],
            f"{case}: after layer {cut} the GPUs are balanced, but {outputs[cut - 1]} numbers are sent, not "
            f"{outputs[best - 1]}. What crosses a cut after c layers is outputs[c - 1]",
        )
        expect(cut == best, f"{case}: {cut} and {best} are equally good; take the smaller one")
    return "the busier GPU has as little as it can, and of such cuts yours sends the least"


@exercise
def check_one_f_one_b(answer):
    """one_f_one_b(rank, num_stages, micro_batches): the order of a rank's passes, such as ["F0", "F1", "B0", ...]."""
    for k, m in [(4, 8), (3, 5), (4, 2), (1, 3)]:
        orders = [list(filled(answer(rank, k, m))) for rank in range(k)]
        for rank, order in enumerate(orders):
            check_order(order, f"rank {rank} of {k}, {m} micro-batches", k - rank, m)
        slots, least = slots_taken(orders), 3 * (m + k - 1)
        expect(
            slots <= least,
            f"{k} ranks and {m} micro-batches: your orders take {slots} slots, and {least} are possible (a forward "
            "pass takes 1, a backward pass 2). A rank that goes backward too early waits: how many forward passes fit "
            "in before its first gradient can be there?",
        )
    return "no slower than GPipe, and rank 0 of 4 holds 4 micro-batches where GPipe holds all"


def check_order(order, case, most, micro_batches):
    """Whether a rank takes every pass once, each forward before its backward, and holds `most` micro-batches."""
    wanted = {f"{kind}{number}" for kind in "FB" for number in range(micro_batches)}
    expect(
        sorted(order) == sorted(wanted),
        f"{case}: {order} should hold each of {', '.join(sorted(wanted))} once",
    )
    held = 0
    for number, name in enumerate(order):
        early = name[0] == "B" and f"F{name[1:]}" not in order[:number]
        expect(not early, f"{case}: {name} comes before F{name[1:]}, whose activations it needs")
        held += 1 if name[0] == "F" else -1
        expect(
            held <= most,
            f"{case}: after {name} it holds the activations of {held} micro-batches; 1F1B needs no more than {most}",
        )


def slots_taken(orders):
    """When the last rank is done, if a forward pass takes 1 slot and a backward pass 2."""
    ends, free, done, total = {}, [0] * len(orders), [0] * len(orders), sum(map(len, orders))
    while len(ends) < total:
        before = len(ends)
        for rank, order in enumerate(orders):
            if done[rank] < len(order):
                name = order[done[rank]]
                giver = rank - 1 if name[0] == "F" else rank + 1
                if giver in (-1, len(orders)) or (giver, name) in ends:
                    start = max(free[rank], ends.get((giver, name), 0))
                    ends[rank, name] = free[rank] = start + (1 if name[0] == "F" else 2)
                    done[rank] += 1
        waiting = [f"rank {r} waits for {orders[r][n]}" for r, n in enumerate(done) if n < len(orders[r])]
        expect(len(ends) > before, f"with these orders nobody can go on: {', '.join(waiting)}")
    return max(free)


@exercise
def check_messages(answer):
    """messages(layout, micro_batches): how many tensors travel between ranks in a step; layout[i] has stage i."""
    for layout, m in [
        ([0, 1, 2, 3], 8),
        ([0, 1, 2, 3] * 2, 8),
        ([0, 1, 2, 3, 3, 2, 1, 0], 8),
        ([0], 5),
        ([0, 0, 1, 0], 3),
    ]:
        got, hops = filled(answer(list(layout), m)), [a != b for a, b in pairwise(layout)]
        case = f"layout {layout}, {m} micro-batches: {got!r}"
        right = 2 * m * sum(hops)
        if got != right:
            expect(got != m * sum(hops), f"{case} counts one way. Where does a gradient come from?")
            expect(got != 2 * sum(hops), f"{case} counts one micro-batch")
            expect(got != 2 * m * len(hops), f"{case}: between two stages on one rank nothing has to travel")
            expect(False, f"{case}. At how many boundaries do two ranks meet, and how often does each of them send?")
    return "with eight micro-batches 1F1B sends 48 messages, interleaved 112, the V 96"
