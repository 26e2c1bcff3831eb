"""Whole steps in a CUDA graph, as test_graphs.py has them, and of many GPUs, communication included."""

import torch
from checking import check
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

F = nn.functional


def beside(function, times):
    """Call function() so many times in a stream beside the current one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [function() for _ in range(times)]
    torch.cuda.current_stream().wait_stream(stream)
    return found


def capture(function, warm_up=2, **options):
    """(a graph of function(), what that returned), after some calls in a stream beside."""
    beside(function, warm_up)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph(), **options):
        out = function()
    return graph, out


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=1e-2, capturable=True)


def steps(make_net, make_optimizer, data, warm_up, dtype, graphed):
    """(losses, state of network and optimizer, gradients) after a step with each of the `data`; before these come some
    with the first of them, run eagerly."""
    torch.manual_seed(0)
    [net] = beside(make_net, 1)
    optimizer, (x, y) = make_optimizer(net), (t.clone() for t in data[0])

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    if graphed:
        graph, loss = capture(step, warm_up)
        assert loss.isnan()  # nothing is computed before the first replay
    else:
        beside(step, warm_up)
    losses = []
    for batch in data:
        x.copy_(batch[0])
        y.copy_(batch[1])
        if graphed:
            graph.replay()
        else:
            loss = step()
        losses.append(loss.item())
    tensors = [*net.state_dict().values(), *(t for state in optimizer.state.values() for t in state.values())]
    tensors += [p.grad for p in net.parameters()]
    return losses, [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def assert_equal(one, other):
    assert all(map(torch.equal, one, other)) and len(one) == len(other)


def check_steps(make_net, make_optimizer, data, warm_up=2, dtype=None):
    """Steps in a graph, replayed, give bit for bit what they give eagerly."""
    eager, graphed = (steps(make_net, make_optimizer, data, warm_up, dtype, graphed) for graphed in (False, True))
    assert eager[0] == graphed[0] and len(set(eager[0])) == len(data), (eager[0], graphed[0])
    assert_equal(eager[1], graphed[1])


def check_wrapped(wrap, seed):
    """The same of a network that many GPUs share; DDP builds its buckets anew in the first eleven steps."""

    def wrapped():
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU()) for _ in range(3)]
        net = wrap(nn.Sequential(*layers).double().cuda())
        torch.manual_seed(seed)
        return net

    generator = torch.Generator().manual_seed(seed)
    data = [[torch.randn(8, 16, dtype=torch.float64, generator=generator).cuda() for _ in "xy"] for _ in range(4)]
    check_steps(wrapped, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), data, warm_up=11)


@check
def ddp_in_a_graph(rank, n):
    check_wrapped(lambda net: DDP(net, device_ids=[rank], bucket_cap_mb=0.002), rank)


@check
def tensor_parallelism_in_a_graph(rank, n):
    plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel(), "2.0": ColwiseParallel(output_layouts=Replicate())}
    check_wrapped(lambda net: parallelize_module(net, init_device_mesh("cuda", (n,)), plan), 0)


@check
def fsdp2_in_a_graph(rank, n):
    def sharded(net):
        for layer in (*net, net):
            fully_shard(layer)
        return net

    check_wrapped(sharded, rank)
