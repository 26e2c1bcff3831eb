"""gloo with tensors on GPUs: everything as with tensors on the CPU."""

import torch
import torch.distributed as dist
from checking import check, network, parts, raises, same, same_networks, train, trained_alone
from torch.nn.parallel import DistributedDataParallel

from virtual_gpus import current

ReduceOp = dist.ReduceOp


def collectives(rank, n, group, device):
    """The results of all that gloo does with tensors on a GPU, with tensors on a `device`."""
    found = []

    def x(*shape, dtype=torch.float64):
        generator = torch.Generator().manual_seed(100 * rank + len(found))
        return (10 * torch.rand(*shape, generator=generator)).to(dtype).to(device)

    def result(*tensors):
        found.extend(tensor.clone() for tensor in tensors)

    for dtype in torch.float32, torch.int64, torch.uint8, torch.bfloat16:
        for op in ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT:
            y = x(3, 2, dtype=dtype)
            work = dist.all_reduce(y, op, group=group, async_op=True)
            work.wait()
            result(y)
    for op in ReduceOp.BAND, ReduceOp.BXOR:
        y = x(4, dtype=torch.int32)
        dist.all_reduce(y, op, group=group)
        result(y)
    y = x(2, 3).t()
    dist.all_reduce(y, ReduceOp.AVG, group=group)
    result(y)
    dist.broadcast(y := x(5), n - 1, group=group)
    result(y)
    y = x(5)
    dist.reduce(y, 1, group=group)
    result(*[y] * (rank == 1))
    outputs = [torch.zeros(2, 2, dtype=torch.float64, device=device) for _ in range(n)]
    dist.all_gather(outputs, x(2, 2), group=group)
    result(*outputs)
    y = torch.zeros(2 * n, dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(y, x(2), group=group)
    result(y)
    outputs = [torch.zeros(3, dtype=torch.float64, device=device) for _ in range(n)]
    dist.gather(x(3), outputs if rank == 0 else None, 0, group=group)
    result(*outputs)
    y = torch.zeros(3, dtype=torch.float64, device=device)
    dist.scatter(y, [x(3) for _ in range(n)] if rank == 1 else None, 1, group=group)
    result(y)
    dist.reduce_scatter_tensor(y, x(3 * n), group=group)
    result(y)
    dist.reduce_scatter(y, [x(3) for _ in range(n)], group=group)
    result(y)
    sent, received = [rank + 1] * n, [source + 1 for source in range(n)]
    y = torch.zeros(sum(received), dtype=torch.float64, device=device)
    dist.all_to_all_single(y, x(sum(sent)), received, sent, group=group)
    result(y)
    dist.barrier(group)
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(n)]
    return found


@check
def gloo_gives_what_it_gives_on_the_cpu(rank, n):
    for backend in "gloo", "cpu:gloo,cuda:gloo":
        group = dist.new_group(backend=backend)
        torch.cuda.current_stream().synchronize()
        for found, expected in zip(*(collectives(rank, n, group, device) for device in ("cuda", "cpu")), strict=True):
            same(found, expected, 0)


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
