"""The checks of "Splitting a network": typical wrong answers are explained, other right ones taken."""

from answers import checks_of, function, test_a_wrong_answer_is_explained, test_other_right_answers  # noqa: F401

from mgpu_lib.exercises import splitting_a_network

SIGNATURES = {
    "best_cut": "outputs, work",
    "bubble": "num_gpus, micro_batches",
    "one_f_one_b": "rank, num_stages, micro_batches",
    "linear_three_gpus": "X, W, b, devices",
    "row_parallel": "parts_X, parts_W, b",
}
WRONG = [
    ("best_cut", "return min(range(1, len(work)), key=lambda c: outputs[c - 1])", "Work comes first"),
    ("best_cut", "return len(work) // 2", "Work comes first"),
    (
        "best_cut",
        "return min(range(1, len(work)), key=lambda c: (max(sum(work[:c]), sum(work[c:])), outputs[c]))",
        "What crosses a cut after c layers is outputs[c - 1]",
    ),
    ("best_cut", "return 0", "without layers"),
    ("best_cut", "return len(work)", "without layers"),
    (
        "best_cut",
        """
        def cost(c):
            return max(sum(work[:c]), sum(work[c:])), outputs[c - 1], -c
        return min(range(1, len(work)), key=cost)""",
        "take the smaller one",
    ),
    ("bubble", "return (num_gpus - 1) / micro_batches", "idle slots for each busy one"),
    ("bubble", "return (num_gpus - 1) / (micro_batches + num_gpus)", "slot m + k - 1"),
    ("bubble", "return (num_gpus - 1) / num_gpus", "Where does m come in"),
    ("bubble", "return micro_batches / (micro_batches + num_gpus - 1)", "busy share"),
    ("bubble", "return 1 / (micro_batches + num_gpus - 1)", "does one GPU wait in k - 1"),
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
    (
        "one_f_one_b",
        "return [f'{kind}{i}' for i in range(micro_batches) for kind in 'BF']",
        "B0 comes before F0, whose activations it needs",
    ),
    (
        "one_f_one_b",
        """
        numbers = range(micro_batches) if rank % 2 == 0 else reversed(range(micro_batches))
        return [f'{kind}{i}' for i in numbers for kind in 'FB']""",
        "nobody can go on: rank 0 waits for B0, rank 1 waits for F7",
    ),
    (
        "linear_three_gpus",
        """
        parts = zip(W.split(len(W) // len(devices)), b.split(len(b) // len(devices)), devices)
        return torch.cat([(X.to(d) @ W.to(d).T + b.to(d)).to(devices[0]) for W, b, d in parts], 1)""",
        "9 columns instead",
    ),
    (
        "linear_three_gpus",
        """
        k, parts = len(devices), []
        for i, d in enumerate(devices):
            part = X.to(d) @ W.to(d).tensor_split(k)[i].T + b.tensor_split(k)[i].to(d)
            parts.append(part.to(devices[0]))
        return torch.cat(parts, 1)""",
        "cut W first",
    ),
    (
        "linear_three_gpus",
        """
        parts = zip(W.tensor_split(len(devices)), b.tensor_split(len(devices)), devices)
        return torch.cat([X.to(d) @ W.to(d).T + b.to(d) for W, b, d in parts], 1)""",
        "your code raises RuntimeError",
    ),
    (
        "linear_three_gpus",
        """
        parts = zip(W.chunk(len(devices)), b.chunk(len(devices)), devices)
        parts = [(X.to(d) @ W.to(d).T + b.to(d)).to(devices[0]) for W, b, d in parts]
        return torch.cat([F.pad(part, (0, 10 - part.shape[1])) for part in parts], 0)""",
        "rows, X has 5",
    ),
    (
        "linear_three_gpus",
        """
        parts = zip(W.tensor_split(len(devices)), devices)
        return torch.cat([(X.to(d) @ W.to(d).T).to(devices[0]) for W, d in parts], 1)""",
        "bias is missing",
    ),
    (
        "linear_three_gpus",
        """
        parts = zip(W.detach().tensor_split(len(devices)), b.tensor_split(len(devices)), devices)
        return torch.cat([(X.to(d) @ W.to(d).T + b.to(d)).to(devices[0]) for W, b, d in parts], 1)""",
        "W gets no gradient",
    ),
    (
        "linear_three_gpus",
        """
        with torch.no_grad():
            return X @ W.to(devices[0]).T + b.to(devices[0])""",
        "X gets no gradient",
    ),
    (
        "linear_three_gpus",
        """
        parts = zip(W.chunk(len(devices)), b.chunk(len(devices)), devices)
        return sum(F.pad(X.to(d) @ W.to(d).T + b.to(d), (0, 10 - len(W))).to(devices[0]) for W, b, d in parts)""",
        "X @ W.T + b",
    ),
    (
        "row_parallel",
        """
        data = [X @ W.T + b.to(X.device) for X, W in zip(parts_X, parts_W)]
        mgpu.allreduce(data)
        return data""",
        "the bias is in there 2 times",
    ),
    (
        "row_parallel",
        """
        data = [X @ W.T for X, W in zip(parts_X, parts_W)]
        mgpu.allreduce(data)
        data[0] += b
        return data""",
        "GPU 1 has the sum without the bias",
    ),
    ("row_parallel", "return [X @ W.T for X, W in zip(parts_X, parts_W)]", "holds only its summand"),
    (
        "row_parallel",
        """
        data = [X @ W.T for X, W in zip(parts_X, parts_W)]
        data[0] += b
        return mgpu.allreduce(data)""",
        "your function returns None",
    ),
    (
        "row_parallel",
        "return [sum((X @ W.T).to('cuda:0') for X, W in zip(parts_X, parts_W)) + b] * len(parts_X)",
        "on the GPU of its part",
    ),
    ("row_parallel", "return [parts_X[0] @ parts_W[0].T]", "1 outputs for 2 GPUs"),
    ("best_cut", "return float(len(work) // 2)", "the check can't use your answer: TypeError"),
]
RIGHT = [
    (
        "one_f_one_b",
        """
    def one_f_one_b(rank, num_stages, micro_batches):  # a pass at a time, by what is held
        order, forward, backward = [], 0, 0
        while backward < micro_batches:
            if forward < micro_batches and forward - backward < num_stages - rank:
                order.append(f"F{forward}")
                forward += 1
            else:
                order.append(f"B{backward}")
                backward += 1
        return tuple(order)""",
    ),
    (
        "linear_three_gpus",
        """
    def linear_three_gpus(X, W, b, devices):  # chunks of other sizes are as good
        parts = zip(W.chunk(len(devices)), b.chunk(len(devices)), devices)
        return torch.cat([F.linear(X.to(d), W.to(d), b.to(d)).to(devices[0]) for W, b, d in parts], 1)""",
    ),
    (
        "bubble",
        """
    def bubble(num_gpus, micro_batches):  # counts, in 32 bits
        busy = torch.zeros(num_gpus, micro_batches + num_gpus - 1)
        for gpu in range(num_gpus):
            busy[gpu, gpu:gpu + micro_batches] = 1
        return 1 - busy.mean().item()""",
    ),
]


def test_every_exercise_of_the_chapter_has_wrong_answers():
    assert {name for name, *_ in WRONG} == set(SIGNATURES) == checks_of(splitting_a_network)
