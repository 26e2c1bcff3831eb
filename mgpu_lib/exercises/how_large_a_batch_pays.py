"""Checks for "How large a batch pays": critical batch size, noise scale, best batch, and AdamW for another batch."""

import math
import random
from numbers import Real

import torch

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
    off = dict(zip((1, 2, 4, 8, 512, 1024, 2048, 4096), (1 / 1.25, 1.1, 1.1, 1.1, 1 / 1.1, 1 / 1.1, 1 / 1.1, 1.25)))
    got = filled(answer({B: 100 * (1 + 200 / B) * factor for B, factor in off.items()}))
    expect(
        close(got, 200, 1.15),
        f"each number of steps is 10 to 25 % off, and B_crit is {got:.0f} instead of about 200. Batches of 1 take most "
        "steps: do they decide alone? Fit all sizes, each by its share (`w=1/S` in `np.polyfit`), or fit log S",
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


# To 75 % on 1, 4 and 8 A100s, modelled: t0, c, B_crit, S_min, k
LENET = [(t0, 0.33e-3 / 400, 28, 87, k) for t0, k in ((0.33e-3, 1), (0.43e-3, 4), (0.48e-3, 8))]


@exercise
def check_best_batch(answer):
    """best_batch(t0, c, B_crit, S_min, k): the batch that k GPUs train fastest with, and the seconds that takes."""
    for *about, k in [*LENET, (5e-4, 1e-4, 3.4, 100, 8), (2e-4, 1e-4, 5, 100, 64)]:
        batch, seconds = filled(answer(*about, k))
        t0, c, B_crit, _ = about
        where = f"t0 / c = {t0 / c:.0f}, B_crit = {B_crit}, k = {k}: a batch of {batch}"
        expect(batch > 0 and batch % k == 0, f"{where} doesn't give each of {k} GPUs equally many whole images")
        real, best = training(*about, k, batch), min(training(*about, k, k * n) for n in range(1, 1000))
        expect(math.isclose(seconds, real), f"{where} takes {real:.4g} s, not {seconds:.4g} s: an image costs c / k")
        less = (
            "With the same t0 the optimum grows with the root of k, "
            "and the multiple of k next to it need not be the faster one"
        )
        expect(real < best * 1.000001, f"{where} takes {real:.6g} s, and another {best:.6g} s. {less}")
    one, four = (answer(*case) for case in LENET[:2])
    return f"LeNet, modelled: 1 GPU {one[0]} images, 4 GPUs {four[0]}, {one[1] / four[1]:.2f} times as fast"


def training(t0, c, B_crit, S_min, k, batch):
    return S_min * (1 + B_crit / batch) * (t0 + c * batch / k)


@exercise
def check_rescale(answer):
    """rescale(optimizer, k): AdamW for k times the batch, in place: rates, beta2 with a floor, weight decay."""
    for lr, beta2, decay, k in [(3e-4, 0.999, 0.1, 4), (1e-3, 0.95, 0.1, 16), (2e-3, 0.99, 0.01, 1 / 4)]:
        weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        groups = [{"params": [weight], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0, "lr": lr / 2}]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2))
        answer(optimizer, k)
        for group, old_lr, old_decay in zip(optimizer.param_groups, (lr, lr / 2), (decay, 0.0), strict=True):
            new_lr, (beta1, new_beta2), new_decay = group["lr"], group["betas"], group["weight_decay"]
            case = f"a rate of {old_lr:g}, beta2 {beta2}, weight decay {old_decay:g}, {k:g} times the batch"
            expect(not math.isclose(new_lr, k * old_lr), f"{case}: the rate became {new_lr:g}. That is SGD's rule")
            expect(
                math.isclose(new_lr, math.sqrt(k) * old_lr),
                f"{case}: the rate is {new_lr:g}; far below B_crit it grows by √k",
            )
            expect(beta1 == 0.9, f"{case}: beta1 became {beta1:g}; leave it alone")
            right, decays = max(beta2**k, 0.9), new_lr * new_decay
            expect(new_beta2 >= 0.9, f"{case}: beta2 is {new_beta2:.3g}, below the floor of 0.9")
            near = math.isclose(1 - new_beta2, 1 - right, rel_tol=0.01)  # 1 - k (1 - beta2), too, where that is near
            expect(near, f"{case}: beta2 is {new_beta2:.6g} instead of {right:.6g}")
            expect(old_decay or new_decay == 0, f"{case}: this group had none, and now it decays")
            expect(
                math.isclose(decays, k * old_lr * old_decay),
                f"{case}: each step shrinks the weights by {decays:.3g} of their length. There are {1 / k:g} times as "
                f"many steps, so it should be {k * old_lr * old_decay:.3g}",
            )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3, weight_decay=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # leaves initial_lr behind
    answer(optimizer, 4)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    begins = optimizer.param_groups[0]["lr"]
    expect(
        math.isclose(begins, 2e-3),
        "the optimizer has had a scheduler, and its rate was 0.001. For 4 times the batch a new scheduler should begin "
        f"at 0.002, and begins at {begins:g}: it takes group['initial_lr'], which the old one has left there",
    )
    return "rate, beta2 and weight decay, up and down, and a new scheduler begins at the new rate"
