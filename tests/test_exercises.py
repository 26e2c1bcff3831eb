"""Each exercise's check takes right answers, and explains what is wrong with typical wrong ones. None ever raises."""

import re
import textwrap

import numpy
import pytest
from pages import CHAPTERS, PAGES, cells, solutions

from mgpu_lib import exercises
from mgpu_lib.exercises.framework import exercise, expect, filled

PRELUDE = """
import copy
from functools import partial
import torch
from torch import nn
from torch.nn import functional as F
import mgpu_lib as mgpu
from mgpu_lib import lenet
"""


def answer(name, program, prelude=""):
    """The function `name` that `program` defines, as a reader would in a cell."""
    names = {}
    exec("\n".join([PRELUDE, prelude, textwrap.dedent(program)]), names)
    return names[name]


def said(capsys, name, program, prelude=""):
    """The one line that the check of exercise `name` prints about an answer."""
    check = getattr(exercises, f"check_{name}")
    check(answer(name, program, prelude))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return lines[0]


# Right answers: the solutions that the chapters show, and others that are as good


def shown_solutions():
    """(exercise, solution, its page) for all solutions that the pages show."""
    found = []
    for page in PAGES:
        code = "\n".join(cell.source for cell in cells(page) if cell.cell_type == "code")
        for program in solutions(page):
            for name, function in re.findall(r"check_(\w+)\((\w+)\)", code):
                if re.search(rf"^def {function}\(", program, re.M):
                    found.append(pytest.param(name, program, page, id=f"{page}: {name}"))
    return found


@pytest.mark.parametrize("name, program, page", shown_solutions())
def test_the_solution_shown_is_right(name, program, page, capsys):
    prelude = ""
    if name == "clipped_step":  # it calls a function of its page
        [prelude] = [cell.source for cell in cells(page) if cell.id == "right-step"]
    assert said(capsys, name, program, prelude).startswith("right: ")


