"""Checks for "Tensor parallelism": layers and losses cut over ranks."""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.exercises.rank_threads import on_ranks


def random(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def pieces(tensor, ranks, dim):
    return [piece.clone() for piece in tensor.tensor_split(ranks, dim)]


def run(answer, ranks, arguments, upstream):
    """The output of `answer(*arguments[rank])` on each rank, the gradients of its tensors, and numbers sent.

    upstream[rank] is the gradient that comes from above.
    """

    def program(rank):
        given = [a.clone().requires_grad_() if a.is_floating_point() else a for a in arguments[rank]]
        output = filled(answer(*given))
        expect(torch.is_tensor(output), f"rank {rank} returns a {type(output).__name__} instead of a tensor")
        if output.requires_grad and output.shape == upstream[rank].shape:
            output.backward(upstream[rank])
        return output.detach(), [a.grad for a in given]

    return on_ranks(ranks, program)


def same(found, right):
    return found is not None and found.shape == right.shape and torch.allclose(found, right, rtol=1e-9, atol=1e-9)


@exercise
def check_scatter_tokens(answer):
    """scatter_tokens(Y, lengths): this rank's tokens of the sum of all ranks' Y."""
    for lengths in ([2, 2], [3, 2, 2], [1, 4, 0]):
        ranks, tokens = len(lengths), sum(lengths)
        *summands, dY = random(tokens, *[(2, tokens, 3)] * (ranks + 1))
        upstream = [piece.contiguous() for piece in dY.split(lengths, 1)]

        def scattered(Y, lengths=lengths):
            return answer(Y, list(lengths))

        found, numbers = run(scattered, ranks, [(Y,) for Y in summands], upstream)
        rights = sum(summands).split(lengths, 1)
        for rank, (output, (grad,)) in enumerate(found):
            right, mine = rights[rank], summands[rank].split(lengths, 1)[rank]
            expect(
                output.shape == right.shape,
                f"rank {rank} has {lengths[rank]} of {tokens} tokens: its output should be {[*right.shape]}, "
                f"not {[*output.shape]}",
            )
            expect(
                not right.numel() or not same(output, mine),
                f"rank {rank} has its tokens, but not the sum over all ranks",
            )
            expect(same(output, right), f"rank {rank} doesn't have its tokens of the sum")
            expect(grad is not None, "Y gets no gradient: the collective needs a backward pass of its own")
            expect(
                not same(grad, ranks * dY),
                f"the gradient of Y is {ranks} times too large: backward gathers, and adds nothing up",
            )
            expect(
                same(grad, dY),
                f"the gradient of Y is wrong on rank {rank}: each rank's summand went into the tokens of all ranks",
            )
        for rank, sent in enumerate(numbers):
            most = 2 * 3 * (lengths[rank] + tokens)
            expect(
                sent <= most,
                f"the numbers are right, but rank {rank} was sent {sent} of them instead of {most}: "
                "dist.reduce_scatter brings it its own tokens only",
            )
    return "sum and gradient are those of one device, and each rank is sent its own tokens only"


@exercise
def check_norm_tokens(answer):
    """norm_tokens(X, weight): RMS norm of this rank's tokens; the gradient of each copy of weight is that of all."""
    for lengths in ([2, 2], [2, 3, 1]):
        ranks, tokens = len(lengths), sum(lengths)
        whole, dY, weight = random(tokens, (2, tokens, 4), (2, tokens, 4), (4,))
        tokens_of, upstream = (tensor.split(lengths, 1) for tensor in (whole, dY))
        rights = [normed(X, weight, dY_) for X, dY_ in zip(tokens_of, upstream, strict=True)]
        summed = sum(d_weight for _, _, d_weight in rights)
        found, numbers = run(answer, ranks, [(X.clone(), weight) for X in tokens_of], upstream)
        for rank, ((output, (dX, d_weight)), right) in enumerate(zip(found, rights, strict=True)):
            expect(same(output, right[0]), f"rank {rank} doesn't have F.rms_norm of its own tokens")
            for name, grad in ("X", dX), ("weight", d_weight):
                expect(grad is not None, f"{name} gets no gradient: is there a detach() or no_grad() on its way?")
            expect(
                same(dX, right[1]),
                f"the gradient of X on rank {rank} is wrong: no other rank has these tokens, and nothing must be added",
            )
            expect(
                not same(d_weight, right[2]),
                f"rank {rank}'s weight has the gradient of its own tokens only: the copies will drift apart",
            )
            expect(
                not same(d_weight, summed / ranks),
                "the gradient of weight is the ranks' mean: one device adds up all tokens",
            )
            expect(same(d_weight, summed), f"the gradient of weight on rank {rank} isn't that of one device")
        expect(
            max(numbers) <= weight.numel(),
            f"each rank is sent {max(numbers)} numbers; one all-reduce of the weight's {weight.numel()} is enough",
        )
    return "every copy of the weight gets the gradient of all tokens, and X only its own"


def normed(X, weight, dY):
    """Output of one rank's RMS norm, and the gradients of X and weight."""
    X, weight = X.clone().requires_grad_(), weight.clone().requires_grad_()
    Y = F.rms_norm(X, weight.shape, weight)
    Y.backward(dY)
    return Y.detach(), X.grad, weight.grad


@exercise
def check_vocabulary_loss(answer):
    """vocabulary_loss(logits, targets, first): mean cross-entropy, by ranks with a part of the vocabulary each."""
    for ranks, words, scale in ((2, 8, 1), (3, 10, 1), (3, 10, 1000)):
        [logits] = random(words, (6, words))
        logits, targets = (scale * logits).requires_grad_(), torch.tensor([0, words - 1, 3, 4, 2, words // 2])
        right = F.cross_entropy(logits, targets)
        right.backward()
        parts, grads = pieces(logits.detach(), ranks, 1), pieces(logits.grad, ranks, 1)
        firsts = [sum(part.shape[1] for part in parts[:rank]) for rank in range(ranks)]
        arguments = [(part, targets, torch.tensor(first)) for part, first in zip(parts, firsts, strict=True)]

        def loss(part, targets, first):
            return answer(part, targets, first.item())

        found, numbers = run(loss, ranks, arguments, [torch.ones((), dtype=torch.float64)] * ranks)
        for rank, (output, (grad, *_)) in enumerate(found):
            expect(output.dim() == 0, f"the loss has the shape {[*output.shape]}: return the mean over all tokens")
            expect(
                output.isfinite(),
                "the loss isn't finite with logits of 1,000: subtract the maximum before you take exponentials",
            )
            expect(not same(output, 6 * right.detach()), "that is the sum over the tokens, not their mean")
            expect(
                same(output, right.detach()),
                f"the loss on rank {rank} is {output:.4f} instead of {right:.4f}. Do all ranks subtract the same "
                "maximum, and does the target's logit come from the rank that has it?",
            )
            expect(grad is not None, "logits get no gradient: is there a detach() or no_grad() too many?")
            expect(
                not same(grad, ranks * grads[rank]),
                f"the gradient is {ranks} times too large: the ranks' losses are one loss, so backward sums nothing",
            )
            expect(same(grad, grads[rank]), f"the loss is right, but the gradient of rank {rank}'s logits isn't")
        expect(
            max(numbers) <= 3 * len(targets),
            f"the numbers are right, but a rank was sent {max(numbers)} of them for {len(targets)} tokens: "
            "three per token are enough, in both passes together",
        )
    return "loss and gradient are those of one device, with three numbers per token"


NAMES = ("X", "H", "Y", "dY", "dH", "dA", "dX")


def placed(seed, ranks):
    """Steps of a program without a mistake: (name, whole, placement, parts) for each name."""
    placements = (Replicate(), Shard(1), Partial(), Replicate(), Shard(1), Shard(0), Partial())
    steps = []
    for i, (name, placement) in enumerate(zip(NAMES, placements, strict=True)):
        [whole] = random(seed + i, (3, 5))
        steps.append((name, whole, placement, parts_of(whole, placement, ranks)))
    return steps


def parts_of(whole, placement, ranks):
    if placement.is_shard():
        parts = list(whole.chunk(ranks, placement.dim))
        return parts + [whole.narrow(placement.dim, 0, 0)] * (ranks - len(parts))
    if placement.is_partial():
        others = random(7, *[whole.shape] * (ranks - 1))
        return [whole - sum(others), *others]
    return [whole.clone() for _ in range(ranks)]


WRONG_PLACEMENTS = {  # name: what is claimed, and where the tensor really lies
    "dX": (Replicate(), Partial()),
    "Y": (Replicate(), Partial()),
    "H": (Shard(1), Replicate()),
    "dH": (Partial(), Replicate()),
    "dA": (Shard(0), Replicate()),
    "dY": (Partial(), Shard(0)),
}


@exercise
def check_wrong_placement(answer):
    """wrong_placement(steps): the name of the first tensor that isn't placed as claimed, or "none"."""
    for ranks in (2, 3, 4):
        found = filled(answer(placed(ranks, ranks)))
        expect(isinstance(found, str), f"return a name, or 'none'; not a {type(found).__name__}")
        expect(found == "none", f"a program without a mistake: you say {found!r}")
        for name, (claimed, really) in WRONG_PLACEMENTS.items():
            steps = placed(ranks, ranks)
            at = NAMES.index(name)
            whole = steps[at][1]
            steps[at] = name, whole, claimed, parts_of(whole, really, ranks)
            for later in range(at + 1, len(steps)):  # what is made of it is wrong, too
                steps[later] = *steps[later][:3], [2 * part for part in steps[later][3]]
            found = filled(answer(steps))
            expect(
                found == name,
                f"on {ranks} ranks {name} claims {claimed} and lies as {really}, and what comes later is wrong, too: "
                f"you say {found!r}",
            )
        for rank in range(ranks):
            steps = placed(ranks, ranks)
            *_, parts = steps[0]
            parts[rank] += 1
            expect(answer(steps) == "X", f"rank {rank}'s copy of X differs from the others', and you don't see it")
        steps = placed(ranks, ranks)
        *_, parts = steps[0]
        parts[0] += 1
        parts[-1] -= 1
        expect(
            answer(steps) == "X",
            f"the copies of X on ranks 0 and {ranks - 1} are wrong, but their mean is right: compare each copy",
        )
    steps = placed(3, 3)
    name, whole, claimed, _ = steps[1]
    steps[1] = name, whole, claimed, parts_of(whole, Shard(0), 3)
    expect(answer(steps) == name, f"{name} claims {claimed}, but each rank has a row, and you don't see it")
    return "found in every program, also with uneven and empty parts"
