"""What the chapters say about recorded experiments is what these show. Recorded anew, the words are checked again.

Each test names the cells with the sentences that depend on it.
"""

import functools
import itertools
import math
import statistics

import pytest
import torch

from mgpu_lib import evidence, prediction, traffic

NETS = ("lenet", "lenet_bn")
SIZES = (1, 4, 16, 64, 256, 1024, 4096)


def study(name, part="summary"):
    return evidence.study(name)[part]


@pytest.fixture(scope="module")
def grids():
    return {net: evidence.grid(net) for net in NETS}


def best(batches, budget):
    """{batch size: (mean, lowest, highest) test accuracy at the best rate}."""
    return {B: evidence.tested(rates[evidence.best_rate(rates, budget)], budget) for B, rates in batches.items()}


def mean(found):
    return found[0]


def interval(first, second):
    """95 % interval of the paired difference over shared seeds."""
    difference, half = evidence.paired(first, second)
    return difference - half, difference + half


def decided(first, second):
    """+1 or -1 where the interval leaves out 0, else 0."""
    low, high = interval(first, second)
    return (low > 0) - (high < 0)


@pytest.mark.parametrize("net", NETS)
def test_claim_1_small_batches_with_equal_epochs(grids, net):
    """title, best-figure, best-why, claim-1-verdict, summary."""
    found = best(grids[net], "epochs")
    assert max(found, key=lambda B: found[B][0]) in {"lenet": (1, 4, 16), "lenet_bn": (16, 64)}[net]
    top = max(found.values(), key=mean)
    assert all(found[B][2] < top[1] for B in (1024, 4096)), "very large ones fall behind"
    assert found[4096] == min(found.values(), key=mean)
    assert net == "lenet" or found[1][2] < found[4][1], "with batch norm the line falls on the left, too"
    if net == "lenet":
        assert [round(found[B][0], 1) for B in (1, 4096)] == [88.7, 68.7]


@pytest.mark.parametrize("net", NETS)
def test_claim_1_large_batches_with_equal_steps(grids, net):
    """title, best-figure, best-why, claim-1-verdict, summary."""
    found = best(grids[net], "steps")
    assert found[1] == min(found.values(), key=mean) and found[1][2] < found[4096][1]
    assert max(found, key=lambda B: found[B][0]) >= 256 and found[4096][0] <= found[1024][0], "the right end is flat"
    if net == "lenet":
        assert [round(found[B][0]) for B in (1, 4096)] == [47, 79]
    ends = [evidence.by_seed(grids[net][B][evidence.best_rate(grids[net][B], "steps")], "steps") for B in (1024, 4096)]
    assert decided(*ends) == 0, "nothing certain"


SMALL = {1: "lenet/1/0.01", 4: "lenet/4/0.025", 16: "lenet/16/0.063", 64: "lenet/64/0.4"}


def test_claim_1_with_ten_seeds(grids):
    """ten-seeds, ten-seeds-why, claim-1-verdict."""
    assert all(
        evidence.best_rate(grids["lenet"][B], "epochs") == float(name.split("/")[2]) for B, name in SMALL.items()
    )
    found = evidence.ten_seeds()
    assert not any(None in found[name].values() for name in SMALL.values())
    found = {B: found[name] for B, name in SMALL.items()}
    assert decided(found[1], found[4]) == 0 and max(map(abs, interval(found[1], found[4]))) < 0.3
    for B in (1, 4):
        assert decided(found[B], found[16]) == 1 and 0.2 < evidence.paired(found[B], found[16])[0] < 0.5, "a few tenths"
    for B in (1, 4, 16):
        assert decided(found[B], found[64]) == 1 and 0.5 < evidence.paired(found[B], found[64])[0] < 1.5, "a point"


