"""The check for the museum's exercise."""

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.exercises.framework import exercise, expect
from mgpu_lib.models import lenet, lenet_params
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
