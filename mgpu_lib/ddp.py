"""DistributedDataParallel from scratch: what `torch.nn.parallel.DistributedDataParallel` does, small enough to read."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from mgpu_lib.arguments import check_count
from mgpu_lib.collectives import buckets


class DDP(nn.Module):
    """A network that every rank trains on its own part of the batch; gradients become the mean over all ranks.

    Parameters and buffers begin as rank 0 has them. During the backward pass gradients are collected in buckets of at
    most `bucket_bytes`, those of the last layers first. A bucket is all-reduced as soon as it is full, while autograd
    goes on with the layers below.

    broadcast_buffers  each forward pass in training begins with the buffers of rank 0
    find_unused        parameters may go without a gradient, and those that get none on any rank keep the one they had.
                       Without it, a backward pass that leaves parameters out raises a RuntimeError that names them.
    Raises ValueError, on all ranks, if their networks differ in names, shapes or types, or if nothing can be trained.
    Freeze parameters before you wrap the network: what changes later goes unnoticed, as with PyTorch's own.
    """

    def __init__(self, module, bucket_bytes=25 * 2**20, broadcast_buffers=True, find_unused=False):
        super().__init__()
        check_count("bucket_bytes", bucket_bytes)
        self.module, self.broadcast_buffers, self.find_unused = module, broadcast_buffers, find_unused
        self.synchronizes = True
        check_same_on_all_ranks(module)
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}  # a tied one only once
        if not self.names:
            raise ValueError("no parameter of this network requires a gradient: there is nothing to train")
        params = list(self.names)
        self.buckets = [[params[i] for i in places] for places in buckets(params, bucket_bytes)]
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.used = set()  # what has had a gradient since the last synchronization
        self.prepare()
        for p in params:
            p.register_post_accumulate_grad_hook(self.on_gradient)
        broadcast_from_rank_0([*module.parameters(), *module.buffers()])

    def prepare(self):
        """Forget the last backward pass."""
        self.arrived = set()  # parameters whose gradient is there
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients, per bucket
        self.traveling = []  # (flat bucket, work) of the buckets that have been sent, always in the same order

    def forward(self, *inputs, **kwargs):
        if torch.is_grad_enabled():
            self.prepare()
            if self.broadcast_buffers and self.synchronizes and self.training:
                broadcast_from_rank_0(list(self.module.buffers()))
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        """Inside, gradients stay on their ranks, added up; the first backward pass outside sends all of them."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def on_gradient(self, p):
        """The backward pass has p.grad: called by autograd."""
        self.used.add(p)
        if not self.synchronizes:
            return
        if p in self.arrived:
            raise RuntimeError(
                f"{self.names[p]} got two gradients in one backward pass, as reentrant checkpointing does"
            )
        if not self.arrived:
            Variable._execution_engine.queue_callback(self.finish)
        self.arrived.add(p)
        self.missing[self.bucket_of[p]] -= 1
        self.send_full_buckets()

    def send_full_buckets(self):
        """Begin to all-reduce what is full, in the order of buckets: all ranks must call the same collectives."""
        while len(self.traveling) < len(self.buckets) and self.missing[len(self.traveling)] == 0:
            bucket = self.buckets[len(self.traveling)]
            flat = torch.cat([gradient_of(p).reshape(-1) for p in bucket]).div_(dist.get_world_size())
            self.traveling.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        """The backward pass is over: send the rest, wait, and give every parameter its part."""
        unused = [p for p in self.names if p not in self.arrived]
        if unused and not self.find_unused:
            names = ", ".join(self.names[p] for p in unused)
            raise RuntimeError(f"no gradient for {names}: freeze what isn't used, or pass find_unused=True")
        self.missing = [0] * len(self.buckets)
        self.send_full_buckets()
        wanted = self.used_anywhere() if self.find_unused else self.used
        for bucket, (flat, work) in zip(self.buckets, self.traveling, strict=True):
            work.wait()
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if p in wanted:
                    p.grad = gradient_of(p).copy_(mean.view_as(p))
        self.used.clear()
        self.prepare()

    def used_anywhere(self):
        """The parameters that have had a gradient on any rank since the last synchronization."""
        used = torch.tensor([float(p in self.used) for p in self.names], device=next(iter(self.names)).device)
        dist.all_reduce(used)
        return {p for p, ranks in zip(self.names, used.tolist(), strict=True) if ranks}


def gradient_of(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


@torch.no_grad()
def broadcast_from_rank_0(tensors):
    """Give all ranks the values that rank 0 has in `tensors`, in place; those of one type travel together."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, src=0)
        if dist.get_rank() > 0:
            for tensor, values in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(values.view_as(tensor))


def check_same_on_all_ranks(module):
    """ValueError, on all ranks, unless all have equal names, shapes and types, in one order, and freeze the same."""
    state = [*module.named_parameters(), *module.named_buffers()]
    mine = {name: (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in state}
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    first = all_ranks[0]
    for rank, other in enumerate(all_ranks):
        if list(other.items()) != list(first.items()):  # the order counts, too: that of the collectives follows it
            names = sorted(name for name in {*other, *first} if other.get(name) != first.get(name))
            what = ", ".join(names) or f"{list(other)} come in another order"
            raise ValueError(f"rank {rank} and rank 0 have different networks: {what}")