def test_claim_1_equal_time(grids):
    """fixed-table-why, time-figure, time-table, time-table-why, time-pairs, -why, claim-1-verdict, summary."""
    lenet, slow, fast = traffic.networks()["LeNet"], 1, 1 / 3
    recorded = {B: evidence.best_at(rates) for B, rates in grids["lenet"].items()}

    @functools.cache
    def seconds(B, k, host):
        images = torch.empty(B, 1, 28, 28, device="meta")
        return prediction.predict(lenet, images, "V100", k, strategy="ddp", host=host).seconds

    def around(B, k, host, budget):
        """Steps at the last measurement in time, and at the next."""
        step = seconds(B, k, host)
        before = max(n for n in recorded[B] if n * step <= 1.005 * budget)
        return before, min((n for n in recorded[B] if n > before), default=None)

    def after(B, number):
        each = [
            {run.seed: 100 * run.accuracy[run.step.index(number)] for run in runs}
            for runs in grids["lenet"][B].values()
            if all(number in run.step and run.ended != number for run in runs)
        ]
        best = max(each, key=lambda found: sum(found.values()))
        assert len(best) == 3 and statistics.fmean(best.values()) == pytest.approx(100 * recorded[B][number])
        return best

    def compared(first, second):
        return decided(after(*first), after(*second)), evidence.paired(after(*first), after(*second))[0]

    for host in (slow, fast):
        assert seconds(16, 1, host) < 1.1 * seconds(1, 1, host), "at most a tenth longer"
        step = seconds(1, 1, host), seconds(16, 1, host)
        assert (step[0] == step[1]) == (host == slow), "launch-bound with the slow host"
    assert [round(seconds(64, 1, host) / seconds(256, 1, host), 2) for host in (slow, fast)] == [0.73, 0.49]
    assert round(4 * 215 * seconds(256, 1, slow), 1) == 0.9 and round(4 * 54 * seconds(1024, 4, slow), 2) == 0.25

    # neither end, with either host
    for host in (slow, fast):
        reached = around(256, 1, host, 0.9)[0]
        for B in (1, 4, 16):
            in_time, late = around(B, 1, host, 0.9)
            assert compared((256, reached), (B, in_time))[0] == 1, (B, host)
            assert compared((256, reached), (B, late))[1] > 0, "by the means"
        for B in (1024, 4096):
            assert compared((256, reached), (B, around(B, 1, host, 0.9)[0]))[0] == 1, (B, host)
            in_time = [recorded[size][around(size, 1, host, 0.25)[0]] for size in (256, B)]
            assert in_time[0] > in_time[1]

    # the rows of the cell time-pairs are what its labels say
    assert [around(256, 1, host, 0.25)[0] for host in (slow, fast)] == [215, 215]
    assert [around(64, 1, host, 0.25)[0] for host in (slow, fast)] == [215, 430]
    assert [around(1024, 1, host, 0.25)[0] for host in (slow, fast)] == [81, 81]
    assert [around(256, 1, host, 0.9)[0] for host in (slow, fast)] == [753, 860]
    assert [around(64, 1, slow, 0.9)[1], around(64, 1, fast, 0.9)[0]] == [1290, 1720]
    assert round(1290 * seconds(64, 1, slow), 2) == 1.00
    assert [round(216 * seconds(1024, 1, host), 1) for host in (slow, fast)] == [0.6, 0.6]
    assert [around(256, 1, host, 0.6)[0] for host in (slow, fast)] == [538, 538]
    assert [around(1024, 4, host, 0.25)[0] for host in (slow, fast)] == [216, 216]
    assert around(256, 4, slow, 0.25) == (215, 323) and around(256, 4, fast, 0.25)[0] == 430
    assert round(323 * seconds(256, 4, slow), 1) == 0.3

    # and what is said about them
    assert compared((256, 215), (64, 215))[0] == compared((256, 215), (64, 430))[0] == 0
    assert compared((256, 753), (64, 1290)) == (1, pytest.approx(1, abs=0.2))
    assert compared((256, 860), (64, 1720))[0] == 0
    assert [compared(*pair)[0] for pair in (((1024, 81), (256, 215)), ((1024, 216), (256, 538)))] == [-1, -1]
    assert compared((1024, 216), (256, 215))[0] == compared((1024, 216), (256, 323))[0] == 0
    assert compared((1024, 216), (256, 430)) == (-1, pytest.approx(-3, abs=0.2))
    assert compared((256, 430), (64, 430))[0] == 0, "what three further GPUs buy"
    bought = [(256, 215), (1024, 216), (64, 430), (256, 430)]
    numbers = [round(100 * recorded[B][number], 1) for B, number in bought]
    assert numbers == [78.2, 80.4, 81.5, 83.5]
    highest = [
        max(100 * recorded[B][around(B, k, host, 0.25)[0]] for B in SIZES if k <= B)
        for host in (slow, fast)
        for k in (1, 4)
    ]
    assert [round(each, 1) for each in highest] == numbers


