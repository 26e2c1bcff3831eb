"""What the recorded experiments say: the grid of batch sizes and learning rates, and the studies beside it."""

import itertools
import math
import statistics
from typing import NamedTuple

from mgpu_lib import recorded
from mgpu_lib.recorded import study

BUDGETS = ("epochs", "steps")  # what is equal for all batch sizes
GUESSING = 0.1  # the accuracy of a network that has learned nothing
# Student's t: for 1 to 19 degrees of freedom, what a value exceeds with a probability of 0.025
STUDENT = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
    *(2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024),
)


class Run(NamedTuple):
    """One training of the grid."""

    seed: int
    step: list  # after which steps there was a measurement
    train_loss: list  # mean since the measurement before
    accuracy: list  # on the validation images, in [0, 1]
    ended: int | None  # the step at which the loss was no longer finite or the network dead
    validation: dict  # {budget: accuracy at its end}, None for a run that had ended by then
    test: dict  # the same on the test images


def recipe():
    """How the grid was made: {"images": trained on, "epochs", "steps": the two budgets, "batch_sizes"}."""
    stored = study("tuning")
    sizes = sorted({entry["batch_size"] for entry in stored["runs"]})
    return {
        "images": stored["trained_on"],
        **{budget: stored["recipe"][budget] for budget in BUDGETS},
        "batch_sizes": sizes,
    }


def grid(net):
    """The runs of the network "lenet" or "lenet_bn": {batch size: {learning rate: [Run of each seed]}}, ascending.

    Raises FileNotFoundError where nothing is recorded, ValueError where nothing of this network is.
    """
    stored = study("tuning")
    chosen = [entry for entry in stored["runs"] if entry["net"] == net]
    if not chosen:
        nets = sorted({entry["net"] for entry in stored["runs"]})
        raise ValueError(f"net={net!r}: recorded are {', '.join(map(repr, nets))}")
    return arranged(chosen, stored["trained_on"], stored["recipe"])


def centred():
    """LeNet's runs on images whose mean is taken away, without batch norm, as `grid` returns them. FileNotFoundError
    without.
    """
    stored = study("centred")
    return arranged(stored["runs"].values(), study("tuning")["trained_on"], stored["recipe"])


def resnet(norm):
    """ResNet-8's runs with batch norm, "batch", group norm, "group", or none, "none", as `grid` returns them, of equal
    epochs only. FileNotFoundError without.
    """
    stored = recorded.resnet_grid(norm)
    return arranged(stored["runs"], stored["trained_on"], stored["recipe"])


def ten_seeds():
    """Test accuracies of runs of equal epochs in percent, {name: {seed: accuracy}}; None for a run that ended early.

    Names are those of `python -m experiments.ten_seeds`, such as "lenet/16/0.063" or "lenet/1024/linear, warm-up".
    Seeds 0 to 2 are those of the grid and of the study "scaling". FileNotFoundError without one of the three.
    """
    found, scaling = {}, study("scaling")["runs"]
    for name, accuracies in study("ten_seeds")["summary"].items():
        net, batch_size, rate = name.split("/")
        if f"{name}/0" in scaling:
            first = {seed: scaling[f"{name}/{seed}"]["test_accuracy"] for seed in range(3)}
        else:
            first = {run.seed: run.test["epochs"] for run in grid(net)[int(batch_size)][float(rate)]}
        both = {**first, **{int(seed): accuracy for seed, accuracy in accuracies.items()}}
        found[name] = {seed: None if each is None else 100 * each for seed, each in both.items()}
    return found


def to_target():
    """LeNet's runs up to an accuracy, measured often: (the accuracy, the runs as `grid` returns them, without ends).

    FileNotFoundError without.
    """
    stored = study("critical")
    return stored["recipe"]["target"], arranged(stored["runs"].values())


def arranged(entries, images=None, budgets=None):
    """{batch size: {learning rate: [Run]}} of runs as the grid's file holds them; `budgets` says how long they are.

    It may hold one of the two only, and other things besides.
    """
    found = {}
    for entry in sorted(entries, key=lambda entry: (entry["batch_size"], entry["lr"], entry["seed"])):
        ends = {
            budget: recorded.length(images, budgets, entry["batch_size"], budget)
            for budget in BUDGETS
            if budget in (budgets or ())
        }
        rates = found.setdefault(entry["batch_size"], {})
        rates.setdefault(entry["lr"], []).append(as_run(entry, ends))
    return found


def as_run(entry, ends):
    step, loss, accuracy = (recorded.numbers(entry[name]) for name in ("step", "train_loss", "validation_accuracy"))
    ended = entry["diverged_at_step"] or entry["dead_at_step"]
    there = [budget for budget, end in ends.items() if ended is None or ended > end]
    return Run(
        entry["seed"],
        step,
        loss,
        accuracy,
        ended,
        {budget: accuracy[step.index(ends[budget])] if budget in there else None for budget in ends},
        {budget: entry["test_accuracy"][budget] if budget in there else None for budget in ends},
    )


# Of the learning rates of one batch size, {learning rate: [Run]}: which is best, which others train


def level(runs, budget):
    """The mean validation accuracy over the seeds at the end of a budget; -inf when one of them had ended."""
    finals = [run.validation[budget] for run in runs]
    return -math.inf if None in finals else statistics.fmean(finals)


def best_rate(rates, budget):
    """The learning rate of the highest `level`. The test images have no say."""
    return max(rates, key=lambda lr: level(rates[lr], budget))


def rates_that_train(rates, budget):
    """Those with which every seed ends with twice the accuracy of guessing, or more, ascending."""
    return [lr for lr in rates if all((run.validation[budget] or 0) >= 2 * GUESSING for run in rates[lr])]


