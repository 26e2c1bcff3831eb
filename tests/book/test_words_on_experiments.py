"""What the chapters say about recorded experiments is what these show. Recorded anew, the words are checked again.

Each test names the cells with the sentences that depend on it.
"""

from itertools import pairwise

import pytest

from mgpu_lib import evidence

NETS = ("lenet", "lenet_bn")
SIZES = (1, 4, 16, 64, 256, 1024, 4096)


def study(name):
    return evidence.study(name)["summary"]


@pytest.fixture(scope="module")
def grids():
    return {net: evidence.grid(net) for net in NETS}


def best(batches, budget):
    """{batch size: (mean, lowest, highest) test accuracy at the best rate}."""
    return {B: evidence.tested(rates[evidence.best_rate(rates, budget)], budget) for B, rates in batches.items()}


def mean(found):
    return found[0]


@pytest.mark.parametrize("net", NETS)
def test_claim_1_small_batches_with_equal_epochs(grids, net):
    """best-figure, best-why, claim-1-verdict, summary."""
    found = best(grids[net], "epochs")
    assert max(found, key=lambda B: found[B][0]) in {"lenet": (1, 4, 16), "lenet_bn": (16, 64)}[net]
    top = max(found.values(), key=mean)
    assert all(found[B][2] < top[1] for B in (1024, 4096)), "very large ones fall behind"
    assert found[4096] == min(found.values(), key=mean)
    assert any(found[B][2] >= found[1][1] for B in (4, 16)), "1 is not special"
    assert net == "lenet" or found[1][2] < found[4][1], "with batch norm the line falls on the left, too"


@pytest.mark.parametrize("net", NETS)
def test_claim_1_large_batches_with_equal_steps(grids, net):
    """best-figure, best-why, claim-1-verdict, summary."""
    found = best(grids[net], "steps")
    assert found[1] == min(found.values(), key=mean) and found[1][2] < found[4096][1]
    assert max(found, key=lambda B: found[B][0]) >= 256 and found[4096][0] <= found[1024][0], "the right end is flat"


def test_each_fixed_rate_has_its_best_batch(grids):
    """fixed-figure, fixed-why."""
    found = {
        lr: {B: evidence.tested(rates[lr], "epochs") for B, rates in grids["lenet"].items() if lr in rates}
        for lr in (0.025, 0.16, 0.4)
    }
    tops = {lr: max((B for B in row if row[B]), key=lambda B: row[B][0]) for lr, row in found.items()}
    assert tops == {0.025: 4, 0.16: 16, 0.4: 64}, "the larger the rate, the larger the best batch"
    for lr, next_smaller in ((0.025, 1), (0.16, 4)):
        assert found[lr][next_smaller][2] < found[lr][tops[lr]][0], "it survives the rate, and is worse"
    assert found[0.4][16] is None, "it dies"


def test_three_rates_for_256(grids):
    """three-rates, three-rates-why."""
    small, good, large = (grids["lenet"][256][lr] for lr in (0.004, 0.4, 1.0))
    assert all(run.accuracy[-1] < min(other.accuracy[-1] for other in good) - 0.1 for run in small)
    assert all(run.accuracy[-1] >= max(run.accuracy[:-2]) - 0.005 for run in small), "still on its way up"
    assert all(max(run.accuracy) < 0.2 for run in large) and sum(run.ended is not None for run in large) == 1

    def falls(run):
        return sum(max(0, a - b) for a, b in zip(run.accuracy[:8], run.accuracy[1:8]))

    assert min(map(falls, good)) > 2 * max(map(falls, small)), "it jumps in its first epoch"


