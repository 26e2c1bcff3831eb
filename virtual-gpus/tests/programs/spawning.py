"""A program that starts processes in all ways that Python has, and sends tensors on GPUs between them."""

import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset


class OnGPU(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((2,), float(i), device="cuda:1")


def worker(rank, n, folder, here, there):
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=n)
    torch.cuda.set_device(rank)
    x = torch.full((3,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3 and torch.cuda.device_count() == 4
    given, parameter = there.get()
    assert given.device == torch.device("cuda", 3) and torch.cuda.memory_allocated(3) == 0
    assert type(parameter) is type(torch.nn.Parameter(x)) and parameter.is_leaf and parameter.requires_grad
    here.put((rank, x))
    given[rank] = 7
    here.put("written")
    dist.barrier()
    there.get()  # tensors are there as long as the process that made them
    dist.destroy_process_group()


def ranks(folder):
    context = mp.get_context("spawn")
    here, there = context.SimpleQueue(), context.SimpleQueue()
    started = mp.spawn(worker, (2, folder, here, there), nprocs=2, join=False)
    shared, parameter = torch.zeros(2, device="cuda:3"), torch.nn.Parameter(torch.ones(2, device="cuda:2"))
    for _ in range(2):
        there.put((shared, parameter))
    got = [here.get() for _ in range(4)]
    sums = dict(pair for pair in got if pair != "written")
    assert [sums[rank].device for rank in range(2)] == [torch.device("cuda", rank) for rank in range(2)], sums
    assert sums[1].tolist() == [3.0] * 3 and shared.tolist() == [7.0, 7.0]  # one memory, as with CUDA's IPC
    for _ in range(2):
        there.put("done")
    started.join()
    try:
        there.put(parameter * 2)
    except RuntimeError as error:
        assert "Cowardly refusing to serialize non-leaf tensor" in str(error)


def workers():
    batches = list(DataLoader(OnGPU(), batch_size=2, num_workers=1, multiprocessing_context="forkserver"))
    assert [batch.tolist() for batch in batches] == [[[0.0] * 2, [1.0] * 2], [[2.0] * 2, [3.0] * 2]]
    assert batches[0].device == torch.device("cuda", 1)


def total(queue):
    queue.put(torch.full((2,), 2.0, device="cuda").sum().item())


def forks_before_first_use():
    """With CUDA, too, a process may fork until it has used a GPU."""
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=total, args=(queue,))
    process.start()
    assert queue.get() == 4.0
    process.join()


def without(queue):
    """In a process whose environment names no virtual GPUs."""
    try:
        queue.get()
    except RuntimeError as error:
        assert "was sent to a process that has no virtual GPUs" in str(error) and not torch.cuda.is_available()
    else:
        raise AssertionError("a tensor has come to nowhere")


def uninvited():
    del os.environ["VIRTUAL_GPUS"]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=without, args=(queue,))
    process.start()
    queue.put(torch.ones(1, device="cuda"))
    process.join()
    assert process.exitcode == 0


if __name__ == "__main__":
    assert torch.cuda.is_available() and torch.cuda.device_count() == 4
    forks_before_first_use()
    ranks(sys.argv[1])
    workers()
    uninvited()
    print("ok")
