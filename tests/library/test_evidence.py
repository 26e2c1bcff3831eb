"""What the chapters read from recorded experiments: best rates and their like, steps to a target, critical batches."""

import math

import pytest

from mgpu_lib import evidence, recorded


def made(lr, validation, ended=None, step=(1, 2, 4), accuracy=(0.2, 0.5, 0.8)):
    finals = {"epochs": validation}
    return evidence.Run(0, list(step), [1.0] * len(step), list(accuracy), ended, finals, finals)


def rates_of(finals):
    """{rate: runs} with the given accuracies at the end, one for each seed."""
    return {lr: [made(lr, final) for final in each] for lr, each in finals.items()}


def test_the_best_rate_is_chosen_on_validation_images_and_none_that_died():
    rates = rates_of({0.1: [0.7, 0.8], 0.2: [0.76, 0.77], 0.4: [0.9, None]})
    assert evidence.best_rate(rates, "epochs") == 0.2
    for lr in (0.1, 0.2):  # on the test images the other one is better
        rates[lr] = [run._replace(test={"epochs": 1 - run.validation["epochs"]}) for run in rates[lr]]
    assert evidence.best_rate(rates, "epochs") == 0.2


def test_undecided_rates_are_the_neighbors_that_the_seeds_cannot_tell_from_the_best():
    best = {0: 80.0, 1: 82.0, 2: 84.0}

    def off(*points):
        return {seed: best[seed] + each for seed, each in enumerate(points)}

    found = {0.4: best, 0.8: off(-4, -1, 2), 1.6: {**best, 1: None}, 0.2: off(1, 0, -2), 0.1: off(-2, -3, -2)}
    found |= {0.05: off(1, 0, -2), 3.2: best}  # beyond a rate that can be told apart, or that died
    assert evidence.undecided(found, 0.4) == [0.2, 0.4, 0.8]
    assert evidence.undecided({0.4: best}, 0.4) == [0.4]


def test_rates_that_train_do_so_with_every_seed():
    rates = rates_of({0.1: [0.5, 0.25], 0.2: [0.8, 0.15], 0.4: [0.9, None]})
    assert evidence.rates_that_train(rates, "epochs") == [0.1]
    assert evidence.tested(rates[0.1], "epochs") == (37.5, 25, 50) and evidence.tested(rates[0.4], "epochs") is None


def test_a_paired_difference_has_student_s_interval():
    """The example of two columns with differences 1, 2 and 3: mean 2, deviation 1, quantile 4.303 of 2 degrees."""
    first, second = {0: 5, 1: 7, 2: 9, 3: 1, 5: None, 6: 2}, {0: 4, 1: 5, 2: 6, 4: 2, 5: 1, 6: None}
    assert evidence.paired(first, second) == (2, pytest.approx(4.3027 / math.sqrt(3), abs=1e-4))
    assert evidence.shared_seeds(first, second) == [0, 1, 2]
    with pytest.raises(ValueError, match="1 shared seeds"):
        evidence.paired({0: 1, 1: 2}, {0: 1, 1: None})
    with pytest.raises(ValueError, match="30 shared seeds: an interval takes 2 to 20"):
        evidence.paired(dict.fromkeys(range(30), 1), dict.fromkeys(range(30), 2))


def test_differences_and_ratios_with_the_ends_of_their_intervals():
    """A ratio of 2 with every seed has no width; seeds that one side lacks are left out."""
    first, second = {0: 5, 1: 7, 2: 9, 3: 1}, {2: 6, 0: 4, 1: 5}
    middle, low, high = evidence.difference(first, second)
    assert (middle, (high - low) / 2) == pytest.approx(evidence.paired(first, second))
    assert evidence.ratio({0: 2, 1: 4, 2: None}, {1: 2, 0: 1, 2: 5}) == pytest.approx((2, 2, 2))
    assert evidence.ratio({0: 1, 1: 4}, {0: 1, 1: 1})[0] == pytest.approx(2)


def test_student_s_quantiles():
    stdtrit = pytest.importorskip("scipy.special").stdtrit
    for freedom, quantile in enumerate(evidence.STUDENT, 1):
        assert quantile == pytest.approx(float(stdtrit(freedom, 0.975)), abs=1e-6)


def test_the_best_at_a_step_is_that_of_any_rate_with_which_all_seeds_live():
    slow, fast = made(0.1, 0.8), made(0.2, None, ended=4, accuracy=(0.3, 0.6, 0.9))
    assert evidence.best_at({0.1: [slow], 0.2: [fast]}) == {1: 0.3, 2: 0.6, 4: 0.8}
    shorter = made(0.2, None, ended=3, step=(1, 2), accuracy=(0.3, 0.6))
    assert evidence.best_at({0.2: [fast._replace(ended=None), shorter]}) == {1: 0.3, 2: 0.6}


