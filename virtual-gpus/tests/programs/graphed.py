"""Whole steps of DistributedDataParallel and of FSDP2 in a CUDA graph, communication included."""

import torch
from checking import check
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

F = nn.functional
STEPS = 4


def network():
    torch.manual_seed(0)
    return (
        nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU()) for _ in range(3)]).double().cuda()
    )


def sharded(net):
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def parallel(net):
    plan = {"0.0": ColwiseParallel(), "1.0": RowwiseParallel(), "2.0": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(net, init_device_mesh("cuda", (torch.distributed.get_world_size(),)), plan)


def steps(wrap, rank, graphed):
    """(losses, parameters) after some steps; the first of them, with other batches, run eagerly."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        net = wrap(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    data = [torch.randn(8, 16).double().cuda() for _ in range(STEPS + 1)]
    x = data[0].clone()

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.step()
        return loss

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(11):  # after which DDP has built its buckets anew
            step()
    torch.cuda.current_stream().wait_stream(stream)
    if graphed:
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            loss = step()
    losses = []
    for batch in data[1:]:
        x.copy_(batch)
        if graphed:
            graph.replay()
        else:
            loss = step()
        losses.append(loss.item())
    return losses, [p.to_local() if hasattr(p, "to_local") else p.clone() for p in net.parameters()]


def check_steps(wrap, rank):
    eager, graphed = (steps(wrap, rank, graphed) for graphed in (False, True))
    assert eager[0] == graphed[0] and len(set(eager[0])) == STEPS, (eager[0], graphed[0])
    assert all(map(torch.equal, eager[1], graphed[1]))


@check
def ddp_in_a_graph(rank, n):
    check_steps(lambda net: DDP(net, device_ids=[rank], bucket_cap_mb=0.002), rank)


@check
def tensor_parallelism_in_a_graph(rank, n):
    check_steps(parallel, 0)


@check
def fsdp2_in_a_graph(rank, n):
    check_steps(sharded, rank)
