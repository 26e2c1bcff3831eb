"""torch.distributed on virtual GPUs: programs of many processes that know nothing of the library, run by torchrun."""

import re
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mgpu_lib.virtual import virtual_gpus

PROGRAMS = Path(__file__).parent / "programs"


def checks(program):
    """The names of the checks in a program."""
    return re.findall(r"@check\ndef (\w+)", (PROGRAMS / program).read_text())


@pytest.fixture(scope="module")
def passed(request):
    return ranks.passed(request, PROGRAMS / "collectives.py")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", checks("collectives.py"))
def test_values_are_those_of_nccl(name, passed):
    assert name in passed


def test_one_process_can_be_a_group():
    with virtual_gpus(2) as machine:
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        x = torch.ones(3, device="cuda:1")
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1] and dist.get_backend() == "nccl"
        work = dist.all_reduce(x, async_op=True)
        assert machine.timeline.reproducible and "every run" not in repr(machine.timeline)
        work.is_completed()  # may be true, or not yet
        assert not machine.timeline.reproducible and "not the same in every run" in repr(machine.timeline)
        dist.destroy_process_group()


def test_the_whole_shapes_that_dtensor_tries_take_neither_memory_nor_time():
    """It finds out the shape of a result by a fake operation on fake tensors of the whole shape."""
    with virtual_gpus(4, backing="meta") as machine:
        dist.init_process_group("nccl", rank=0, world_size=4, store=dist.HashStore())
        mesh, part = init_device_mesh("cuda", (4,)), torch.empty(2**18, device="cuda")
        x, start = DTensor.from_local(part, mesh, [Shard(0)]), machine.elapsed()
        y = torch._foreach_mul([x], 2)[0]
        assert y.shape == (2**20,) and y.device.type == "cuda"
        assert machine.ledgers[0].peak == part.nbytes + y.to_local().nbytes == 2**21
        assert [event.nbytes for event in machine.timeline.since(start)] == [2**21]
        dist.destroy_process_group()
