"""Checks for "Batch size and learning rate": five curves to diagnose, two lists of seeds, a comparison to mend."""

import math
import statistics
from itertools import pairwise
from numbers import Real

from mgpu_lib import evidence
from mgpu_lib.exercises.framework import exercise, expect, filled

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
        expect(got == right, f"curve {letter} isn't {got!r}. Look for this: {EXPLAINED[got].partition('. ')[0]}")
    return " ".join(
        f"{letter}, {word}: {EXPLAINED[word].partition('Change: ')[2]}." for letter, word in LETTERS.items()
    )


# Two lists of seeds

LARGE = {2: 83.2, 0: 82.9, 3: 82.8, 1: 85.7, 4: 83.8}  # test accuracies in percent; the seeds are in another order
SMALL = {0: 82.6, 1: 84.6, 2: 80.6, 3: 82.1, 4: 82.0}
WANTED = 0.5  # points to either side


@exercise
def check_seeds_needed(answer):
    """seeds_needed(first, second): (mean difference, half the width of its 95 % interval, seeds for ±0.5 points)."""
    found = filled(answer(dict(LARGE), dict(SMALL)))
    expect(
        isinstance(found, tuple) and len(found) == 3 and all(isinstance(each, Real) for each in found),
        f"you return {found!r}; return three numbers: the difference, half the interval, the seeds",
    )
    mean, half, seeds = found
    right, wide = evidence.paired(LARGE, SMALL)
    expect(not close(mean, -right), "the difference has the wrong sign: the first minus the second")
    expect(close(mean, right), f"the mean difference is {right:+.2f} points, you say {mean:+.2f}")
    differences = [LARGE[seed] - SMALL[seed] for seed in SMALL]
    deviation, n = statistics.stdev(differences), len(differences)
    for wrong, hint in wrong_halves(differences):
        expect(not close(half, wrong), hint)
    expect(close(half, wide), f"half the interval is {wide:.2f} points, you say {half:.2f}")
    least, most = math.ceil((1.96 * deviation / WANTED) ** 2), seeds_for(deviation)
    expect(seeds == int(seeds), f"{seeds} seeds: round up to a whole number")
    expect(
        least <= seeds <= most + 1,
        f"{seeds} seeds: twice the deviation of {deviation:.2f} points, divided by the root of their number, must be "
        f"at most {WANTED}",
    )
    return f"{mean:+.2f} ± {half:.2f} points from {n} seeds; ±{WANTED} takes about {int(seeds)} seeds"


def close(value, right):
    return abs(value - right) < 0.006


def wrong_halves(differences):
    """(half an interval that is wrong, what to say) for what people usually compute in its place."""
    n, quantile = len(differences), evidence.STUDENT[len(differences) - 2]
    deviation = statistics.stdev(differences)
    mixed = [large - small for large, small in zip(LARGE.values(), SMALL.values())]
    sides = math.sqrt(sum(statistics.variance(side.values()) for side in (LARGE, SMALL)))
    yield quantile * deviation, "that is the spread of single seeds: a mean of n is √n times as sure"
    yield deviation / math.sqrt(n), "that is the standard error: multiply it by Student's factor"
    yield 1.96 * deviation / math.sqrt(n), "1.96 is for very many seeds: with five, Student's factor is larger"
    yield 2 * deviation / math.sqrt(n), "2 is for very many seeds: with five, Student's factor is larger"
    yield quantile * statistics.pstdev(differences) / math.sqrt(n), "divide the squares by n - 1: use statistics.stdev"
    yield quantile * statistics.stdev(mixed) / math.sqrt(n), "the seeds stand in different orders: match them by key"
    yield quantile * sides / math.sqrt(n), "that ignores the pairs: take the difference seed by seed, then its spread"


def seeds_for(deviation):
    """The fewest seeds whose interval is within WANTED, with Student's factor for that many."""
    for n, quantile in enumerate(evidence.STUDENT, 2):
        if quantile * deviation / math.sqrt(n) <= WANTED:
            return n
    return math.ceil((2.1 * deviation / WANTED) ** 2)


# A comparison to mend


def planted(shift=0.0, lost=None, uneven=0.0):
    """Runs of two batch sizes, as `evidence.grid` returns them, at three rates each and with three seeds.

    Batches of 64 are best at 0.1 and those of 1024 at 0.4, and then equally good, but for `shift`, to which the seeds
    add -`uneven`, 0 and `uneven`. On the test images 0.2 looks better by chance. Of the small batch the seed `lost` has
    died.
    """
    level = {64: {0.1: 0.85, 0.2: 0.84, 0.4: 0.78}, 1024: {0.1: 0.76, 0.2: 0.83, 0.4: 0.85 + shift}}
    luck = {64: 0.02, 1024: 0.05}  # of the test images, at 0.2
    noise = {0: 0.0, 1: 0.03, 2: -0.03}
    return {
        B: {
            lr: [
                planted_run(
                    seed,
                    mean + noise[seed] + (seed - 1) * uneven * (B == 1024),
                    luck[B] * (lr == 0.2),
                    lost == seed and B == 64,
                )
                for seed in noise
            ]
            for lr, mean in rates.items()
        }
        for B, rates in level.items()
    }


def planted_run(seed, accuracy, luck, died):
    return evidence.Run(
        seed, [1], [0.5], [accuracy], None, {"epochs": accuracy}, {"epochs": None if died else accuracy + luck}
    )


@exercise
def check_mended_comparison(answer):
    """compared(grid, first, second): what batches of `first` gain over `second`, each at its own best rate, paired."""
    small = 0.01 / 3  # a gain that no single seed could show
    got = pair_of(filled(answer(planted(), 1024, 64)))
    expect(not close(got[0], 2), "the test images chose a rate: the validation images must, for each batch")
    expect(not (close(got[0], -9) or close(got[0], 7)), "the rate is tuned for one batch only: tune it for each")
    expect(close(got[0], 0), f"two batches that are equally good at their best rates differ by {got[0]:+.1f} points")
    gain, half = pair_of(answer(planted(small), 1024, 64))
    expect(close(gain, 100 * small), f"a gain of {100 * small:.2f} points with every seed comes out as {gain:+.2f}")
    expect(half < 0.1, f"every seed gains the same, yet half your interval is {half:.1f} points: compare seed by seed")
    gain, _ = pair_of(answer(planted(small, lost=2), 1024, 64))
    expect(
        close(gain, 100 * small),
        f"where one seed of the small batch is missing, the gain comes out as {gain:+.1f}: leave it out on both sides",
    )
    gain, half = pair_of(answer(planted(small, uneven=0.01), 1024, 64))
    right = 100 * small
    _, wide = evidence.paired({0: right - 1, 1: right, 2: right + 1}, dict.fromkeys(range(3), 0))
    expect(close(gain, right), f"gains around {right:.2f} points, a point apart, come out as {gain:+.2f}")
    expect(
        close(half, wide),
        f"three seeds whose gains lie a point apart: half the interval is {wide:.2f} points, you say {half:.2f}",
    )
    gain, half = pair_of(answer(evidence.grid("lenet"), 1024, 256))
    return f"in the grid, batches of 1024 against 256: {gain:+.1f} ± {half:.1f} points"


def pair_of(found):
    expect(
        isinstance(found, tuple) and len(found) == 2 and all(isinstance(each, Real) for each in found),
        f"you return {found!r}; return two numbers: the mean difference and half its interval",
    )
    return found
