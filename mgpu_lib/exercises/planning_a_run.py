"""Checks for "Plan a run on a thousand GPUs": tokens that hide the network, GPUs to rent, a straggler, a whole plan."""

import math

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.plan_formulas import TrainingRun, held
from virtual_gpus import GPUS

DAY = 86_400
H100 = GPUS["H100"].bf16


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# How many tokens hide the network


@exercise
def check_tokens_to_hide(answer):
    """tokens_to_hide(peak, mfu, cards, gbits, recompute): tokens per GPU from which on ZeRO-3 hides its traffic."""
    cases = [(H100, 0.405, 8, 400, True), (H100, 0.405, 1, 100, True)]
    cases += [(H100, 0.45, 8, 100, False), (1e15, 0.5, 4, 200, False)]
    for given in cases:
        peak, mfu, cards, gbits, recompute = given
        got, right = filled(answer(*given)), least_tokens(*given)
        how = "recomputed" if recompute else "kept"
        case = f"{mfu:.1%} of {peak:.3g} FLOP/s, {cards} x {gbits} Gb/s, activations {how}"
        expect(is_number(got), f"{case}: {got!r}. Return a number of tokens")
        close = math.isclose(got, right, rel_tol=1e-6)
        expect(close, f"{case}: {got:,.0f} instead of {right:,.0f} tokens. {tokens_slip(got / right, *given)}")
    return f"with cards of 100 Gb/s each H100 needs {answer(H100, 0.405, 8, 100, True):,.0f} tokens, recomputed"


def least_tokens(peak, mfu, cards, gbits, recompute):
    """Both passes hidden: 8 FLOPs against 8 bytes, or without recomputation in the backward pass 4 against 6."""
    bandwidth = cards * gbits * 1e9 / 8
    return (4 / 3 if recompute else 6 / 4) * mfu * peak / bandwidth


def tokens_slip(ratio, peak, mfu, cards, gbits, recompute):
    """What may be wrong with a number of tokens that is `ratio` times the right one."""
    slips = {
        1 / 8: "A byte has eight bits",
        8: "A byte has eight bits",
        cards: "A node has several cards, and all of them work for its GPUs",
        1 / mfu: "A GPU doesn't reach its peak, only a part of it",
        (3 / 4 if recompute else 2 / 3): (
            "MFU doesn't count what is computed once more: the GPU does 8 FLOPs where MFU counts 6"
            if recompute
            else "Both passes must hide theirs: in the backward pass 6 bytes hide behind 4 FLOPs for each token"
        ),
        8 / 9: "Without recomputation a step has 6 FLOPs, 4 of them in the backward pass, which has 6 bytes to hide",
    }
    found = [words for slip, words in slips.items() if slip != 1 and math.isclose(ratio, slip, rel_tol=1e-6)]
    return found[0] if found else "Divide the FLOP/s that a GPU really does by the bytes per second into its node"


# How many GPUs to rent


@exercise
def check_gpus_to_rent(answer):
    """gpus_to_rent(parameters, tokens, batch, days, peak, mfu, cards, gbits): the fewest in time, or math.inf."""
    cases = [
        (70.55e9, 1.5e12, 2**22, 30, H100, 0.4, 8, 400),
        (8.03e9, 1e12, 2**20, 30, H100, 0.4, 8, 100),
        (70.55e9, 1.5e12, 2**20, 75, H100, 0.4, 8, 100),
        (70.55e9, 1.5e12, 2**20, 94, H100, 0.4, 8, 100),
    ]
    for given in cases:
        got, right = filled(answer(*given)), gpus_in_time(*given)
        parameters, tokens, batch, days, _, _, cards, gbits = given
        case = (
            f"{parameters / 1e9:.0f}B parameters, {tokens:.3g} tokens, {batch:,} of them in a step, {days} days, "
            f"{cards} x {gbits} Gb/s"
        )
        whole = got == math.inf or (is_number(got) and got == int(got) and got > 0)
        expect(whole, f"{case}: {got!r}. Return a number of GPUs, or math.inf")
        expect(got == right, f"{case}: {got} instead of {right}. {rent_slip(got, right, *given)}")
    return (
        f"with cards of 400 Gb/s, {answer(*cases[0])} GPUs train 70B in a month; with a batch of 2²⁰ and 100 Gb/s none"
    )


