"""The checks of "The parallel primitives": typical wrong answers are explained, other right ones taken."""

from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
    variants,
)

SIGNATURES = {
    "gather_in_order": "finished, device",
    "scatter_sizes": "rows, k",
    "broadcast_backward": "grads, device",
    "step_bytes": "k, params, buffers, inputs, outputs",
}

IN_ORDER = "return torch.cat([part.to(device) for _, part in sorted(finished, key=lambda pair: pair[0])])"
SIZES = "return tuple(len(part) for part in torch.arange(rows).chunk(k))"
SUMMED = "return sum(grad.to(device) for grad in grads if grad is not None)"
IN_PLACE = """
    total = None
    for grad in grads:
        if grad is not None:
            total = grad.to(device) if total is None else total.add_(grad.to(device))
    return total"""
BYTES = "return (k - 1) * (2 * params + buffers + (inputs + 2 * outputs) // k)"

WRONG = [
    *variants(
        "gather_in_order",
        IN_ORDER,
        ("sorted(finished, key=lambda pair: pair[0])", "finished", "in which the replicas finished"),
        ("pair[0]", "pair[1].device.index", "sorted by GPU"),
        ("to(device)", "to('cuda:0')", "is on cuda:0, and was asked for on cuda:2"),
        (".to(device)", "", "your code raises RuntimeError"),
        ("cat([part", "stack([part[:1]", "don't stack"),
        ("part.to", "part.detach().to", "no gradient reaches the parts"),
        (
            "sorted(finished, key=lambda pair: pair[0])",
            "(finished.sort(key=lambda pair: pair[0]), finished)[1]",
            "changed",
        ),
    ),
    *variants(
        "scatter_sizes",
        SIZES,
        ("chunk", "tensor_split", "So tensor_split cuts"),
        (
            "chunk(k))",
            "chunk(k)) + (0,) * (k - len(torch.arange(rows).chunk(k)))",
            "Leave out the GPUs",
        ),
    ),
    ("scatter_sizes", "return [rows // k] * (k - 1) + [rows - rows // k * (k - 1)]", "scatter gives"),
    ("scatter_sizes", "return [-(-rows // k)] * k", "Together they hold"),
    *variants(
        "broadcast_backward",
        SUMMED,
        ("grad.to(device) for", "grad.to(device).sum() for", "the gradient has shape (), the parameter (2,)"),
        ("not None)", "not None) / sum(grad is not None for grad in grads)", "don't average"),
        ("return sum(", "return next(", "other replicas' rows"),
        ("grad.to(device) for", "grad for", "your code raises RuntimeError"),
        (" if grad is not None", "", "your code raises AttributeError"),
        ("to(device)", "to('cuda:1')", "is on cuda:1"),
    ),
    ("broadcast_backward", IN_PLACE, "grads[0] was changed"),
    *variants(
        "step_bytes",
        BYTES,
        ("(k - 1)", "k", "sends nothing to itself"),
        ("2 * params", "params", "gradients of the parameters"),
        ("+ buffers", "+ 2 * buffers", "one way"),
        ("2 * outputs", "outputs", "gather's backward"),
        ("(inputs", "(2 * inputs", "need no gradient"),
        (" // k", "", "a k-th of the inputs"),
        (" + buffers + (inputs + 2 * outputs) // k", "", "the ledger counts"),
    ),
]
RIGHT = [("gather_in_order", IN_ORDER), ("scatter_sizes", SIZES), ("broadcast_backward", SUMMED), ("step_bytes", BYTES)]
