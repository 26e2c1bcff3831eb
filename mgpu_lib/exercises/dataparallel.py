"""Checks for "DataParallel": four lines, a backward pass, bytes, batches that stop a run, two programs, batch norm."""

import warnings
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.exercises.framework import exercise, expect, filled
from virtual_gpus import virtual_gpus


@exercise
def check_in_parallel(answer):
    """in_parallel(module, X, devices): module(X), the batch divided among the GPUs."""
    torch.manual_seed(0)
    plain, X = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3)
    for rows, k, first in [(8, 4, "cpu"), (7, 3, "cuda:0"), (2, 4, "cpu"), (5, 1, "cuda:0")]:
        case = f"{rows} rows on {k} GPUs"
        with virtual_gpus(k) as machine:
            net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            net.load_state_dict(plain.state_dict())
            net.to("cuda:0")
            batch = X[:rows].to(first)
            calls = []
            net.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(seen(inputs[0])))
            with machine.counting() as moved:
                output = filled(answer(net, batch, list(machine.devices)))
            expect(isinstance(output, torch.Tensor), f"{case}: return one tensor, and not a {type(output).__name__}")
            expect(str(output.device) == "cuda:0", f"{case}: the output is on {output.device}, not on the first GPU")
            right = plain(X[:rows])
            expect(output.shape == right.shape, f"{case}: the output has shape {tuple(output.shape)}")
            expect(torch.allclose(output.cpu(), right, atol=1e-6), f"{case}: the output isn't that of module(X)")
            sizes = [len(part) for part in torch.arange(rows).chunk(k)]
            parts = {device: size for device, size, _ in calls}
            expect(
                parts == {f"cuda:{i}": size for i, size in enumerate(sizes)},
                f"{case}: the module ran with {parts}, {{device: rows}}; scatter gives {sizes}",
            )
            expect(
                all(device == current for device, _, current in calls),
                f"{case}: inside the module a bare 'cuda' is GPU 0 for every replica: tell parallel_apply the devices",
            )
            for gpu in range(len(sizes), k):
                got = moved.total(target=f"cuda:{gpu}")
                expect(not got, f"{case}: GPU {gpu} gets no rows, and still {got} bytes: it needs no replica")
            expect(output.requires_grad, f"{case}: no gradient finds its way back. Is there a detach()?")
            output.sum().backward()
            grads = [p.grad for p in net.parameters()]
            expect(None not in grads, f"{case}: no gradient reaches the module's parameters")
    return "the output of one device, and only the GPUs with rows get a replica"


def seen(X):
    """Where a module runs: (the device of its input, its rows, the current GPU)."""
    return str(X.device), len(X), f"cuda:{torch.cuda.current_device()}"


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
            own = all(output is not grad for grad in grads)
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
        expect(own, f"{case.partition(':')[0]}: you return the replica's own tensor; a sum is a new one")
    return "the sum, on the original's GPU"


@exercise
def check_step_bytes(answer):
    """step_bytes(k, params, buffers, inputs, outputs): bytes between GPUs in one step with DataParallel."""
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


@exercise
def check_refused(answer):
    """refused(k, most): the batch sizes up to `most` of which scatter gives some of k GPUs a single row."""
    for k, most in [(4, 20), (1, 6), (2, 9), (8, 70), (3, 3)]:
        right = [n for n in range(1, most + 1) if 1 in map(len, torch.arange(n).chunk(k))]
        found = sorted(filled(answer(k, most)))
        if found == right:
            continue
        case = f"{k} GPUs, up to {most} rows"
        even = [n for n in range(1, most + 1) if 1 in map(len, torch.arange(n).tensor_split(k))]
        expect(
            found != even,
            f"{case}: so it is with tensor_split. Scatter rounds rows / k up, and cuts until none is left",
        )
        expect(
            found != [n for n in range(1, most + 1) if n % k == 1 % k],
            f"{case}: what counts is what is left after parts of the rounded-up size, not rows % k",
        )
        wrong = sorted(set(found) ^ set(right))[0]
        parts = [len(part) for part in torch.arange(wrong).chunk(k)] if isinstance(wrong, int) and wrong > 0 else []
        expect(False, f"{case}: look again at {wrong}, of which scatter makes parts of {parts}")
    return "every size at which BatchNorm1d stops a run"


