"""What makes validation accuracy jump from one measurement to the next? One factor changed at a time.

    python -m experiments.oscillation

writes mgpu_lib/recorded/oscillation.json. For each seed LeNet trains for six epochs with batches of 256 at a learning
rate of 0.2. From there it goes on for four epochs in several branches, which differ in one thing each: the learning
rate or the batch size. What needs no run of its own is measured in the same run: averages of the weights, smaller
validation sets, and, in LeNet with batch norm, other statistics to evaluate with. There is no sample: the quickest case
takes minutes. Its steps are those of `tuning`, which has one.
"""

import itertools
import math
import statistics
from functools import cache

import torch

from experiments import study, tuning, tuning_runs
from experiments.tuning_runs import EVALUATED, MOMENTUM, NETS, accuracies, counter, stacked, start
from mgpu_lib import data, training
from mgpu_lib.data import endless

BATCH_SIZE, LR = 256, 0.2
EPOCHS, LATE_EPOCHS = 6, 4  # before the runs branch, and after
PER_EPOCH = 4  # measurements
SETTLED = 3  # epochs at the end in which the spread is measured
SEEDS = (0, 1, 2)
LATE = {
    "same": (BATCH_SIZE, "constant", 1),
    "lr / 4": (BATCH_SIZE, "constant", 1 / 4),
    "lr / 16": (BATCH_SIZE, "constant", 1 / 16),
    "cosine to 0": (BATCH_SIZE, "cosine", 1),
    "batch 64": (64, "constant", 1),
    "batch 1024": (1024, "constant", 1),
}  # batch size, schedule, factor
AVERAGED = 100  # steps over which the exponential average of the weights reaches back
MOMENTA = (0.01, 0.5)  # of running statistics, beside PyTorch's 0.1
RECOMPUTED = 40  # batches from which batch-norm statistics are computed anew
SIZES = (250, 500, 1000, 2500, 5000)  # images in validation sets that are parts of the whole


def cases():
    """{key: (net, late, seed)}: key net/late/seed; one seed after the other."""
    branches = [("lenet", late) for late in LATE] + [("lenet_bn", "same")]
    return {f"{net}/{late}/{seed}": (net, late, seed) for seed in SEEDS for net, late in branches}


@cache
def trunk(net, seed):
    """(parameters, running statistics, curve) after the first epochs, which all branches share."""
    X, y, *_ = study.split()
    params, running = (stacked(tensors, 1) for tensors in start(net, seed))
    measure, curve = counts(net), new_curve()
    running = {"as usual": running, **{f"momentum {m}": running for m in MOMENTA}} if running else {"as usual": []}
    steps = EPOCHS * math.ceil(len(X) / BATCH_SIZE)
    shuffled = endless(X, y, BATCH_SIZE, seed)
    params, running = train_further(
        net,
        params,
        running,
        shuffled,
        lambda step: LR,
        steps,
        EPOCHS * PER_EPOCH,
        lambda params, running: {"as usual": measure(params, running["as usual"])},
        curve,
    )
    return params, running, curve


def record(net, late, seed):
    """One branch: curves before and after it leaves the trunk, and the accuracy on the test set at the end."""
    batch_size, schedule, factor = LATE[late]
    X, y, *_ = study.split()
    params, running, early = trunk(net, seed)
    steps = LATE_EPOCHS * math.ceil(len(X) / batch_size)
    rate = {"constant": lambda step: LR * factor, "cosine": lambda step: LR * cosine(step / steps)}[schedule]
    curve, measure = new_curve(), counts(net)
    averages = Averages() if (net, late) == ("lenet", "same") else None

    def measured(params, running):
        found = {name: measure(params, statistics) for name, statistics in running.items()}
        if net == "lenet_bn":
            found["recomputed"] = measure(params, recomputed(net, params, X, y))
        return found | {name: measure(tensors, []) for name, tensors in (averages.now() if averages else {}).items()}

    params, running = train_further(
        net,
        params,
        running,
        endless(X, y, batch_size, seed + 1000),
        rate,
        steps,
        LATE_EPOCHS * PER_EPOCH,
        measured,
        curve,
        averages,
    )
    test = tuning.fashion_mnist()
    (accuracy,), (dead,) = accuracies(net, params, running["as usual"], test.X_test, test.y_test)
    return {
        "net": net,
        "late": late,
        "seed": seed,
        "early": packed(early),
        **packed(curve),
        "test_accuracy": accuracy,
        "dead": dead or steps not in curve["step"],  # the loss was no longer finite
    }


def cosine(share):
    return (1 + math.cos(math.pi * share)) / 2


def train_further(net, params, running, shuffled, rate, steps, times, measured, curve, averages=None):
    """Take `steps` steps, adding to `curve` `times` times: (parameters, {kind: running statistics})."""
    due = {math.ceil(steps * i / times) for i in range(1, times + 1)}
    # From statistics of 0 the step makes MOMENTUM times those of the batch; any momentum can be had from these.
    empty = [torch.zeros_like(tensor) for tensor in running["as usual"]]
    rates = map(rate, itertools.count())

    def step(X, y):
        nonlocal params, running
        params, seen, loss = tuning_runs.stepper(net)(params, empty, X, y, torch.tensor([next(rates)]))
        running = {kind: blended(old, seen, momentum(kind)) for kind, old in running.items()}
        if averages:
            averages.add(params)
        return loss.item()

    for at in training.run_steps(step, itertools.islice(shuffled, steps), due):
        if at.train_loss is not None:
            curve["step"].append(at.step)
            curve["train_loss"].append(round(at.train_loss, 5))
            for kind, blocks in measured(params, running).items():
                curve["correct"].setdefault(kind, []).extend(blocks)
    return params, running


