"""Mistakes that NCCL answers with an error, or by waiting for ever: run by torchrun on three ranks.

Each is made in a group of its own, so that the others go on. Each rank prints a line of JSON for each, with the words.
"""

import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def other_sizes(rank, group):
    dist.all_reduce(torch.ones(4 if rank else 6, device="cuda"), group=group)


def other_operations(rank, group):
    x = torch.ones(4, device="cuda")
    dist.broadcast(x, 0, group=group) if rank == 2 else dist.all_reduce(x, group=group)


def other_reductions(rank, group):
    dist.all_reduce(torch.ones(4, device="cuda"), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group=group)


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


def one_has_gone(rank, group):
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)
    if rank == 2:
        os._exit(0)
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)


MISTAKES = [
    *(other_sizes, other_operations, other_reductions, one_stays_away, after_an_error, a_message_of_another_size),
    *(to_itself, from_anybody, on_the_cpu, on_one_gpu, one_has_gone),
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
        line = json.dumps({"mistake": mistake.__name__, "rank": rank, "words": words})
        print(f"{line}\n", end="", flush=True)
        if mistake is not one_has_gone:
            dist.barrier()


if __name__ == "__main__":
    main()
