"""What chapter 8 says about its recorded experiments is what they show. Recorded anew, the words are checked again.

Each test names the cells with the sentences that depend on it.
"""

import statistics

import pytest

from mgpu_lib import evidence
from mgpu_lib.widgets import recorded

NETS = ("lenet", "lenet_bn")
SIZES = (1, 4, 16, 64, 256, 1024, 4096)


def study(name):
    if not (recorded.RESULTS / f"{name}.json").exists():
        pytest.skip(f"{name}.json is not recorded yet: python -m experiments.{name}")
    return evidence.study(name)["summary"]


@pytest.fixture(scope="module")
def grids():
    if not (recorded.RESULTS / "tuning.json").exists():
        pytest.skip("tuning.json is not recorded yet: python -m experiments.tuning")
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
    assert max(found, key=lambda B: found[B][0]) >= 256


def test_each_fixed_rate_has_its_best_batch(grids):
    """fixed-figure, fixed-why."""
    tops = []
    for lr in (0.01, 0.063, 0.4):
        found = {B: evidence.tested(rates[lr], "epochs") for B, rates in grids["lenet"].items() if lr in rates}
        tops.append(max((B for B in found if found[B]), key=lambda B: found[B][0]))
    assert tops == sorted(set(tops)), "the larger the rate, the larger the best batch"


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


def test_claim_3_the_rate_grows_and_then_stops(grids):
    """rates-figure, rates-why, claim-3-verdict."""
    rates = {B: evidence.best_rate(rates, "epochs") for B, rates in grids["lenet"].items()}
    limits, with_equal_steps = ({B: evidence.rates_that_train(rates, budget)[-1] for B, rates in grids["lenet"].items()}
                                for budget in ("epochs", "steps"))
    assert [rates[B] for B in (1, 4, 16, 64)] == sorted(rates[B] for B in (1, 4, 16, 64)) and rates[1] < rates[64]
    assert limits[1] < limits[4] <= limits[16] and len({limits[B] for B in SIZES[2:]}) == 1
    assert len({with_equal_steps[B] for B in SIZES[1:]}) == 1, "with equal steps the limit is the same from 4 on"
    assert rates[4096] < rates[256] * 16 / 2.5, "the linear rule leaves the best rates by more than a step of the grid"
    ratio = rates[256] / rates[1]
    assert 16 < ratio < 16 * 2.6 and ratio < 256 / 2.5, "less than in proportion; within a step of the square root"


def test_claim_3_rules_and_warm_up():
    """scaling-why, claim-3-verdict, example-why."""
    found = study("scaling")

    def level(B, rule, net="lenet"):
        return found[f"{net}/{B}/{rule}"].get("test_accuracy", [0.1])[0]

    rules = ("kept", "square root", "square root, warm-up", "linear")
    assert level(1024, "linear, warm-up") > max(level(1024, rule) for rule in rules), "most with linear and warm-up"
    assert level(256, "kept") > level(1024, "linear, warm-up"), "it gets back a part"
    assert all(level(1024, rule) - level(1024, "kept") < 0.01 for rule in rules[:3]), "the others little or nothing"
    gained = [level(4096, rule, "lenet_bn") - level(4096, "kept", "lenet_bn") for rule in rules[1:3]]
    assert all(0 < each < 0.03 for each in gained), "with batch norm the square root gains about a point"
    cold, warm = (found[f"lenet/4096/linear{how}"]["ended_at_step"] for how in ("", ", warm-up"))
    assert cold and len(warm) == len(cold) and statistics.fmean(warm) > statistics.fmean(cold), "it delays the death"
    assert max(level(4096, rule) for rule in rules[1:]) <= found["lenet/4096/kept"]["test_accuracy"][2]


def test_claim_4(grids):
    """norm-table, norm-figure, norm-why, claim-4-verdict."""
    for B in SIZES:
        without, with_norm = (evidence.rates_that_train(grids[net][B], "epochs")[-1] for net in NETS)
        assert (with_norm > 2 * without) if B >= 64 else (with_norm == without), f"batch {B}"
    normed = grids["lenet_bn"]
    assert all(None in [run.test["epochs"] for run in normed[B][2.5]] for B in SIZES[2:]), "at 2.5 at least one fails"
    assert not any(2.5 in normed[B] for B in (1, 4)), "2.5 was tried from 16 images on"
    assert evidence.tested(normed[1][0.01], "epochs") < evidence.tested(grids["lenet"][1][0.01], "epochs")


def test_accuracies_do_not_depend_on_the_number_of_gpus():
    """same-step-why."""
    found = study("same_step")
    for B in (256, 1024):
        accuracies = found[f"float32/{B}"]["accuracy"]
        assert accuracies["one device"] == accuracies["1"]
        tops = [max(column) for column in zip(*accuracies.values())]
        assert not any(list(each) == tops for each in accuracies.values()), "one is ahead with all seeds"
        assert max(found[f"float64/{B}"]["gaps"].values())[1] < 1e-10


def test_noise_grows_along_training():
    """noise-figure, noise-why."""
    for found in study("noise").values():
        scales = [moment["noise_scale"] for moment in found["moments"]]
        assert scales[0] == min(scales) and 5 < scales[0] < 50 and max(scales) > 10 * scales[0]
        windows = [window["noise_scale"] for window in found["windows"]]
        assert windows == sorted(windows)


def test_the_critical_batch_is_near_the_noise_scale():
    """critical-why, summary: in the order of magnitude, before the accuracy is reached."""
    study("critical")
    target, runs = evidence.to_target()
    steps = {B: about for B, (_, about, _) in evidence.fewest_steps(runs, target).items()}
    critical = evidence.critical_batch(steps)[0]
    scales = [m["noise_scale"] for each in study("noise").values() for m in each["windows"] if m["to_step"] <= 215]
    assert min(scales) / 10 < critical < 10 * max(scales)
