"""Checks for the museum's exercises: a clipped step, a bug that no check finds, seeds and features of many ranks."""

from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.exercises.rank_threads import on_ranks
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.museum import Museum, every_step_matches, mean_loss, objections, one_device
from mgpu_lib.parallel import get_params, max_divergence
from virtual_gpus import checks, virtual_gpus

LR, LONGER = 0.01, 1e9  # LONGER than any gradient here


@exercise
def check_clipped_step(answer):
    """clipped_step(X, y, replicas, devices, lr, length): clips the whole batch's mean gradient, on all GPUs."""
    start = [p.double() for p in lenet_params()]
    X, y = torch.rand(7, 1, 28, 28, generator=torch.Generator().manual_seed(0)).double(), torch.arange(7)
    unclipped = single_device(X, y, start, LONGER)
    for length in (1.0, 0.3, LONGER):
        with virtual_gpus(2) as machine:
            replicas = [get_params(start, device) for device in machine.devices]
            answer(X, y, replicas, machine.devices, LR, length)
            expect(
                max_divergence(replicas) == 0,
                "the replicas differ after the step: all must clip the same gradient, by the same factor",
            )
            clipped = distance(replicas[0], unclipped) > 1e-9
            expect(clipped or length == LONGER, "nothing was clipped: it must happen before the GPUs step")
            expect(not clipped or length < LONGER, "a gradient shorter than `length` was changed")
            checks.assert_step_matches_single_device(start, replicas[0], single_device(X, y, start, length))
            checks.assert_gradients_fresh(replicas)
    return "clipped once, after the all-reduce: the step of a single device"


def single_device(X, y, start, length):
    params = get_params(start, "cpu")
    F.cross_entropy(lenet(X, params), y).backward()
    nn.utils.clip_grad_norm_(params, length)
    torch.optim.SGD(params, LR).step()
    return params


def distance(params, others):
    return max((p.detach().cpu() - q.detach()).abs().max().item() for p, q in zip(params, others))


CASES = [([20, 7], 1e-4, 1), ([1, 2], 0.05, 1), ([3, 3, 3], 0.05, 1), ([33, 16], 0.05, 1), ([9, 5], 1e-4, 20)]


@exercise
def check_own_bug(answer):
    """own_bug(X, y, replicas, devices, lr): the right step with a bug that the museum's checks don't find."""
    with virtual_gpus(2) as machine:
        caught = objections(Museum(list(machine.devices)).questions(answer))
    where, raised = first_wrong(answer)
    names = ", ".join(f"`{name}`" for name in caught)
    expect(where or not caught, f"caught by {names}, although each replica takes one device's step")
    expect(not caught, f"it is wrong, but {names} caught it in the museum. There a bug must not show")
    expect(where or not raised, f"in the museum it is right; elsewhere it is not silent, but raises an error: {raised}")
    expect(
        where,
        "no check objects, and we find no bug: on 1 to 4 GPUs, with batches of 1 to 33 rows and up to three steps, it "
        "takes one device's steps. What does the museum never vary?",
    )
    return f"none of the museum's four checks objects, and yet it is wrong {where}"


def first_wrong(step):
    """(The first case in which `step` isn't one device's, in words, or None; the error of a case that raises one)."""
    start, raised = [p.double() for p in lenet_params()], None
    generator = torch.Generator().manual_seed(0)
    for rows, lr, scale in CASES:
        batches = [(scale * torch.rand(n, 1, 28, 28, generator=generator).double(), torch.arange(n) % 10) for n in rows]
        expected = one_device(start, batches, mean_loss, lr)
        for k in (1, 2, 3, 4):
            sizes = " and ".join(map(str, rows))
            case = f"on {k} GPU{'s' * (k > 1)}, with batches of {sizes} rows, pixels up to {scale} and a rate of {lr:g}"
            try:
                with virtual_gpus(k) as machine:
                    replicas = [get_params(start, device) for device in machine.devices]
                    for X, y in batches:
                        step(X, y, replicas, list(machine.devices), lr)
                    found = objections([(every_step_matches, start, replicas, expected)])
            except Exception as error:
                raised = raised or f"{case}, {type(error).__name__}: {error}"
                continue
            if found:
                return f"{case}: {found['assert_step_matches_single_device'].partition('. ')[0]}", raised
    return None, raised


