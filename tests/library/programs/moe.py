"""A layer of experts shared out among ranks, against the layer on one device: checks of from_scratch.py."""

import copy

import torch
import torch.distributed as dist
from checking import check, raises

from mgpu_lib.experts import Exchange, ExpertParallel, MoE, auxiliary_loss, average_gradients, choose

WIDTH, INNER = 6, 5


def layer(experts, k):
    torch.manual_seed(0)
    moe = MoE(WIDTH, INNER, experts, k).double()
    moe.bias += torch.linspace(-0.1, 0.1, experts)
    return moe


def batch(tokens):
    """Tokens, and what their outputs are multiplied with to make a loss."""
    torch.manual_seed(1)
    return torch.randn(2, tokens, WIDTH, dtype=torch.float64)


def alone(moe, X, weights, total):
    """(output, gradient of X) of the layer on one device, which then has gradients."""
    X = X.clone().requires_grad_()
    Y = moe(X)
    ((Y * weights).sum() / total).backward()
    return Y, X.grad


def compare(experts, k, sizes, group):
    """On the ranks of `group`, with `sizes` tokens each: outputs, and gradients of X, the experts and the router."""
    rank = dist.get_rank(group)
    moe, (X, weights), total = layer(experts, k), batch(sum(sizes)), sum(sizes)
    ours = ExpertParallel(copy.deepcopy(moe), group).cuda()
    expected, grad = alone(moe, X, weights, total)
    X_own = X.split(sizes)[rank].cuda().requires_grad_()
    Y = ours(X_own)
    ((Y * weights.split(sizes)[rank].cuda()).sum() / total).backward()
    dist.all_reduce(ours.router.weight.grad, group=group)
    torch.testing.assert_close(Y.cpu(), expected.split(sizes)[rank])
    torch.testing.assert_close(X_own.grad.cpu(), grad.split(sizes)[rank])
    torch.testing.assert_close(ours.router.weight.grad.cpu(), moe.router.weight.grad)
    first = sum(ours.shares[:rank])
    theirs = moe.experts[first : first + ours.own]
    for p, other in zip(ours.experts.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), other.grad)


@check
def experts_on_any_number_of_ranks(rank, n):
    """Uneven tokens, none on a rank, and uneven numbers of experts, of which some are not chosen at all."""
    for ranks in range(1, n + 1):
        group = dist.new_group(list(range(ranks)))
        if rank < ranks:
            compare(4, 2, [5, 3, 8, 2][:ranks], group)
            compare(7, 3, [4, 0, 1, 9][:ranks], group)
            compare(12, 1, [3, 2, 0, 1][:ranks], group)


@check
def experts_with_replicas(rank, n):
    """Two copies of each expert: gradients are those of the mean of all ranks' losses."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, n, 2)]
    replicas = [dist.new_group(list(range(first, n, 2))) for first in (0, 1)]
    moe, (X, weights) = layer(5, 2), batch(6 * n)
    ours = ExpertParallel(copy.deepcopy(moe), pairs[rank // 2]).cuda()
    alone(moe, X, weights, len(X))
    rows = slice(6 * rank, 6 * (rank + 1))
    ((ours(X[rows].cuda()) * weights[rows].cuda()).sum() / 6).backward()  # each rank's loss is a mean
    average_gradients(ours, replicas[rank % 2])
    torch.testing.assert_close(ours.router.weight.grad.cpu(), moe.router.weight.grad)
    theirs = list(moe.experts)[3 * (rank % 2) :][: ours.own]
    for expert, other in zip(ours.experts, theirs, strict=True):
        for p, q in zip(expert.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad)


@check
def auxiliary_loss_of_all_ranks(rank, n):
    """With the share over all ranks, the mean of the ranks' losses has the whole batch's value and gradient."""
    logits, k = batch(4 * n)[0], 2
    whole = logits.clone().requires_grad_()
    expected = auxiliary_loss(whole, choose(whole, k)[1])
    expected.backward()
    own = logits[4 * rank : 4 * (rank + 1)].cuda().requires_grad_()
    chosen = choose(own, k)[1]
    share = chosen.flatten().bincount(minlength=WIDTH) / chosen.numel()
    dist.all_reduce(share, op=dist.ReduceOp.AVG)
    loss = auxiliary_loss(own, chosen, share)
    (loss / n).backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(mean.cpu(), expected.detach())
    torch.testing.assert_close(own.grad.cpu(), whole.grad[4 * rank : 4 * (rank + 1)])


@check
def rows_there_and_back(rank, n):
    """Rows of more than one dimension, and a strided gradient."""
    sends, receives = [rank + 1] * n, [r + 1 for r in range(n)]
    X = torch.arange(sum(sends) * 6.0, device="cuda").view(-1, 2, 3).requires_grad_()
    Y = Exchange.apply(X, sends, receives, None)
    back = Exchange.apply(Y, receives, sends, None)
    assert torch.equal(back, X)
    back.transpose(0, 2).sum().backward()
    assert torch.equal(X.grad, torch.ones_like(X))


@check
def too_few_experts(rank, n):
    raises(ValueError, f"{n - 1} experts on {n} ranks", ExpertParallel, layer(n - 1, 1))
