"""Checks for "How large a batch pays": the critical batch size, and the noise scale from two batch sizes."""

import random
from numbers import Real

from mgpu_lib import evidence
from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.tuning import noise_from_norms, noise_scale


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
        expect(
            close(got, critical),
            f"{case}: {got:g}. Where 1 / B is 0, the line is at S_min; that is less than the "
            "steps of the largest batch",
        )
    steps = {B: 100 * (1 + 200 / B) * factor for B, factor in zip((1, 8, 64, 512, 4096), (1.1, 1 / 1.1) * 3)}
    got = filled(answer(steps))
    expect(
        close(got, 200, 1.4),
        f"each number of steps is 10 % off, and B_crit is {got:.0f} instead of about 200. "
        "Batches of 1 take most steps: do they decide alone? Give each the weight 1 / S², or fit log S",
    )
    target, runs = evidence.to_target()
    found = {B: about for B, (_, about, _) in evidence.fewest_steps(runs, target).items()}
    got, right = filled(answer(found)), evidence.critical_batch(found)[0]
    expect(close(got, right, 2), f"the recorded runs of LeNet: {got:.0f} images, about {right:.0f} were expected")
    return f"the recorded runs of LeNet have a critical batch of about {got:.0f} images at {target:.0%}"


def close(got, right, factor=1.02):
    return got > 0 and 1 / factor < got / right < factor


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
    expect(
        close(got, right, 1.3),
        f"forty steps: {got:.3g} instead of about {right:.3g}. Take the means of the "
        "lengths first, and one ratio at the end",
    )
    return f"and forty steps that scatter give {got:.0f} images, when their means are taken first"
