"""The checks of "Splitting a network": typical wrong answers are explained, other right ones taken."""

from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
    variants,
)

SIGNATURES = {
    "best_cut": "outputs, work",
    "bubble": "num_gpus, micro_batches",
    "one_f_one_b": "rank, num_stages, micro_batches",
    "linear_three_gpus": "X, W, b, devices",
    "row_parallel": "parts_X, parts_W, b",
}

CUT = """
    def cost(c):
        return max(sum(work[:c]), sum(work[c:])), outputs[c - 1], c
    return min(range(1, len(work)), key=cost)"""
BUBBLE = "return (num_gpus - 1) / (micro_batches + num_gpus - 1)"
ONE_F_ONE_B = """
    order, forward, backward = [], 0, 0  # a pass at a time, by what is held
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < num_stages - rank:
            order.append(f"F{forward}")
            forward += 1
        else:
            order.append(f"B{backward}")
            backward += 1
    return tuple(order)"""
LINEAR = """
    parts = zip(W.chunk(len(devices)), b.chunk(len(devices)), devices)  # of other sizes than tensor_split's
    return torch.cat([(X.to(d) @ W.to(d).T + b.to(d)).to(devices[0]) for W, b, d in parts], 1)"""
FIRST_MOVED = """
    k, parts = len(devices), []
    for i, d in enumerate(devices):
        part = X.to(d) @ W.to(d).tensor_split(k)[i].T + b.to(d).tensor_split(k)[i]
        parts.append(part.to(devices[0]))
    return torch.cat(parts, 1)"""
ROW = """
    data = [X @ W.T for X, W in zip(parts_X, parts_W)]
    data[0] += b
    mgpu.allreduce(data)
    return data"""

WRONG = [
    ("best_cut", "return len(work) // 2", "Work comes first"),
    ("best_cut", "return 0", "without layers"),
    ("best_cut", "return len(work)", "without layers"),
    ("best_cut", "return float(len(work) // 2)", "the check can't use your answer: TypeError"),
    *variants(
        "best_cut",
        CUT,
        ("max(sum(work[:c]), sum(work[c:])), ", "0, ", "Work comes first"),
        ("outputs[c - 1]", "outputs[c]", "What crosses a cut after c layers is outputs[c - 1]"),
        ("], c\n", "], -c\n", "take the smaller one"),
    ),
    *variants(
        "bubble",
        BUBBLE,
        ("(micro_batches + num_gpus - 1)", "micro_batches", "idle slots for each busy one"),
        ("micro_batches + num_gpus - 1", "micro_batches + num_gpus", "slot m + k - 1"),
        ("(micro_batches + num_gpus - 1)", "num_gpus", "Where does m come in"),
        ("(num_gpus - 1) /", "micro_batches /", "busy share"),
        ("(num_gpus - 1) /", "1 /", "does one GPU wait in k - 1"),
    ),
    (
        "one_f_one_b",
        "return [f'{kind}{i}' for kind in 'FB' for i in range(micro_batches)]",
        "rank 0 of 4, 8 micro-batches: after F4 it holds the activations of 5 micro-batches; 1F1B needs no more than 4",
    ),
    (
        "one_f_one_b",
        "return [f'{kind}{i}' for i in range(micro_batches) for kind in 'FB']",
        "4 ranks and 8 micro-batches: your orders take 96 slots, and 33 are possible",
    ),
    ("one_f_one_b", "return [f'F{i}' for i in range(micro_batches)]", "should hold each of B0, B1"),
    ("one_f_one_b", "return [f'{kind}{i}' for i in range(micro_batches) for kind in 'BF']", "B0 comes before F0"),
    (
        "one_f_one_b",
        "return [f'{kind}{i}' for i in list(range(micro_batches))[:: (-1) ** rank] for kind in 'FB']",
        "nobody can go on: rank 0 waits for B0, rank 1 waits for F7",
    ),
    ("linear_three_gpus", FIRST_MOVED, "cut W first"),
    ("linear_three_gpus", "return F.linear(X, W.to(devices[0]), b.to(devices[0])).detach()", "X gets no gradient"),
    *variants(
        "linear_three_gpus",
        LINEAR,
        ("zip(W.chunk(len(devices))", "zip(W[:-1].chunk(len(devices))", "your code raises"),
        ("b.to(d)).to(devices[0])", "b.to(d))", "your code raises RuntimeError"),
        (" + b.to(d)", "", "bias is missing"),
        ("W.chunk", "W.detach().chunk", "W gets no gradient"),
        ("for W, b, d in parts]", "for W, b, d in list(parts)[:2]]", "8 columns instead"),
        ("X.to(d) @", "2 * X.to(d) @", "X @ W.T + b"),
        ("], 1)", "], 1)[:4]", "rows, X has 5"),
    ),
    *variants(
        "row_parallel",
        ROW,
        (
            "data[0] += b\n    mgpu.allreduce(data)",
            "mgpu.allreduce(data)\n    data[0] += b",
            "GPU 1 has the sum without",
        ),
        ("data[0] += b", "data = [part + b.to(part.device) for part in data]", "the bias is in there 2 times"),
        ("    mgpu.allreduce(data)\n", "", "holds only its summand"),
        ("    return data", "", "your function returns None"),
        ("return data", "return [data[0]] * len(data)", "on the GPU of its part"),
        ("return data", "return data[:1]", "1 outputs for 2 GPUs"),
    ),
]
RIGHT = [("one_f_one_b", ONE_F_ONE_B), ("linear_three_gpus", LINEAR), ("row_parallel", ROW), ("best_cut", CUT)]
RIGHT += [("bubble", "return 1 - torch.tensor(micro_batches / (micro_batches + num_gpus - 1)).item()")]  # in 32 bits
