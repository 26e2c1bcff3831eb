"""The check of the museum's exercise: clipping at the wrong place is explained."""

import pytest
from answers import changed, function, said

GRADIENTS = """
def backward(X, y, replicas, devices):
    for X, y, params in zip(*mgpu.split_batch(X, y, devices), replicas):
        F.cross_entropy(mgpu.lenet(X, params), y, reduction="sum").backward()

def reduce(replicas):
    for same in zip(*replicas):
        mgpu.allreduce([p.grad for p in same])
"""
CLIPPED = """
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        nn.utils.clip_grad_norm_(params, length)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))"""
CLIP = "    for params in replicas:\n        nn.utils.clip_grad_norm_(params, length)\n"
SCALED = """norm = torch.cat([p.grad.flatten() for p in params]).norm()
        for p in params:
            p.grad.mul_(length / norm)"""


@pytest.mark.parametrize(
    "before, after, phrase",
    [
        (f"    reduce(replicas)\n{CLIP}", f"{CLIP}    reduce(replicas)\n", "the step differs from a single device's"),
        (CLIP, "", "nothing was clipped"),
        ("in replicas:\n        nn", "in replicas[:1]:\n        nn", "the replicas differ"),
        ("mgpu.sgd(params, lr, len(X))", "torch.optim.SGD(params, lr / len(X)).step()", "still has a gradient"),
        ("nn.utils.clip_grad_norm_(params, length)", SCALED, "a gradient shorter than `length` was changed"),
        ("(params, length)", "(params, 1.0)", "the step differs"),
    ],
)
def test_clipping_at_the_wrong_place_is_explained(before, after, phrase, capsys):
    body = changed(CLIPPED, before, after)
    program = function("clipped_step", "X, y, replicas, devices, lr, length", body)
    line = said(capsys, "clipped_step", program, GRADIENTS)
    assert line.startswith("not yet: ") and phrase in line, line