def tested(runs, budget):
    """(mean, lowest, highest) accuracy on the test images over the seeds, in percent; None when one had ended."""
    finals = [run.test[budget] for run in runs]
    return None if None in finals else tuple(100 * of(finals) for of in (statistics.fmean, min, max))


def by_seed(runs, budget):
    """{seed: accuracy on the test images in percent}, None for a run that had ended: what `paired` compares."""
    return {run.seed: None if run.test[budget] is None else 100 * run.test[budget] for run in runs}


def shared_seeds(first, second):
    """The seeds for which two {seed: number or None} both have a number."""
    return [seed for seed in first if None not in (first[seed], second.get(seed))]


def paired(first, second):
    """What `first` has more than `second`: (mean difference, half the width of its 95 % interval) over shared seeds.

    Both are {seed: number}; a seed that one of them lacks, or has None for, is left out. Runs with the same seed begin
    with the same weights and see the same images, so some of what makes seeds differ cancels in their difference. The
    interval is Student's, which takes the differences as normal: with three seeds it is wide. ValueError for fewer than
    2 shared seeds, or more than 20.
    """
    shared = shared_seeds(first, second)
    if not 2 <= len(shared) <= len(STUDENT) + 1:
        raise ValueError(f"{len(shared)} shared seeds: an interval takes 2 to {len(STUDENT) + 1}")
    differences = [first[seed] - second[seed] for seed in shared]
    quantile = STUDENT[len(shared) - 2]
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(len(shared))


def difference(first, second):
    """`paired` as (mean, its 95 % interval's two ends): what `mgpu_lib.plots.forest` draws."""
    mean, half = paired(first, second)
    return mean, mean - half, mean + half


def ratio(first, second):
    """By what factor `first` is above `second`: (the factor, its 95 % interval's two ends), paired in the logarithm."""
    logs = ({seed: None if each is None else math.log(each) for seed, each in side.items()} for side in (first, second))
    return tuple(map(math.exp, difference(*logs)))


def undecided(found, best):
    """The rates around `best` that the seeds can't tell from it, ascending; `found` is {rate: {seed: number or None}}.

    Outwards from `best`, up to the first rate with a None, or with a `difference` whose interval leaves out 0.
    """

    def as_good(rate):
        _, low, high = difference(found[rate], found[best])
        return low <= 0 <= high

    def side(rates):
        return itertools.takewhile(lambda rate: None not in found[rate].values() and as_good(rate), rates)

    ascending = sorted(found)
    place = ascending.index(best)
    return [*reversed([*side(ascending[:place][::-1])]), best, *side(ascending[place + 1 :])]


def best_at(rates):
    """{step: the best mean validation accuracy, in [0, 1], of the rates with which no seed had ended by then}."""
    found = {}
    for runs in rates.values():
        for step in runs[0].step:
            each = [run.accuracy[run.step.index(step)] for run in runs if step in run.step and run.ended != step]
            if len(each) == len(runs):
                found[step] = max(found.get(step, 0), statistics.fmean(each))
    return dict(sorted(found.items()))


# Steps to an accuracy, and the critical batch size


def steps_to(run, target):
    """Steps until the validation accuracy first reaches `target`: (the last measurement before it, between, the first
    with it), or None where it never does.

    Between two measurements the accuracy is taken to rise in a straight line with the logarithm of the steps.
    """
    low, before = 1, GUESSING
    for step, value in zip(run.step, run.accuracy):
        if value >= target:
            return low, low * (step / low) ** ((target - before) / (value - before)), step
        low, before = step, value
    return None


def fewest_steps(rates_of, target):
    """{batch size: (at least, about, at most) steps to `target`} at the learning rate that needs the fewest.

    The medians over the seeds. A batch size is left out where at no rate most of the seeds get there.
    """
    found = {}
    for batch_size, rates in rates_of.items():
        reached = [[steps_to(run, target) or (math.inf,) * 3 for run in runs] for runs in rates.values()]
        medians = [tuple(map(statistics.median, zip(*each))) for each in reached]
        fewest = min(medians, key=lambda steps: steps[1])
        if fewest[1] < math.inf:
            found[batch_size] = fewest
    return found


def of_seed(rates_of, seed):
    """The same runs, as `grid` returns them, but of one seed only. Cells without any are left out."""
    found = {
        batch_size: {lr: own for lr, runs in rates.items() if (own := [run for run in runs if run.seed == seed])}
        for batch_size, rates in rates_of.items()
    }
    return {batch_size: rates for batch_size, rates in found.items() if rates}


def critical_batch(steps):
    """Fit (S / S_min - 1)(E / E_min - 1) = 1 to {batch size B: steps S}, E = S B images: (B_crit, S_min, E_min).

    S_min are the fewest steps, with batches as large as one likes, E_min the fewest images, with batches as small as
    one likes, and B_crit = E_min / S_min takes twice as many of both. The same as S = S_min (1 + B_crit / B), fitted by
    least squares in log S. Source: McCandlish et al. 2018, section 2.3 (arXiv:1812.06162). Raises ValueError
    for fewer than three batch sizes: two numbers are fitted. B_crit is sought from 1/100 of the smallest to 100 times
    the largest batch.
    """
    if len(steps) < 3:
        raise ValueError(f"{len(steps)} batch sizes reach the target: pass at least 3, or a target that more reach")
    low, high = math.log(min(steps) / 100), math.log(max(steps) * 100)
    candidates = [math.exp(low + (high - low) * i / 2000) for i in range(2001)]

    def rest(critical):  # log S_min, as each batch size would have it
        return [math.log(S) - math.log1p(critical / B) for B, S in steps.items()]

    critical = min(candidates, key=lambda candidate: statistics.pvariance(rest(candidate)))
    fewest = math.exp(statistics.fmean(rest(critical)))
    return critical, fewest, fewest * critical