@exercise
def check_seed_of(answer):
    """seed_of(seed, step, rank): 32 bits for each rank in each step of each run, however many ranks there are."""
    steps, ranks = [*range(9), 11, 64, 1000, 1024, 99_999, 194_304, 999_999], [*range(9), 11, 64, 511, 1000, 1023]
    draws = {}
    for case in product((0, 1, 4, 999), steps, ranks):
        got = filled(answer(*case))
        expect(
            type(got) is int and 0 <= got < 2**32,
            f"seed_of{case} is {got!r}: return a whole number from 0 to 2**32 - 1, all that a CPU's generator looks at",
        )
        expect(got == answer(*case), f"seed_of{case} says {got}, and then {answer(*case)}: a run could not be repeated")
        expect(got not in draws, f"seed_of{case} and seed_of{draws.get(got)} are both {got}: these two draw alike")
        draws[got] = case
    return "no two ranks draw alike, in no step of no run, however many ranks there are"


WHY_NOT = {
    "replicas_equal": "DDP gives all ranks the same mean of the gradients, right or wrong: the replicas are equal",
    "draws_differ": "nothing is drawn at random here",
}


@exercise
def check_gather_backward(answer):
    """gather_backward(grads): the check that objects, and what reaches the features of this rank from all losses."""
    for ranks in (2, 3):
        generator = torch.Generator().manual_seed(ranks)
        grads = torch.randn(ranks, ranks, 4, 3, generator=generator).double()  # of rank, for the features of rank

        def program(rank, grads=grads):
            return named_gradient(filled(answer(tuple(grads[rank].clone()))))

        found, _ = on_ranks(ranks, program)
        for rank, (name, gradient) in enumerate(found):
            expect(name == "step_matches_single_device", f"{name} passes. {WHY_NOT.get(name, 'Ask it on the ranks')}")
            check_gathered(rank, gradient, grads)
    return "each rank's features get a gradient from the losses of all ranks, and the step is a single device's"


def named_gradient(answer):
    expect(isinstance(answer, tuple) and len(answer) == 2, "return two things: the name of a check, and a gradient")
    name, gradient = answer
    expect(isinstance(name, str), f"the first is a {type(name).__name__} instead of the name of a check")
    expect(torch.is_tensor(gradient), f"the second is a {type(gradient).__name__} instead of a tensor")
    return name.removeprefix("checks.").removeprefix("assert_"), gradient


def check_gathered(rank, gradient, grads):
    """`gradient` is what rank `rank` returns; grads[i, j] is the gradient of rank i's loss for rank j's features."""

    def same(wanted):
        return gradient.allclose(wanted)

    ranks, own, right = len(grads), grads[rank, rank], grads[:, rank].sum(0)
    has, needs = [*gradient.shape], [*own.shape]
    expect(has == needs, f"rank {rank} returns a gradient of shape {has} instead of {needs}")
    expect(not same(own), f"rank {rank} returns what the program returns, the gradient of its own loss alone")
    expect(
        not same(sum(grads[i, i] for i in range(ranks))),
        "all ranks return the same: each brought the gradient of its own features, and they were added up, although "
        "they belong to different rows",
    )
    expect(not same(grads[rank].sum(0)), f"rank {rank} adds up its gradients for the features of different ranks")
    expect(not same(right / ranks), f"{ranks} times too small: each loss is a mean already, and DDP takes another")
    expect(same(right), f"rank {rank}'s gradient isn't the sum over all losses of the gradient for its features")
