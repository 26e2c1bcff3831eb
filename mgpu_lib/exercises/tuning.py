"""Checks for chapter 8: a rate for an unseen batch size, the critical batch size, five curves, the noise scale."""

import math
import random
import statistics
from itertools import pairwise
from numbers import Real

from mgpu_lib import evidence
from mgpu_lib.tuning import noise_from_norms, noise_scale

from .framework import exercise, expect, filled


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
    expect(not ended, f"{case}, and there {len(ended)} of {len(rates[near])} runs diverged. A rule that starts far "
                      "away goes too far; start from the neighbors")
    reached, top = (100 * evidence.level(rates[each], "epochs") for each in (near, best))
    seen = f"{case}, with {reached:.1f} % on the validation images, and the best, {best:g}, has {top:.1f} %"
    expect(near in evidence.good_rates(rates, "epochs"), f"{seen}. Go {'up' if near < best else 'down'}: what do the "
                                                         "neighbors of this batch size in `known` say?")
    return seen


@exercise
def check_critical_batch(answer):
    """critical_batch(steps): B_crit of S = S_min (1 + B_crit / B), from {B: S}."""
    for fewest, critical, sizes in [(100, 50, (4, 16, 64, 256)), (1000, 700, (64, 256, 4096)), (20, 8, (1, 8, 32))]:
        steps = {B: fewest * (1 + critical / B) for B in sizes}
        got, case = filled(answer(dict(steps))), f"S_min {fewest}, B_crit {critical}, batches of {sizes}"
        expect(isinstance(got, Real), f"{case}: {got!r} is no number")
        expect(not close(got, fewest * critical), f"{case}: {got:g} is E_min, the fewest images. Divide by S_min")
        expect(not close(got, fewest), f"{case}: {got:g} is S_min, the fewest steps. E_min / S_min is asked for")
        expect(not close(got, 1 / critical), f"{case}: {got:g} is S_min / E_min; turn it round")
        expect(close(got, critical), f"{case}: {got:g}. Where 1 / B is 0, the line is at S_min; that is less than the "
                                     "steps of the largest batch")
    steps = {B: 100 * (1 + 200 / B) * factor for B, factor in zip((1, 8, 64, 512, 4096), (1.1, 1 / 1.1) * 3)}
    got = filled(answer(steps))
    expect(close(got, 200, 1.4), f"each number of steps is 10 % off, and B_crit is {got:.0f} instead of about 200. "
           "Batches of 1 take most steps: do they decide alone? Give each the weight 1 / S², or fit log S")
    target, runs = evidence.to_target()
    found = {B: about for B, (_, about, _) in evidence.fewest_steps(runs, target).items()}
    got, right = filled(answer(found)), evidence.critical_batch(found)[0]
    expect(close(got, right, 2), f"the recorded runs of LeNet: {got:.0f} images, about {right:.0f} were expected")
    return f"the recorded runs of LeNet have a critical batch of about {got:.0f} images at {target:.0%}"


def close(got, right, factor=1.02):
    return got > 0 and 1 / factor < got / right < factor


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
    found = {"too small": batches[max(batches)][min(batches[max(batches)])][0], "good": batches[256][best[256]][0],
             "jumps": max(large, key=jumping), "dead at once": batches[256][max(batches[256])][0],
             "learned, then died": max(ended, key=lambda run: max(run.accuracy))}
    return {letter: found[word] for letter, word in LETTERS.items()}


def jumping(run):
    """The mean fall of accuracy between measurements in the second half of them; 0 for a run that hardly learned."""
    late = run.accuracy[len(run.accuracy) // 2:]
    falls = [max(0, before - after) for before, after in pairwise(late)]
    return statistics.fmean(falls) if statistics.fmean(late) > 0.5 else 0


@exercise
def check_diagnose(answer):
    """diagnose(curve): for "A" to "E" one of five words."""
    for letter, right in LETTERS.items():
        got = filled(answer(letter))
        expect(isinstance(got, str) and got in EXPLAINED, f"curve {letter}: {got!r} is none of {', '.join(EXPLAINED)}")
        expect(got == right, f"curve {letter} isn't {got!r}: {EXPLAINED[right].partition('. ')[0]}")
    return " ".join(f"{letter}, {word}: {EXPLAINED[word].partition('Change: ')[2]}."
                    for letter, word in LETTERS.items())


@exercise
def check_two_batch_noise(answer):
    """two_batch_noise(small, large, b, B): tr Σ / |G|² from squared lengths of gradients of two batch sizes."""
    for signal, noise, b, B in [(0.5, 40, 16, 64), (2, 3000, 256, 1024), (0.1, 1, 1, 2)]:
        small, large = signal + noise / b, signal + noise / B
        got, right = filled(answer([small], [large], b, B)), noise / signal
        case = f"|G|² = {signal}, tr Σ = {noise}, batches of {b} and {B}: {got!r} instead of {right:g}"
        expect(isinstance(got, Real), case)
        expect(not close(got, signal / noise), f"{case}; that is signal over noise")
        expect(not close(got, noise / large), f"{case}; the large batch has noise too: its length isn't |G|² yet")
        expect(not close(got, noise), f"{case}; that is tr Σ. Divide by |G|²")
        expect(close(got, right), f"{case}; small - large is tr Σ (1/b - 1/B)")
    chance = random.Random(0)
    pairs = [(chance.uniform(2.5, 6), chance.uniform(0.5, 3.5)) for _ in range(40)]
    small, large = map(list, zip(*pairs))
    right = noise_scale(noise_from_norms(*pair, 4, 16) for pair in pairs)
    got = filled(answer(small, large, 4, 16))
    expect(close(got, right, 1.3), f"forty steps: {got:.3g} instead of about {right:.3g}. Take the means of the "
                                   "lengths first, and one ratio at the end")
    return f"and forty steps that scatter give {got:.0f} images, when their means are taken first"
