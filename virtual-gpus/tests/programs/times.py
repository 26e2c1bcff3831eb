"""When collective operations run, on one clock for all ranks. Each rank prints one line of JSON."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn

from virtual_gpus import current

KERNEL = 1e-3  # seconds


def kernel(seconds):
    """Keep the GPU busy for so long."""
    torch.cuda._sleep(round(seconds * current().spec.frequency))


def events(name):
    return [(e.start, e.end, e.launched) for e in current().timeline if e.name == name]


def the_last_rank_is_waited_for(rank, n):
    kernel((rank + 1) * KERNEL)
    dist.all_reduce(torch.ones(1000, device="cuda"))
    kernel(KERNEL)
    torch.cuda.synchronize()
    return events("all_reduce")[-1], events("sleep")[-1]


def one_group_after_the_other(rank, n):
    """Two operations of a group are begun together; a kernel waits for the first only."""
    x, y = torch.ones(1_000_000, device="cuda"), torch.ones(1_000_000, device="cuda")
    first, second = dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)
    first.wait()
    kernel(KERNEL)
    second.wait()
    torch.cuda.synchronize()
    return *events("all_reduce")[-2:], events("sleep")[-1]


def messages(rank, n):
    """Rank 0 is busy when rank 1 comes for its message; what it waits for is not the sender's stream."""
    x = torch.ones(1000, device="cuda")
    if rank == 0:
        kernel(3 * KERNEL)
        dist.send(x, 1)
        torch.cuda.synchronize()
        return events("send")[-1]
    if rank == 1:
        dist.recv(x, 0)
        torch.cuda.synchronize()
        return events("recv")[-1]
    return None


def buckets(rank, n):
    """DDP's buckets travel behind the backward pass."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda()
    net = nn.parallel.DistributedDataParallel(net, device_ids=[torch.cuda.current_device()], bucket_cap_mb=4)
    for _ in range(3):
        net(torch.ones(512 + 64 * rank, 1024, device="cuda")).sum().backward()
        net.zero_grad()
    torch.cuda.synchronize()
    started = current().elapsed()
    net(torch.ones(512 + 64 * rank, 1024, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    timeline = current().timeline.since(started)
    kernels = [e for e in timeline if e.part == "backward"]
    sums = [(e.start, e.end) for e in timeline if e.name == "all_reduce"]
    return sums, kernels[0].start, kernels[-1].end, timeline.end, timeline.overlap()[rank]


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    found = {
        f.__name__: f(rank, dist.get_world_size())
        for f in (the_last_rank_is_waited_for, one_group_after_the_other, messages, buckets)
    }
    found["elapsed"] = current().elapsed()
    print(f"rank {rank} {json.dumps(found)}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
