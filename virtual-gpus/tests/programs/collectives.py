"""Operations of torch.distributed, by NCCL and by gloo, with tensors on GPUs.

What gloo has, too, gives what gloo gives with tensors on the CPU; of the rest each rank works out what should come out.
"""

import itertools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from checking import CHECKS, check, network, parts, raises, same, same_networks, train, trained_alone
from torch.distributed import P2POp, ReduceOp
from torch.nn.parallel import DistributedDataParallel

from virtual_gpus import current

NUMBERS = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8
GROUPS = {}  # of NCCL, by the number of their ranks


def each_group(function):
    """A check, whose `function` of (group, rank, n) all n ranks of a group call, of groups of one rank to all."""

    def of_all_groups(rank, n):
        for size in range(1, n + 1):
            if size not in GROUPS:
                GROUPS[size] = dist.new_group(list(range(size))) if size < n else dist.group.WORLD
            if rank < size:
                function(GROUPS[size], rank, size)

    of_all_groups.__name__ = function.__name__
    CHECKS.append(of_all_groups)
    return function


def values(rank, *shape):
    """Whole numbers that differ from rank to rank."""
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 2) % 7 + rank
    return numbers.double()


def results(group, rank, n, device):
    """The tensors that each operation writes which gloo has for tensors on a GPU; here they are on a `device`."""
    found, calls = [], itertools.count()

    def x(*shape, dtype=torch.float64):
        generator = torch.Generator().manual_seed(100 * rank + next(calls))
        return torch.randint(1, 4, shape, generator=generator).to(device, dtype)

    def several(*shape):
        return [x(*shape) for _ in range(n)]

    def result(*tensors):
        found.extend(tensor.clone() for tensor in tensors)

    for dtype in NUMBERS:
        for op in ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX:
            y = x(3, 2, dtype=dtype)
            assert dist.all_reduce(y, op, group=group) is None
            result(y)
    y = x(2, 3, 4, 5).to(memory_format=torch.channels_last)
    work = dist.all_reduce(y, group=group, async_op=True)
    work.wait()
    assert y.is_contiguous(memory_format=torch.channels_last)
    result(y)
    for root in range(n):
        at_root = rank == root
        dist.broadcast(y := x(5), group=group, group_src=root)
        result(y)
        dist.reduce(y := x(5), group=group, group_dst=root)
        result(*[y] * at_root)
        outputs = several(3)
        dist.gather(x(3), outputs if at_root else None, group=group, group_dst=root)
        result(*outputs)
        dist.scatter(y := x(3), several(3) if at_root else None, group=group, group_src=root)
        result(y)
    outputs, whole, in_place = several(2, 2), x(2 * n), x(2 * n)
    dist.all_gather(outputs, x(2, 2), group=group)
    dist.all_gather_into_tensor(whole, x(2), group=group)
    dist.all_gather_into_tensor(in_place, in_place[2 * rank : 2 * rank + 2], group=group)
    result(*outputs, whole, in_place)
    dist.reduce_scatter(y := x(3), several(3), group=group)
    dist.reduce_scatter_tensor(z := x(3), x(3 * n), group=group)
    result(y, z)
    sent, received = [rank + 1] * n, [source + 1 for source in range(n)]
    dist.all_to_all_single(y := x(2 * n), x(2 * n), group=group)
    dist.all_to_all_single(z := x(sum(received)), x(sum(sent)), received, sent, group=group)
    result(y, z)
    return found


def check_results(group, oracle, rank, n):
    for found, expected in zip(*(results(*way) for way in ((group, rank, n, "cuda"), (oracle, rank, n, "cpu")))):
        same(found, expected, 0)


@check
def values_are_those_of_gloo_on_the_cpu(rank, n):
    for size in 1, 3, n:
        group, oracle = (dist.new_group(list(range(size)), backend=backend) for backend in ("nccl", "gloo"))
        if rank < size:
            check_results(group, oracle, rank, size)
    for backend in "gloo", "cpu:gloo,cuda:gloo":
        check_results(dist.new_group(backend=backend), oracle, rank, n)


