"""What chapters say about recorded experiments beyond what their cells print or assert, checked against the records.

Each test names the cells with the sentences that depend on it.
"""

import itertools
import math
import statistics

import pytest

from mgpu_lib import evidence, planning, recorded
from virtual_gpus import GPUS


@pytest.fixture(scope="module")
def lenet():
    return evidence.grid("lenet")


def decided(first, second):
    """+1 or -1 where the 95 % interval of the paired difference leaves out 0, else 0."""
    mean, half = evidence.paired(first, second)
    return (mean > half) - (mean < -half)


def mean(found):
    return statistics.fmean(found.values())


def test_very_large_batches_fall_behind_with_equal_epochs(lenet):
    """title, best-why, claim-1-verdict, summary."""
    for net, tops in (("lenet", (1, 4, 16)), ("lenet_bn", (16, 64))):
        rates = evidence.grid(net)
        found = {B: evidence.tested(each[evidence.best_rate(each, "epochs")], "epochs") for B, each in rates.items()}
        best = max(found, key=lambda B: found[B][0])
        assert best in tops and max(found[1024][2], found[4096][2]) < found[best][1]
        assert net == "lenet" or found[1][2] < found[4][1], "with batch norm the line falls on the left, too"
    ends = [evidence.by_seed(lenet[B][evidence.best_rate(lenet[B], "steps")], "steps") for B in (1024, 4096)]
    assert decided(*ends) == 0, "from 1024 to 4096 equal steps gain nothing certain"


def test_each_second_measurement_comes_right_after_the_small_last_batch():
    """little-why."""
    for seed in range(3):
        text = evidence.study("little_data")["runs"][f"10000/256/{seed}"]["accuracy"]
        late = [float(number) for number in text.split()][16:]
        assert statistics.fmean(late[0::2]) > statistics.fmean(late[1::2]) + 0.05


def test_noise_scale_and_critical_batch_agree_in_order_of_magnitude():
    """noise-why, critical-why, summary."""
    found = evidence.study("noise")["summary"].values()
    moments = zip(*(each["moments"] for each in found))
    assert all(max(m["from"] for m in each) > min(m["to"] for m in each) for each in moments), "the seeds lie apart"
    target, runs = evidence.to_target()
    steps = {B: about for B, (_, about, _) in evidence.fewest_steps(runs, target).items()}
    critical = evidence.critical_batch(steps)[0]
    scales = [window["noise_scale"] for each in found for window in each["windows"] if window["to_step"] <= 215]
    assert min(scales) / 10 < critical < 10 * max(scales) and math.isclose(critical, 28, abs_tol=1)


def test_the_loop_from_256_to_1024(lenet):
    """loop-explained."""
    assert evidence.best_rate(lenet[256], "epochs") == evidence.best_rate(lenet[1024], "epochs") == 0.4
    found = {lr: evidence.tested(lenet[1024][lr], "epochs") for lr in (0.16, 0.4, 1.0)}
    assert all(found[lr][2] < evidence.tested(lenet[256][lr], "epochs")[1] for lr in (0.16, 0.4)), "it ends lower"
    assert found[0.16][0] < found[0.4][0] < found[0.16][0] + 3 and found[1.0] is None


def test_two_gpus_in_published_runs_and_in_our_own():
    """Chapter 5: d2l-builds-why, resnet-epochs-why."""
    printed = recorded.study("d2l_resnet18")["rows"]
    assert [0.93, 0.67] in [row[:2] for row in printed]
    assert (min(row[1] for row in printed), max(row[1] for row in printed)) == (0.44, 0.91)
    ours = evidence.study("resnet18")["summary"]
    one, two = (ours[setting]["test_accuracy"] for setting in ("1/256/0.1", "2/512/0.2"))
    assert all(a > b for first, second in zip(one, two, strict=True) for a, b in zip(first, second)), "each seed, epoch"
    assert max(abs(b - a) for run in two for a, b in itertools.pairwise(run)) > 0.2, "from one epoch to the next"


def test_llama_65b_as_planned_on_2048_a100s():
    """Chapter 14, published-card-why: the numbers in its fold, and "16% too slow" against the paper's 380."""
    ways = {"kept": {"recompute": False}, "recomputed": {}}
    runs = {
        name: planning.recorded_plan("65B", 2048, "InfiniBand HDR", tokens=2048, **options)
        for name, options in ways.items()
    }
    assert round(100 * runs["kept"]["gib"] * 2**30 / GPUS["A100-80"].memory) == 70
    rates = {name: 2048 / run["seconds"] for name, run in runs.items()}
    assert round(rates["kept"]) == 381
    assert round(100 * (rates["recomputed"] / 380 - 1)) == -16
