"""What one rank of many does, found out without the others: on GPUs that hold shapes only, nobody is waited for."""

import copy
import os
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from mgpu_lib.exercises.framework import expect
from virtual_gpus import virtual_gpus

IMAGES = 32


class Images(Dataset):
    """Images and labels that remember who was looked at."""

    def __init__(self):
        self.rows = []

    def __len__(self):
        return IMAGES

    def __getitem__(self, row):
        self.rows.append(int(row))
        return torch.zeros(1, 28, 28), row % 10


class Ran(NamedTuple):
    """What a script did on one rank."""

    rows: list  # of the data, in order
    gpus: set  # that have worked
    calls: list  # (name, bytes) of the collectives, in order


def run_as(script, rank, machines, gpus):
    """What `script` does as one rank of many, alone: its GPUs hold shapes only, and collectives come to nothing."""
    world_size, data = machines * gpus, Images()
    names = {"RANK": rank, "LOCAL_RANK": rank % gpus, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": gpus}
    names |= {"GROUP_RANK": rank // gpus, "GROUP_WORLD_SIZE": machines}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        virtual_gpus(gpus, backing="meta") as machine,
        in_place_of_ranks(rank, world_size),
    ):
        with saying_who_has_no_gpu(rank, machines, gpus):
            script(data)
        events = list(machine.timeline)
    calls = [(event.name, event.nbytes) for event in events if event.kind == "collective"]
    return Ran(data.rows, {event.gpu for event in events}, calls)


@contextmanager
def saying_who_has_no_gpu(rank, machines, gpus):
    try:
        yield
    except RuntimeError as error:
        where = f"{machines} machines with {gpus} GPUs each" if machines > 1 else f"one machine with {gpus}"
        expect("invalid device ordinal" not in str(error), f"on {where}, rank {rank} asks for a GPU that isn't there")
        raise


@contextmanager
def in_place_of_ranks(rank, world_size):
    """Inside, init_process_group makes a group in which this process is `rank`, and nobody is waited for.

    To PyTorch the rank is always 0. It warns of a process whose rank changes, and a dry run never looks at it.
    """
    begin = dist.init_process_group

    def init_process_group(*args, **kwargs):
        begin("nccl", store=dist.HashStore(), rank=0, world_size=world_size)

    expect(not dist.is_initialized(), "this notebook is in a process group: call dist.destroy_process_group() first")
    try:
        with (
            mock.patch.object(dist, "init_process_group", init_process_group),
            mock.patch.object(dist, "get_rank", lambda group=None: rank),
        ):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def arrivals(net, X, gpu):
    """When each gradient is there, in modelled seconds from the beginning of the backward pass, and its bytes."""
    came = []
    with virtual_gpus(1, gpu, backing="meta"):
        net, X = copy.deepcopy(net).to_empty(device="cuda:0"), torch.empty_like(X, device="cuda:0")

        def arrived(p):
            came.append((event(), p.nbytes))

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(arrived)
        loss = net(X).sum()
        torch.cuda.synchronize()
        start = event()
        loss.backward()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for end, _ in came], [nbytes for _, nbytes in came]


def event():
    """The time at which the GPU comes to here."""
    now = torch.cuda.Event(enable_timing=True)
    now.record()
    return now