@each_group
def reductions_that_only_nccl_has(group, rank, n):
    numbers, flags = torch.stack([values(r, n, 3) for r in range(n)]), torch.eye(n, 2, dtype=torch.bool)
    integers, half = numbers.long(), dist._make_nccl_premul_sum(0.5)
    for everybody, op, expected in (
        (numbers, ReduceOp.AVG, numbers.mean(0)),
        (numbers, half, numbers.sum(0) / 2),
        (integers, ReduceOp.AVG, integers.sum(0) // n),
        (numbers + 1j, ReduceOp.SUM, (numbers + 1j).sum(0)),
        (flags, ReduceOp.SUM, flags.any(0)),
    ):
        x = everybody[rank].cuda()
        dist.all_reduce(x, op, group=group)
        same(x, expected)
    out = torch.empty(3, dtype=torch.float64, device="cuda")
    dist.reduce_scatter(out, list(numbers[rank].cuda()), ReduceOp.AVG, group=group)
    same(out, numbers.mean(0)[rank])


@each_group
def uneven_parts(group, rank, n):
    uneven = [torch.empty(r + 1, device="cuda") for r in range(n)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="cuda"), group=group)
    same(torch.cat(uneven), torch.cat([torch.full((r + 1,), float(r)) for r in range(n)]))
    parts = [torch.full((r + 1,), float(rank + r), device="cuda") for r in range(n)]
    out = torch.empty(rank + 1, device="cuda")
    dist.reduce_scatter(out, parts, group=group)
    same(out, torch.full((rank + 1,), float(sum(range(n)) + n * rank)))
    parts = [torch.full((r + 2 * rank,), 10.0 * rank + r, device="cuda") for r in range(n)]
    out = [torch.empty(rank + 2 * r, device="cuda") for r in range(n)]
    dist.all_to_all(out, parts, group=group)
    same(torch.cat(out), torch.cat([torch.full((rank + 2 * r,), 10.0 * r + rank) for r in range(n)]))


@check
def refused(rank, n):
    for x, op, error in (
        (torch.ones(2, dtype=torch.int64).cuda(), ReduceOp.BAND, "Cannot use ReduceOp.BAND with NCCL"),
        (torch.ones(2, dtype=torch.bool).cuda(), ReduceOp.AVG, "Cannot use ReduceOp.AVG"),
    ):
        raises(ValueError, error, dist.all_reduce, x, op)


@each_group
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