def gpus_in_time(parameters, tokens, batch, days, peak, mfu, cards, gbits):
    """With fewer tokens than T* on each GPU a step takes as long as its sending: more GPUs than so many don't help."""
    needed = 6 * parameters * tokens / (mfu * peak * days * DAY)
    return 8 * math.ceil(needed / 8) if needed <= batch / least_tokens(peak, mfu, cards, gbits, True) else math.inf


def rent_slip(got, right, parameters, tokens, batch, days, peak, mfu, cards, gbits):
    """What may be wrong with a number of GPUs."""
    least = least_tokens(peak, mfu, cards, gbits, True)
    most = batch / least
    if got == math.inf:
        return f"{right} are in time. The batch has {least:,.0f} tokens, T*, for each of {most:.0f}"
    taken = 6 * parameters * tokens / (mfu * peak * min(got, most)) / DAY
    if right == math.inf and got > most:
        return (
            f"Each has {batch / got:,.0f} tokens of a step, fewer than T*, {least:,.0f}: it takes {taken:.0f} days, "
            "however many there are"
        )
    if got % 8:
        return "They come in nodes of eight"
    if taken > days:
        return f"So many take {taken:.0f} days"
    return f"So many take {taken:.0f} days, and the fewest that are in time are wanted"


# Which rank is slow

LATE = [  # seconds of each rank in the all-reduce of each of seven steps
    [0.41, 0.38, 0.02, 0.40, 0.39, 0.37, 0.42, 0.36],
    [0.43, 0.35, 0.01, 0.41, 0.36, 0.38, 0.40, 0.39],
    [9.62, 9.55, 9.10, 9.58, 9.57, 0.03, 9.63, 9.51],  # rank 5 wrote a checkpoint
    [0.40, 0.39, 0.03, 0.38, 0.37, 0.36, 0.44, 0.37],
    [0.39, 0.37, 0.02, 0.42, 0.38, 0.40, 0.41, 0.38],
    [0.11, 0.12, 0.10, 0.13, 0.02, 0.12, 0.14, 0.11],
    [0.42, 0.36, 0.01, 0.39, 0.40, 0.37, 0.43, 0.35],
]
IN_TURN = [[0.02 if rank == step % 4 else 0.1 + 0.01 * rank for rank in range(4)] for step in range(8)]
SLOW_NODE = [
    [0.5 + 0.01 * rank if rank < 4 else 0.02 + 0.01 * ((rank + step) % 4) for rank in range(8)] for step in range(8)
]
TENTH = [
    [2.1, 2.2, 0.02, 2.3] if step == 9 else [0.02 + 0.01 * ((rank + step) % 4) for rank in range(4)]
    for step in range(20)
]
BUSY = [[9.0, 0.01], [1.0, 1.1], [9.0, 0.02], [2.0, 2.1], [3.0, 3.1], [9.0, 0.01], [4.0, 4.1]]  # others use the network
WAITS = {
    "eight ranks, of which one is late": (LATE, 2),
    "four ranks that are late in turn": (IN_TURN, None),
    "a slow node, whose four ranks are late in turn": (SLOW_NODE, None),
    "a rank that pauses once in twenty steps": (TENTH, None),
    "two ranks on a network that others use, too": (BUSY, 0),
}


@exercise
def check_straggler(answer):
    """straggler(waits): the rank that the others wait for in more than half of all steps; None if there is none."""
    for case, (waits, right) in WAITS.items():
        got = answer([list(step) for step in waits])
        expect(got == right, f"{case}: {got!r} instead of {right}. {straggler_slip(got, waits, right)}")
    return "rank 2 is late in five steps of seven, and a step's time is the same on all ranks"


def straggler_slip(got, waits, right):
    """What may be wrong with a rank."""
    totals = [sum(step[rank] for step in waits) for rank in range(len(waits[0]))]
    if right is None:
        return "Each is the last one now and then, none in more than half of the steps: None"
    if got == totals.index(max(totals)):
        return "Who waits longest was ready first. The straggler is the one who hardly waits"
    if got == totals.index(min(totals)):
        return "A single long pause decides this sum. Ask in each step who was last, and count steps"
    return "In each step the last to arrive waits least"


# A plan on a page

