"""Checks for "Jobs that survive": runs of training that die and go on, and the time that they take."""

import io
import math
import pickle
import random
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data.distributed import DistributedSampler

from mgpu_lib.exercises.framework import exercise, expect, filled

EPOCHS, SHARE, ROWS = 3, 12, 4  # epochs, rows of this rank in an epoch, rows of a step
WHAT_TO_SAVE = "save state dicts, tensors and numbers, not the objects themselves"
TELLING = 5  # after so many steps, to start over, to repeat an epoch and to repeat a step are three different things


@exercise
def check_resumable(answer):
    """resumable(net, X, y, sampler, checkpoint, save): trains for three epochs; goes on from what it gave to save."""
    with torch.random.fork_rng(devices=[]):
        whole = training(answer, seed=0)
        check_whole(whole)
        for done in sorted(range(1, len(whole.rows)), key=lambda done: done != TELLING):
            again = training(answer, seed=done, checkpoint=loaded(whole.saved[done - 1]))
            check_resumed(again, whole, done)
    return f"after whichever of its {len(whole.rows)} steps the run died, resumed it ends with the same bits"


class Trained(NamedTuple):
    """What a run of training did."""

    rows: list  # of each step
    params: list  # all of them in one tensor, before each step and after the last
    draws: list  # the state of the random numbers before each forward pass
    saved: list  # the bytes of each checkpoint