def test_each_fixed_rate_has_its_best_batch(grids):
    """fixed-figure, fixed-why, fixed-table, fixed-table-why."""
    found = {
        lr: {B: evidence.tested(rates[lr], "epochs") for B, rates in grids["lenet"].items() if lr in rates}
        for lr in (0.025, 0.16, 0.4)
    }
    tops = {lr: max((B for B in row if row[B]), key=lambda B: row[B][0]) for lr, row in found.items()}
    assert tops == {0.025: 4, 0.16: 16, 0.4: 64}, "by the means, the larger the rate, the larger the best batch"
    assert found[0.4][16] is None, "it dies"
    neighbors = [(0.025, 4, 1), (0.025, 4, 16), (0.16, 16, 4), (0.16, 16, 64), (0.4, 64, 256)]
    said = [
        decided(*(evidence.by_seed(grids["lenet"][B][lr], "epochs") for B in (first, second)))
        for lr, first, second in neighbors
    ]
    assert said == [0, 1, 1, 0, 0], "three of the five are undecided, and none is decided the other way"


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

    def compared(way, net="lenet"):
        """The interval of the ratio to the same network without the change."""
        logs = [dict(enumerate(map(math.log, found[f"{net}/{key}"]["spreads"]))) for key in (way, "same")]
        return [math.exp(end) for end in interval(*logs)]

    for calm in ("lr / 4", "lr / 16", "same/average of 100 steps", "same/average of all steps"):
        assert compared(calm)[1] < 1, calm
    assert compared("batch 64")[0] > 1 and compared("same/250 images")[0] > 1 and compared("same/1000 images")[0] > 1
    for undecided in ("cosine to 0", "batch 1024"):
        assert compared(undecided)[0] < 1 < compared(undecided)[1], undecided
    ratio = found["lenet/batch 1024"]["spread"] / found["lenet/same"]["spread"]
    assert 0.9 < ratio < 1.1, "a larger batch doesn't calm"
    assert compared("batch 1024")[0] > 0.5, "noise alone would halve the spread"
    low, high = compared("same/recomputed", "lenet_bn")
    assert low < 1 < high < 1.05, "just reaches 1"
    norm = [found[f"lenet_bn/{way}"]["spread"] for way in ("same/recomputed", "same")]
    assert 0.4 < norm[0] / norm[1] < 0.65, "halves the mean spread"
    assert [round(100 * found[f"{net}/same"]["spread"], 1) for net in NETS] == [0.4, 0.8]
    accuracy = [round(100 * found[f"lenet/{way}"]["accuracy"], 1) for way in ("same/average of 100 steps", "same")]
    assert accuracy == [87.9, 87.1]


def test_claim_2_little_data():
    """little-ask, little-table, little-why, claim-2-verdict."""
    stored = evidence.study("little_data")
    logs = {
        key: {seed: math.log(run["spread"]) for seed, run in enumerate(runs)}
        for key, runs in study("little_data").items()
    }
    low, _ = interval(logs["10000/256"], logs["9984/256"])
    assert math.exp(low) > 1.5, "a small last batch makes the curve jump"
    for seed in range(3):  # every second measurement comes right after it: 40 steps are an epoch
        late = [float(number) for number in stored["runs"][f"10000/256/{seed}"]["accuracy"].split()][16:]
        assert statistics.fmean(late[0::2]) > statistics.fmean(late[1::2]) + 0.05
    for other, whole in (("9984/256", "55000/256"), ("10000/1024", "55000/1024"), ("500/1024", "500/64")):
        assert decided(logs[other], logs[whole]) < 1, "few images or large batches alone don't"
    wilder = max(logs, key=lambda key: statistics.median(logs[key].values()))
    assert wilder == "10000/256" and len(logs) == 13


