"""DistributedDataParallel with all its options, ZeRO, and batch norm over all ranks."""

import copy

import torch
import torch.distributed as dist
from checking import (
    Branches,
    Tied,
    batches,
    check,
    check_accumulation,
    check_unused_parameters,
    equal_on_all_ranks,
    network,
    part,
    parts,
    raises,
    same,
    same_networks,
    sgd,
    train,
    trained_alone,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

F = nn.functional
SMALL = 2e-4  # MiB: a bucket of two or three tensors


def replica(net, rank, **options):
    return DDP(copy.deepcopy(net).cuda(), device_ids=[rank], **options)


@check
def ddp_buckets(rank, n):
    for net, options in (
        (network(), {}),
        (Tied(), {}),
        (network(), {"gradient_as_bucket_view": True}),
        (network(), {"static_graph": True}),
        (network(), {"find_unused_parameters": True}),
    ):
        ddp = train(replica(net, rank, bucket_cap_mb=SMALL, **options), parts(rank, n))
        same_networks(ddp.module, trained_alone(net))


@check
def ddp_unused_parameters(rank, n):
    check_unused_parameters(
        replica(Branches(5), rank, find_unused_parameters=True, bucket_cap_mb=SMALL), Branches(5), rank, n
    )


@check
def ddp_hooks(rank, n):
    net, numbers, builtin = network(), set(), dist.BuiltinCommHookType

    def doubled(state, bucket):
        numbers.add(bucket.index())
        assert bucket.buffer().is_cuda and all(gradient.is_cuda for gradient in bucket.gradients())
        work = dist.all_reduce(bucket.buffer().div_(2 * n), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] * 2)

    def in_place(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(2 * n), async_op=True)
        return work.get_future().then(lambda future: bucket.buffer() * 1.0).then(lambda future: future.value().mul_(2))

    for hook, tolerance in (
        (doubled, 1e-9),
        (in_place, 1e-9),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-2),
        (default_hooks.bf16_compress_hook, 5e-2),
        (builtin.ALLREDUCE, 1e-9),
        (builtin.FP16_COMPRESS, 1e-2),
    ):
        ddp = replica(net, rank, bucket_cap_mb=SMALL)
        ddp._register_builtin_comm_hook(hook) if isinstance(hook, builtin) else ddp.register_comm_hook(None, hook)
        same_networks(train(ddp, parts(rank, n)).module, trained_alone(net), tolerance)
        assert equal_on_all_ranks(ddp.module[0].weight)
    assert len(numbers) > 1  # the buckets are as small as was asked for


@check
def ddp_steps_in_backward(rank, n):
    """With each bucket that arrives."""
    net = network().cuda()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    ddp = DDP(net, device_ids=[rank], gradient_as_bucket_view=True, bucket_cap_mb=SMALL)
    for X, y in parts(rank, n):
        F.cross_entropy(ddp(X), y).backward()
    same_networks(net, trained_alone(network(), lambda parameters: torch.optim.SGD(parameters, lr=0.1)))


