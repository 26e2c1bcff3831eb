"""Checks for "What fills the memory": bytes of an MLP, the longest text, pieces of a batch, clipping, ways that fit."""

from itertools import chain, combinations, pairwise
from math import ceil
from numbers import Integral

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_mlp_bytes(answer):
    """mlp_bytes(widths, batch): what a step of such an MLP with Adam keeps in FP32, the batch itself not counted."""
    for widths, batch in (((784, 256, 10), 64), ((3, 5, 7, 2), 11), ((8, 4), 1)):
        weights, biases = sum(a * b for a, b in pairwise(widths)), sum(widths[1:])
        right = 16 * (weights + biases) + 4 * batch * sum(widths[1:])
        slips = {
            right - 16 * biases: "the biases are parameters, too",
            right + 4 * batch * widths[0]: "the batch itself doesn't count",
            right - 4 * batch * widths[-1]: "the loss keeps the logarithms of the probabilities",
            right + 4 * batch * sum(widths[1:-1]): "a hidden layer keeps the ReLU's output; its input is freed",
            right - 4 * batch * sum(widths[1:]): "activations are missing",
            right - 4 * (weights + biases): "each parameter takes sixteen bytes: count its gradient, and two moments",
            right - 12 * (weights + biases): "gradients and Adam's moments are missing",
            right / 4: "these are numbers, and each takes four bytes",
        }
        found = filled(answer(widths, batch))
        why = slips.get(found, f"it is {right:,}")
        expect(found == right, f"{found!r} bytes for widths {widths} and a batch of {batch}: {why}")
    return "exact for three MLPs"


LONGEST = {
    "fused": ("at the peak, a token has more logits than those that it keeps", "divide the free bytes by a token's"),
    "plain": ("a table of s × s scores for each head of each layer", "only the table grows with s squared"),
}


@exercise
def check_longest(answer, fits):
    """{"fused": tokens, "plain": tokens}: the longest texts, in whole 1,024s, for which `fits(kind, tokens)` holds.

    They are estimates: a tenth more or less is near enough, and so are 1,024 tokens.
    """
    said = []
    for kind, (too_many, too_few) in LONGEST.items():
        tokens = filled(answer[kind])
        whole = isinstance(tokens, Integral) and tokens > 0 and tokens % 1024 == 0
        expect(whole, f"{kind}: {tokens!r} is no multiple of 1,024")
        near = 1024 * max(1, tokens // 10240)
        low, high = tokens - near, tokens + near + 1024
        expect(
            low == 0 or fits(kind, low), f"{kind}: {tokens:,} tokens are far too many. Did you count this: {too_many}?"
        )
        expect(not fits(kind, high), f"{kind}: far more than {tokens:,} tokens fit; {too_few}")
        while high - low > 1024:  # low fits, and high doesn't
            middle = (low + high) // 2048 * 1024
            low, high = (middle, high) if fits(kind, middle) else (low, middle)
        said.append(f"{low:,} tokens with {kind} attention" + (f" (you: {tokens:,})" if tokens != low else ""))
    return f"measured are {' and '.join(said)}"


@exercise
def check_accumulate(answer):
    """accumulate(net, X, y, size): the gradients of the mean loss over all rows, from pieces of `size` rows."""
    seen = []
    for rows, size in ((12, 4), (10, 4), (3, 8)):
        X, y = batch_of(rows)
        right, wrong = gradients_by(X, y, size, "share"), {}
        for slip in ("mean of means", "sum of means", "rows dropped"):
            wrong[slip] = gradients_by(X, y, size, slip)
        net = small_net()
        net.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        answer(net, X, y, size)
        where = f"{rows} rows in pieces of {size}"
        grads = [p.grad for p in net.parameters()]
        expect(None not in grads, f"{where}: some gradients are missing; did you call backward()?")
        expect(max(seen) <= size, f"{where}: the network saw {max(seen)} rows at once")
        if not close(grads, right):
            named = [slip for slip in wrong if close(grads, wrong[slip])]
            expect(False, f"{where}: {ACCUMULATION[named[0]] if named else 'the gradients are wrong'}")
    return "the whole batch's gradients, whatever remains"


ACCUMULATION = {
    "mean of means": "the last piece is smaller, and its rows count too much",
    "sum of means": "the means of the pieces are added up, so the gradient is several times too long",
    "rows dropped": "the rows that fill no whole piece are missing",
}


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def batch_of(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=generator).double(), torch.arange(rows) % 4


def gradients_by(X, y, size, way):
    net, pieces = small_net(), list(zip(X.split(size), y.split(size), strict=True))
    if way == "rows dropped" and len(X) > size:
        pieces = [piece for piece in pieces if len(piece[1]) == size]
    weigh = {"mean of means": lambda n: 1 / len(pieces), "sum of means": lambda n: 1.0}
    for X_piece, y_piece in pieces:
        weight = weigh.get(way, lambda n: n / len(X))(len(y_piece))
        (F.cross_entropy(net(X_piece), y_piece) * weight).backward()
    return [p.grad for p in net.parameters()]


def close(found, wanted):
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(found, wanted, strict=True))


