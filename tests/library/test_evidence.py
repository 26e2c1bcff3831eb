"""What the chapters read from recorded experiments: best and good rates, steps to an accuracy, the critical batch."""

import json
import math

import pytest
from made_up import IMAGES, write_results
from made_up import run as made_up_run

from experiments import centred, tuning
from mgpu_lib import evidence, recorded


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder with made-up results, from which everything is read."""
    write_results(tmp_path)
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    return tmp_path


def made(lr, validation, ended=None, step=(1, 2, 4), accuracy=(0.2, 0.5, 0.8)):
    finals = {"epochs": validation}
    return evidence.Run(0, list(step), [1.0] * len(step), list(accuracy), ended, finals, finals)


def rates_of(finals):
    """{rate: runs} with the given accuracies at the end, one for each seed."""
    return {lr: [made(lr, final) for final in each] for lr, each in finals.items()}


def test_a_run_has_its_accuracies_at_the_end_of_both_budgets(results):
    grid = evidence.grid("lenet")
    stored = json.loads((results / "tuning.json").read_text())["runs"]
    assert list(grid) == [1, 4, 16, 64, 256, 1024, 4096] and all(len(rates) == 9 for rates in grid.values())
    run = grid[256][0.16][1]
    [wanted] = [r for r in stored if (r["net"], r["batch_size"], r["lr"], r["seed"]) == ("lenet", 256, 0.16, 1)]
    assert run.seed == 1 and run.ended is None and run.test == wanted["test_accuracy"]
    assert run.validation["epochs"] == wanted["validation_accuracy"][wanted["step"].index(4 * math.ceil(IMAGES / 256))]
    assert run.validation["steps"] == wanted["validation_accuracy"][wanted["step"].index(215)]


def test_a_run_that_ended_has_no_accuracy_where_the_budget_goes_on(results):
    dead = evidence.grid("lenet")[256][2.5][0]
    assert dead.ended < 215 and dead.validation == dead.test == {"epochs": None, "steps": None}
    late = evidence.as_run(
        {
            "seed": 0,
            "diverged_at_step": None,
            "dead_at_step": 100,
            "step": [56, 100],
            "train_loss": [1, 1],
            "validation_accuracy": [0.5, 0.1],
            "test_accuracy": {"epochs": 0.4},
        },
        {"epochs": 56, "steps": 215},
    )
    assert late.validation == {"epochs": 0.5, "steps": None} and late.test == {"epochs": 0.4, "steps": None}


def test_what_is_missing_is_named(results):
    with pytest.raises(ValueError, match="'resnet18': recorded are 'lenet', 'lenet_bn'"):
        evidence.grid("resnet18")
    with pytest.raises(FileNotFoundError, match=r"python -m experiments\.scaling"):
        evidence.study("scaling")


def test_the_best_rate_is_chosen_on_validation_images_and_none_that_died():
    rates = rates_of({0.1: [0.7, 0.8], 0.2: [0.76, 0.77], 0.4: [0.9, None]})
    assert evidence.best_rate(rates, "epochs") == 0.2
    swapped = {
        lr: [run._replace(test={"epochs": 1 - run.validation["epochs"]}) for run in runs]
        for lr, runs in list(rates.items())[:2]
    }
    assert evidence.best_rate(swapped, "epochs") == 0.2


def test_good_rates_are_within_points_of_the_best():
    rates = rates_of({0.1: [0.79], 0.2: [0.8], 0.4: [0.775], 0.8: [None]})
    assert evidence.good_rates(rates, "epochs") == [0.1, 0.2]
    assert evidence.good_rates(rates, "epochs", points=3) == [0.1, 0.2, 0.4]


def test_rates_that_train_do_so_with_every_seed():
    rates = rates_of({0.1: [0.5, 0.25], 0.2: [0.8, 0.15], 0.4: [0.9, None]})
    assert evidence.rates_that_train(rates, "epochs") == [0.1]
    assert evidence.tested(rates[0.1], "epochs") == (37.5, 25, 50) and evidence.tested(rates[0.4], "epochs") is None


def test_a_paired_difference_has_student_s_interval():
    """The example of two columns with differences 1, 2 and 3: mean 2, deviation 1, quantile 4.303 of 2 degrees."""
    first, second = {0: 5, 1: 7, 2: 9, 3: 1}, {0: 4, 1: 5, 2: 6, 4: 2}
    assert evidence.paired(first, second) == (2, pytest.approx(4.3027 / math.sqrt(3), abs=1e-4))
    assert evidence.shared_seeds(first, second) == [0, 1, 2]


def test_student_s_quantiles():
    stdtrit = pytest.importorskip("scipy.special").stdtrit
    for freedom, quantile in enumerate(evidence.STUDENT, 1):
        assert quantile == pytest.approx(float(stdtrit(freedom, 0.975)), abs=1e-6)


def test_runs_that_ended_have_no_part_in_a_paired_difference():
    first, second = {0: 5, 1: None, 2: 9, 3: 2}, {0: 4, 1: 5, 2: 6, 3: None}
    assert evidence.paired(first, second)[0] == 2
    with pytest.raises(ValueError, match="1 shared seeds"):
        evidence.paired({0: 1, 1: 2}, {0: 1, 1: None})
    with pytest.raises(ValueError, match="30 shared seeds: an interval takes 2 to 20"):
        evidence.paired(dict.fromkeys(range(30), 1), dict.fromkeys(range(30), 2))


def test_accuracies_by_seed_are_in_percent():
    runs = [made(0.1, 0.5), made(0.1, None)._replace(seed=1)]
    assert evidence.by_seed(runs, "epochs") == {0: 50, 1: None}


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
    slow = made(0.1, 0.8, step=(10, 20, 40))
    batches = {
        8: {0.1: [slow] * 3, 0.2: [made(0.2, 0.8), slow, made(0.2, 0.8)]},
        16: {0.1: [made(0.1, 0.8)]},
        32: {0.1: [made(0.1, 0.3, accuracy=(0.1, 0.2, 0.3))]},
    }
    assert evidence.fewest_steps(batches, 0.65) == {
        8: (2, pytest.approx(math.sqrt(8)), 4),
        16: (2, pytest.approx(math.sqrt(8)), 4),
    }


@pytest.mark.parametrize("critical", [3, 40, 5000])
def test_the_critical_batch_is_found_again(critical):
    steps = {B: 70 * (1 + critical / B) for B in (1, 16, 256, 4096)}
    assert evidence.critical_batch(steps) == pytest.approx((critical, 70, 70 * critical), rel=0.01)


def test_two_batch_sizes_are_too_few():
    with pytest.raises(ValueError, match="2 batch sizes reach the target"):
        evidence.critical_batch({1: 100, 2: 60})


def test_runs_to_a_target_are_read_without_ends(results):
    entries = {
        str(i): {
            "batch_size": 8,
            "lr": 0.1,
            "seed": i,
            "diverged_at_step": None,
            "dead_at_step": None,
            "step": "20 22",
            "train_loss": "2 1",
            "validation_accuracy": f"0.2 0.{5 + i}",
            "test_accuracy": {},
        }
        for i in (1, 0)
    }
    (results / "critical.json").write_text(json.dumps({"recipe": {"target": 0.5}, "runs": entries}))
    target, batches = evidence.to_target()
    assert target == 0.5 and [run.seed for run in batches[8][0.1]] == [0, 1]
    assert batches[8][0.1][1] == evidence.Run(1, [20, 22], [2, 1], [0.2, 0.6], None, {}, {})
    assert evidence.of_seed(batches, 1) == {8: {0.1: [batches[8][0.1][1]]}}
    assert evidence.of_seed(batches, 2) == {}, "a seed that is not recorded yet"


# The runs of batch sizes that the grid leaves out


def test_unseen_runs_read_as_the_grid_does(results):
    runs = evidence.unseen()
    assert list(runs) == [32, 512] and list(runs[32]) == tuning.learning_rates(32)
    assert [run.seed for run in runs[512][0.16]] == [0, 1, 2] and runs[512][0.16][0].test["epochs"] > 0.5


# Studies beside the grid, read as it is


def test_centred_runs_read_as_the_grid_does(results):
    runs = {f"{lr}/{seed}": made_up_run("lenet", 256, lr, seed) for lr in centred.LRS for seed in (0, 1)}
    recipe = {"epochs": 4, "steps": 215, "validation": 5000}
    (results / "centred.json").write_text(json.dumps({"recipe": recipe, "runs": runs}))
    found = evidence.centred()
    assert list(found) == [256] and list(found[256]) == centred.LRS
    assert found[256][0.16] == evidence.grid("lenet")[256][0.16][:2]


def test_runs_of_the_resnet_have_one_budget(results):
    def made_up(*accuracy):
        test = accuracy[-1] - 0.01 if len(accuracy) == 2 else None
        ended = None if len(accuracy) == 2 else 90
        return {
            "diverged_at_step": ended,
            "train_loss": [1.0] * len(accuracy),
            "validation_accuracy": list(accuracy),
            "test_accuracy": test,
        }

    runs = {"batch/1024/0.4/1": made_up(0.7), "batch/1024/0.4/0": made_up(0.7, 0.8), "none/64/0.1/0": made_up(0.5, 0.6)}
    (results / "resnet_grid.json").write_text(json.dumps({"recipe": {"images": IMAGES, "epochs": 2}, "runs": runs}))
    assert list(evidence.resnet("none")) == [64]
    lives, dies = evidence.resnet("batch")[1024][0.4]
    assert lives == evidence.Run(0, [54, 108], [1, 1], [0.7, 0.8], None, {"epochs": 0.8}, {"epochs": 0.79})
    assert dies.seed == 1 and dies.ended == 90 and dies.test == {"epochs": None}


def test_ten_seeds_are_those_of_three_studies(results):
    scaling = {f"lenet/1024/kept/{seed}": {"test_accuracy": seed / 10} for seed in range(3)}
    (results / "scaling.json").write_text(json.dumps({"runs": scaling}))
    summary = {"lenet/1024/kept": {"3": 0.75, "4": None}, "lenet/16/0.063": {"3": 0.5}}
    (results / "ten_seeds.json").write_text(json.dumps({"summary": summary}))
    found = evidence.ten_seeds()
    assert found["lenet/1024/kept"] == {0: 0, 1: 10, 2: 20, 3: 75, 4: None}
    grid = {run.seed: 100 * run.test["epochs"] for run in evidence.grid("lenet")[16][0.063]}
    assert found["lenet/16/0.063"] == {**grid, 3: 50}