GPUS_64, BATCH, DAYS_14 = 64, 2**21, 14
SEQ_LEN = 4096
SIZES = {"vocab": 32_000, "width": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "inner": 13_824}  # Llama 2 13B
ROOM = 0.7 * GPUS["H100"].memory / 2**30  # GiB
INTERRUPTED = 50_700, 8_090  # GPU-hours between two interruptions: Llama 3, and Meta's research clusters


@exercise
def check_page(answer):
    """page(): a plan for 13B parameters on 64 H100 with 8 × 100 Gb/s, 2²¹ tokens in a step at most, and 14 days."""
    page = filled(answer())
    names = "tokens at a time", "micro-batches", "recomputed", "GiB", "MFU", "tokens", "interruptions", "dollars"
    expect(isinstance(page, dict), f"{page!r}: return a dictionary with {', '.join(names)}")
    missing = [name for name in names if name not in page]
    expect(not missing, f"the page doesn't say: {', '.join(missing)}")
    for name in ("tokens", "interruptions", "dollars"):
        value = page[name]
        pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value))
        expect(pair and value[0] < value[1], f"{name}: {value!r}. Give a range, (from, to)")
    for wrong in page_faults(page):
        expect(False, wrong)
    low, high = page["tokens"]
    return f"a page that can be handed in: {low / 1e9:.0f} to {high / 1e9:.0f} billion tokens"


def page_faults(page):
    """What a reader in the know would object to, in words."""
    at_a_time, micro_batches = page["tokens at a time"], page["micro-batches"]
    step = at_a_time * micro_batches * GPUS_64
    if at_a_time < SEQ_LEN or at_a_time % SEQ_LEN or micro_batches != int(micro_batches):
        yield f"{at_a_time:,} tokens at a time, {micro_batches} times: take whole sequences of {SEQ_LEN:,}"
    if step > BATCH:
        yield f"a step has {step:,} tokens, and may have {BATCH:,}"
    if page["GiB"] > ROOM:
        yield f"{page['GiB']:.0f} GiB leave no room: plan up to seven tenths of the GPU, {ROOM:.0f} GiB"
    counted = counted_gib(at_a_time // SEQ_LEN, page["recomputed"])
    if not 0.75 * counted < page["GiB"] < 1.35 * counted:
        how = "recomputed" if page["recomputed"] else "kept"
        yield f"{page['GiB']:.0f} GiB: with {at_a_time:,} tokens at a time, {how}, the planner counts {counted:.0f}"
    best = 0.42 if page["recomputed"] else 0.5
    bound = best * min(1, at_a_time / least_tokens(H100, best, 8, 100, page["recomputed"]))
    if page["MFU"] > 1.1 * bound:
        yield f"{page['MFU']:.0%} MFU, {at_a_time:,} tokens at a time: the network allows {bound:.0%} or so"
    if page["MFU"] < 0.6 * bound:
        yield f"{page['MFU']:.0%} MFU is a bad plan: {bound:.0%} or so can be had with {at_a_time:,} tokens at a time"
    low, high = page["tokens"]
    planned = page["MFU"] * H100 * GPUS_64 * DAYS_14 * DAY / (6 * 13.0e9 + 6 * 40 * 5120 * 4096)
    if high > 1.1 * planned:
        yield f"{high:.3g} tokens can't be had: {page['MFU']:.0%} MFU for 14 days makes {planned:.3g}"
    if low > 0.8 * planned:
        yield f"{low:.3g} tokens at worst is too bold: one step in ten was more than 29% too short, and jobs fail"
    hours = GPUS_64 * DAYS_14 * 24
    rare, often = (hours / each for each in INTERRUPTED)
    few, many = page["interruptions"]
    if few > 1.5 * rare or not 0.7 * often < many < 5 * often:
        yield f"published rates give {rare:.1f} to {often:.1f} interruptions in {hours:,} GPU-hours"
    cheap, dear = (dollars / hours for dollars in page["dollars"])
    if not 1 < cheap < dear < 15:
        yield f"${cheap:.2f} to ${dear:.2f} for a GPU-hour is not what GPUs cost: 64 of them run for {hours:,} hours"


def counted_gib(sequences, recompute):
    """GiB that the planner counts on a GPU which takes so many sequences at a time, sharded over all 64."""
    run = TrainingRun(
        SIZES,
        "H100",
        GPUS_64,
        zero=3,
        micro_batch=sequences,
        batch=GPUS_64 * sequences,
        seq_len=SEQ_LEN,
        recompute=recompute,
    )
    return sum(held(run).values()) / 2**30
