"""The check of the museum's exercise: clipping at the wrong place is explained."""

import pytest
from answers import function, said

GRADIENTS = """
def backward(X, y, replicas, devices):
    for X, y, params in zip(*mgpu.split_batch(X, y, devices), replicas):
        F.cross_entropy(mgpu.lenet(X, params), y, reduction="sum").backward()

def reduce(replicas):
    for same in zip(*replicas):
        mgpu.allreduce([p.grad for p in same])
"""


@pytest.mark.parametrize(
    "body, phrase",
    [
        (
            """
    backward(X, y, replicas, devices)
    for params in replicas:
        nn.utils.clip_grad_norm_(params, length)
    reduce(replicas)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))""",
            "the step differs from a single device's",
        ),
        (
            """
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))""",
            "nothing was clipped",
        ),
        (
            """
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))
        nn.utils.clip_grad_norm_(params, length)""",
            "nothing was clipped",
        ),
        (
            """
    backward(X, y, replicas, devices)
    reduce(replicas)
    nn.utils.clip_grad_norm_(replicas[0], length)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))""",
            "the replicas differ",
        ),
        (
            """
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        nn.utils.clip_grad_norm_(params, length)
        torch.optim.SGD(params, lr / len(X)).step()""",
            "still has a gradient",
        ),
        (
            """
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        for p in params:
            p.grad.mul_(length / norm)
        mgpu.sgd(params, lr, len(X))""",
            "a gradient shorter than `length` was changed",
        ),
        (
            """
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        nn.utils.clip_grad_norm_(params, 1.0)
        mgpu.sgd(params, lr, len(X))""",
            "the step differs",
        ),
    ],
)
def test_clipping_at_the_wrong_place_is_explained(body, phrase, capsys):
    line = said(
        capsys, "clipped_step", function("clipped_step", "X, y, replicas, devices, lr, length", body), GRADIENTS
    )
    assert line.startswith("not yet: ") and phrase in line
