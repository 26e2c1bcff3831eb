"""Checks for "Splitting a network": cutting a network, the order of a pipeline, and layers split over GPUs."""

import torch

from mgpu_lib.exercises.framework import exercise, expect, filled
from virtual_gpus import virtual_gpus


@exercise
def check_best_cut(answer):
    """best_cut(outputs, work): after which layer to cut, so that the busier GPU has little work, and little is sent."""
    for outputs, work in [
        ([1, 1, 1], [1, 1, 4]),
        ([5, 4, 3, 2, 1], [6, 1, 1, 1, 1]),
        ([9, 1, 1, 9], [1, 3, 3, 1]),
        ([9, 7, 2, 9], [4, 0, 0, 4]),
        ([9, 2, 2, 9], [4, 0, 0, 4]),
        ([8, 8], [1, 3]),
    ]:
        cut, layers = filled(answer(list(outputs), list(work))), len(work)
        case = f"outputs {outputs}, work {work}"
        expect(cut in range(1, layers), f"{case}: {cut!r} leaves one GPU without layers; cut in 1 … {layers - 1}")
        busier = [max(sum(work[:c]), sum(work[c:])) for c in range(layers)]
        expect(
            busier[cut] == min(busier[1:]),
            f"{case}: cut after layer {cut}, the busier GPU has {busier[cut]}, and {min(busier[1:])} is possible. "
            "Work comes first: half of the layers isn't half of the work, and a small output balances nothing",
        )
        best = min(range(1, layers), key=lambda c: (busier[c], outputs[c - 1]))
        expect(
            outputs[cut - 1] == outputs[best - 1],
            f"{case}: after layer {cut} the GPUs are balanced, but {outputs[cut - 1]} numbers are sent, not "
            f"{outputs[best - 1]}. What crosses a cut after c layers is outputs[c - 1]",
        )
        expect(cut == best, f"{case}: {cut} and {best} are equally good; take the smaller one")
    return "the busier GPU has as little as it can, and of such cuts yours sends the least"


@exercise
def check_bubble(answer):
    """bubble(num_gpus, micro_batches): the share of time slots in which a GPU of the pipeline idles."""
    for k, m in [(4, 8), (4, 1), (2, 3), (1, 5)]:
        got, right = filled(answer(k, m)), (k - 1) / (m + k - 1)
        case = f"{k} GPUs and {m} micro-batches: {got!r} isn't the share"
        if abs(got - right) > 1e-6:
            expect(got != (k - 1) / m, f"{case}; it is idle slots for each busy one. The share is of all slots")
            expect(got != (k - 1) / (m + k), f"{case}; count again: the last micro-batch leaves in slot m + k - 1")
            expect(got != m / (m + k - 1), f"{case}; it is the busy share")
            expect(got != (k - 1) / k, f"{case}; it is the one for a single micro-batch. Where does m come in?")
            expect(False, f"{case}. Of how many slots in all, m + k - 1, does one GPU wait in k - 1?")
    return f"four GPUs idle {answer(4, 1):.0%} of the time with one micro-batch, {answer(4, 32):.0%} with 32"


@exercise
def check_one_f_one_b(answer):
    """one_f_one_b(rank, num_stages, micro_batches): the order of a rank's passes, such as ["F0", "F1", "B0", ...]."""
    for k, m in [(4, 8), (3, 5), (4, 2), (1, 3)]:
        orders = [list(filled(answer(rank, k, m))) for rank in range(k)]
        for rank, order in enumerate(orders):
            check_order(order, f"rank {rank} of {k}, {m} micro-batches", k - rank, m)
        slots, least = slots_taken(orders), 3 * (m + k - 1)
        expect(
            slots <= least,
            f"{k} ranks and {m} micro-batches: your orders take {slots} slots, and {least} are possible (a forward "
            "pass takes 1, a backward pass 2). A rank that goes backward too early waits: how many forward passes fit "
            "in before its first gradient can be there?",
        )
    return "no slower than GPipe, and rank 0 of 4 holds 4 micro-batches where GPipe holds all"


def check_order(order, case, most, micro_batches):
    """Whether a rank takes every pass once, each forward before its backward, and holds `most` micro-batches."""
    wanted = {f"{kind}{number}" for kind in "FB" for number in range(micro_batches)}
    expect(
        sorted(order) == sorted(wanted),
        f"{case}: {order} should hold each of {', '.join(sorted(wanted))} once",
    )
    held = 0
    for number, name in enumerate(order):
        early = name[0] == "B" and f"F{name[1:]}" not in order[:number]
        expect(not early, f"{case}: {name} comes before F{name[1:]}, whose activations it needs")
        held += 1 if name[0] == "F" else -1
        expect(
            held <= most,
            f"{case}: after {name} it holds the activations of {held} micro-batches; 1F1B needs no more than {most}",
        )