def steps(page):
    """What a page says about its exercises, in order: ("exercise", label), ("check", name), ("solution", label)."""
    for cell in cells(page):
        if cell.cell_type == "code":
            yield from (("check", name) for name in re.findall(r"exercises\.(check_\w+)\(", cell.source))
        else:
            directive = r"^:::+\{(exercise|solution)\}(?: .+\n:label:)? (\S+)$"
            yield from re.findall(directive, cell.source, re.M)


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("appendix")])
def test_every_exercise_has_a_check_and_then_a_solution(page):
    found = list(steps(page))
    assert found, "a page without an exercise"
    assert [kind for kind, _ in found] == ["exercise", "check", "solution"] * (len(found) // 3)
    assert [label for _, label in found[::3]] == [label for _, label in found[2::3]]
    assert len(found) // 3 == sum(cell.source.count("{exercise}") for cell in cells(page)), "one is of another form"


@pytest.mark.parametrize("page", PAGES)
def test_every_exercise_has_a_drawing(page):
    """A picture of its own, which lies in assets/figures, or a drawing made of text."""
    for cell in cells(page):
        for label, text in re.findall(r"^:::\{exercise\} .+\n:label: (\S+)\n(.*?)^:::$", cell.source, re.M | re.S):
            picture = f"../assets/figures/{label}.svg"
            if f"```{{image}} {picture}\n" in text:
                assert (CHAPTERS / picture).exists()
            else:
                assert "```text\n" in text, f"{label} has no drawing"


def test_every_check_is_used_once_and_tried_with_the_solution_shown():
    used = [name for page in PAGES for kind, name in steps(page) if kind == "check"]
    assert sorted(used) == sorted(exercises.__all__)
    plain_values = {"check_aliases", "check_largest"}  # with tests of their own, below
    assert {f"check_{parameters.values[0]}" for parameters in shown_solutions()} == set(used) - plain_values


@pytest.mark.parametrize("name, program", [
    ("linear_three_gpus", """
    def linear_three_gpus(X, W, b, devices):  # chunks of other sizes are as good
        parts = zip(W.chunk(len(devices)), b.chunk(len(devices)), devices)
        return torch.cat([F.linear(X.to(d), W.to(d), b.to(d)).to(devices[0]) for W, b, d in parts], 1)"""),
    ("strip_prefix", """
    from mgpu_lib.checkpoints import strip_prefix"""),
    ("strays", """
    def strays(net, device):
        return [name for name, tensor in net.state_dict().items() if tensor.device != device]"""),
    ("to_device", """
    def to_device(nest, device):
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        if isinstance(nest, dict):
            return {key: to_device(value, device) for key, value in nest.items()}
        if isinstance(nest, (list, tuple)):
            return type(nest)(to_device(value, device) for value in nest)
        return nest"""),
    ("ring_allreduce", "from mgpu_lib.collectives import ring_allreduce"),
    ("tree_allreduce", "from mgpu_lib.collectives import tree_allreduce"),
    ("tree_allreduce", """
    def tree_allreduce(data):  # the last adds to the first, so the sum has another order
        active, sent = list(range(len(data))), []
        while len(active) > 1:
            half = len(active) // 2
            sent += [(active[-1 - i], active[i]) for i in range(half)]
            active = active[:len(active) - half]
        for source, target in sent:
            data[target] += data[source].to(data[target].device)
        for source, target in reversed(sent):
            data[source].copy_(data[target])"""),
    ("bubble", """
    def bubble(num_gpus, micro_batches):  # counts, in 32 bits
        busy = torch.zeros(num_gpus, micro_batches + num_gpus - 1)
        for gpu in range(num_gpus):
            busy[gpu, gpu:gpu + micro_batches] = 1
        return 1 - busy.mean().item()"""),
    ("bucketed_allreduce", "from mgpu_lib.collectives import bucketed_allreduce"),
    ("bucketed_allreduce", """
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
                grads[i].copy_(piece.view_as(grads[i]))"""),
    ("uneven_weights", """
    def uneven_weights(sizes):
        return torch.tensor(sizes) / sum(sizes)"""),
    ("emptiest_gpu", """
    def emptiest_gpu(devices):
        return max(devices, key=lambda device: torch.cuda.mem_get_info(device)[0])"""),
    ("physical", """
    def physical(i, visible):
        return int(visible.split(",")[i])"""),
    ("unwrap", """
    def unwrap(net):
        while type(net) is nn.DataParallel:
            net = net.module
        return net"""),
    ("halve_every", """
    def halve_every(optimizer, epochs):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** (epoch // epochs))"""),
    ("scatter_sizes", """
    def scatter_sizes(rows, k):
        return tuple(len(part) for part in torch.arange(rows).chunk(k))"""),
])
def test_other_right_answers(name, program, capsys):
    assert said(capsys, name, program).startswith("right: ")


# Wrong answers: (exercise, program, what the line must say)

WRONG = [
    ("best_cut", "return min(range(1, len(work)), key=lambda c: outputs[c - 1])", "Work comes first"),
    ("best_cut", "return len(work) // 2", "Work comes first"),
    ("best_cut", "return min(range(1, len(work)), key=lambda c: (max(sum(work[:c]), sum(work[c:])), outputs[c]))",
     "What crosses a cut after c layers is outputs[c - 1]"),
    ("best_cut", "return 0", "without layers"),
    ("best_cut", "return len(work)", "without layers"),
    ("best_cut", """
        def cost(c):
            return max(sum(work[:c]), sum(work[c:])), outputs[c - 1], -c
        return min(range(1, len(work)), key=cost)""", "take the smaller one"),
    ("bubble", "return (num_gpus - 1) / micro_batches", "idle slots for each busy one"),
    ("bubble", "return (num_gpus - 1) / (micro_batches + num_gpus)", "slot m + k - 1"),
    ("bubble", "return (num_gpus - 1) / num_gpus", "Where does m come in"),
    ("bubble", "return micro_batches / (micro_batches + num_gpus - 1)", "busy share"),
    ("bubble", "return 1 / (micro_batches + num_gpus - 1)", "does one GPU wait in k - 1"),
    ("linear_three_gpus", """
        parts = zip(W.split(len(W) // len(devices)), b.split(len(b) // len(devices)), devices)
        return torch.cat([(X.to(d) @ W.to(d).T + b.to(d)).to(devices[0]) for W, b, d in parts], 1)""",
     "9 columns instead"),
    ("linear_three_gpus", """
        k, parts = len(devices), []
        for i, d in enumerate(devices):
            part = X.to(d) @ W.to(d).tensor_split(k)[i].T + b.tensor_split(k)[i].to(d)
            parts.append(part.to(devices[0]))
        return torch.cat(parts, 1)""", "cut W first"),
    ("linear_three_gpus", """
        parts = zip(W.tensor_split(len(devices)), b.tensor_split(len(devices)), devices)
        return torch.cat([X.to(d) @ W.to(d).T + b.to(d) for W, b, d in parts], 1)""", "your code raises RuntimeError"),
    ("linear_three_gpus", """
        parts = zip(W.chunk(len(devices)), b.chunk(len(devices)), devices)
        parts = [(X.to(d) @ W.to(d).T + b.to(d)).to(devices[0]) for W, b, d in parts]
        return torch.cat([F.pad(part, (0, 10 - part.shape[1])) for part in parts], 0)""", "rows, X has 5"),
    ("linear_three_gpus", """
        parts = zip(W.tensor_split(len(devices)), devices)
        return torch.cat([(X.to(d) @ W.to(d).T).to(devices[0]) for W, d in parts], 1)""", "bias is missing"),
    ("linear_three_gpus", """
        parts = zip(W.detach().tensor_split(len(devices)), b.tensor_split(len(devices)), devices)
        return torch.cat([(X.to(d) @ W.to(d).T + b.to(d)).to(devices[0]) for W, b, d in parts], 1)""",
     "W gets no gradient"),
    ("linear_three_gpus", """
        with torch.no_grad():
            return X @ W.to(devices[0]).T + b.to(devices[0])""", "X gets no gradient"),
    ("linear_three_gpus", """
        parts = zip(W.chunk(len(devices)), b.chunk(len(devices)), devices)
        return sum(F.pad(X.to(d) @ W.to(d).T + b.to(d), (0, 10 - len(W))).to(devices[0]) for W, b, d in parts)""",
     "X @ W.T + b"),
    ("row_parallel", """
        data = [X @ W.T + b.to(X.device) for X, W in zip(parts_X, parts_W)]
        mgpu.allreduce(data)
        return data""", "the bias is in there 2 times"),
    ("row_parallel", """
        data = [X @ W.T for X, W in zip(parts_X, parts_W)]
        mgpu.allreduce(data)
        data[0] += b
        return data""", "GPU 1 has the sum without the bias"),
    ("row_parallel", "return [X @ W.T for X, W in zip(parts_X, parts_W)]", "holds only its summand"),
    ("row_parallel", """
        data = [X @ W.T for X, W in zip(parts_X, parts_W)]
        data[0] += b
        return mgpu.allreduce(data)""", "your function returns None"),
    ("row_parallel", "return [sum((X @ W.T).to('cuda:0') for X, W in zip(parts_X, parts_W)) + b] * len(parts_X)",
     "on the GPU of its part"),
    ("row_parallel", "return [parts_X[0] @ parts_W[0].T]", "1 outputs for 2 GPUs"),
    ("gather_in_order", "return torch.cat([p.to(device) for _, p in finished])", "in which the replicas finished"),
    ("gather_in_order", """
        return torch.cat([part.to(device) for _, part in sorted(finished, key=lambda pair: pair[1].device.index)])""",
     "sorted by GPU"),
    ("gather_in_order", "return torch.cat([part.to('cuda:0') for _, part in sorted(finished, key=lambda p: p[0])])",
     "lies on cuda:0, and was asked for on cuda:2"),
    ("gather_in_order", "return torch.cat([part for _, part in sorted(finished, key=lambda p: p[0])])",
     "your code raises RuntimeError"),
    ("gather_in_order", "return torch.stack([p[:1].to(device) for _, p in sorted(finished, key=lambda p: p[0])])",
     "don't stack"),
    ("gather_in_order", "return torch.cat([p.detach().to(device) for _, p in sorted(finished, key=lambda p: p[0])])",
     "no gradient reaches the parts"),
    ("gather_in_order", """
        finished.sort(key=lambda pair: pair[0])
        return torch.cat([part.to(device) for _, part in finished])""", "the caller's list was changed"),
    ("scatter_sizes", "return [len(part) for part in torch.arange(rows).tensor_split(k)]", "So tensor_split cuts"),
    ("scatter_sizes", """
        sizes = [len(part) for part in torch.arange(rows).chunk(k)]
        return sizes + [0] * (k - len(sizes))""", "Leave out the GPUs that get nothing"),
    ("scatter_sizes", "return [rows // k] * (k - 1) + [rows - rows // k * (k - 1)]", "scatter gives"),
    ("scatter_sizes", "return [-(-rows // k)] * k", "Together they hold"),
    ("broadcast_backward", "return torch.stack([g.to(device) for g in grads if g is not None]).sum()",
     "the gradient has shape (), the parameter (2,)"),
    ("strip_prefix", """
        if not next(iter(state)).startswith("module."):
            return dict(state)
        if not all(name.startswith("module.") for name in state):
            raise ValueError("mixed")
        return {name.removeprefix("module."): value for name, value in state.items()}""", "['b', 'module.w'] became"),
    ("best_cut", "return float(len(work) // 2)", "the check can't use your answer: TypeError"),
    ("broadcast_backward", """
        arrived = [grad.to(device) for grad in grads if grad is not None]
        return sum(arrived) / len(arrived)""", "don't average"),
    ("broadcast_backward", "return next(g for g in grads if g is not None).to(device)", "other replicas' rows"),
    ("broadcast_backward", "return sum(grads)", "your code raises RuntimeError"),
    ("broadcast_backward", "return sum(grad.to(device) for grad in grads)", "your code raises AttributeError"),
    ("broadcast_backward", """
        total = None
        for grad in grads:
            if grad is not None:
                total = grad.to(device) if total is None else total.add_(grad.to(device))
        return total""", "grads[0] was changed"),
    ("broadcast_backward", "return sum(grad.to('cuda:1') for grad in grads if grad is not None)", "lies on cuda:1"),
    ("step_bytes", "return k * (2 * params + buffers + (inputs + 2 * outputs) // k)", "sends nothing to itself"),
    ("step_bytes", "return (k - 1) * (params + buffers + (inputs + 2 * outputs) // k)", "gradients of the parameters"),
    ("step_bytes", "return (k - 1) * (2 * params + 2 * buffers + (inputs + 2 * outputs) // k)", "one way"),
    ("step_bytes", "return (k - 1) * (2 * params + buffers + (inputs + outputs) // k)", "gather's backward"),
    ("step_bytes", "return (k - 1) * (2 * params + buffers + (2 * inputs + 2 * outputs) // k)", "need no gradient"),
    ("step_bytes", "return (k - 1) * (2 * params + buffers + inputs + 2 * outputs)", "a k-th of the inputs"),
    ("step_bytes", "return (k - 1) * 2 * params", "the ledger counts"),
    ("strip_prefix", 'return {key.replace("module.", ""): value for key, value in state.items()}', "inside a name"),
    ("strip_prefix", 'return {key.lstrip("module."): value for key, value in state.items()}', "lstrip removes letters"),
    ("strip_prefix", "return {key[7:]: value for key, value in state.items()}", "none may change"),
    ("strip_prefix", 'return {key.split(".", 1)[1]: value for key, value in state.items()}', "none may change"),
    ("strip_prefix", """
        for key in list(state):
            state[key.removeprefix("module.")] = state.pop(key)""", "the caller's dict was changed"),
    ("strip_prefix", 'return {key.removeprefix("module."): value for key, value in state.items()}', "a ValueError"),
    ("strip_prefix", """
        if not all(key.startswith("module.") for key in state):
            raise ValueError("no prefix")
        return {key.removeprefix("module."): value for key, value in state.items()}""", "your code raises ValueError"),
    ("strip_prefix", """
        def strip(key):
            return strip(key[7:]) if key.startswith("module.") else key
        return {strip(key): value for key, value in state.items()}""", "only one goes"),
    ("strip_prefix", 'return {key.removeprefix("module."): value.clone() for key, value in state.items()}', "no clone"),
    ("halve_every", "return torch.optim.lr_scheduler.StepLR(optimizer, epochs)", "falls to a tenth"),
    ("halve_every", "return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)", "after every epoch"),
    ("halve_every", "return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "after every epoch"),
    ("halve_every", "return torch.optim.lr_scheduler.StepLR(optimizer, epochs, 2)", "it grows"),
    ("halve_every", "return optimizer", "a scheduler is asked for"),
    ("halve_every", """
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5 ** (e // epochs), lambda e: 1])""",
     "second parameter group"),
    ("emptiest_gpu", "return min(devices, key=lambda d: torch.cuda.mem_get_info(d)[0])", "has the least free memory"),
    ("emptiest_gpu", "return max(range(len(devices)), key=lambda i: torch.cuda.mem_get_info(i)[0])", "is no device"),
    ("emptiest_gpu", "return devices[1]", "another GPU has"),
    ("emptiest_gpu", "return min(devices, key=torch.cuda.memory_allocated)", "Others use this machine, too"),
    ("emptiest_gpu", "return min(devices, key=torch.cuda.memory_reserved)", "Others use this machine, too"),
    ("emptiest_gpu", """
        count = torch.cuda.device_count()
        return torch.device('cuda', max(range(count), key=lambda i: torch.cuda.mem_get_info(i)[0]))""",
     "one of the devices that were passed"),
    ("strays", "return [n for n, p in net.named_parameters() if p.device != device]", "buffers, such as"),
    ("strays", "return [n for n, p in net.named_parameters() if p.device.type != device.type]", "not its type"),
    ("strays", "return [p for p in net.parameters() if p.device != device]", "not the tensors"),
    ("strays", "return [n for n, p in net.named_parameters() if p.device == device]", "all of the network is on"),
    ("strays", "return [] if net[2].weight.device == device else [n for n, _ in net.named_parameters()]",
     "only 2.weight"),
    ("to_device", "return [x.to(device) for x in nest]", "can't use your answer: AttributeError"),
    ("to_device", "return nest.to(device).clone() if isinstance(nest, torch.Tensor) else nest", "needs no copy"),
    ("to_device", "return nest.to(device) if isinstance(nest, torch.Tensor) else nest", "the caller's list"),
    ("to_device", """
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        if isinstance(nest, (list, tuple)):
            return [to_device(part, device) for part in nest]
        return nest""", "a tuple came back as list"),
    ("to_device", """
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        return [to_device(part, device) for part in nest] if hasattr(nest, '__iter__') else nest""",
     "your code raises"),
    ("to_device", """
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        if isinstance(nest, (list, tuple)):
            return type(nest)(x.to(device) if isinstance(x, torch.Tensor) else x for x in nest)
        if isinstance(nest, dict):
            return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in nest.items()}
        return nest""", "was not moved"),
    ("physical", "return visible.split(',')[i]", "turn it into a number"),
    ("physical", "return i", "numbers what it sees from 0 on"),
    ("physical", "return int(visible[2 * i])", "numbers what it sees from 0 on"),
    ("physical", "return visible.split(',').index(str(i))", "numbers what it sees from 0 on"),
    ("accuracy_of_each", "return mgpu.evaluate(partial(lenet, params=device_params[0]), X, y, devices[0])",
     "0.25 for 3 replicas: return a list"),
    ("accuracy_of_each", "return [mgpu.evaluate(partial(lenet, params=device_params[0]), X, y, devices[0])]",
     "return a list with one accuracy for each"),
    ("accuracy_of_each", """
        return [mgpu.evaluate(partial(lenet, params=device_params[0]), X, y, devices[0]) for _ in devices]""",
     "the same replica each time"),
    ("accuracy_of_each", """
        return [mgpu.evaluate(partial(lenet, params=params), X, y, devices[0]) for params in device_params]""",
     "your code raises RuntimeError"),
    ("accuracy_of_each", """
        return [mgpu.evaluate(partial(lenet, params=params), X, y, device)
                for X, y, params, device in zip(*mgpu.split_batch(X, y, devices), device_params, devices)]""",
     "no shards"),
    ("accuracy_of_each", """
        return [100 * mgpu.evaluate(partial(lenet, params=params), X, y, device)
                for params, device in zip(device_params, devices)]""", "between 0 and 1"),
    ("accuracy_of_each", """
        return [len(y) * mgpu.evaluate(partial(lenet, params=params), X, y, device)
                for params, device in zip(device_params, devices)]""", "between 0 and 1"),
    ("accuracy_of_each", """
        return sorted(mgpu.evaluate(partial(lenet, params=params), X, y, device)
                      for params, device in zip(device_params, devices))""", "belongs at place i"),
    ("ring_allreduce", """
        for i in range(1, len(data)):
            data[0] += data[i].to(data[0].device)
        for i in range(1, len(data)):
            data[i] = data[0].to(data[i].device)""", "GPU 1 still has its own numbers"),
    ("ring_allreduce", "mgpu.allreduce(data)", "sends to GPU 0; in a ring"),
    ("ring_allreduce", """
        k, own = len(data), [tensor.clone() for tensor in data]
        for _ in range(k - 1):  # whole tensors go around
            own = [own[(i - 1) % k].to(data[i].device, copy=True) for i in range(k)]
            for i in range(k):
                data[i] += own[i]""", "Send one chunk in each round"),
    ("ring_allreduce", """
        k = len(data)
        chunks = [tensor.tensor_split(k) for tensor in data]
        for r in range(k - 1):  # no all-gather
            for i in range(k):
                chunks[(i + 1) % k][(i - r) % k].add_(chunks[i][(i - r) % k].to(data[(i + 1) % k].device))""",
     "Who brings it the others?"),
    ("ring_allreduce", """
        total = sum(tensor.cpu() for tensor in data)
        for tensor in data:
            tensor.copy_(total)""", "from the CPU. Send from GPU to GPU"),
    ("tree_allreduce", """
        total = sum(tensor.cpu() for tensor in data)
        for tensor in data:
            tensor.copy_(total)""", "from the CPU. Send from GPU to GPU"),
    ("bucketed_allreduce", """
        for same in zip(*device_grads):
            total = sum(grad.cpu() for grad in same)
            for grad in same:
                grad.copy_(total)""", "from the CPU. Send from GPU to GPU"),
    ("tree_allreduce", "mgpu.allreduce(data)", "GPU 0 receives 3 tensors, and 2 will do"),
    ("tree_allreduce", "pass", "still has its own numbers"),
    ("tree_allreduce", """
        step = 1
        while step < len(data):
            for i in range(0, len(data) - step, 2 * step):
                data[i] += data[i + step].to(data[i].device)
            step *= 2""", "GPU 1 still has its own numbers"),
    ("tree_allreduce", """
        k, step = len(data), 1  # everybody exchanges with a partner: right for powers of 2, twice the traffic
        while step < k:
            others = [data[i ^ step].to(data[i].device, copy=True) for i in range(k)]
            for i in range(k):
                data[i] += others[i]
            step *= 2""", "tensors travel in all"),
    ("bucketed_allreduce", """
        for same in zip(*device_grads):
            mgpu.allreduce(list(same))""", "32 messages were sent for 16 gradients"),
    ("bucketed_allreduce", """
        flat = [torch.cat([grad.flatten() for grad in grads]) for grads in device_grads]
        mgpu.allreduce(flat)""", "copy the sums from the bucket back"),
    ("bucketed_allreduce", """
        flat = [torch.cat([grad.flatten() for grad in grads]) for grads in device_grads]
        mgpu.allreduce(flat)
        for grads, values in zip(device_grads, flat):
            for grad, piece in zip(grads, values.split([grad.numel() for grad in grads])):
                grad.copy_(piece.view_as(grad))""", "one message has 280 bytes"),
    ("bucketed_allreduce", """
        flat = [torch.cat([grad.flatten() for grad in grads]) for grads in device_grads]
        mgpu.allreduce(flat)
        for grads, values in zip(device_grads, flat):
            for grad, piece in zip(reversed(grads), values.split([grad.numel() for grad in reversed(grads)])):
                grad.copy_(piece.view_as(grad))""", "isn't the sum"),
    ("bucketed_allreduce", """
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
            reduce(places)""", "one message has 64"),
    ("uneven_weights", "return [1 / len(sizes)] * len(sizes)", "equal weights are right for equal shards only"),
    ("uneven_weights", "return sizes", "not to 1"),
    ("uneven_weights", "return [size / max(sizes) for size in sizes]", "not to 1"),
    ("uneven_weights", """
        inverse = [1 / (size + 1) for size in sizes]
        return [weight / sum(inverse) for weight in inverse]""", "as much as any other"),
    ("uneven_weights", "return [sizes[0] / sum(sizes)]", "one weight for each shard"),
    ("unwrap", "return net.module", "has no .module"),
    ("unwrap", 'return getattr(net, "module", net)', "only has a part called module"),
    ("unwrap", "return net.module if hasattr(net, 'module') else net", "only has a part called module"),
    ("unwrap", "return copy.deepcopy(net.module)", "no copy"),
    ("unwrap", "return net", "the wrapper came back"),
]
SIGNATURES = {
    "best_cut": "outputs, work", "bubble": "num_gpus, micro_batches", "linear_three_gpus": "X, W, b, devices",
    "row_parallel": "parts_X, parts_W, b", "gather_in_order": "finished, device", "scatter_sizes": "rows, k",
    "broadcast_backward": "grads, device", "step_bytes": "k, params, buffers, inputs, outputs", "strip_prefix": "state",
    "emptiest_gpu": "devices", "strays": "net, device", "to_device": "nest, device", "physical": "i, visible",
    "accuracy_of_each": "device_params, devices, X, y", "ring_allreduce": "data", "tree_allreduce": "data",
    "bucketed_allreduce": "device_grads, bucket_bytes", "uneven_weights": "sizes",
    "halve_every": "optimizer, epochs", "unwrap": "net", "clipped_step": "X, y, replicas, devices, lr, length",
}


def function(name, body):
    return f"def {name}({SIGNATURES[name]}):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")


@pytest.mark.parametrize("name, body, phrase", WRONG)
def test_a_wrong_answer_is_explained(name, body, phrase, capsys):
    line = said(capsys, name, function(name, body))
    assert line.startswith("not yet: ") and phrase in line


GRADIENTS = """
def backward(X, y, replicas, devices):
    for X, y, params in zip(*mgpu.split_batch(X, y, devices), replicas):
        F.cross_entropy(mgpu.lenet(X, params), y, reduction="sum").backward()

def reduce(replicas):
    for same in zip(*replicas):
        mgpu.allreduce([p.grad for p in same])
"""


@pytest.mark.parametrize("body, phrase", [
    ("""
    backward(X, y, replicas, devices)
    for params in replicas:
        nn.utils.clip_grad_norm_(params, length)
    reduce(replicas)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))""", "the step differs from a single device's"),
    ("""
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))""", "nothing was clipped"),
    ("""
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))
        nn.utils.clip_grad_norm_(params, length)""", "nothing was clipped"),
    ("""
    backward(X, y, replicas, devices)
    reduce(replicas)
    nn.utils.clip_grad_norm_(replicas[0], length)
    for params in replicas:
        mgpu.sgd(params, lr, len(X))""", "the replicas differ"),
    ("""
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        nn.utils.clip_grad_norm_(params, length)
        torch.optim.SGD(params, lr / len(X)).step()""", "still has a gradient"),
    ("""
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        norm = torch.cat([p.grad.flatten() for p in params]).norm()
        for p in params:
            p.grad.mul_(length / norm)
        mgpu.sgd(params, lr, len(X))""", "a gradient shorter than `length` was changed"),
    ("""
    backward(X, y, replicas, devices)
    reduce(replicas)
    for params in replicas:
        nn.utils.clip_grad_norm_(params, 1.0)
        mgpu.sgd(params, lr, len(X))""", "the step differs"),
])
def test_clipping_at_the_wrong_place_is_explained(body, phrase, capsys):
    line = said(capsys, "clipped_step", function("clipped_step", body), GRADIENTS)
    assert line.startswith("not yet: ") and phrase in line


@pytest.mark.parametrize("largest, line", [
    (None, "yours to fill in"), (64, "right: 64 fits, and 128 doesn't"), (32, "not yet: twice that, 64, fits too"),
    (numpy.int64(64), "right: 64 fits, and 128 doesn't"),
    (128, "not yet: 128 is too large"), (100, "not yet: 100 is no power of two"), (0, "not yet: 0 is no power of two"),
    ("64", "not yet: '64' is no power of two")])
def test_the_largest_batch(largest, line, capsys):
    exercises.check_largest(largest, lambda batch_size: batch_size <= 100)
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize("names, phrase", [
    ({"X[:2]", "X.detach()", "X.to(devices[0])"}, "right: all six"),
    (["X[:2]", "X.detach()", "X.to(devices[0])"], "right: all six"),
    (set(), "yours to fill in"),
    ({"X.to(devices[0])"}, "look again at X.detach()"),
    ({"X[:2]", "X.detach()", "X.to(devices[0])", "X.cpu()"}, "they were copied"),
    ({"X"}, "isn't among the six names")])
def test_aliases(names, phrase, capsys):
    exercises.check_aliases(names)
    assert phrase in capsys.readouterr().out


# What all checks share


FUNCTIONS = sorted({name.removeprefix("check_") for name in exercises.__all__} - {"aliases", "largest"})


def test_every_function_asked_for_has_wrong_answers_here():
    elsewhere = exercises.clock, exercises.tuning  # see test_exercises_7.py, test_exercises_8.py
    here = {name for name in FUNCTIONS if not any(hasattr(module, f"check_{name}") for module in elsewhere)}
    assert set(SIGNATURES) == here == {name for name, *_ in WRONG} | {"clipped_step"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_not_filled_in_is_not_wrong(name, capsys):
    check = getattr(exercises, f"check_{name}")
    for unfilled in (None, lambda *args: NotImplemented):
        check(unfilled)
        assert capsys.readouterr().out == "yours to fill in\n"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("odd", [3, "text", lambda: 1, lambda *args: object(), lambda *args: args[0]])
def test_no_answer_makes_a_check_raise(name, odd, capsys):
    getattr(exercises, f"check_{name}")(odd)
    assert capsys.readouterr().out.startswith("not yet: ")


def test_the_three_lines(capsys):
    @exercise
    def check(answer):
        """Doubles."""
        got = filled(answer(2))
        expect(got == 4, f"{got} isn't twice 2")
        return "doubled"

    for given in (None, lambda x: None, lambda x: x, lambda x: 2 * x, lambda: 0, lambda x: x + "1"):
        check(given)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["yours to fill in", "yours to fill in", "not yet: 2 isn't twice 2", "right: doubled"]
    assert lines[4].startswith("not yet: the check can't use your answer: TypeError: ")
    assert lines[5].startswith("not yet: your code raises TypeError: ")
    assert check.__doc__ == "Doubles."
