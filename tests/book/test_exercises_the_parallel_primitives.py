"""The checks of "The parallel primitives": typical wrong answers are explained, other right ones taken."""

from answers import checks_of, test_a_wrong_answer_is_explained, test_other_right_answers  # noqa: F401

from mgpu_lib.exercises import the_parallel_primitives

SIGNATURES = {
    "gather_in_order": "finished, device",
    "scatter_sizes": "rows, k",
    "broadcast_backward": "grads, device",
    "step_bytes": "k, params, buffers, inputs, outputs",
}
WRONG = [
    ("gather_in_order", "return torch.cat([p.to(device) for _, p in finished])", "in which the replicas finished"),
    (
        "gather_in_order",
        """
        return torch.cat([part.to(device) for _, part in sorted(finished, key=lambda pair: pair[1].device.index)])""",
        "sorted by GPU",
    ),
    (
        "gather_in_order",
        "return torch.cat([part.to('cuda:0') for _, part in sorted(finished, key=lambda p: p[0])])",
        "is on cuda:0, and was asked for on cuda:2",
    ),
    (
        "gather_in_order",
        "return torch.cat([part for _, part in sorted(finished, key=lambda p: p[0])])",
        "your code raises RuntimeError",
    ),
    (
        "gather_in_order",
        "return torch.stack([p[:1].to(device) for _, p in sorted(finished, key=lambda p: p[0])])",
        "don't stack",
    ),
    (
        "gather_in_order",
        "return torch.cat([p.detach().to(device) for _, p in sorted(finished, key=lambda p: p[0])])",
        "no gradient reaches the parts",
    ),
    (
        "gather_in_order",
        """
        finished.sort(key=lambda pair: pair[0])
        return torch.cat([part.to(device) for _, part in finished])""",
        "the caller's list was changed",
    ),
    ("scatter_sizes", "return [len(part) for part in torch.arange(rows).tensor_split(k)]", "So tensor_split cuts"),
    (
        "scatter_sizes",
        """
        sizes = [len(part) for part in torch.arange(rows).chunk(k)]
        return sizes + [0] * (k - len(sizes))""",
        "Leave out the GPUs that get nothing",
    ),
    ("scatter_sizes", "return [rows // k] * (k - 1) + [rows - rows // k * (k - 1)]", "scatter gives"),
    ("scatter_sizes", "return [-(-rows // k)] * k", "Together they hold"),
    (
        "broadcast_backward",
        "return torch.stack([g.to(device) for g in grads if g is not None]).sum()",
        "the gradient has shape (), the parameter (2,)",
    ),
    (
        "broadcast_backward",
        """
        arrived = [grad.to(device) for grad in grads if grad is not None]
        return sum(arrived) / len(arrived)""",
        "don't average",
    ),
    ("broadcast_backward", "return next(g for g in grads if g is not None).to(device)", "other replicas' rows"),
    ("broadcast_backward", "return sum(grads)", "your code raises RuntimeError"),
    ("broadcast_backward", "return sum(grad.to(device) for grad in grads)", "your code raises AttributeError"),
    (
        "broadcast_backward",
        """
        total = None
        for grad in grads:
            if grad is not None:
                total = grad.to(device) if total is None else total.add_(grad.to(device))
        return total""",
        "grads[0] was changed",
    ),
    ("broadcast_backward", "return sum(grad.to('cuda:1') for grad in grads if grad is not None)", "is on cuda:1"),
    ("step_bytes", "return k * (2 * params + buffers + (inputs + 2 * outputs) // k)", "sends nothing to itself"),
    ("step_bytes", "return (k - 1) * (params + buffers + (inputs + 2 * outputs) // k)", "gradients of the parameters"),
    ("step_bytes", "return (k - 1) * (2 * params + 2 * buffers + (inputs + 2 * outputs) // k)", "one way"),
    ("step_bytes", "return (k - 1) * (2 * params + buffers + (inputs + outputs) // k)", "gather's backward"),
    ("step_bytes", "return (k - 1) * (2 * params + buffers + (2 * inputs + 2 * outputs) // k)", "need no gradient"),
    ("step_bytes", "return (k - 1) * (2 * params + buffers + inputs + 2 * outputs)", "a k-th of the inputs"),
    ("step_bytes", "return (k - 1) * 2 * params", "the ledger counts"),
]
RIGHT = [
    (
        "scatter_sizes",
        """
    def scatter_sizes(rows, k):
        return tuple(len(part) for part in torch.arange(rows).chunk(k))""",
    ),
]


def test_every_exercise_of_the_chapter_has_wrong_answers():
    assert {name for name, *_ in WRONG} == set(SIGNATURES) == checks_of(the_parallel_primitives)
