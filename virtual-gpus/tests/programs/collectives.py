"""Every operation of torch.distributed that NCCL has, on groups of one, two, three and four ranks: run by torchrun.

Each rank works out by itself what should come out. Rank 0 prints "ok NAME" for each check that no rank failed.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from checking import CHECKS, raises, run
from torch.distributed import P2POp, ReduceOp

GROUPS = {}  # by the number of their ranks


def check(function):
    """A function of (group, rank, n), which all n ranks of a group call, of each group."""

    def of_all_groups(rank, n):
        for size in range(1, n + 1):
            if size not in GROUPS:
                GROUPS[size] = dist.new_group(list(range(size))) if size < n else dist.group.WORLD
            if rank < size:
                function(GROUPS[size], rank, size)

    of_all_groups.__name__ = function.__name__
    CHECKS.append(of_all_groups)
    return function


def values(rank, *shape, dtype=torch.float64):
    """Numbers that differ from rank to rank."""
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 2) % 7 + rank
    return numbers.to(dtype)


def same(tensor, expected):
    assert tensor.device.type == "cuda" and tensor.dtype == expected.dtype, (tensor, expected)
    torch.testing.assert_close(tensor.cpu(), expected, rtol=1e-6, atol=1e-9)


def reduced(stack):
    """(op, what it makes of the rows of `stack`, one for each rank) for all reductions that need no factor."""
    found = {
        ReduceOp.SUM: stack.sum(0),
        ReduceOp.AVG: stack.mean(0),
        ReduceOp.PRODUCT: stack.prod(0),
        ReduceOp.MIN: stack.amin(0),
        ReduceOp.MAX: stack.amax(0),
    }
    return found.items()


@check
def all_reduce(group, rank, n):
    stack = torch.stack([values(r, 3, 2) for r in range(n)])
    for op, result in reduced(stack):
        x = values(rank, 3, 2).cuda()
        assert dist.all_reduce(x, op, group=group) is None
        same(x, result)
    x = values(rank, 3, 2).cuda()
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5), group=group)
    same(x, stack.sum(0) / 2)


@check
def all_reduce_of_every_type(group, rank, n):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8):
        x = values(rank, 5, dtype=dtype).cuda()
        dist.all_reduce(x, group=group)
        same(x, torch.stack([values(r, 5, dtype=dtype) for r in range(n)]).sum(0).to(dtype))
    x = values(rank, 5, dtype=torch.int64).cuda()
    dist.all_reduce(x, ReduceOp.AVG, group=group)
    same(x, torch.stack([values(r, 5, dtype=torch.int64) for r in range(n)]).sum(0) // n)
    x = torch.tensor([rank == 0, False, True]).cuda()
    dist.all_reduce(x, group=group)
    same(x, torch.tensor([True, False, True]))
    x = torch.complex(values(rank, 4), values(rank, 4) + 1).cuda()
    dist.all_reduce(x, group=group)
    same(x, sum(torch.complex(values(r, 4), values(r, 4) + 1) for r in range(n)))


@check
def refused(group, rank, n):
    for x, op, error in (
        (torch.ones(2), ReduceOp.SUM, "No backend type associated with device type cpu"),
        (torch.ones(2, dtype=torch.int16).cuda(), ReduceOp.SUM, "Input tensor data type is not supported"),
        (torch.ones(2, dtype=torch.int64).cuda(), ReduceOp.BAND, "Cannot use ReduceOp.BAND with NCCL"),
        (torch.ones(2, dtype=torch.bool).cuda(), ReduceOp.AVG, "Cannot use ReduceOp.AVG"),
        (torch.ones(4, 4).cuda().t()[:, 1:], ReduceOp.SUM, "Tensors must be contiguous"),
    ):
        raises((RuntimeError, ValueError, TypeError), error, dist.all_reduce, x, op, group=group)


@check
def all_reduce_of_channels_last(group, rank, n):
    x = values(rank, 2, 3, 4, 5).cuda().to(memory_format=torch.channels_last)
    dist.all_reduce(x, group=group)
    assert x.is_contiguous(memory_format=torch.channels_last)
    same(x, sum(values(r, 2, 3, 4, 5) for r in range(n)))


@check
def broadcast_and_reduce(group, rank, n):
    for root in range(n):
        x = values(rank, 3, 2).cuda()
        dist.broadcast(x, group=group, group_src=root)
        same(x, values(root, 3, 2))
        for op, result in reduced(torch.stack([values(r, 3, 2) for r in range(n)])):
            x = values(rank, 3, 2).cuda()
            dist.reduce(x, op=op, group=group, group_dst=root)
            same(x, result if rank == root else values(rank, 3, 2))


@check
def all_gather(group, rank, n):
    everybody = [values(r, 3, 2) for r in range(n)]
    out = [torch.empty(3, 2, dtype=torch.float64, device="cuda") for _ in range(n)]
    dist.all_gather(out, values(rank, 3, 2).cuda(), group=group)
    for x, expected in zip(out, everybody, strict=True):
        same(x, expected)
    whole = torch.empty(3 * n, 2, dtype=torch.float64, device="cuda")
    dist.all_gather_into_tensor(whole, values(rank, 3, 2).cuda(), group=group)
    same(whole, torch.cat(everybody))
    own = whole.zero_()[3 * rank : 3 * rank + 3].copy_(values(rank, 3, 2))
    dist.all_gather_into_tensor(whole, own, group=group)  # in place
    same(whole, torch.cat(everybody))
    uneven = [torch.empty(r + 1, device="cuda") for r in range(n)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="cuda"), group=group)
    same(torch.cat(uneven), torch.cat([torch.full((r + 1,), float(r)) for r in range(n)]))


@check
def reduce_scatter(group, rank, n):
    for op, expected in reduced(torch.stack([values(r, n, 3) for r in range(n)])):
        out, given = torch.empty(3, dtype=torch.float64, device="cuda"), values(rank, n, 3).cuda()
        dist.reduce_scatter(out, list(given.unbind()), op, group=group)
        same(out, expected[rank])
        dist.reduce_scatter_tensor(out.zero_(), given.view(-1), op, group=group)
        same(out, expected[rank])
        same(given, values(rank, n, 3))
    parts = [torch.full((r + 1,), float(rank + r), device="cuda") for r in range(n)]
    out = torch.empty(rank + 1, device="cuda")
    dist.reduce_scatter(out, parts, group=group)
    same(out, torch.full((rank + 1,), float(sum(range(n)) + n * rank)))


@check
def all_to_all(group, rank, n):
    given = values(rank, n, 2).cuda()
    out = torch.empty_like(given)
    dist.all_to_all_single(out, given, group=group)
    same(out, torch.stack([values(r, n, 2)[rank] for r in range(n)]))
    parts = [torch.full((r + 2 * rank,), 10.0 * rank + r, device="cuda") for r in range(n)]
    out = [torch.empty(rank + 2 * r, device="cuda") for r in range(n)]
    dist.all_to_all(out, parts, group=group)
    expected = [torch.full((rank + 2 * r,), 10.0 * r + rank) for r in range(n)]
    same(torch.cat(out), torch.cat(expected))
    sizes = [[r + 2 * rank for r in range(n)], [rank + 2 * r for r in range(n)]]
    single = torch.empty(sum(sizes[1]), device="cuda")
    dist.all_to_all_single(single, torch.cat(parts), sizes[1], sizes[0], group=group)
    same(single, torch.cat(expected))


@check
def gather_and_scatter(group, rank, n):
    for root in range(n):
        out = [torch.empty(2, dtype=torch.float64, device="cuda") for _ in range(n)] if rank == root else None
        dist.gather(values(rank, 2).cuda(), out, group=group, group_dst=root)
        if rank == root:
            same(torch.stack(out), torch.stack([values(r, 2) for r in range(n)]))
        given = list(values(root, n, 2).cuda().unbind()) if rank == root else None
        out = torch.empty(2, dtype=torch.float64, device="cuda")
        dist.scatter(out, given, group=group, group_src=root)
        same(out, values(root, n, 2)[rank])


@check
def asynchronous(group, rank, n):
    first, second = values(rank, 4).cuda(), values(rank, 6).cuda()
    works = [dist.all_reduce(x, group=group, async_op=True) for x in (first, second)]
    for work in reversed(works) if rank % 2 else works:  # no rank hangs because another waits in another order
        assert work.wait() is True
        assert work.is_completed() and work.is_success()
    same(first, sum(values(r, 4) for r in range(n)))
    same(second, sum(values(r, 6) for r in range(n)))
    future = dist.all_reduce(first, group=group, async_op=True).get_future()
    same(future.then(lambda future: future.value()[0] / n).wait(), sum(values(r, 4) for r in range(n)))


@check
def order_of_a_stream(group, rank, n):
    """An operation reads what those before it have written, waited for or not, in any of the tensors that it reads."""
    total = sum(values(r, 4) for r in range(n))
    firsts, summed, got = [values(rank, 4).cuda() for _ in range(n - 1)], values(rank, 4).cuda(), values(0, n, 4).cuda()
    work = dist.all_reduce(summed, group=group, async_op=True)
    dist.all_to_all([*got], [*firsts, summed], group=group)  # the last rank gets the sums
    work.wait()
    # one that is over, because a later one has been waited for, has written: what the program writes then is newer
    x, y = values(rank, 4).cuda(), values(rank, 4).cuda()
    early, late = (dist.all_reduce(tensor, group=group, async_op=True) for tensor in (x, y))
    late.wait()
    dist.all_reduce(x.fill_(1), group=group)
    early.wait()
    same(got, torch.stack([total if rank == n - 1 else values(r, 4) for r in range(n)]))  # if it fails, nobody waits
    same(x, torch.full((4,), float(n), dtype=torch.float64))


@check
def messages_in_flight(group, rank, n):
    if n != 2:
        return
    sent, got = values(rank, 2, 3).cuda(), torch.empty(2, 3, dtype=torch.float64, device="cuda")
    begin = [dist.isend, dist.irecv][rank]
    peer = {"group_dst": 1} if rank == 0 else {"group_src": 0}
    for work in [begin(row, group=group, **peer) for row in (got if rank else sent)]:
        work.wait()
    if rank:
        same(got, values(0, 2, 3))


@check
def point_to_point(group, rank, n):
    if n == 1:
        return
    after, before = (rank + 1) % n, (rank - 1) % n
    got = torch.empty(3, dtype=torch.float64, device="cuda")
    if rank % 2 == 0:
        dist.send(values(rank, 3).cuda(), group=group, group_dst=after)
    if (before % 2 == 0) and before != rank:
        dist.recv(got, group=group, group_src=before)
        same(got, values(before, 3))
    sent, got = values(rank, 3).cuda(), torch.empty(3, dtype=torch.float64, device="cuda")
    ops = [
        P2POp(dist.isend, sent, group=group, group_peer=after),
        P2POp(dist.irecv, got, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, values(before, 3))


@check
def coalesced(group, rank, n):
    xs = [values(rank, size).cuda() for size in (2, 3)]
    with dist.distributed_c10d._coalescing_manager(group, device=torch.device("cuda")):
        for x in xs:
            dist.all_reduce(x, group=group)
    for x in xs:
        same(x, sum(values(r, len(x)) for r in range(n)))
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x, group=group)
    manager.wait()
    for x in xs:
        same(x, n * sum(values(r, len(x)) for r in range(n)))


@check
def objects(group, rank, n):
    everybody = [None] * n
    dist.all_gather_object(everybody, {"rank": rank, "list": [rank] * rank}, group=group)
    assert everybody == [{"rank": r, "list": [r] * r} for r in range(n)]
    said = ["hello", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(said, group=group, group_src=0)
    assert said == ["hello", 0]
    out = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(n)] if rank == 0 else None, group=group, group_src=0)
    assert out == [f"for {rank}"]
    got = ["nothing"]
    if rank == 0 < n - 1:
        dist.send_object_list([{"from": 0}], group=group, group_dst=n - 1)
    elif 0 < rank == n - 1:
        dist.recv_object_list(got, group=group, group_src=0)
    assert got == [{"from": 0} if 0 < rank == n - 1 else "nothing"]
    everybody = [None] * n if rank == 0 else None
    dist.gather_object(rank, everybody, group=group, group_dst=0)
    assert rank or everybody == list(range(n))


@check
def functional_collectives(group, rank, n):
    x = values(rank, 4).cuda()
    total = functional.all_reduce(x, "sum", group)
    same(total + 0, sum(values(r, 4) for r in range(n)))
    same(functional.all_gather_tensor(x, 0, group) + 0, torch.cat([values(r, 4) for r in range(n)]))
    given = values(rank, n, 3).cuda()
    same(
        functional.reduce_scatter_tensor(given, "avg", 0, group) + 0,
        sum(values(r, n, 3) for r in range(n))[rank, None] / n,
    )
    same(
        functional.all_to_all_single(given, None, None, group) + 0,
        torch.stack([values(r, n, 3)[rank] for r in range(n)]),
    )
    same(functional.broadcast(x, 0, group) + 0, values(0, 4))


@check
def gradients_of_functional_collectives(group, rank, n):
    """They go back the way that values came, and add up."""
    for collective, shape, expected in (
        (lambda x: functional.all_gather_tensor_autograd(x, 0, group), (2,), sum(range(1, n + 1))),
        (lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group), (n, 2), None),
        (lambda x: functional.all_to_all_single_autograd(x, [1] * n, [1] * n, group), (n, 2), None),
    ):
        x = values(rank, *shape).cuda().requires_grad_()
        (collective(x) * (rank + 1)).sum().backward()
        by_rank = torch.arange(1.0, n + 1, dtype=torch.float64)[:, None].expand(n, 2)
        same(x.grad, torch.full(shape, float(expected), dtype=torch.float64) if expected else by_rank)


@check
def results_that_are_on_their_way(group, rank, n):
    """They can be copied and moved, and have a device."""

    def begun():
        return functional.all_reduce(torch.ones(2, device="cuda"), "sum", group)

    x = begun()
    assert isinstance(x, functional.AsyncCollectiveTensor) and x.is_cuda and not x.is_cpu
    assert x.device == torch.device("cuda", rank) and x.tolist() == [n, n]
    for moved in (begun().cpu(), begun().to("cpu"), torch.empty(2).copy_(begun())):
        assert type(moved) is torch.Tensor and moved.tolist() == [n, n]
    same(torch.empty(2, device="cuda").copy_(begun()), torch.full((2,), float(n)))
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        begun() + 1
    assert torch.cuda.memory_allocated() == held  # nothing keeps them


@check
def barriers(group, rank, n):
    dist.barrier(group)
    work = dist.barrier(group, async_op=True, device_ids=[torch.cuda.current_device()])
    work.wait()


if __name__ == "__main__":
    run(sys.argv[1:])
