"""The ways to train on many GPUs that PyTorch has, on four ranks: each against the same network on one device.

Run by torchrun; with names of checks as arguments, only those. Rank 0 prints "ok NAME" for each that no rank failed.
"""

import sys
import traceback
from datetime import timedelta

import grouped  # noqa: F401, their checks enter themselves
import placed  # noqa: F401
import replicated  # noqa: F401
import sharded  # noqa: F401
import staged  # noqa: F401
import torch
import torch.distributed as dist
from checking import CHECKS


def main(names):
    dist.init_process_group("nccl", timeout=timedelta(seconds=8))
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    for function in CHECKS:
        if names and function.__name__ not in names:
            continue
        failed = 0
        try:
            function(rank, n)
        except Exception:
            failed = 1
            print(f"rank {rank}, {function.__name__}", traceback.format_exc(), file=sys.stderr)
        flag = torch.tensor(failed)
        dist.all_reduce(flag, group=dist.new_group(backend="gloo"))
        if rank == 0 and not flag:
            print("ok", function.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