def test_claim_2():
    """oscillation-figure, oscillation-why, claim-2-verdict."""
    found = study("oscillation")
    same = found["lenet/same"]
    ratio = {key.removeprefix("lenet/"): line["spread"] / same["spread"] for key, line in found.items()}
    for calm in ("lr / 4", "lr / 16", "cosine to 0"):
        assert max(found[f"lenet/{calm}"]["spreads"]) <= min(same["spreads"]) * 1.1
        assert found[f"lenet/{calm}"]["accuracy"] > same["accuracy"]
    assert min(found["lenet/batch 64"]["spreads"]) > max(same["spreads"]) and 0.8 < ratio["batch 1024"] < 1.25
    for average in ("same/average of 100 steps", "same/average of all steps"):
        assert ratio[average] < 1.2 * ratio["lr / 16"] and found[f"lenet/{average}"]["accuracy"] > same["accuracy"]
    assert ratio["same/250 images"] > 2 and ratio["same/1000 images"] > 1.2
    norm = {key.removeprefix("lenet_bn/"): line["spread"] for key, line in found.items() if key.startswith("lenet_bn/")}
    assert 0.4 < norm["same/recomputed"] / norm["same"] < 0.65, "about half of the jumping is gone"


def within(rate, rates):
    return min(rates) / 1.001 <= rate <= max(rates) * 1.001


@pytest.mark.parametrize("net", NETS)
def test_claim_3_the_rate_grows_and_then_stops(grids, net):
    """rates-figure, rates-growth, rates-why, claim-3-verdict, and the rule of the cell `scaling`."""
    best_lr = {B: evidence.best_rate(rates, "epochs") for B, rates in grids[net].items()}
    good = {B: evidence.good_rates(rates, "epochs") for B, rates in grids[net].items()}
    growth = best_lr[64] / best_lr[1]
    assert 64 / growth < growth / 8, "from 1 to 64 nearer to the linear rule than to the square root"
    assert best_lr[64] == best_lr[256] == best_lr[1024] == 0.4
    if net == "lenet":
        assert all(within(best_lr[64] * B / 64, good[B]) for B in (1, 4, 16)), "linear, through the dot at 64"
        assert all(within(best_lr[256] * (B / 256) ** 0.5, good[B]) for B in SIZES[:5]), "square root, through 256"


def test_claim_3_how_wide_the_bars_are(grids):
    """rates-why: what a rate costs that is a step of the grid too small or too large."""
    for B, rates in grids["lenet"].items():
        lrs, top = sorted(rates), evidence.best_rate(rates, "epochs")
        reached = evidence.tested(rates[top], "epochs")[0]
        below, above = (rates[lrs[lrs.index(top) + way]] for way in (-1, 1))
        assert B == 4096 or reached - evidence.tested(below, "epochs")[0] < 3, f"too small costs little, batch {B}"
        if B <= 16:
            assert reached - evidence.tested(above, "epochs")[0] < 3, f"too large costs little, batch {B}"
        elif B <= 1024:
            assert top == evidence.rates_that_train(rates, "epochs")[-1], f"the best is the largest, batch {B}"


def test_claim_3_where_the_limit_is(grids):
    """rates-table, rates-why, claim-3-verdict, norm-why."""
    limits, with_equal_steps = (
        {B: evidence.rates_that_train(rates, budget)[-1] for B, rates in grids["lenet"].items()}
        for budget in ("epochs", "steps")
    )
    assert limits[1] < limits[4] <= limits[16] < limits[64] == limits[256] == limits[1024] == limits[4096]
    assert with_equal_steps[1] == pytest.approx(2.5 * limits[1], rel=0.1), "a step of the grid higher"
    _, low, high = evidence.tested(grids["lenet"][4096][0.4], "epochs")
    assert high - low > 10, "after 56 steps the seeds differ by ten points and more"
    for run in grids["lenet"][4096][0.4]:
        early = run.accuracy[run.step.index(14) : run.step.index(56) + 1]
        assert max(abs(a - b) for a, b in pairwise(early)) > 0.1, "and the accuracy jumps by as much"


