"""Mistakes that NCCL answers with an error, or by waiting for ever, on three ranks: see times.py, which starts them.

Each is made in a group of its own, so that the others go on. Each rank prints a line of JSON for each, with the words.
"""

import contextlib
import json
import os
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

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


def many(rank, group, op=dist.ReduceOp.SUM, size=1000):
    """What a rank calls is too long for what ranks say of it."""
    dist.all_reduce_coalesced([ones(size if i == 49 else 1000) for i in range(60)], op, group=group)


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
        MISTAKES["other_sizes"](rank, group)
    MISTAKES["other_sizes"](rank, group)


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
MISTAKES = {
    "other_sizes": lambda rank, group: dist.all_reduce(ones(4 if rank else 6), group=group),
    "other_operations": lambda rank, group: (
        dist.broadcast(ones(4), 0, group=group) if rank == 2 else dist.all_reduce(ones(4), group=group)
    ),
    "other_reductions": lambda rank, group: dist.all_reduce(ones(4), MAX if rank else SUM, group=group),
    "other_reductions_of_many": lambda rank, group: many(rank, group, op=MAX if rank else SUM),
    "other_sizes_of_many": lambda rank, group: many(rank, group, size=7 if rank == 1 else 1000),
    "uneven_all_to_all": uneven_all_to_all,
    "gathered_too_much": gathered_too_much,
    "one_stays_away": lambda rank, group: None if rank == 1 else dist.all_reduce(ones(4), group=group),
    "after_an_error": after_an_error,
    "a_message_of_another_size": lambda rank, group: (
        (dist.send, dist.recv)[rank](ones(4 + rank), 1 - rank, group=group) if rank < 2 else None
    ),
    "to_itself": lambda rank, group: dist.send(ones(4), rank, group=group),
    "from_anybody": lambda rank, group: dist.recv(ones(4), group=group),
    "on_the_cpu": lambda rank, group: dist.all_reduce(ones(4, "cpu"), group=group),
    # All ranks but the last forget torch.cuda.set_device.
    "on_one_gpu": lambda rank, group: dist.all_reduce(ones(4, "cuda:0" if rank < 2 else "cuda:2"), group=group),
    "a_thread_has_ended": a_thread_has_ended,
    "one_has_gone": one_has_gone,
}


def make_all(rank):
    for name, mistake in MISTAKES.items():
        seconds = 3 if name == "one_stays_away" else 30
        group, words = dist.new_group(timeout=timedelta(seconds=seconds)), ""
        try:
            mistake(rank, group)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        say(name, rank, words)
        if name != "one_has_gone":
            dist.barrier()
    dist.destroy_process_group()
    say("groups_of_gloo", rank, [len(MADE), sum(made() is not None for made in MADE)])


def say(mistake, rank, words):
    line = json.dumps({"mistake": mistake, "rank": rank, "words": words})
    print(f"{line}\n", end="", flush=True)