def loop(net, X, y, sampler, checkpoint, save):
    """The loop that the exercise gives, which saves nothing."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(ROWS):
            optimizer.zero_grad()
            F.cross_entropy(net(X[rows]), y[rows]).backward()
            optimizer.step()
            scheduler.step()


def training(answer, seed, checkpoint=None, draws=()):
    """Let `answer` train in what is to it a new process: another network, and random numbers from another `seed`.

    With `draws`, the random numbers of each forward pass begin at one of these states.
    """
    torch.manual_seed(seed)
    net, run = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3)), Trained([], [], [], [])
    X = torch.linspace(-1, 1, 2 * SHARE)[:, None] ** torch.arange(6)
    y = torch.arange(2 * SHARE) % 3

    def look(module, inputs):
        if draws:
            torch.set_rng_state(draws[len(run.rows)])
        run.rows.append([(row == X).all(1).nonzero().item() for row in inputs[0]])
        run.params.append(parameters_of(module))
        run.draws.append(torch.get_rng_state())

    def save(content):
        file = io.BytesIO()
        try:
            torch.save(filled(content), file)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            expect(False, f"the checkpoint can't be written ({error}): {WHAT_TO_SAVE}")
        run.saved.append(file.getvalue())

    net.register_forward_pre_hook(look)
    answer(net, X, y, DistributedSampler(X, 2, 1), checkpoint, save)
    run.params.append(parameters_of(net))
    return run


def parameters_of(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def loaded(saved):
    """A checkpoint as a new process reads it."""
    try:
        return torch.load(io.BytesIO(saved), weights_only=True)
    except pickle.UnpicklingError:
        expect(False, f"the checkpoint can't be loaded with weights_only=True: {WHAT_TO_SAVE}")


def check_whole(whole):
    """The run `whole`, which was left alone, did what the loop does, and saved a checkpoint after each step."""
    expect(
        whole.rows == training(loop, seed=0).rows, "without a checkpoint, the rows differ from those of the loop given"
    )
    given = training(loop, seed=0, draws=whole.draws)  # who seeds each step anew draws others, and rightly so
    expect(
        whole.params[-1].equal(given.params[-1]),
        "without a checkpoint, the parameters differ from those of the loop given: optimizer and schedule should stay",
    )
    steps, saves = len(whole.rows), len(whole.saved)
    expect(saves == steps, f"save was called {saves} times for {steps} steps: call it at the end of every step")


def check_resumed(again, whole, done):
    """`again`, resumed after `done` steps, did what `whole` did from then on."""
    case = f"resumed after step {done} of {len(whole.rows)}"
    check_next_rows(again.rows, whole.rows, done, case)
    expect(again.params[0].equal(whole.params[done]), f"{case}, the network doesn't have the parameters that it had")
    expect(
        again.draws[0].equal(whole.draws[done]),
        f"{case}, rows and parameters are right, but dropout draws different random numbers: torch.get_rng_state()",
    )
    expect(
        again.params[1].equal(whole.params[done + 1]),
        f"{case}, everything is as it was up to the first update, which is another one. What does the optimizer "
        "remember of the steps before?",
    )
    expect(
        again.params[-1].equal(whole.params[-1]),
        f"{case}, the first step is the same bit for bit, and a later one isn't. Which learning rate comes next?",
    )


def check_next_rows(rows, whole, done, case):
    """Resumed after `done` steps, the steps take the `rows` that are left of `whole`."""
    expect(rows, f"{case}, the run takes no step")
    expect(rows != whole, f"{case}, the run starts over: it takes all {len(whole)} steps again")
    per_epoch = SHARE // ROWS
    if rows[0] != whole[done]:
        begins = whole[done // per_epoch * per_epoch]
        expect(rows[0] != begins, f"{case}, the run repeats the epoch from its start. How many of its steps are done?")
        expect(
            rows[0] != whole[done - 1],
            f"{case}, the run takes step {done} again: save how many steps are done, and this one is",
        )
        expect(
            False, f"{case}, the next rows are {rows[0]} instead of {whole[done]}: which epoch is it, and which step?"
        )
    expect(
        rows == whole[done:],
        f"{case}, the first rows are right, and {len(rows)} steps follow instead of {len(whole) - done}, or with other "
        "rows. Are steps skipped in the first epoch only, and does the sampler know each epoch?",
    )


FAILURES = {  # of a job of 60 minutes, with a save of 2 every 20 and a restart of 5: what each case is about
    (): "three times 20 minutes and a save",
    (30.0,): "the save at 22 is whole, and 8 minutes are lost",
    (21.0,): "it dies in the middle of a save, and half a checkpoint is none",
    (30.0, 33.0): "it dies once more before it is up again, and the restart begins anew",
    (65.0,): "it dies in its last save",
    (67.0,): "the last save is complete before the failure",
    (10.0, 50.0, 80.0): "the first failure takes 10 minutes of work, the second and the third what came after a save",
}
WEEK, MINUTES_BETWEEN, WRITE, RESTART = 7 * 24 * 60, 180, 0.5, 5


@exercise
def check_minutes(answer):
    """minutes(work, interval, write, restart, failures): how long a job takes that fails at the moments `failures`."""
    for failures, why in FAILURES.items():
        check_job(answer, 60, 20, 2, 5, failures, f": {why}")
    numbers = random.Random(0)
    for _ in range(20):
        interval, write, restart = (numbers.randint(1, most) for most in (9, 4, 6))
        failures = moments(numbers, 20, 10)
        check_job(answer, 12 * interval, interval, write, restart, failures, "")
    weeks = [moments(numbers, MINUTES_BETWEEN, 200) for _ in range(20)]
    *longer, longest = (f"{mean_minutes(answer, interval, weeks) / WEEK - 1:.0%}" for interval in (3, 7, 14, 28, 56))
    return (
        f"a save every 3, 7, 14, 28 or 56 minutes makes a week of work {', '.join(longer)} or {longest} longer. "
        f"Young's formula says {math.sqrt(2 * WRITE * MINUTES_BETWEEN):.0f} minutes"
    )


def check_job(answer, work, interval, write, restart, failures, why):
    found, right = (filled(f(work, interval, write, restart, list(failures))) for f in (answer, minutes))
    case = f"work {work}, interval {interval}, write {write}, restart {restart}, failures {[*failures]}"
    expect(isinstance(found, int | float), f"it returns a {type(found).__name__} instead of a number")
    expect(math.isclose(found, right), f"{case}: {found:g} minutes instead of {right:g}{why}")


def minutes(work, interval, write, restart, failures):
    """The right answer, save by save: the moment at which each is complete, or the restart after a failure."""
    clock, failures = 0, list(failures)
    for _ in range(work // interval):
        while failures and failures[0] < clock + interval + write:
            clock = failures.pop(0) + restart
        clock += interval + write
    return clock


def moments(numbers, mean, count):
    """`count` failures, on average `mean` minutes apart, to a hundredth of a minute."""
    clock, failures = 0, []
    for _ in range(count):
        clock += round(numbers.expovariate(1 / mean), 2)
        failures.append(clock)
    return failures


def mean_minutes(answer, interval, weeks):
    return sum(answer(WEEK, interval, WRITE, RESTART, list(failures)) for failures in weeks) / len(weeks)