@each_group
def messages(group, rank, n):
    """Two in flight from rank 0 to rank 1; and all around the ring."""
    if n == 1:
        return
    x, got = values(rank, 2, 3).cuda(), torch.empty(2, 3, dtype=torch.float64, device="cuda")
    if rank < 2:
        begin, peer = [(dist.isend, {"group_dst": 1}), (dist.irecv, {"group_src": 0})][rank]
        for work in [begin(row, group=group, **peer) for row in (got if rank else x)]:
            work.wait()
    assert rank != 1 or torch.equal(got.cpu(), values(0, 2, 3))
    after, before = (rank + 1) % n, (rank - 1) % n
    ring = [P2POp(dist.isend, x, group=group, group_peer=after), P2POp(dist.irecv, got, group=group, group_peer=before)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    same(got, values(before, 2, 3))


@each_group
def coalesced(group, rank, n):
    xs = [values(rank, size).cuda() for size in (2, 3)]
    for waited_for in True, False:
        with dist.distributed_c10d._coalescing_manager(group, torch.device("cuda"), async_ops=waited_for) as manager:
            for x in xs:
                dist.all_reduce(x, group=group)
        if waited_for:
            manager.wait()
    for x in xs:
        same(x, n * sum(values(r, len(x)) for r in range(n)))


@each_group
def objects(group, rank, n):
    everybody, at_root = [None] * n, [None] * n if rank == 0 else None
    dist.all_gather_object(everybody, {"rank": rank, "list": [rank] * rank}, group=group)
    dist.gather_object(rank, at_root, group=group, group_dst=0)
    assert everybody == [{"rank": r, "list": [r] * r} for r in range(n)] and at_root in (None, list(range(n)))
    said, out, got = ["hello", rank] if rank == 0 else [None, None], [None], ["nothing"]
    dist.broadcast_object_list(said, group=group, group_src=0)
    dist.scatter_object_list(out, [f"for {r}" for r in range(n)] if rank == 0 else None, group=group, group_src=0)
    assert said == ["hello", 0] and out == [f"for {rank}"]
    if rank == 0 < n - 1:
        dist.send_object_list([{"from": 0}], group=group, group_dst=n - 1)
    elif 0 < rank == n - 1:
        dist.recv_object_list(got, group=group, group_src=0)
    assert got == [{"from": 0} if 0 < rank == n - 1 else "nothing"]


@each_group
def functional_collectives(group, rank, n):
    """And gradients, which go back the way that values came, and add up."""
    whole = torch.stack([values(r, n, 2) for r in range(n)])  # (source, target, numbers)
    mine, factors = whole[:, rank], torch.arange(1.0, n + 1, dtype=torch.float64)[:, None]
    for collective, expected, gradient in (
        (lambda x: functional.all_gather_tensor_autograd(x, 0, group), whole.flatten(0, 1), factors.sum()),
        (lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group), mine.sum(0, True), factors),
        (lambda x: functional.all_to_all_single_autograd(x, [1] * n, [1] * n, group), mine, factors),
        (lambda x: functional.all_reduce(x, "avg", group), whole.mean(0), None),
        (lambda x: functional.broadcast(x, n - 1, group), whole[-1], None),
    ):
        x = whole[rank].cuda().requires_grad_(gradient is not None)
        y = collective(x)
        same(y.detach() + 0, expected)
        if gradient is not None:
            (y * (rank + 1)).sum().backward()
            same(x.grad, gradient.expand(n, 2))


@each_group
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


@each_group
def barriers(group, rank, n):
    dist.barrier(group)
    work = dist.barrier(group, async_op=True, device_ids=[torch.cuda.current_device()])
    work.wait()


@check
def gloo_trains_a_network(rank, n):
    net = DistributedDataParallel(network().cuda(), device_ids=[rank], process_group=dist.new_group(backend="gloo"))
    same_networks(train(net, parts(rank, n)).module, trained_alone(network()))


@check
def the_host_waits_for_gloo(rank, n):
    group, x = dist.new_group([0, 1], backend="gloo"), torch.ones(2**22, device="cuda")
    if rank > 1:
        return
    torch.cuda.synchronize()
    start = current().elapsed()
    work = dist.all_reduce(x, group=group, async_op=True)
    assert current().elapsed() - start < 50e-6
    work.wait()
    first = current().elapsed() - start
    dist.all_reduce(x[: 2**21], group=group)
    assert 2e-3 < first < 10e-3 and 0.4 * first < current().elapsed() - start - first < 0.9 * first


@check
def what_gloo_does_not_do_is_refused(rank, n):
    group, x = dist.new_group(backend="gloo"), torch.ones(3, device="cuda")
    raises(RuntimeError, "gloo has no send for tensors on a GPU", dist.send, x, (rank + 1) % n, group)
    raises(RuntimeError, "gloo has no alltoall for tensors on a GPU", dist.all_to_all, [x] * n, [x] * n, group)
    raises(ValueError, "without gaps", dist.all_reduce, torch.ones(4, 4, device="cuda")[:, 1], group=group)
    only_cpu = dist.new_group(backend="cpu:gloo")
    raises(RuntimeError, "No backend type associated with device type cuda", dist.all_reduce, x, group=only_cpu)


@check
def ranks_of_gloo_may_share_a_gpu(rank, n):
    x = torch.ones(3, device="cuda:0")
    dist.all_reduce(x, group=dist.new_group(backend="gloo"))
    assert x.tolist() == [n] * 3
