"""Checks for "Pipelines": cutting a network, and the order of a pipeline."""

from itertools import combinations, pairwise

from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_best_cuts(answer):
    """best_cuts(outputs, work, stages): where to cut, so that the busiest stage has little work, and little is sent."""
    for outputs, work, stages in [
        ([1, 1, 1], [1, 1, 4], 2),
        ([9, 1, 1, 9], [1, 3, 3, 1], 2),
        ([9, 7, 2, 9], [4, 0, 0, 4], 2),
        ([1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], 3),
        ([5, 1, 1, 5, 9], [4, 0, 4, 0, 4], 3),
        ([7, 1, 1, 1], [1, 3, 2, 1], 4),
    ]:
        cuts, layers = list(filled(answer(list(outputs), list(work), stages))), len(work)
        case = f"outputs {outputs}, work {work}, {stages} stages"
        expect(
            len(cuts) == stages - 1 and all(a < b for a, b in pairwise([0, *cuts, layers])),
            f"{case}: {cuts} leaves a stage without layers, or has too few cuts or too many; give {stages - 1} of 1 … "
            f"{layers - 1}, rising",
        )
        every = [list(some) for some in combinations(range(1, layers), stages - 1)]
        least = min(busiest(work, some) for some in every)
        expect(
            busiest(work, cuts) == least,
            f"{case}: cut at {cuts}, the busiest stage has {busiest(work, cuts)}, and {least} is possible. Work comes "
            "first: equal numbers of layers aren't equal work, and what fills one stage is missing in the next",
        )
        sends = {tuple(some): sum(outputs[cut - 1] for cut in some) for some in every if busiest(work, some) == least}
        sent = sends[tuple(cuts)]
        expect(
            sent == min(sends.values()),
            f"{case}: cut at {cuts} the stages are balanced, but {sent} numbers are sent, not {min(sends.values())}. "
            "What crosses a cut after c layers is outputs[c - 1]",
        )
    return "the busiest stage has as little as it can, and of such cuts yours send the least"


def busiest(work, cuts):
    return max(sum(work[a:b]) for a, b in pairwise([0, *cuts, len(work)]))


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


def slots_taken(orders, forward=None, backward=None):
    """When the last rank is done; a forward pass takes 1 slot and a backward pass 2, or what is given for each rank."""
    ends, free, done, total = {}, [0] * len(orders), [0] * len(orders), sum(map(len, orders))
    costs = {"F": forward or [1] * len(orders), "B": backward or [2] * len(orders)}
    while len(ends) < total:
        before = len(ends)
        for rank, order in enumerate(orders):
            if done[rank] < len(order):
                name = order[done[rank]]
                giver = rank - 1 if name[0] == "F" else rank + 1
                if giver in (-1, len(orders)) or (giver, name) in ends:
                    start = max(free[rank], ends.get((giver, name), 0))
                    ends[rank, name] = free[rank] = start + costs[name[0]][rank]
                    done[rank] += 1
        waiting = [f"rank {r} waits for {orders[r][n]}" for r, n in enumerate(done) if n < len(orders[r])]
        expect(len(ends) > before, f"with these orders nobody can go on: {', '.join(waiting)}")
    return max(free)


def gpipe(ranks, micro_batches):
    return [[f"{kind}{i}" for kind in "FB" for i in range(micro_batches)]] * ranks


def one_f_one_b(ranks, micro_batches):
    orders = []
    for rank in range(ranks):
        first = min(ranks - rank - 1, micro_batches)  # forward passes before the first pair
        order = [f"F{i}" for i in range(first)]
        for i in range(micro_batches):
            order += [f"F{first + i}", f"B{i}"] if first + i < micro_batches else [f"B{i}"]
        orders.append(order)
    return orders


CLOCKED = [  # orders, forward, backward, what the case is about
    ([["F0", "B0", "F1", "B1"]], [2], [3], "a single rank never waits"),
    (gpipe(2, 1), [1, 2], [3, 5], "F0 of rank 1 needs F0 of rank 0, and B0 of rank 0 needs B0 of rank 1"),
    (gpipe(2, 2), [1, 1], [2, 2], "two ranks can work at the same time"),
    (gpipe(3, 4), [1, 5, 1], [2, 1, 2], "rank 2 is free long before its input is there"),
    (one_f_one_b(3, 5), [3, 1, 2], [1, 4, 2], "input may be there long before the rank is free"),
]


@exercise
def check_step_time(answer):
    """step_time(orders, forward, backward): when the last pass of a step ends; orders[r] are the passes of rank r."""

    def clocked(orders, forward, backward):
        return filled(answer([list(order) for order in orders], list(forward), list(backward)))

    for orders, forward, backward, why in CLOCKED:
        found, right = clocked(orders, forward, backward), slots_taken(orders, forward, backward)
        case = f"orders {orders}, forward {forward}, backward {backward}"
        expect(isinstance(found, int | float), f"it returns a {type(found).__name__} instead of a number")
        expect(found == right, f"{case}: {found:g} instead of {right}: {why}")
    times = []
    for forward in ([1, 1, 1, 1], [2, 1, 1, 1], [1, 1, 1, 2]):
        backward = [2 * cost for cost in forward]
        times += [clocked(orders(4, 8), forward, backward) for orders in (gpipe, one_f_one_b)]
    return (
        "four equal stages and eight micro-batches take {:g} under GPipe and {:g} under 1F1B; if the first stage is "
        "twice as slow, {:g} and {:g}; if the last one is, {:g} and {:g}".format(*times)
    )