def test_claim_3_rules_and_warm_up(grids):
    """scaling-why, claim-3-verdict, summary."""
    found = study("scaling")
    rules = ("square root", "square root, warm-up", "linear", "linear, warm-up")

    def accuracy(net, B, rule):
        return found[f"{net}/{B}/{rule}"]["test_accuracy"]

    def ended(net, B, rule):
        return found[f"{net}/{B}/{rule}"]["ended_at_step"]

    assert len(ended("lenet", 1024, "linear")) == 1 and not ended("lenet", 1024, "linear, warm-up")
    for net in NETS:
        (kept_mean, _, kept_high), (warm_mean, warm_low, _) = (
            accuracy(net, 1024, rule) for rule in ("kept", "linear, warm-up")
        )
        assert warm_mean == max(accuracy(net, 1024, rule)[0] for rule in rules) > kept_mean
        assert (warm_low > kept_high) == (net == "lenet_bn"), "apart with batch norm only"
        assert accuracy(net, 256, "kept")[0] > warm_mean, "a part of what the larger batch loses"
        others = [accuracy(net, 4096, rule)[0] for rule in rules if len(ended(net, 4096, rule)) < 3]
        assert max(others) <= accuracy(net, 4096, "kept")[2], "no rule is better than the rate that was kept"
    tuned = grids["lenet"][1024]
    assert evidence.tested(tuned[evidence.best_rate(tuned, "epochs")], "epochs")[0] > (
        100 * accuracy("lenet", 1024, "linear, warm-up")[0] - 0.5
    ), "the best of nine rates does as well"
    cold, warm = (ended("lenet", 4096, rule) for rule in ("linear", "linear, warm-up"))
    assert len(cold) == len(warm) == 3 and max(cold) < 10 and 20 < min(warm) <= max(warm) < 50, "it delays the death"
    assert not ended("lenet_bn", 4096, "linear, warm-up") and accuracy("lenet_bn", 4096, "linear, warm-up")[2] < 0.5


def test_the_worked_example():
    """title, example-table, example-why."""
    found = {key: line["test_accuracy"] for key, line in study("example").items() if not line["ended_at_step"]}
    one, four = found["1/256/0.2/4"], found["4/256/0.2/4"]
    assert one[1] < four[2] and four[1] < one[2] and abs(one[0] - four[0]) < 0.01, "the same batch, the same end"
    large = {lr: found.get(f"4/1024/{lr}/4", [0.1] * 3) for lr in (0.2, 0.4, 0.8, 1.6)}
    assert all(mean < one[1] for mean, *_ in large.values()), "lower at every rate"
    assert max(large, key=lambda lr: large[lr][0]) == 0.8 and large[1.6][2] < 0.12
    assert abs(large[0.4][0] - large[0.2][0]) < 0.01, "half of the linear rule's rate is no better than the old one"
    low, high = max(large[lr][1] for lr in (0.2, 0.4, 0.8)), min(large[lr][2] for lr in (0.2, 0.4, 0.8))
    assert low < high and max(large[lr][2] for lr in large) < one[1], "undecided among themselves, all below one GPU"
    assert [round(100 * mean) for mean in (one[0], large[0.2][0], large[0.8][0])] == [84, 77, 79]
    eight = found["4/1024/0.4/8"]
    assert large[0.4][2] < eight[1] and eight[2] < one[1], "eight epochs win back a part, and no range overlaps"


def test_the_glance_at_resnet():
    """resnet, resnet-why."""
    found = {tuple(map(float, key.split("/"))): line["test_accuracy"] for key, line in study("resnet_grid").items()}
    assert all(len(accuracies) == 2 for accuracies in found.values())
    for B in (16, 64):
        for seed in (0, 1):
            assert min((0.025, 0.1, 0.4, 1.6), key=lambda lr: found[B, lr][seed]) == 1.6
    assert max(abs(a - b) for a, b in found.values()) > 0.1, "the seeds differ by more than neighboring rates"
    assert max(max(found[256, lr]) for lr in (0.025, 0.1, 0.4, 1.6)) < 0.5, "little is learned"


def test_claim_4(grids):
    """norm-table, norm-figure, norm-why, claim-4-verdict."""
    plain, normed = grids["lenet"], grids["lenet_bn"]
    limits = {B: [evidence.rates_that_train(grids[net][B], "epochs")[-1] for net in NETS] for B in SIZES}
    factors = {B: with_norm / without for B, (without, with_norm) in limits.items()}
    assert factors.pop(4) == 1 and all(factor == pytest.approx(2.5, rel=0.05) for factor in factors.values())
    assert [limits[B][1] for B in SIZES[3:]] == [1.0] * 4 and sorted(limits.values()) == list(limits.values())
    best_lr = [{B: evidence.best_rate(rates, "epochs") for B, rates in batches.items()} for batches in (plain, normed)]
    assert best_lr[0] == best_lr[1], "the best rate is the same with and without"
    at_2_5 = [run for B in SIZES[2:] for run in normed[B][2.5]]
    assert all(None in [run.test["epochs"] for run in normed[B][2.5]] for B in SIZES[2:]), "at 2.5 at least one fails"
    not_finite = sum(run.ended is not None and run.ended not in run.step for run in at_2_5)
    assert not_finite >= len(at_2_5) / 3, "often its loss becomes infinite or NaN"
    assert not any(2.5 in normed[B] for B in (1, 4)), "2.5 was tried from 16 images on"
    assert evidence.tested(normed[1][0.01], "epochs") < evidence.tested(plain[1][0.01], "epochs")