SLIPS = {
    "pieces": "pieces of unequal size count as equal",
    "each": "each piece is clipped, not their sum",
    "scaled": "clipping sees scaled gradients",
    "old": "the second step still has the gradients of the first",
}
BOUND = 0.05


@exercise
def check_mended_step(answer):
    """mended_step(net, optimizer, scaler, X, y, size, bound): in pieces and scaled, the clipped step of one batch.

    The scaler's factor is small here: a large one hides gradients of the step before, which have been divided by it.
    """
    for rows in (10, 12):
        X, y = batch_of(rows)
        found, scaler = after_two_steps(answer, X, y)
        if not close(found, after_two_steps(with_slips(()), X, y)[0]):
            sets = chain.from_iterable(combinations(SLIPS, n) for n in range(1, len(SLIPS) + 1))
            same = (slips for slips in sets if close(found, after_two_steps(with_slips(slips), X, y)[0]))
            said = "; ".join(SLIPS[slip] for slip in next(same, ())) or "the parameters are not those of a right step"
            expect(False, f"{rows} rows in pieces of 4: {said}")
        expect(scaler.get_scale() == 16, "the scaler's factor has not changed: it learns from scaler.update()")
    X, y = batch_of(8)
    found, _ = after_two_steps(answer, X * torch.inf, y)
    expect(close(found, small_net().parameters()), "gradients overflowed, and the step was taken all the same")
    return "the same step as on the whole batch, and none when gradients overflow"


def after_two_steps(step, X, y):
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for _ in range(2):
        step(net, optimizer, scaler, X, y, 4, BOUND)
    return [p.detach() for p in net.parameters()], scaler


def with_slips(slips):
    def step(net, optimizer, scaler, X, y, size, bound):
        if "old" not in slips:
            optimizer.zero_grad()
        for X_piece, y_piece in zip(X.split(size), y.split(size), strict=True):
            share = 1 / ceil(len(X) / size) if "pieces" in slips else len(y_piece) / len(y)
            scaler.scale(F.cross_entropy(net(X_piece), y_piece) * share).backward()
            if "each" in slips:
                nn.utils.clip_grad_norm_(net.parameters(), bound)
        if "scaled" not in slips:
            scaler.unscale_(optimizer)
        if "each" not in slips:
            nn.utils.clip_grad_norm_(net.parameters(), bound)
        scaler.step(optimizer)
        scaler.update()

    return step


@exercise
def check_cheapest(answer, try_out):
    """A dict of options: the fastest step that fits, of `try_out(**options)`, which gives (GiB, seconds) or raises."""

    def outcome(options):
        try:
            return try_out(**options)
        except torch.OutOfMemoryError:
            return None

    half, again = {"dtype": torch.float16}, {"recomputed": True}
    expect(answer.get("pieces", 1) == 1, "a single text is a batch of one, which can't be cut into pieces")
    expect(outcome(answer) is not None, f"{answer} runs out of memory")
    gib, seconds = outcome(answer)
    best = min(found[1] for found in map(outcome, ({}, half, again, half | again)) if found)
    expect(seconds < 1.02 * best, f"it fits, in {seconds:.2g} s, but another set of ways takes {best:.2g} s")
    return f"{gib:.1f} GiB and {seconds:.2g} s"