def within(rate, rates):
    return min(rates) / 1.001 <= rate <= max(rates) * 1.001


@pytest.mark.parametrize("net", NETS)
def test_claim_3_the_rate_grows_and_then_stops(grids, net):
    """rates-figure, rates-why, claim-3-verdict, and the rule of the cell `scaling`."""
    best_lr = {B: evidence.best_rate(rates, "epochs") for B, rates in grids[net].items()}
    good = {B: evidence.good_rates(rates, "epochs") for B, rates in grids[net].items()}
    growth = best_lr[64] / best_lr[1]
    assert round(growth) == 40, "from 1 to 64 nearer to the linear rule than to the square root"
    assert best_lr[64] == best_lr[256] == best_lr[1024] == 0.4
    at_4096 = {lr: evidence.by_seed(grids[net][4096][lr], "epochs") for lr in (0.063, 0.4)}
    assert best_lr[4096] == 0.063 and decided(at_4096[0.063], at_4096[0.4]) == 0
    if net == "lenet":
        assert all(within(best_lr[64] * B / 64, good[B]) for B in (1, 4, 16)), "linear, through the dot at 64"
        assert all(within(best_lr[256] * (B / 256) ** 0.5, good[B]) for B in SIZES[:5]), "square root, through 256"


def test_claim_3_where_the_limit_is(grids):
    """rates-figure, rates-why, claim-3-verdict, norm-why."""
    limits = {B: evidence.rates_that_train(rates, "epochs")[-1] for B, rates in grids["lenet"].items()}
    assert limits[1] < limits[4] <= limits[16] < limits[64] == limits[256] == limits[1024] == limits[4096] == 0.4


def test_claim_3_rules_and_warm_up(grids):
    """scaling-figure, scaling-why, claim-3-verdict."""
    found = study("scaling")
    rules = ("square root", "square root, warm-up", "linear", "linear, warm-up")

    def accuracy(net, B, rule):
        return found[f"{net}/{B}/{rule}"]["test_accuracy"]

    def ended(net, B, rule):
        return found[f"{net}/{B}/{rule}"]["ended_at_step"]

    assert len(ended("lenet", 1024, "linear")) == 1 and not ended("lenet", 1024, "linear, warm-up")
    for net in NETS:
        assert accuracy(net, 256, "kept")[0] > accuracy(net, 1024, "linear, warm-up")[0] + 0.5 / 100, "only a part"
        others = [accuracy(net, 4096, rule)[0] for rule in rules if len(ended(net, 4096, rule)) < 3]
        assert max(others) <= accuracy(net, 4096, "kept")[2], "no rule is better than the rate that was kept"
    cold, warm = (ended("lenet", 4096, rule) for rule in ("linear", "linear, warm-up"))
    assert len(cold) == len(warm) == 3 and max(cold) < 10 and 20 < min(warm) <= max(warm) < 50, "it delays the death"
    assert not ended("lenet_bn", 4096, "linear, warm-up") and accuracy("lenet_bn", 4096, "linear, warm-up")[2] < 0.5


def test_claim_3_against_batches_of_256(grids):
    """scaling-why, claim-3-verdict."""
    runs = study("scaling", "runs")
    for net in NETS:
        small, large = (
            {seed: 100 * runs[f"{net}/{rule}/{seed}"]["test_accuracy"] for seed in range(3)}
            for rule in ("256/kept", "1024/linear, warm-up")
        )
        assert evidence.paired(small, large)[0] > 0 and decided(small, large) == 0, "lower by the means, but undecided"
    small, large = (evidence.by_seed(grids["lenet"][B][0.4], "epochs") for B in (256, 1024))  # the best rate for each
    assert decided(small, large) == 1 and round(evidence.paired(small, large)[0]) == 7, "seven points"


