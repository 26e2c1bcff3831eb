"""The checks of "Data parallelism from scratch": typical wrong answers are explained, other right ones taken."""

from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
    variants,
)

SIGNATURES = {
    "accuracy_of_each": "device_params, devices, X, y",
    "ring_allreduce": "data",
    "tree_allreduce": "data",
    "bucketed_allreduce": "device_grads, bucket_bytes",
    "uneven_weights": "sizes",
}

EACH = """
    return [mgpu.evaluate(partial(lenet, params=params), X, y, device)
            for params, device in zip(device_params, devices)]"""
RING = """
    k = len(data)
    chunks = [tensor.tensor_split(k) for tensor in data]
    for r in range(k - 1):
        for i in range(k):
            chunks[(i + 1) % k][(i - r) % k].add_(chunks[i][(i - r) % k].to(data[(i + 1) % k].device))
    for r in range(k - 1):
        for i in range(k):
            j = (i + 1) % k
            chunks[j][(j - r) % k].copy_(chunks[i][(j - r) % k])"""
WHOLE_RING = """
    k, own = len(data), [tensor.clone() for tensor in data]
    for _ in range(k - 1):
        own = [own[(i - 1) % k].to(data[i].device, copy=True) for i in range(k)]
        for i in range(k):
            data[i] += own[i]"""
TREE = """
    k, sent = len(data), [(i + step, i) for step in (1, 2, 4) for i in range(0, len(data) - step, 2 * step)]
    for source, target in sent:
        data[target] += data[source].to(data[target].device)
    for source, target in reversed(sent):
        data[source].copy_(data[target])"""
PARTNERS = """
    k, step = len(data), 1  # everybody exchanges with a partner: right for powers of 2, twice the traffic
    while step < k:
        others = [data[i ^ step].to(data[i].device, copy=True) for i in range(k)]
        for i in range(k):
            data[i] += others[i]
        step *= 2"""
VIA_CPU = """
    total = sum(tensor.cpu() for tensor in data)
    for tensor in data:
        tensor.copy_(total)"""
BUCKETED = """
    def reduce(places):
        flat = [torch.cat([grads[i].flatten() for i in places]) for grads in device_grads]
        mgpu.allreduce(flat)
        for grads, values in zip(device_grads, flat):
            for i, piece in zip(places, values.split([grads[i].numel() for i in places])):
                grads[i].copy_(piece.view_as(grads[i]))
    bucket, size = [], 0
    for i, grad in enumerate(device_grads[0]):
        if bucket and size + grad.nbytes > bucket_bytes:
            reduce(bucket)
            bucket, size = [], 0
        bucket, size = [*bucket, i], size + grad.nbytes
    reduce(bucket)"""
SHARES = "return [size / sum(sizes) for size in sizes]"

WRONG = [
    ("accuracy_of_each", EACH + "[0]", "for 3 replicas: return a list"),
    ("accuracy_of_each", EACH + "[:1]", "return a list with one accuracy for each"),
    ("accuracy_of_each", EACH + "[::-1]", "belongs at place i"),
    *variants(
        "accuracy_of_each",
        EACH,
        (
            "zip(device_params, devices)",
            "[(device_params[0], devices[0])] * len(devices)",
            "the same replica each time",
        ),
        ("X, y, device)", "X, y, devices[0])", "your code raises RuntimeError"),
        ("X, y, device)", "X[::2], y[::2], device)", "no shards"),
        ("[mgpu", "[100 * mgpu", "between 0 and 1"),
        ("[mgpu", "[len(y) * mgpu", "between 0 and 1"),
    ),
    ("ring_allreduce", "data[:] = [sum(t.to(own.device) for t in data) for own in data]", "still has its own numbers"),
    ("ring_allreduce", "mgpu.allreduce(data)", "sends to GPU 0; in a ring"),
    ("ring_allreduce", WHOLE_RING, "Send one chunk in each round"),
    (
        "ring_allreduce",
        RING.partition("    for r in range(k - 1):\n        for i in range(k):\n            j =")[0],
        "others?",
    ),
    ("ring_allreduce", VIA_CPU, "from the CPU. Send from GPU to GPU"),
    ("tree_allreduce", VIA_CPU, "from the CPU. Send from GPU to GPU"),
    ("tree_allreduce", "mgpu.allreduce(data)", "GPU 0 receives 3 tensors, and 2 will do"),
    ("tree_allreduce", "pass", "still has its own numbers"),
    ("tree_allreduce", TREE.partition("    for source, target in rev")[0], "GPU 1 still has its own numbers"),
    ("tree_allreduce", PARTNERS, "tensors travel in all"),
    *variants(
        "bucketed_allreduce",
        BUCKETED,
        ("mgpu.allreduce(flat)", "flat = [sum(t.cpu() for t in flat)] * len(flat)", "from the CPU. Send from GPU"),
        ("if bucket and size + grad.nbytes > bucket_bytes", "if bucket", "32 messages were sent for 16 gradients"),
        ("if bucket and size + grad.nbytes > bucket_bytes", "if False", "one message has 280 bytes"),
        ("if bucket and size + grad.nbytes > bucket_bytes", "if bucket and size >= bucket_bytes", "one message has 64"),
        ("for i, piece in zip(places, ", "for i, piece in zip([], ", "copy the sums from the bucket back"),
        ("grads[i].copy_(piece.view_as(grads[i]))", "grads[i].copy_(values[0])", "isn't the sum"),
    ),
    ("uneven_weights", "return [1 / len(sizes)] * len(sizes)", "equal weights are right for equal shards only"),
    ("uneven_weights", SHARES + "[:1]", "one weight for each shard"),
    *variants(
        "uneven_weights",
        SHARES,
        (" / sum(sizes)", "", "not to 1"),
        ("sum", "max", "not to 1"),
        ("size / sum(sizes)", "(1 / (size + 1)) / sum(1 / (n + 1) for n in sizes)", "as much as any other"),
    ),
]
RIGHT = [
    ("ring_allreduce", RING),
    ("ring_allreduce", "from mgpu_lib.collectives import ring_allreduce"),
    ("tree_allreduce", TREE),
    ("bucketed_allreduce", BUCKETED),
    ("bucketed_allreduce", "from mgpu_lib.collectives import bucketed_allreduce"),
    ("uneven_weights", "return torch.tensor(sizes) / sum(sizes)"),
]