class Sparse(nn.Module):
    """The network of the exercise "Repair a network"."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, X):
        H = torch.relu(self.hidden(X))
        self.penalty = H.mean()
        return self.out(H)


@exercise
def check_row_losses(answer):
    """row_losses(self, X, y): a forward for Sparse whose mean, gathered, is the loss with its penalty."""

    class Repaired(Sparse):
        forward = filled(answer)

    torch.manual_seed(0)
    state, X, y = Sparse().state_dict(), torch.randn(12, 4), torch.randint(3, (12,))
    for rows, k in [(12, 4), (10, 4), (2, 3), (7, 1)]:
        case = f"{rows} rows on {k} GPUs"
        alone = Sparse()
        alone.load_state_dict(state)
        cross_entropy = F.cross_entropy(alone(X[:rows]), y[:rows])
        right = cross_entropy + 0.1 * alone.penalty
        right.backward()
        with virtual_gpus(k) as machine, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gather's, about scalars
            net = Repaired()
            net.load_state_dict(state)
            parallel = nn.DataParallel(net.to("cuda:0"), machine.devices)
            output = filled(parallel(X[:rows], y[:rows]))
            expect(isinstance(output, torch.Tensor), f"return one tensor, and not a {type(output).__name__}")
            found = output.mean()
            expect(found.requires_grad, "the loss needs a gradient: is there a detach() or .item() on the way?")
            found.backward()
            value, shape = found.item(), tuple(output.shape)
            grads = [None if p.grad is None else p.grad.cpu() for p in net.parameters()]
        here = f"{case}: the loss is {value:.4f}, on one GPU it is {right.item():.4f}"
        if abs(value - right.item()) > 1e-5:
            expect(abs(value - cross_entropy.item()) > 1e-5, f"{here}. The penalty is missing")
            expect(
                abs(value - cross_entropy.item() - alone.penalty.item()) > 1e-5, f"{here}. The penalty counts a tenth"
            )
            mean_of_means = len(shape) == 0 or shape[0] < rows
            expect(
                not mean_of_means, f"{here}. Its parts differ in size: a mean for each replica gives a mean of means"
            )
            expect(False, here)
        expect(
            all(
                grad is not None and torch.allclose(grad, p.grad, atol=1e-5)
                for grad, p in zip(grads, alone.parameters())
            ),
            f"{case}: the loss is right, but not its gradient. Was the penalty computed without autograd?",
        )
    return "the same loss and the same gradients, however the rows are cut"


def dots(n=40, side=8):
    """n noisy pictures with a bright dot, and their heat maps."""
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(side, (n, 2), generator=generator)
    row, column = torch.arange(side)[:, None], torch.arange(side)
    distance = (row - place[:, 0, None, None]) ** 2 + (column - place[:, 1, None, None]) ** 2
    pictures = 0.2 * torch.randn(n, 1, side, side, generator=generator)
    return pictures + (distance == 0)[:, None], torch.exp(-distance / 4.0)[:, None]


def found_on_one(net, pictures, heat, epochs, zero=True, halved=lambda epoch: epoch % 2 == 1, factor=0.5, size=10):
    """The state dict of `net` after the training of "Five mistakes" on the CPU; its slips are options."""
    lr = 0.8
    for epoch in range(epochs):
        for X, y in zip(pictures.split(size), heat.split(size)):
            if zero:
                net.zero_grad()
            F.mse_loss(net(X), y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= lr * p.grad
        lr *= factor if halved(epoch) else 1
    return net.state_dict()


@exercise
def check_find_dots(answer):
    """find_dots(net, pictures, heat, devices, epochs): the program, mended."""
    pictures, heat = dots()

    def fresh():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))

    for epochs, k in [(5, 4), (2, 2)]:
        with virtual_gpus(k) as machine:
            state = filled(answer(fresh(), pictures, heat, list(machine.devices), epochs))
            expect(isinstance(state, dict), f"return a state dict, and not a {type(state).__name__}")
            state = {name: value.detach().cpu() for name, value in state.items()}
        names = list(fresh().state_dict())
        expect(
            not any(name.startswith("module.") for name in state),
            "the names begin with 'module.': return the state dict of the network inside the wrapper",
        )
        expect(list(state) == names, f"the state dict has the names {list(state)}, the network {names}")

        def like(names=names, state=state, epochs=epochs, **slip):
            other = found_on_one(fresh(), pictures, heat, epochs, **slip)
            return all(torch.allclose(state[name], other[name], atol=1e-5) for name in names)

        if like():
            continue
        for slip, why in [
            (
                {"zero": False},
                "each backward pass adds to the gradients of all earlier steps. What does zero_grad belong to?",
            ),
            ({"halved": lambda epoch: epoch % 2 == 0}, "the rate is halved too early, after the first epoch already"),
            ({"halved": lambda epoch: False}, "the rate is never halved"),
            ({"halved": lambda epoch: True}, "the rate is halved after every epoch"),
            ({"factor": 0.1}, "the rate falls to a tenth, which is the default of gamma"),
            (
                {"zero": False, "halved": lambda epoch: epoch % 2 == 0},
                "gradients are never zeroed, the rate is halved early",
            ),
        ]:
            expect(not like(**slip), f"{epochs} epochs on {k} GPUs: {why}")
        expect(not all(torch.equal(state[name], fresh().state_dict()[name]) for name in names), "nothing was learned")
        expect(False, f"{epochs} epochs on {k} GPUs: the parameters aren't those of the same training on one GPU")
    return "all five mistakes are gone"


SHARD_SIZES = [4, 4, 4, 1], [5, 2], [6], [100, 100, 100, 97]
MEAN_SLIPS = {
    "own": "each shard is normalized with its own mean, as without any exchange",
    "mean of means": "a mean of the shards' means counts each row of a small shard too much: add sums and counts",
}
VAR_SLIPS = {
    "own": "each shard is divided by its own spread",
    "within": "a mean of the shards' own variances leaves out how far their means lie apart: add sums of squares",
    "unbiased": "a row is normalized with the sum of squares over n: n - 1 is for running_var only",
    "squares": "the mean of the squares is no variance yet: subtract the square of the mean",
    "no eps": "eps is missing under the root",
    "eps outside": "eps belongs under the root",
}


@exercise
def check_sync_batch_norm(answer):
    """sync_batch_norm(shards, running_mean, running_var, momentum, eps): batch norm over the rows of all shards."""
    for sizes, momentum, eps in product(SHARD_SIZES, [0.1, 0.6], [1e-5, 0.5]):
        case = f"shards of {sizes} rows"
        X = rows_from(sizes)
        weights = torch.randn(X.shape, generator=torch.Generator().manual_seed(1), dtype=X.dtype)
        alone = nn.BatchNorm1d(3, eps, momentum, affine=False, dtype=X.dtype)
        whole = X.clone().requires_grad_()
        right = alone(whole)
        (right * weights).sum().backward()
        with virtual_gpus(len(sizes)) as machine:
            ours = X.clone().requires_grad_()
            shards = [part.to(device) for part, device in zip(ours.split(sizes), machine.devices, strict=True)]
            running = torch.zeros(3, dtype=X.dtype, device="cuda:0"), torch.ones(3, dtype=X.dtype, device="cuda:0")
            with machine.counting() as moved:
                found = filled(answer(list(shards), *running, momentum, eps))
            expect(isinstance(found, list | tuple), f"return a list of tensors, and not a {type(found).__name__}")
            expect(len(found) == len(sizes), f"{case}: you return {len(found)} of them")
            for number, (Y, shard) in enumerate(zip(found, shards, strict=True)):
                expect(isinstance(Y, torch.Tensor) and Y.shape == shard.shape, f"{case}: shard {number} changed shape")
                expect(Y.device == shard.device, f"{case}: shard {number} was on {shard.device}, now on {Y.device}")
            Y = torch.cat([part.cpu() for part in found])
            values = [tensor.detach().cpu() for tensor in running]
            with_history = any(tensor.requires_grad for tensor in running)
            if Y.requires_grad:
                (Y * weights).sum().backward()
        if not close(Y.detach(), right.detach()):
            expect(False, f"{case}: {normalized_how(Y.detach(), X, sizes, eps)}")
        check_running(case, values, alone, X, momentum)
        expect(
            Y.requires_grad and ours.grad is not None and close(ours.grad, whole.grad),
            f"{case}: the output is right, but not the gradient. Mean and variance depend on every row, so autograd "
            "must see how they were computed",
        )
        expect(not with_history, "the running statistics have a history: each step would keep all steps before it")
        rest = X[sizes[0] :].nbytes
        expect(
            len(X) < 100 or moved.total() < rest / 2,
            f"{case}: {moved.total():,} bytes travel, and the rows off GPU 0 have {rest:,}: send sums, not rows",
        )
    before, after = error_in_training(), error_in_training(answer)
    return f"in training mode a gradient is off by {before:.0%} if each shard is by itself, by {after:.1%} with yours"


def close(found, wanted):
    return torch.allclose(found, wanted, rtol=1e-8, atol=1e-8)


def rows_from(sizes):
    """Rows of three numbers in 64 bits; each shard has a mean and a spread of its own, as in a sorted batch."""
    generator = torch.Generator().manual_seed(len(sizes))
    shards = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]
    return torch.cat([(1 + 0.5 * i) * shard + i for i, shard in enumerate(shards)])


def normalized_how(Y, X, sizes, eps):
    """What was done to the rows X of shards of these sizes if it gave Y and not batch norm over all of them."""
    parts, n = X.split(sizes), len(X)

    def each(values):
        return torch.cat([value.expand(size, -1) for value, size in zip(values, sizes, strict=True)])

    own_means, own_vars = [part.mean(dim=0) for part in parts], [part.var(dim=0, correction=0) for part in parts]
    mean, of_means = X.mean(dim=0), sum(own_means) / len(sizes)
    var, of_squares = X.var(dim=0, correction=0), sum(part.pow(2).mean(dim=0) for part in parts) / len(sizes)
    withins = [sum(v * size for v, size in zip(own_vars, sizes, strict=True)) / n, sum(own_vars) / len(sizes)]
    means = [("", mean), ("own", each(own_means)), ("mean of means", of_means)]
    variances = [("", var), ("", X.pow(2).mean(dim=0) - of_means**2), ("", of_squares - of_means**2)]
    variances += [("own", each(own_vars)), *(("within", within) for within in withins)]
    variances += [("unbiased", var * n / max(n - 1, 1)), ("squares", X.pow(2).mean(dim=0)), ("no eps", var - eps)]
    variances += [("eps outside", (var.sqrt() + eps) ** 2 - eps)]
    for (mean_slip, m), (var_slip, v) in product(means, variances):
        if close(Y, (X - m) / (v + eps).sqrt()):
            said = [MEAN_SLIPS.get(mean_slip), VAR_SLIPS.get(var_slip)]
            if any(said):
                return "; ".join(filter(None, said))
    return "the rows aren't normalized as on one device"


def check_running(case, values, alone, X, momentum):
    """The running mean and variance are what one device would have after this batch, or expect says why not."""
    if close(values[0], alone.running_mean) and close(values[1], alone.running_var):
        return
    mean, var = X.mean(dim=0), X.var(dim=0, correction=0)
    expect(
        not torch.equal(values[0], torch.zeros(3)) or not torch.equal(values[1], torch.ones(3)),
        f"{case}: the running statistics are as before: change the two tensors in place",
    )
    expect(
        not close(values[1], (1 - momentum) + momentum * var),
        f"{case}: the rows are right, but running_var takes the unbiased variance, over n - 1",
    )
    expect(
        not close(values[0], (1 - momentum) * mean),
        f"{case}: momentum is the weight of the new batch, and 1 - momentum that of the old value",
    )
    expect(False, f"{case}: the rows are right, and the running statistics are not")


def error_in_training(sync=None):
    """How far the gradient of a network with batch norm in it is from one device's, relative to its length."""
    sizes = [4, 4, 4, 2]
    torch.manual_seed(0)
    before, after = nn.Linear(3, 8).double(), nn.Linear(8, 2).double()
    X, y = rows_from(sizes), torch.arange(14) % 2

    def gradient(normalized):
        before.zero_grad()
        F.cross_entropy(after(torch.tanh(normalized(before(X)))), y).backward()
        return before.weight.grad.clone()

    def batch_norm(H):
        return F.batch_norm(H, None, None, training=True)

    def by_shards(H):
        if sync is None:
            return torch.cat([batch_norm(part) for part in H.split(sizes)])
        running = [torch.zeros(8, dtype=H.dtype, device="cuda:0"), torch.ones(8, dtype=H.dtype, device="cuda:0")]
        shards = [part.to(f"cuda:{i}") for i, part in enumerate(H.split(sizes))]
        return torch.cat([part.cpu() for part in sync(shards, *running, 0.1, 1e-5)])

    wanted = gradient(batch_norm)
    with virtual_gpus(len(sizes)):
        found = gradient(by_shards)
    return ((found - wanted).norm() / wanted.norm()).item()
