"""What "Where the time goes" builds by hand is right: its step with names."""

import pytest
import torch
from pages import shown

import mgpu_lib as mgpu

PAGE = "07-where-the-time-goes"


def batch(rows, *shape):
    return torch.rand(rows, *shape), torch.arange(rows) % 10


@pytest.mark.parametrize("rows, k", [(8, 1), (9, 2), (7, 4), (2, 3)])
def test_the_step_with_names_is_train_batch(rows, k):
    with mgpu.virtual_gpus(k) as machine:
        named_step = shown(PAGE, "named_step", phase=torch.cuda.nvtx.range)["named_step"]
        X, y = batch(rows, 1, 28, 28)
        ours, theirs = ([mgpu.get_params(mgpu.lenet_params(), device) for device in machine.devices] for _ in range(2))
        for _ in range(2):
            named_step(X, y, ours, machine.devices, 0.1)
            mgpu.train_batch(X, y, theirs, machine.devices, 0.1)
        assert all(a.equal(b) for mine, other in zip(ours, theirs) for a, b in zip(mine, other))
        phases = {event.phase for event in machine.timeline}
    assert {"forward", "backward", "update"} <= phases and ("all-reduce" in phases) == (k > 1)