def test_steps_to_a_target_lie_on_a_line_over_the_logarithm():
    run = made(0.1, 0.8)
    assert evidence.steps_to(run, 0.65) == (2, pytest.approx(math.sqrt(8)), 4)
    assert evidence.steps_to(run, 0.2)[1:] == (1, 1) and evidence.steps_to(run, 0.81) is None


def test_the_fewest_steps_are_those_of_the_fastest_rate():
    slow, about = made(0.1, 0.8, step=(10, 20, 40)), (2, pytest.approx(math.sqrt(8)), 4)
    batches = {
        8: {0.1: [slow] * 3, 0.2: [made(0.2, 0.8), slow, made(0.2, 0.8)]},
        16: {0.1: [made(0.1, 0.8)]},
        32: {0.1: [made(0.1, 0.3, accuracy=(0.1, 0.2, 0.3))]},
    }
    assert evidence.fewest_steps(batches, 0.65) == {8: about, 16: about}


@pytest.mark.parametrize("critical", [3, 40, 5000])
def test_the_critical_batch_is_found_again(critical):
    steps = {B: 70 * (1 + critical / B) for B in (1, 16, 256, 4096)}
    assert evidence.critical_batch(steps) == pytest.approx((critical, 70, 70 * critical), rel=0.01)
    with pytest.raises(ValueError, match="2 batch sizes reach the target"):
        evidence.critical_batch({1: 100, 2: 60})


# Reading the records


def check_runs(found, entries, ends=None):
    """Each entry of a record is a run, with its accuracies at the `ends` of budgets, and none where it has ended."""
    for entry in entries:
        [run] = [run for run in found[entry["batch_size"]][entry["lr"]] if run.seed == entry["seed"]]
        step, accuracy = (recorded.numbers(entry[name]) for name in ("step", "validation_accuracy"))
        assert (run.step, run.accuracy) == (step, accuracy)
        assert run.ended == (entry["diverged_at_step"] or entry["dead_at_step"])
        for budget, end in (ends(entry["batch_size"]) if ends else {}).items():
            there = not run.ended or run.ended > end
            assert run.validation[budget] == (accuracy[step.index(end)] if there else None)
            assert run.test[budget] == (entry["test_accuracy"][budget] if there else None)
    assert len(entries) == sum(len(runs) for rates in found.values() for runs in rates.values())
    assert list(found) == sorted(found) and all(list(rates) == sorted(rates) for rates in found.values())


def test_the_grid_and_studies_that_are_read_as_it_is():
    def ends(batch_size):
        return {"epochs": 4 * math.ceil(55_000 / batch_size), "steps": 215}

    for net in ("lenet", "lenet_bn"):
        entries = [entry for entry in recorded.study("tuning")["runs"] if entry["net"] == net]
        assert len(entries) == 7 * 9 * 3
        check_runs(evidence.grid(net), entries, ends)
    check_runs(evidence.centred(), recorded.study("centred")["runs"].values(), ends)
    target, found = evidence.to_target()
    assert target == recorded.study("critical")["recipe"]["target"]
    check_runs(found, recorded.study("critical")["runs"].values())
    one = evidence.of_seed(found, 1)
    assert one.keys() <= found.keys() and {
        run.seed for rates in one.values() for runs in rates.values() for run in runs
    } == {1}
    assert evidence.of_seed(found, 99) == {}, "a seed that is not recorded yet"


def test_runs_of_the_resnet_have_one_budget():
    study, found = recorded.study("resnet_grid"), evidence.resnet("batch")
    runs = {(B, lr, run.seed): run for B, rates in found.items() for lr, each in rates.items() for run in each}
    assert len(runs) == sum(key.startswith("batch/") for key in study["runs"])
    for (B, lr, seed), run in runs.items():
        entry = study["runs"][f"batch/{B}/{lr}/{seed}"]
        assert run.test == {"epochs": entry["test_accuracy"]} and run.ended == entry["diverged_at_step"]
        assert run.validation == {"epochs": None if run.ended else entry["validation_accuracy"][-1]}
        assert run.step[:1] == [math.ceil(study["recipe"]["images"] / B)]


def test_ten_seeds_are_those_of_three_studies():
    late, scaling = recorded.study("ten_seeds")["summary"], recorded.study("scaling")["runs"]
    found = evidence.ten_seeds()
    assert found.keys() == late.keys() and all(list(seeds) == [*range(10)] for seeds in found.values())
    assert found["lenet/1024/kept"][2] == 100 * scaling["lenet/1024/kept/2"]["test_accuracy"]
    assert found["lenet/1024/kept"][3] == 100 * late["lenet/1024/kept"]["3"]
    assert evidence.by_seed(evidence.grid("lenet")[16][0.063], "epochs").items() <= found["lenet/16/0.063"].items()


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'resnet18': recorded are 'lenet', 'lenet_bn'"):
        evidence.grid("resnet18")
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"python -m experiments\.scaling"):
        evidence.study("scaling")