def test_claim_3_with_ten_seeds():
    """scaling-ten, scaling-why, claim-3-verdict."""
    found = evidence.ten_seeds()
    for net in NETS:
        warmed, kept = found[f"{net}/1024/linear, warm-up"], found[f"{net}/1024/kept"]
        assert not any(warmed[seed] is None for seed in range(3)), "with warm-up, none diverged"
        assert decided(warmed, kept) == 1 and 1 <= evidence.paired(warmed, kept)[0] < 3


def test_claim_3_resnet():
    """resnet-figure, resnet-table, resnet-why, claim-3-verdict; in chapter 6, resnet-epochs-why."""
    normed, grouped, plain = (
        {
            B: {lr: evidence.by_seed(runs, "epochs") for lr, runs in rates.items()}
            for B, rates in evidence.resnet(n).items()
        }
        for n in ("batch", "group", "none")
    )
    for B, first, last in ((16, 0.00625, 0.1), (64, 0.025, 0.4)):
        plateau = [normed[B][lr] for lr in sorted(normed[B])]
        assert (min(normed[B]), max(normed[B])) == (first, last) and last == pytest.approx(16 * first)
        assert all(decided(one, other) == 0 for one, other in itertools.combinations(plateau, 2))
    assert evidence.paired(normed[256][0.1], normed[256][0.025]) == pytest.approx((1.0, 0.4), abs=0.05)
    assert decided(normed[256][0.4], normed[256][0.1]) == decided(normed[1024][0.4], normed[1024][0.1]) == 0
    lost = [normed[1024][0.1][seed] - normed[1024][1.6][seed] for seed in range(5)]
    assert min(lost) > 6 and sum(found < 11 for found in normed[1024][1.6].values()) == 1
    assert statistics.fmean(plain[1024][0.1].values()) == pytest.approx(42, abs=0.5)
    assert statistics.fmean(plain[1024][0.4].values()) == pytest.approx(75, abs=0.5)
    assert decided(plain[1024][0.4], plain[1024][0.1]) == 1 and max(plain[1024][1.6].values()) < 11
    assert interval(normed[64][0.1], grouped[64][0.1]) == pytest.approx((0.6, 2.1), abs=0.05)
    low, high = interval(normed[1024][0.1], grouped[1024][0.1])
    assert 2 < low < 3 and 10.5 < high < 11.5
    for B, other, points in ((64, 256, 0.7), (256, 1024, 2.5)):
        assert decided(normed[B][0.1], normed[other][0.1]) == 1
        assert evidence.paired(normed[B][0.1], normed[other][0.1])[0] == pytest.approx(points, abs=0.05)
    best = {B: max(statistics.fmean(found.values()) for found in rates.values()) for B, rates in normed.items()}
    assert best[64] == statistics.fmean(normed[64][0.1].values()) and best[64] > best[256] > best[1024]


def test_resnet18_for_whole_epochs():
    """In chapter 6, resnet-epochs, resnet-epochs-why."""
    one, two = (study("resnet18")[setting] for setting in ("1/256/0.1", "2/512/0.2"))
    for epoch in range(3):
        losses, accuracies = (
            [{seed: run[epoch] for seed, run in enumerate(setting[of])} for setting in (one, two)]
            for of in ("train_loss", "test_accuracy")
        )
        assert decided(*losses) == -1 and decided(*accuracies) == (1 if epoch == 0 else 0)
        assert all(losses[0][seed] < losses[1][seed] for seed in range(4))
        assert all(accuracies[0][seed] > accuracies[1][seed] for seed in range(4))
    runs = one["test_accuracy"] + two["test_accuracy"]
    assert max(before - after for run in runs for before, after in itertools.pairwise(run)) > 0.2


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


