"""Checks for "Batch size and learning rate": runs that are lost, two lists of seeds, a comparison to mend."""

import math
import statistics
from numbers import Real

import torch
from torch.nn.functional import cross_entropy

from mgpu_lib import evidence
from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.models import lenet, lenet_params

# Runs that are lost

IMAGES, CLASSES, STEPS = 8, 10, 12  # of a planted run
GUESS = math.log(CLASSES)  # the loss of a network that guesses


def run_of(losses, same_from=STEPS, apart=1.0):
    """(losses, logits) of a run, whose images get one and the same row of logits from step `same_from` on.

    Before, the rows differ, all images fall into class 0, and the first two are one image. `apart` scales the logits.
    """
    generator = torch.Generator().manual_seed(0)
    logits = []
    for step in range(len(losses)):
        rows = apart * torch.rand(IMAGES, CLASSES, generator=generator)
        rows[:, 0] += apart
        rows[1] = rows[0]
        logits.append(rows[:1].expand(IMAGES, CLASSES).clone() if step >= same_from else rows)
    return losses, logits


def falling(steps=STEPS):
    return [2.4 * 0.9**step for step in range(steps)]


def planted_runs():
    """(what happens, when it may be ended, run, what to say of a wrong answer) for all runs of the check."""
    nan, inf = math.nan, math.inf
    yield "learns", -1, run_of(falling()), "nothing is wrong with it, though all its images get the same class"
    plateau = [2.41] + [GUESS] * 6 + falling(5)
    hint = "it stands at ln 10 with different logits, and then learns: the loss alone doesn't tell"
    yield "waits at ln 10", -1, run_of(plateau, apart=0.01), hint
    spike = [2.41, 6e9, 3e4, 12.0, *falling(8)]
    yield "jumps once", -1, run_of(spike), "however large, a finite loss may come down again"
    hint = "from step 4 on all images get the same logits; their loss is that of guessing"
    yield "dies early", 4, run_of([2.41, 1.9, 6e9] + [GUESS] * 9, same_from=4), hint
    yield "learns, then dies", 9, run_of(falling(9) + [GUESS] * 3, same_from=9), "it is dead from step 9 on"
    lost = falling(3) + [nan] * 9
    yield "becomes NaN", 3, (lost, run_of(lost)[1][:3] + [torch.full((IMAGES, CLASSES), nan)] * 9), "its loss is NaN"
    hint = "its loss is infinite, which is no less final than NaN"
    yield "becomes infinite", 5, run_of(falling(5) + [inf] * 7), hint


@exercise
def check_died_at(answer):
    """died_at(losses, logits): the first step after which a run may be ended, or -1."""
    for what, right, run, hint in planted_runs():
        losses, logits = run
        got = filled(answer([*losses], [rows.clone() for rows in logits]))
        expect(isinstance(got, int), f"you return {got!r}; return the number of a step, or -1")
        how = "may not be ended" if right < 0 else f"may be ended after step {right}"
        expect(got == right, f"the run that {what} {how}, you say {got}: {hint}")
    return f"LeNet of the chapter, at a rate of 2.0, could have been ended after step {answer(*too_fast())} of 60"


def too_fast(steps=60):
    """(losses, logits) of the chapter's LeNet on its 60 images at a rate of 2.0, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    X, y = torch.rand(60, 1, 28, 28, generator=generator), torch.arange(60) % CLASSES
    params, losses, logits = [p.requires_grad_() for p in lenet_params()], [], []
    for _ in range(steps):
        loss = cross_entropy(lenet(X, params), y)
        with torch.no_grad():
            for p, grad in zip(params, torch.autograd.grad(loss, params)):
                p -= 2.0 * grad
            losses.append(loss.item())
            logits.append(lenet(X, params))
    return losses, logits


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