@check
def ddp_mixed_precision(rank, n):
    """By autocast and with scaled losses; DDP's own is refused, which begins with a step of numbers out of nowhere."""
    ddp, scaler = replica(network().float(), rank), torch.amp.GradScaler("cuda")
    optimizer = sgd(ddp.parameters())
    for X, y in parts(rank, n):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(ddp(X.float()), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    same_networks(ddp.module, trained_alone(network()).float(), 0.01)
    half = _MixedPrecision(param_dtype=torch.bfloat16)
    raises(NotImplementedError, "use torch.autocast", replica, network(), rank, mixed_precision=half)


@check
def futures(rank, n):
    """What follows a future sees what the operation wrote, also where it does not ask for the future's value."""
    tensors = [torch.full((100_000,), float(rank + i), device="cuda") for i in range(3)]

    def begun(tensor):
        return dist.all_reduce(tensor, async_op=True).get_future()

    seen = []
    begun(tensors[0]).add_done_callback(lambda future: seen.append(tensors[0].max().item()))
    torch.futures.wait_all([begun(tensor) for tensor in tensors[1:]])
    assert seen == [6] and [tensor.min().item() for tensor in tensors] == [6, 10, 14]
    [first] = torch.futures.collect_all([begun(tensors[0])]).wait()
    assert tensors[0].sum().item() == 2_400_000 and first.value()[0].max().item() == 24


@check
def ddp_accumulation(rank, n):
    check_accumulation(replica(network(), rank, gradient_as_bucket_view=True), network(), rank, n)


@check
def ddp_uneven_inputs(rank, n):
    """Rank r has r + 1 batches; who has none left sends zeros, and the sum is divided by those who have some."""
    net, data = network(), [list(batches(2, n)) for _ in range(n)]
    for throw, divide in ((False, False), (False, True)):
        ddp, alone = replica(net, rank), copy.deepcopy(net)
        optimizer, oracle = sgd(ddp.parameters()), sgd(alone.parameters())
        with Join([ddp], enable=True, throw_on_early_termination=throw, divide_by_initial_world_size=divide):
            for X, y in data[rank][: rank + 1]:
                optimizer.zero_grad()
                F.cross_entropy(ddp(X.cuda() + rank), y.cuda()).backward()
                optimizer.step()
        for step in range(n):
            oracle.zero_grad()
            there = range(step, n)
            losses = [F.cross_entropy(alone(data[r][step][0] + r), data[r][step][1]) for r in there]
            (sum(losses) / (n if divide else len(there))).backward()
            oracle.step()
        same_networks(ddp.module, alone)


@check
def zero(rank, n):
    """Each rank has the optimizer's state of some parameters; rank 0 can gather it."""
    net = network()
    for options in ({}, {"parameters_as_bucket_view": True}):
        ddp = replica(net, rank)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01, **options)
        train(ddp, parts(rank, n), optimizer)
        alone = copy.deepcopy(net)
        oracle = torch.optim.Adam(alone.parameters(), lr=0.01)
        same_networks(ddp.module, train(alone, batches(), oracle))
        assert len(optimizer.optim.state) < len(list(net.parameters()))
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            states = optimizer.state_dict()["state"]
            for i, state in oracle.state_dict()["state"].items():
                torch.testing.assert_close(states[i]["exp_avg"].cpu(), state["exp_avg"])


def normalized():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6)
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(6, 3)).double()


@check
def batch_norm_of_the_whole_batch(rank, n):
    """Also where rank r has r examples; losses are sums, which DDP divides by the number of ranks."""
    net = normalized()
    for sizes in [3] * n, list(range(n)):
        data = list(batches(sum(sizes), shape=(2, 6, 6)))
        own = [(X.split(sizes)[rank].cuda(), y.split(sizes)[rank].cuda()) for X, y in data]
        ddp = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net)).cuda(), device_ids=[rank])
        train(ddp, own, loss=lambda y_hat, y: F.cross_entropy(y_hat, y, reduction="sum"))
        alone = trained_alone(net, data=data, loss=lambda y_hat, y: F.cross_entropy(y_hat, y, reduction="sum") / n)
        same_networks(ddp.module, alone)
        ddp.eval(), alone.eval()
        same(ddp(data[0][0].cuda()), alone(data[0][0]))


@check
def batch_norm_options(rank, n):
    """Without weights, without running statistics, with a cumulative average; in half precision, channels last."""
    X = next(batches(12, shape=(4, 6, 6)))[0]
    for options in ({"affine": False}, {"track_running_stats": False}, {"momentum": None}):
        alone = nn.BatchNorm2d(4, **options).double()
        norm = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)).cuda()
        x, whole = part(X, rank, n).requires_grad_(), X.clone().requires_grad_()
        for _ in range(2):
            out, expected = norm(x), alone(whole)
            same(out, expected.chunk(n)[rank])
        out.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        same(x.grad, whole.grad.chunk(n)[rank])
        same_networks(norm, alone)
    norm, x = nn.SyncBatchNorm(4).cuda(), part(X.half(), rank, n).to(memory_format=torch.channels_last)
    assert norm(x).dtype is torch.float16 and norm(x).is_contiguous(memory_format=torch.channels_last)
    same(norm(x).float(), nn.BatchNorm2d(4)(X.float()).chunk(n)[rank], 1e-2)