def test_claim_4(grids):
    """norm-table, norm-why, norm-dead-why, claim-4-verdict."""
    plain, normed = grids["lenet"], grids["lenet_bn"]
    limits = {B: [evidence.rates_that_train(grids[net][B], "epochs")[-1] for net in NETS] for B in SIZES}
    factors = {B: with_norm / without for B, (without, with_norm) in limits.items()}
    assert factors.pop(4) == 1 and all(factor == pytest.approx(2.5, rel=0.05) for factor in factors.values())
    assert [limits[B][1] for B in SIZES[3:]] == [1.0] * 4 and sorted(limits.values()) == list(limits.values())
    best_lr = [{B: evidence.best_rate(rates, "epochs") for B, rates in batches.items()} for batches in (plain, normed)]
    assert best_lr[0] == best_lr[1], "the best rate is the same with and without"
    assert all(None in [run.test["epochs"] for run in normed[B][2.5]] for B in SIZES[2:]), "at 2.5 at least one fails"
    assert not any(2.5 in normed[B] for B in (1, 4)), "2.5 was tried from 16 images on"


def test_claim_4_centred_inputs(grids):
    """centred-figure, centred-table, centred-why, claim-4-verdict."""
    three = [grids["lenet"][256], evidence.centred()[256], grids["lenet_bn"][256]]
    plain, centred, normed = ({lr: evidence.by_seed(runs, "epochs") for lr, runs in rates.items()} for rates in three)
    for lr in (0.01, 0.025, 0.063):
        assert decided(centred[lr], plain[lr]) == 0, "nothing that three seeds can show"
        assert decided(normed[lr], centred[lr]) == 1 and 3.5 < evidence.paired(normed[lr], centred[lr])[0] < 6.5
    assert decided(centred[0.16], plain[0.16]) == 1 and evidence.paired(centred[0.16], plain[0.16])[0] == pytest.approx(
        1, abs=0.2
    )
    assert [decided(normed[lr], centred[lr]) for lr in (0.16, 0.4)] == [0, 0]
    learned = [sum((each or 0) > 20 for each in rates[1.0].values()) for rates in (plain, centred, normed)]
    assert learned == [0, 2, 3]


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


def test_the_language_model():
    """Chapter 9: small-lm-ask, small-lm, small-lm-why."""
    found = {name: dict(enumerate(losses)) for name, losses in study("small_lm").items()}
    assert all(len(losses) == 5 and None not in losses.values() for losses in found.values()), "nothing was unstable"
    tuned = found["16/0.008/0.99"]
    gaps = {name: evidence.paired(losses, tuned) for name, losses in found.items()}
    for beta in ("0.99", "0.999372"):
        kept, root, linear = (gaps[f"1/{lr}/{beta}"] for lr in ("0.008", "0.002", "0.0005"))
        assert root[0] + root[1] < 0 and root[0] + root[1] < min(kept[0] - kept[1], linear[0] - linear[1]), (
            "single rows beat 16 by the square root, and only so"
        )
    for beta in ("0.99", "0.960596"):
        kept, root, linear = (gaps[f"64/{lr}/{beta}"] for lr in ("0.008", "0.016", "0.032"))
        assert root[0] - root[1] > 0.1 and abs(root[0] - kept[0]) < 0.01, "64 rows end far behind"
        assert linear[0] - linear[1] > root[0] + root[1], "the linear rule overshoots"
    lower, half = evidence.paired(found["1/0.002/0.99"], found["1/0.002/0.999372"])
    assert 0 < lower < 0.01 and lower > half, "the half-life of beta2: less than a hundredth"
    assert round(math.log(0.5) / math.log(0.99)) == 69


def test_what_the_museums_bugs_cost():
    """museum: longer, longer-why."""
    found = study("museum")
    costs = {name: decided(runs["mended"], runs["shown"]) for name, runs in found.items()}
    assert len(found) == 14
    assert {name: cost for name, cost in costs.items() if cost} == {
        "Zeroed on GPU 0 only": 1,
        "A sum, and the old learning rate": -1,
    }
    assert max(found["Zeroed on GPU 0 only"]["shown"].values()) < 0.11
    old_rate = found["A sum, and the old learning rate"]
    assert evidence.paired(old_rate["shown"], old_rate["mended"])[0] == pytest.approx(0.04, abs=0.005)
