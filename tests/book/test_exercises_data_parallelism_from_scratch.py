"""The checks of "Data parallelism from scratch": typical wrong answers are explained, other right ones taken."""

from answers import checks_of, test_a_wrong_answer_is_explained, test_other_right_answers  # noqa: F401

from mgpu_lib.exercises import data_parallelism_from_scratch

SIGNATURES = {
    "accuracy_of_each": "device_params, devices, X, y",
    "ring_allreduce": "data",
    "tree_allreduce": "data",
    "bucketed_allreduce": "device_grads, bucket_bytes",
    "uneven_weights": "sizes",
}
WRONG = [
    (
        "accuracy_of_each",
        "return mgpu.evaluate(partial(lenet, params=device_params[0]), X, y, devices[0])",
        "0.25 for 3 replicas: return a list",
    ),
    (
        "accuracy_of_each",
        "return [mgpu.evaluate(partial(lenet, params=device_params[0]), X, y, devices[0])]",
        "return a list with one accuracy for each",
    ),
    (
        "accuracy_of_each",
        """
        return [mgpu.evaluate(partial(lenet, params=device_params[0]), X, y, devices[0]) for _ in devices]""",
        "the same replica each time",
    ),
    (
        "accuracy_of_each",
        """
        return [mgpu.evaluate(partial(lenet, params=params), X, y, devices[0]) for params in device_params]""",
        "your code raises RuntimeError",
    ),
    (
        "accuracy_of_each",
        """
        return [mgpu.evaluate(partial(lenet, params=params), X, y, device)
                for X, y, params, device in zip(*mgpu.split_batch(X, y, devices), device_params, devices)]""",
        "no shards",
    ),
    (
        "accuracy_of_each",
        """
        return [100 * mgpu.evaluate(partial(lenet, params=params), X, y, device)
                for params, device in zip(device_params, devices)]""",
        "between 0 and 1",
    ),
    (
        "accuracy_of_each",
        """
        return [len(y) * mgpu.evaluate(partial(lenet, params=params), X, y, device)
                for params, device in zip(device_params, devices)]""",
        "between 0 and 1",
    ),
    (
        "accuracy_of_each",
        """
        return sorted(mgpu.evaluate(partial(lenet, params=params), X, y, device)
                      for params, device in zip(device_params, devices))""",
        "belongs at place i",
    ),
    (
        "ring_allreduce",
        """
        for i in range(1, len(data)):
            data[0] += data[i].to(data[0].device)
        for i in range(1, len(data)):
            data[i] = data[0].to(data[i].device)""",
        "GPU 1 still has its own numbers",
    ),
    ("ring_allreduce", "mgpu.allreduce(data)", "sends to GPU 0; in a ring"),
    (
        "ring_allreduce",
        """
        k, own = len(data), [tensor.clone() for tensor in data]
        for _ in range(k - 1):  # whole tensors go around
            own = [own[(i - 1) % k].to(data[i].device, copy=True) for i in range(k)]
            for i in range(k):
                data[i] += own[i]""",
        "Send one chunk in each round",
    ),
    (
        "ring_allreduce",
        """
        k = len(data)
        chunks = [tensor.tensor_split(k) for tensor in data]
        for r in range(k - 1):  # no all-gather
            for i in range(k):
                chunks[(i + 1) % k][(i - r) % k].add_(chunks[i][(i - r) % k].to(data[(i + 1) % k].device))""",
        "Who brings it the others?",
    ),
    (
        "ring_allreduce",
        """
        total = sum(tensor.cpu() for tensor in data)
        for tensor in data:
            tensor.copy_(total)""",
        "from the CPU. Send from GPU to GPU",
    ),
    (
        "tree_allreduce",
        """
        total = sum(tensor.cpu() for tensor in data)
        for tensor in data:
            tensor.copy_(total)""",
        "from the CPU. Send from GPU to GPU",
    ),
    (
        "bucketed_allreduce",
        """
        for same in zip(*device_grads):
            total = sum(grad.cpu() for grad in same)
            for grad in same:
                grad.copy_(total)""",
        "from the CPU. Send from GPU to GPU",
    ),
    ("tree_allreduce", "mgpu.allreduce(data)", "GPU 0 receives 3 tensors, and 2 will do"),
    ("tree_allreduce", "pass", "still has its own numbers"),
    (
        "tree_allreduce",
        """
        step = 1
        while step < len(data):
            for i in range(0, len(data) - step, 2 * step):
                data[i] += data[i + step].to(data[i].device)
            step *= 2""",
        "GPU 1 still has its own numbers",
    ),
    (
        "tree_allreduce",
        """
        k, step = len(data), 1  # everybody exchanges with a partner: right for powers of 2, twice the traffic
        while step < k:
            others = [data[i ^ step].to(data[i].device, copy=True) for i in range(k)]
            for i in range(k):
                data[i] += others[i]
            step *= 2""",
        "tensors travel in all",
    ),
    (
        "bucketed_allreduce",
        """
        for same in zip(*device_grads):
            mgpu.allreduce(list(same))""",
        "32 messages were sent for 16 gradients",
    ),
    (
        "bucketed_allreduce",
        """
        flat = [torch.cat([grad.flatten() for grad in grads]) for grads in device_grads]
        mgpu.allreduce(flat)""",
        "copy the sums from the bucket back",
    ),
    (
        "bucketed_allreduce",
        """
        flat = [torch.cat([grad.flatten() for grad in grads]) for grads in device_grads]
        mgpu.allreduce(flat)
        for grads, values in zip(device_grads, flat):
            for grad, piece in zip(grads, values.split([grad.numel() for grad in grads])):
                grad.copy_(piece.view_as(grad))""",
        "one message has 280 bytes",
    ),
    (
        "bucketed_allreduce",
        """
        flat = [torch.cat([grad.flatten() for grad in grads]) for grads in device_grads]
        mgpu.allreduce(flat)
        for grads, values in zip(device_grads, flat):
            for grad, piece in zip(reversed(grads), values.split([grad.numel() for grad in reversed(grads)])):
                grad.copy_(piece.view_as(grad))""",
        "isn't the sum",
    ),
    (
        "bucketed_allreduce",
        """
        def reduce(places):
            flat = [torch.cat([grads[i].flatten() for i in places]) for grads in device_grads]
            mgpu.allreduce(flat)
            for grads, values in zip(device_grads, flat):
                for i, piece in zip(places, values.split([grads[i].numel() for i in places])):
                    grads[i].copy_(piece.view_as(grads[i]))
        places, size = [], 0
        for i, grad in enumerate(device_grads[0]):  # looks only once the bucket is too full
            places, size = [*places, i], size + grad.nbytes
            if size >= bucket_bytes:
                reduce(places)
                places, size = [], 0
        if places:
            reduce(places)""",
        "one message has 64",
    ),
    ("uneven_weights", "return [1 / len(sizes)] * len(sizes)", "equal weights are right for equal shards only"),
    ("uneven_weights", "return sizes", "not to 1"),
    ("uneven_weights", "return [size / max(sizes) for size in sizes]", "not to 1"),
    (
        "uneven_weights",
        """
        inverse = [1 / (size + 1) for size in sizes]
        return [weight / sum(inverse) for weight in inverse]""",
        "as much as any other",
    ),
    ("uneven_weights", "return [sizes[0] / sum(sizes)]", "one weight for each shard"),
]
RIGHT = [
    ("ring_allreduce", "from mgpu_lib.collectives import ring_allreduce"),
    ("tree_allreduce", "from mgpu_lib.collectives import tree_allreduce"),
    (
        "tree_allreduce",
        """
    def tree_allreduce(data):  # the last adds to the first, so the sum has another order
        active, sent = list(range(len(data))), []
        while len(active) > 1:
            half = len(active) // 2
            sent += [(active[-1 - i], active[i]) for i in range(half)]
            active = active[:len(active) - half]
        for source, target in sent:
            data[target] += data[source].to(data[target].device)
        for source, target in reversed(sent):
            data[source].copy_(data[target])""",
    ),
    ("bucketed_allreduce", "from mgpu_lib.collectives import bucketed_allreduce"),
    (
        "bucketed_allreduce",
        """
    def bucketed_allreduce(device_grads, bucket_bytes):
        bucket, size = [], 0
        for i, grad in enumerate(device_grads[0]):
            if bucket and size + grad.nbytes > bucket_bytes:
                reduce(device_grads, bucket)
                bucket, size = [], 0
            bucket.append(i)
            size += grad.nbytes
        reduce(device_grads, bucket)

    def reduce(device_grads, bucket):
        flat = [torch.cat([grads[i].flatten() for i in bucket]) for grads in device_grads]
        mgpu.allreduce(flat)
        for grads, values in zip(device_grads, flat):
            for i, piece in zip(bucket, values.split([grads[i].numel() for i in bucket])):
                grads[i].copy_(piece.view_as(grads[i]))""",
    ),
    (
        "uneven_weights",
        """
    def uneven_weights(sizes):
        return torch.tensor(sizes) / sum(sizes)""",
    ),
]


def test_every_exercise_of_the_chapter_has_wrong_answers():
    assert {name for name, *_ in WRONG} == set(SIGNATURES) == checks_of(data_parallelism_from_scratch)
