"""What goes wrong between three ranks, and what each hears of it: run by torchrun.

Each mistake is made in a group of its own, so that the others go on. Rank 0 prints "ok NAME" after each.
"""

import contextlib
import os
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from checking import raises

from virtual_gpus.ranks.members import Members
from virtual_gpus.ranks.process_groups import GROUPS

MADE = []  # weak references to the groups of gloo under the virtual ones


def remembered(members, name, gloo=Members.gloo):
    group = gloo(members, name)
    MADE.append(weakref.ref(group))
    return group


Members.gloo = remembered


def ones(count, where="cuda"):
    return torch.ones(count, device=where)


def many(group, op=dist.ReduceOp.SUM, size=1000):
    """What a rank calls is too long for what ranks say of it."""
    dist.all_reduce_coalesced([ones(size if i == 49 else 1000) for i in range(60)], op, group=group)


def other_sizes(rank, group):
    dist.all_reduce(ones(4 if rank else 6), group=group)


def uneven_all_to_all(rank, group):
    """Rank 0 sends one number to each; rank 1 expects two."""
    sizes = [2, 1, 1] if rank == 1 else [1, 1, 1]
    dist.all_to_all_single(torch.empty(sum(sizes), device="cuda"), ones(3), sizes, [1, 1, 1], group=group)


def gathered_too_much(rank, group):
    gathered = [torch.empty(4, device="cuda") for _ in range(3)] if rank == 0 else None
    dist.gather(ones(5 if rank == 2 else 4), gathered, 0, group=group)


def after_an_error(rank, group):
    """What failed once goes on to fail."""
    with contextlib.suppress(dist.DistBackendError):
        other_sizes(rank, group)
    other_sizes(rank, group)


def a_thread_has_ended(rank, group):
    """Rank 1 can communicate no more."""
    x = ones(4)
    dist.all_reduce(x, group=group)
    if rank == 1:
        [communicator] = GROUPS[group.group_name].communicators.values()
        communicator.queue.put(None)
        communicator.thread.join()
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()


def one_has_gone(rank, group):
    dist.all_reduce(ones(4), group=group)
    if rank == 2:
        os._exit(0)
    dist.all_reduce(ones(4), group=group)


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
GONE = "another rank has gone"
LATE = [
    *("not all ranks came within 3 s", "rank 1 waits nowhere"),
    *(f"rank {rank} waits in all_reduce of float32[4], SUM, operation 1" for rank in (0, 2)),
]
MISTAKES = {  # (what a rank calls, the words that all hear; or of each rank, "" where there is no error)
    "other sizes": (other_sizes, "rank 0: all_reduce of float32[6], SUM\n  rank 1: all_reduce of float32[4], SUM"),
    "other operations": (
        lambda rank, group: dist.broadcast(ones(4), 0, group=group) if rank == 2 else other_sizes(1, group),
        "rank 1: all_reduce of float32[4], SUM\n  rank 2: broadcast of float32[4] from rank 0",
    ),
    "other reductions": (
        lambda rank, group: dist.all_reduce(ones(4), MAX if rank else SUM, group=group),
        "rank 0: all_reduce of float32[4], SUM\n  rank 1: all_reduce of float32[4], MAX",
    ),
    "other reductions of many": (lambda rank, group: many(group, MAX if rank else SUM), "called different operations"),
    "other sizes of many": (
        lambda rank, group: many(group, size=7 if rank == 1 else 1000),
        "called different operations",
    ),
    "uneven all_to_all": (uneven_all_to_all, "all_to_all: rank 0 sends 4 bytes to rank 1, which expects 8"),
    "gathered too much": (gathered_too_much, "gather: rank 2 sends 20 bytes to rank 0, which expects 16"),
    "one stays away": (
        lambda rank, group: None if rank == 1 else dist.all_reduce(ones(4), group=group),
        (LATE, "", LATE),
    ),
    "after an error": (after_an_error, "rank 0: all_reduce of float32[6], SUM"),
    "a message of another size": (
        lambda rank, group: (dist.send, dist.recv)[rank](ones(4 + rank), 1 - rank, group=group) if rank < 2 else None,
        (*["rank 0: message of float32[4]\n  rank 1: message of float32[5]"] * 2, ""),
    ),
    "to itself": (
        lambda rank, group: dist.send(ones(4), rank, group=group),
        "destination rank should not be the same",
    ),
    "from anybody": (lambda rank, group: dist.recv(ones(4), group=group), "does not support recvAnysource"),
    "on the CPU": (
        lambda rank, group: dist.all_reduce(ones(4, "cpu"), group=group),
        "No backend type associated with device type cpu",
    ),
    "torch.cuda.set_device forgotten": (
        lambda rank, group: dist.all_reduce(ones(4, "cuda:0" if rank < 2 else "cuda:2"), group=group),
        "Duplicate GPU detected : rank 1 and rank 0 both on GPU 0",
    ),
    "a thread has ended": (a_thread_has_ended, (GONE, "the thread that communicates for it has ended", GONE)),
    "one has gone": (one_has_gone, GONE),
}


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    for name, (mistake, words) in MISTAKES.items():
        group = dist.new_group(timeout=timedelta(seconds=3 if name == "one stays away" else 30))
        mine = words[rank] if isinstance(words, tuple) else words
        if mine:
            raises(Exception, mine, mistake, rank, group)
        else:
            mistake(rank, group)
        if rank == 0:
            print("ok", name, flush=True)
        if name != "one has gone":
            dist.barrier()
    dist.destroy_process_group()
    # An error's traceback would keep them, and a thread of gloo's that comes back to a Python that ends, aborts.
    assert len(MADE) > 20 and not any(made() for made in MADE)


if __name__ == "__main__":
    main()
