"""Checks for "The parallel primitives": what scatter, replicate and gather do, by hand."""

import torch

from mgpu_lib.exercises.framework import exercise, expect, filled
from virtual_gpus import virtual_gpus


@exercise
def check_gather_in_order(answer):
    """gather_in_order(finished, device): all rows in the batch's order, from (replica, part) pairs in any order."""
    with virtual_gpus(4):
        leaves = [
            torch.full((rows, 2), float(replica), device=f"cuda:{gpu}", requires_grad=True)
            for replica, (rows, gpu) in enumerate([(3, 2), (3, 0), (1, 3)])
        ]
        parts = [leaf * 1 for leaf in leaves]
        finished = [(replica, parts[replica]) for replica in (2, 0, 1)]
        given = list(finished)
        output = filled(answer(finished, torch.device("cuda:2")))
        expect(
            [pair[0] for pair in finished] == [pair[0] for pair in given],
            "the caller's list was changed: sorted(finished) makes a new one, finished.sort() doesn't",
        )
        expect(output.dim() == 2, f"the output has {output.dim()} dimensions: concatenate (torch.cat), don't stack")
        expect(str(output.device) == "cuda:2", f"the output is on {output.device}, and was asked for on cuda:2")
        order = output.detach().cpu()[:, 0].int().tolist()
        expect(
            order != [2, 0, 0, 0, 1, 1, 1],
            "the rows come in the order in which the replicas finished: sort by the replica's number",
        )
        expect(
            order != [1, 1, 1, 0, 0, 0, 2],
            "the rows are sorted by GPU. Replica 0 may be on GPU 2: its number says where its rows belong",
        )
        expect(order == [0, 0, 0, 1, 1, 1, 2], f"the rows come from the replicas {order}; expected 0 0 0 1 1 1 2")
        expect(output.requires_grad, "no gradient reaches the parts: is there a detach() or .data on the way?")
        output.sum().backward()
        expect(all(leaf.grad is not None for leaf in leaves), "no gradient reaches some of the parts")
    return "all rows in order, on the right GPU, and the gradients find their way back"


@exercise
def check_scatter_sizes(answer):
    """scatter_sizes(rows, k): how many rows scatter gives to each GPU that gets any."""
    for rows, k in [(9, 4), *((rows, k) for rows in range(1, 25) for k in range(1, 10))]:
        right = [len(part) for part in torch.arange(rows).chunk(k)]
        sizes = list(filled(answer(rows, k)))
        if sizes == right:
            continue
        case = f"{rows} rows on {k} GPUs: scatter gives {right}, you say {sizes}"
        expect([size for size in sizes if size] != right, f"{case}. Leave out the GPUs that get nothing")
        even = [len(part) for part in torch.arange(rows).tensor_split(k)]
        expect(
            sizes != even,
            f"{case}. So tensor_split cuts, and chapter 4's split_batch; scatter rounds rows / k up, "
            "and goes on until no row is left",
        )
        expect(sum(sizes) == rows, f"{case}. Together they hold {sum(sizes)} rows, not {rows}")
        expect(False, case)
    return "for every batch, also when some GPUs get nothing"


@exercise
def check_broadcast_backward(answer):
    """broadcast_backward(grads, device): the original's gradient, from those of its replicas; some may be None."""
    for values in ([1.0, 10.0, 100.0], [5.0], [1.0, None, 100.0], [None, 10.0, 100.0]):
        with virtual_gpus(3):
            grads = [
                None if value is None else torch.full((2,), value, device=f"cuda:{gpu}")
                for gpu, value in enumerate(values)
            ]
            output = filled(answer(list(grads), torch.device("cuda:0")))
            here = [value for value in values if value is not None]
            expect(str(output.device) == "cuda:0", f"the gradient is on {output.device}, the original on cuda:0")
            expect(output.shape == (2,), f"the gradient has shape {tuple(output.shape)}, the parameter (2,)")
            output, after = output.cpu().tolist()[0], [None if g is None else g.cpu().tolist()[0] for g in grads]
        case = f"gradients {values}: you return {output:g}, not {sum(here):g}"
        changed = [gpu for gpu, value in enumerate(values) if after[gpu] != value]
        expect(
            not changed,
            f"grads[{changed[:1] and changed[0]}] was changed: .to returns the same tensor where it is "
            "already (chapter 2), so don't add to it in place",
        )
        means = [sum(here) / len(here), sum(here) / len(values)]
        expect(
            len(here) == 1 or min(abs(output - mean) for mean in means) > 1e-3,
            f"{case}. There is one loss, of all rows, and each is a part of its gradient: add, don't average",
        )
        expect(len(here) == 1 or output != here[0], f"{case}. The other replicas' rows are missing")
        expect(output == sum(here), case)
    return "the sum, on the original's GPU"


@exercise
def check_step_bytes(answer):
    """step_bytes(k, params, buffers, inputs, outputs): bytes between GPUs in one step with data_parallel."""
    params, buffers, inputs, outputs = 1000, 40, 800, 160
    for k in (2, 4, 1):

        def total(params=2 * params, buffers=buffers, inputs=inputs, outputs=2 * outputs, others=k - 1, parts=k):
            return others * (params + buffers + (inputs + outputs) / parts)

        got = filled(answer(k, params, buffers, inputs, outputs))
        if got == total():
            continue
        case = f"{k} GPUs, {params=}, {buffers=}, {inputs=}, {outputs=}: you say {got:g}"
        for slip, why in [
            (total(others=k), "GPU 0 sends nothing to itself: k - 1 others"),
            (total(params=params), "the gradients of the parameters come back in the backward pass"),
            (total(buffers=2 * buffers), "buffers have no gradient: they travel one way"),
            (total(outputs=outputs), "the gradient of the outputs goes out to the replicas (gather's backward)"),
            (total(inputs=2 * inputs), "the inputs need no gradient, so nothing comes back for them"),
            (total(parts=1), "each of the others gets a k-th of the inputs, and sends a k-th of the outputs"),
            (total(parts=k - 1 or 1), "GPU 0's own rows don't travel"),
        ]:
            expect(got != slip, f"{case}; {why}")
        expect(False, f"{case}, the ledger counts {total():g}")
    return "byte for byte what the ledger counts"
