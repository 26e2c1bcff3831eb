"""Checks for "Tensor parallelism": layers and losses cut over ranks."""

import torch
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


LAYERS = "embedding", "norm", "attention", "up", "head"


def expect_place(answer, right, wrong, how, ranks=(0, 1)):
    """That `answer` is `right` where the gradients of the layers `wrong` are off on these `ranks` of three."""
    gaps = [(n, [0.3 if n in wrong and r in ranks else 2e-16 * (r + 1) for r in range(3)]) for n in LAYERS]
    found = filled(answer(gaps))
    expect(isinstance(found, str), f"return a string such as 'in norm', not a {type(found).__name__}")
    expect(found == right, f"{how}: you say {found!r} instead of {right!r}")


@exercise
def check_where_to_look(answer):
    """where_to_look(gaps): "in …" or "behind …" the layer to look at first, or "nowhere"."""
    expect_place(answer, "nowhere", (), "all gaps are rounding")
    for at, layer in enumerate(LAYERS):
        how = f"the gradients of {layer} and of all layers before it are wrong, so what came into {layer} may be, too"
        expect_place(answer, f"behind {layer}", LAYERS[: at + 1], how)
        for rank in range(3):
            how = f"rank {rank}'s gradients are wrong up to {layer}, and the other ranks' are right"
            expect_place(answer, f"behind {layer}", LAYERS[: at + 1], how, [rank])
        if at > 0:
            how = f"only {layer}'s gradient is wrong, and a right one went through it to {LAYERS[at - 1]}"
            expect_place(answer, f"in {layer}", [layer], how)
    expect_place(answer, "in up", ["norm", "up"], "norm and up are wrong, and up is nearer to the loss")
    expect_place(
        answer, "in up", ["embedding", "norm", "up"], "up is wrong, and attention, which comes just before it, is right"
    )
    return "found in every program, also where a single rank is wrong, or two layers are"