def momentum(kind):
    return MOMENTUM if kind == "as usual" else float(kind.removeprefix("momentum "))


def blended(old, seen, momentum):
    return [(1 - momentum) * before + momentum / MOMENTUM * new for before, new in zip(old, seen)]


class Averages:
    """Averages of the weights, kept beside training: exponential, and the mean of all steps since the branching."""

    def __init__(self):
        self.steps, self.exponential, self.mean = 0, None, None

    def add(self, params):
        self.steps += 1
        if self.steps == 1:
            self.exponential, self.mean = ([p.clone() for p in params] for _ in range(2))
        for average, weight in ((self.exponential, 1 / AVERAGED), (self.mean, 1 / self.steps)):
            for old, new in zip(average, params):
                old.lerp_(new, weight)

    def now(self):
        return {f"average of {AVERAGED} steps": self.exponential, "average of all steps": self.mean}


@torch.no_grad()
def recomputed(net, params, X, y):
    """Batch-norm statistics of the present weights: means over the first batches, instead of a running average."""
    seen = [
        NETS[net](X_batch, [p[0] for p in params], None)[1]
        for X_batch, _ in itertools.islice(data.batches(X, y, BATCH_SIZE), RECOMPUTED)
    ]
    return [torch.stack(tensors).mean(dim=0)[None] for tensors in zip(*seen)]


def counts(net):
    """measure(params, running): correct validation images in each block of EVALUATED, a list."""
    *_, X, y = study.split()
    blocks = list(data.batches(X, y, EVALUATED))

    @torch.no_grad()
    def measure(params, running):
        return [int(counter(net)(params, running, *block)[0]) for block in blocks]

    return measure


def new_curve():
    return {"step": [], "train_loss": [], "correct": {}}


def packed(curve):
    """A curve as text: `correct` has, for each kind, the counts of all blocks at the first measurement, the second …"""
    return {
        "step": study.text(curve["step"]),
        "train_loss": study.text(curve["train_loss"]),
        "correct": {kind: study.text(counts) for kind, counts in curve["correct"].items()},
    }


def recipe():
    return {
        "batch_size": BATCH_SIZE,
        "lr": LR,
        "late": LATE,
        "epochs": EPOCHS,
        "late_epochs": LATE_EPOCHS,
        "per_epoch": PER_EPOCH,
        "averaged": AVERAGED,
        "momenta": MOMENTA,
        "recomputed": RECOMPUTED,
        "block": EVALUATED,
        "validation": tuning.VALIDATION,
    }


# What the runs say


def accuracy(run, kind="as usual", images=None):
    """Validation accuracy at each measurement, on each disjoint set of `images` images (default: one set, of all)."""
    measurements = len(run["step"].split())
    blocks = torch.tensor(study.numbers(run["correct"][kind])).reshape(measurements, -1)
    each = blocks.shape[1] if images is None else images // EVALUATED
    sets = blocks[:, : blocks.shape[1] // each * each].unflatten(1, (-1, each)).sum(dim=2)
    return (sets / (each * EVALUATED)).T.tolist()


def spread(values):
    """Standard deviation of equally spaced `values` around their straight line (two numbers are fitted)."""
    if len(values) < 3:
        raise ValueError(f"{len(values)} values: a straight line goes through any two, so pass at least 3")
    middle, mean = (len(values) - 1) / 2, statistics.fmean(values)
    slope = sum((i - middle) * value for i, value in enumerate(values)) / sum(
        (i - middle) ** 2 for i in range(len(values))
    )
    rest = [value - mean - slope * (i - middle) for i, value in enumerate(values)]
    return math.sqrt(sum(r * r for r in rest) / (len(values) - 2))


def binomial(p, images):
    """Standard deviation of the accuracy on `images` images drawn anew each time, when the true one is `p`.

    sqrt(p (1 - p) / images). The runs measure the same images each time, so this isn't the noise they show: their
    accuracy moves only where an answer changes. It says how far a set of this size is from the truth, not how far
    one measurement is from the next.
    """
    return math.sqrt(p * (1 - p) / images)


def settled(values):
    return values[-SETTLED * PER_EPOCH :]


def line(runs, kind="as usual", images=None):
    """Over the seeds: the spread of one way of training and measuring, and its mean accuracy while settled."""
    sets = [accuracy(run, kind, images) for run in runs]
    spreads = [statistics.fmean(spread(settled(values)) for values in each) for each in sets]
    level = statistics.fmean(statistics.fmean(settled(values)) for each in sets for values in each)
    size = images or EVALUATED * len(runs[0]["correct"][kind].split()) // len(runs[0]["step"].split())
    return {
        "spread": round(statistics.fmean(spreads), 6),
        "spreads": [round(each, 6) for each in spreads],
        "accuracy": round(level, 5),
        "binomial": round(binomial(level, size), 6),
    }


def summary(runs):
    """{what was changed: line}, for what is there, without runs that died, whose seeds are named. Where weights and
    statistics are measured as usual, with test_accuracy of each seed at the end.

    "lenet/same/250 images" is the mean over disjoint sets of 250.
    """
    found = {}
    for name, each in itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0]):
        seeds = [runs[key] for key in each]
        alive = [run for run in seeds if not run["dead"]]
        for kind in alive[0]["correct"] if alive else ():
            found[name if kind == "as usual" else f"{name}/{kind}"] = line(alive, kind)
        if alive:
            found[name]["test_accuracy"] = [run["test_accuracy"] for run in alive]
        if alive and name == "lenet/same":
            found |= {f"{name}/{images} images": line(alive, images=images) for images in SIZES}
        if len(alive) < len(seeds):
            found.setdefault(name, {})["dead"] = [run["seed"] for run in seeds if run["dead"]]
    return found


if __name__ == "__main__":
    study.run("oscillation", cases(), record, recipe(), summary)