def test_accuracies_do_not_depend_on_the_number_of_gpus():
    """same-step-why."""
    found = study("same_step")
    for B in (256, 1024):
        accuracies = found[f"float32/{B}"]["accuracy"]
        assert accuracies["one device"] == accuracies["1"]
        tops = [max(column) for column in zip(*accuracies.values())]
        assert not any(list(each) == tops for each in accuracies.values()), "one is ahead with all seeds"
        lost = [k for k, each in accuracies.items() if all(a < b for a, b in zip(each, accuracies["one device"]))]
        assert lost == (["2"] if B == 256 else [])
        assert max(found[f"float64/{B}"]["gaps"].values())[1] < 1e-10


def test_noise_grows_along_training():
    """noise-figure, noise-why, critical-why, rate-growth."""
    said = {0: (6, 18), 10: (22, 27), 50: (70, 78), 430: (180, 215)}
    for found in study("noise").values():
        scales = [moment["noise_scale"] for moment in found["moments"]]
        assert scales[0] == min(scales) and 5 < scales[0] < 50 and max(scales) > 10 * scales[0]
        windows = [window["noise_scale"] for window in found["windows"]]
        assert windows == sorted(windows)
        for window in found["windows"]:
            low, high = said.get(window["after"], (0, 1000))
            assert low <= round(window["noise_scale"]) <= high
    moments = zip(*(found["moments"] for found in study("noise").values()))
    assert all(max(m["from"] for m in each) > min(m["to"] for m in each) for each in moments), "the seeds lie apart"


def test_the_critical_batch_is_near_the_noise_scale():
    """critical-fit, critical-why, summary: in the order of magnitude, before the accuracy is reached."""
    study("critical")
    target, runs = evidence.to_target()
    steps = {B: about for B, (_, about, _) in evidence.fewest_steps(runs, target).items()}
    critical = evidence.critical_batch(steps)[0]
    scales = [m["noise_scale"] for each in study("noise").values() for m in each["windows"] if m["to_step"] <= 215]
    assert min(scales) / 10 < critical < 10 * max(scales)
    assert 20 < critical < 100, "some tens of images"
    assert max(steps[B] for B in SIZES[3:]) < 1.5 * min(steps[B] for B in SIZES[3:]), "nearly flat from 64 on"
    assert steps[1024] >= steps[256], "1024 images need no fewer steps"
    assert steps[256] < 215, "less than an epoch with batches of 256"
    for seed in range(3):
        own = evidence.of_seed(runs, seed)
        at_65, at_70, at_75 = (
            evidence.critical_batch({B: about for B, (_, about, _) in evidence.fewest_steps(own, accuracy).items()})[0]
            for accuracy in (0.65, 0.70, target)
        )
        assert at_65 < at_70 > at_75, "it grows from 65 to 70 %, and not from there to 75 %"


def test_the_loop_from_256_to_1024(grids):
    """loop-explained."""
    at_256, at_1024 = (grids["lenet"][B] for B in (256, 1024))
    assert evidence.best_rate(at_256, "epochs") == evidence.best_rate(at_1024, "epochs") == 0.4
    found = {lr: evidence.tested(at_1024[lr], "epochs") for lr in (0.16, 0.4, 1.0)}
    assert all(found[lr][2] < evidence.tested(at_256[lr], "epochs")[1] for lr in (0.16, 0.4)), "it ends lower"
    assert found[0.16][0] < found[0.4][0] < found[0.16][0] + 3 and found[1.0] is None
