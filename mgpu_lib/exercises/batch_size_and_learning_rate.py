"""Checks for "Batch size and learning rate": a rate for an unseen batch size, and five curves to diagnose."""

import math
import statistics
from itertools import pairwise
from numbers import Real

from mgpu_lib import evidence
from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_best_lr(answer):
    """best_lr(batch_size, known): a learning rate for a batch size that the grid leaves out."""
    known = {B: evidence.best_rate(rates, "epochs") for B, rates in evidence.grid("lenet").items()}
    runs = evidence.unseen()
    given = {B: filled(answer(B, dict(known))) for B in (32, 512)}
    return "; ".join(judged(B, lr, runs[B]) for B, lr in given.items())


def judged(B, lr, rates):
    """What to praise in rate `lr` for batch size B, whose recorded runs are `rates`."""
    expect(isinstance(lr, Real) and 0 < lr < math.inf, f"batch {B}: {lr!r} is no learning rate; return a positive one")
    near, best = min(rates, key=lambda other: abs(math.log(other / lr))), evidence.best_rate(rates, "epochs")
    case = f"batch {B}: you say {lr:.3g}. The nearest recorded rate is {near:g}"
    expect(max(near / lr, lr / near) < 3, f"{case}, and it isn't near. The best rates of the neighbors of {B} say more")
    ended = [run.ended for run in rates[near] if run.validation["epochs"] is None]
    expect(
        not ended,
        f"{case}, and there {len(ended)} of {len(rates[near])} runs diverged. A rule that starts far "
        "away goes too far; start from the neighbors",
    )
    reached, top = (100 * evidence.level(rates[each], "epochs") for each in (near, best))
    seen = f"{case}, with {reached:.1f} % on the validation images, and the best, {best:g}, has {top:.1f} %"
    expect(
        near in evidence.good_rates(rates, "epochs"),
        f"{seen}. Go {'up' if near < best else 'down'}: what do the neighbors of this batch size in `known` say?",
    )
    return seen


# Five curves

EXPLAINED = {
    "too small": "it rises slowly, without any jump, and is still rising at the end. Change: a larger rate",
    "good": "it rises fast and then stays, with little up and down. Change: nothing, or let the rate fall at the end",
    "jumps": "it is far above guessing, and yet falls back again and again. Change: a smaller rate late in training, "
    "or an average of the weights",
    "dead at once": "it never leaves the 10 % of guessing, and ends after a few steps. Change: a much smaller rate",
    "learned, then died": "it was above guessing before it fell to 10 % and stayed. Change: a smaller rate; warm-up "
    "would only delay it",
}
LETTERS = {"A": "jumps", "B": "dead at once", "C": "too small", "D": "learned, then died", "E": "good"}


def curves():
    """{letter: Run of LeNet}, one for each word of EXPLAINED, chosen from the grid by what they show."""
    batches = evidence.grid("lenet")
    best = {B: evidence.best_rate(rates, "epochs") for B, rates in batches.items()}
    runs = [(B, lr, run) for B, rates in batches.items() for lr, each in rates.items() for run in each]
    large = [run for B, lr, run in runs if lr > best[B] and run.ended is None]
    ended = [run for *_, run in runs if run.ended and run.accuracy and run.accuracy[-1] < 2 * evidence.GUESSING]
    found = {
        "too small": batches[max(batches)][min(batches[max(batches)])][0],
        "good": batches[256][best[256]][0],
        "jumps": max(large, key=jumping),
        "dead at once": batches[256][max(batches[256])][0],
        "learned, then died": max(ended, key=lambda run: max(run.accuracy)),
    }
    return {letter: found[word] for letter, word in LETTERS.items()}


def jumping(run):
    """The mean fall of accuracy between measurements in the second half of them; 0 for a run that hardly learned."""
    late = run.accuracy[len(run.accuracy) // 2 :]
    falls = [max(0, before - after) for before, after in pairwise(late)]
    return statistics.fmean(falls) if statistics.fmean(late) > 0.5 else 0


@exercise
def check_diagnose(answer):
    """diagnose(curve): for "A" to "E" one of five words."""
    for letter, right in LETTERS.items():
        got = filled(answer(letter))
        expect(isinstance(got, str) and got in EXPLAINED, f"curve {letter}: {got!r} is none of {', '.join(EXPLAINED)}")
        expect(got == right, f"curve {letter} isn't {got!r}: {EXPLAINED[right].partition('. ')[0]}")
    return " ".join(
        f"{letter}, {word}: {EXPLAINED[word].partition('Change: ')[2]}." for letter, word in LETTERS.items()
    )
