"""Mistakes that NCCL answers with an error, or by waiting for ever: run by torchrun on three ranks.

Each is made in a group of its own, so that the others go on. Each rank prints a line of JSON for each, with the words.
"""

import json
import os
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from mgpu_lib.virtual.collectives import GROUPS
from mgpu_lib.virtual.communicator import Members

MADE = []  # weak references to the groups of gloo under the virtual ones


def remembered(members, name, gloo=Members.gloo):
    group = gloo(members, name)
    MADE.append(weakref.ref(group))
    return group


Members.gloo = remembered


def other_sizes(rank, group):
    dist.all_reduce(torch.ones(4 if rank else 6, device="cuda"), group=group)


def other_operations(rank, group):
    x = torch.ones(4, device="cuda")
    dist.broadcast(x, 0, group=group) if rank == 2 else dist.all_reduce(x, group=group)


def other_reductions(rank, group):
    dist.all_reduce(torch.ones(4, device="cuda"), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group)


def other_reductions_of_many(rank, group):
    """What a rank calls is too long for what ranks say of it."""
    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    dist.all_reduce_coalesced([torch.ones(1000 + i, device="cuda") for i in range(60)], op, group=group)


def other_sizes_of_many(rank, group):
    """The same; only the 50th tensor differs."""
    dist.all_reduce_coalesced(
        [torch.ones(7 if (rank, i) == (1, 49) else 1000, device="cuda") for i in range(60)], group=group
    )


def uneven_all_to_all(rank, group):
    """Rank 0 sends one number to each; rank 1 expects two."""
    sizes = [2, 1, 1] if rank == 1 else [1, 1, 1]
    x, y = torch.ones(3, device="cuda"), torch.empty(sum(sizes), device="cuda")
    dist.all_to_all_single(y, x, sizes, [1, 1, 1], group=group)


def gathered_too_much(rank, group):
    x = torch.ones(5 if rank == 2 else 4, device="cuda")
    dist.gather(x, [torch.empty(4, device="cuda") for _ in range(3)] if rank == 0 else None, 0, group=group)


def one_stays_away(rank, group):
    if rank != 1:
        dist.all_reduce(torch.ones(4, device="cuda"), group=group)


def after_an_error(rank, group):
    """What failed once goes on to fail."""
    for _ in range(2):
        try:
            other_sizes(rank, group)
        except dist.DistBackendError as error:
            again = error
    raise again


def a_message_of_another_size(rank, group):
    x = torch.ones(4 + rank, device="cuda")
    if rank == 0:
        dist.send(x, 1, group=group)
    elif rank == 1:
        dist.recv(x, 0, group=group)


def to_itself(rank, group):
    dist.send(torch.ones(4, device="cuda"), rank, group=group)


def from_anybody(rank, group):
    dist.recv(torch.ones(4, device="cuda"), group=group)


def on_the_cpu(rank, group):
    dist.all_reduce(torch.ones(4), group=group)


def on_one_gpu(rank, group):
    """All ranks but the last forget torch.cuda.set_device."""
    dist.all_reduce(torch.ones(4, device="cuda:0" if rank < 2 else "cuda:2"), group=group)


def a_thread_has_ended(rank, group):
    """Rank 1 can communicate no more."""
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, group=group)
    if rank == 1:
        [communicator] = GROUPS[group.group_name].communicators.values()
        communicator.queue.put(None)
        communicator.thread.join()
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()


def one_has_gone(rank, group):
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)
    if rank == 2:
        os._exit(0)
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)


MISTAKES = [
    *(other_sizes, other_operations, other_reductions, other_reductions_of_many, other_sizes_of_many),
    *(uneven_all_to_all, gathered_too_much, one_stays_away, after_an_error, a_message_of_another_size),
    *(to_itself, from_anybody, on_the_cpu, on_one_gpu, a_thread_has_ended, one_has_gone),
]


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    for mistake in MISTAKES:
        seconds = 3 if mistake is one_stays_away else 30
        group, words = dist.new_group(timeout=timedelta(seconds=seconds)), ""
        try:
            mistake(rank, group)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        say(mistake.__name__, rank, words)
        if mistake is not one_has_gone:
            dist.barrier()
    dist.destroy_process_group()
    say("groups_of_gloo", rank, [len(MADE), sum(made() is not None for made in MADE)])


def say(mistake, rank, words):
    line = json.dumps({"mistake": mistake, "rank": rank, "words": words})
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    main()