def slots_taken(orders):
    """When the last rank is done, if a forward pass takes 1 slot and a backward pass 2."""
    ends, free, done, total = {}, [0] * len(orders), [0] * len(orders), sum(map(len, orders))
    while len(ends) < total:
        before = len(ends)
        for rank, order in enumerate(orders):
            if done[rank] < len(order):
                name = order[done[rank]]
                giver = rank - 1 if name[0] == "F" else rank + 1
                if giver in (-1, len(orders)) or (giver, name) in ends:
                    start = max(free[rank], ends.get((giver, name), 0))
                    ends[rank, name] = free[rank] = start + (1 if name[0] == "F" else 2)
                    done[rank] += 1
        waiting = [f"rank {r} waits for {orders[r][n]}" for r, n in enumerate(done) if n < len(orders[r])]
        expect(len(ends) > before, f"with these orders nobody can go on: {', '.join(waiting)}")
    return max(free)


@exercise
def check_linear_three_gpus(answer):
    """linear_three_gpus(X, W, b, devices): X @ W.T + b, each device computing its share of the outputs."""
    for k in (3, 1, 4):
        X, W, b = (torch.randn(shape, generator=torch.Generator().manual_seed(k)) for shape in [(5, 8), (10, 8), (10,)])
        with virtual_gpus(k) as machine:
            inputs = X.to("cuda:0").requires_grad_(), W.clone().requires_grad_(), b.clone().requires_grad_()
            output = filled(answer(*inputs, machine.devices))
            sent = [machine.traffic.total("cpu", device) for device in machine.devices]
            sent[0] -= X.nbytes
            check_linear(output, inputs, X, W, b)
        share = -(-10 // k) * 8 * 4 + b.nbytes
        expect(
            max(sent) <= share,
            f"the numbers are right, but GPU {sent.index(max(sent))} was sent {max(sent)} "
            f"bytes, more than its share of W ({share}): cut W first, then move the pieces",
        )
    return "equal to the unsplit layer, gradients too; each GPU was sent its own share of W"


def check_linear(output, inputs, X, W, b):
    """Whether `output` is what the unsplit layer computes from X, W and b, with gradients for all three `inputs`."""
    expect(output.shape[0] == 5, f"the output has {output.shape[0]} rows, X has 5: the outputs are columns (dim=1)")
    expect(
        output.shape == (5, 10),
        f"the output has {output.shape[-1]} columns instead of 10. Are all rows of W used, "
        "also when the GPUs don't divide 10, and are the parts joined, not added?",
    )
    expect(output.device == inputs[0].device, f"the output is on {output.device} and belongs on devices[0]")
    result = output.detach().cpu()
    expect(not torch.allclose(result, X @ W.T, atol=1e-6), "the bias is missing")
    expect(
        torch.allclose(result, X @ W.T + b, atol=1e-5),
        "the numbers aren't those of X @ W.T + b: does each device use its own rows of W, and its own part of b?",
    )
    upstream = torch.arange(50.0).reshape(5, 10)
    if output.requires_grad:
        output.backward(upstream.to(output.device))
    for name, tensor, right in zip("XWb", inputs, (upstream @ W, upstream.T @ X, upstream.sum(0))):
        expect(tensor.grad is not None, f"{name} gets no gradient: is there a detach(), .data or no_grad() on its way?")
        expect(torch.allclose(tensor.grad.cpu(), right, rtol=1e-4, atol=1e-4), f"the gradient of {name} is wrong")


@exercise
def check_row_parallel(answer):
    """row_parallel(parts_X, parts_W, b): a list with the whole output X @ W.T + b on every GPU."""
    for k in (2, 3):
        X, W, b = (torch.randn(shape, generator=torch.Generator().manual_seed(k)) for shape in [(4, 7), (5, 7), (5,)])
        whole = X @ W.T
        with virtual_gpus(k) as machine:
            parts = [[part.to(device) for part, device in zip(T.tensor_split(k, 1), machine.devices)] for T in (X, W)]
            summands = [(x @ w.T).cpu() for x, w in zip(*parts)]
            data = answer(*parts, b.to("cuda:0"))
            expect(data is not None, "your function returns None. (mgpu.allreduce does, too: it works in place)")
            data = filled(data)
            expect(len(data) == k, f"{len(data)} outputs for {k} GPUs: return one for each")
            expect([part.device for part in data] == machine.devices, "each output belongs on the GPU of its part")
            data = [part.detach().cpu() for part in data]
        for gpu, output in enumerate(data):
            check_row(gpu, output, summands[gpu], whole, b, k)
    return "every GPU holds the whole output, and the bias once"


def check_row(gpu, output, summand, whole, b, k):
    def equals(right):
        return output.shape == right.shape and torch.allclose(output, right, atol=1e-5)

    expect(not equals(summand) and not equals(summand + b), f"GPU {gpu} holds only its summand: all-reduce the outputs")
    expect(not equals(whole + k * b), f"the bias is in there {k} times, once for each GPU: add it on one GPU only")
    expect(
        not equals(whole),
        f"GPU {gpu} has the sum without the bias. If you add it on GPU 0, do so before the "
        "all-reduce, so that it reaches all",
    )
    expect(equals(whole + b), f"GPU {gpu} doesn't hold X @ W.T + b")
