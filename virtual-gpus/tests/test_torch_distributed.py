"""torch.distributed on virtual GPUs in one process; test_parallelism.py has programs of many."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from virtual_gpus import virtual_gpus


def test_backends_that_a_program_registers_stay(monkeypatch):
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list])
    before = dict(dist.Backend._plugins)
    with virtual_gpus(2):
        dist.Backend.register_backend("mine", lambda *_: None, devices=["cpu"])
        assert dist.Backend._plugins["GLOO"] is not before.get("GLOO")
    assert dist.Backend._plugins.pop("MINE", None) is not None and dist.Backend._plugins == before
    del dist.Backend.MINE


@contextlib.contextmanager
def alone(gpus=2, world_size=1, **options):
    """A machine of a program whose one process is a group."""
    with virtual_gpus(gpus, **options) as machine:
        dist.init_process_group("nccl", rank=0, world_size=world_size, store=dist.HashStore())
        yield machine
        dist.destroy_process_group()


def test_one_process_can_be_a_group():
    with alone() as machine:
        x = torch.ones(3, device="cuda:1")
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1] and dist.get_backend() == "nccl"
        work = dist.all_reduce(x, async_op=True)
        assert machine.timeline.reproducible and "every run" not in repr(machine.timeline)
        work.is_completed()  # may be true, or not yet
        assert not machine.timeline.reproducible and "not the same in every run" in repr(machine.timeline)


def test_a_mesh_gives_each_process_its_gpu(monkeypatch):
    """As long as the program has neither used nor chosen one: to draw numbers on the CPU, or to seed, is no use."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    for chosen, used in ((None, 1), (0, 0)):
        with virtual_gpus(2):
            torch.manual_seed(0)
            torch.rand(2)
            assert not torch.cuda.is_initialized()
            if chosen is not None:
                torch.cuda.set_device(chosen)
            dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
            init_device_mesh("cuda", (1,))
            assert torch.cuda.current_device() == used and torch.cuda.is_initialized()
            dist.destroy_process_group()


def test_the_whole_shapes_that_dtensor_tries_take_neither_memory_nor_time():
    """It finds out the shape of a result by a fake operation on fake tensors of the whole shape."""
    with alone(4, world_size=4, backing="meta") as machine:
        mesh, part = init_device_mesh("cuda", (4,)), torch.empty(2**18, device="cuda")
        x, start = DTensor.from_local(part, mesh, [Shard(0)]), machine.elapsed()
        y = torch._foreach_mul([x], 2)[0]
        assert y.shape == (2**20,) and y.device.type == "cuda"
        assert machine.ledgers[0].peak == part.nbytes + y.to_local().nbytes == 2**21
        assert [event.nbytes for event in machine.timeline.since(start)] == [2**21]


def test_what_a_program_sees_before_it_waits_does_not_depend_on_threads():
    with alone() as machine:
        x, gathered = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        twice = dist._make_nccl_premul_sum(2.0)
        begun = dist.all_reduce(x, twice, async_op=True), dist.all_gather_into_tensor(gathered, x, async_op=True)
        for work in list(machine.gpus[0].communicators[0].pending.values()):
            assert work.completed.wait(600)  # the thread has got the results
        assert x.tolist() == [1, 1, 1] and gathered.tolist() == [0, 0, 0]
        x.zero_()  # too late for the operations, and overwritten
        begun[0].wait()
        assert x.tolist() == [2, 2, 2] and gathered.tolist() == [0, 0, 0]
        assert begun[1].is_completed()  # after which no program waits
        assert gathered.tolist() == [2, 2, 2]  # a group's operations come one after the other
        dist.all_reduce(x, twice, async_op=True)
        torch.cuda.synchronize()  # waits for the values, too
        assert x.tolist() == [4, 4, 4]


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced")
def test_operations_on_the_same_memory_keep_their_order():
    with alone():
        x, other, twice = torch.ones(8, device="cuda"), torch.ones(1, device="cuda"), dist._make_nccl_premul_sum(2.0)
        early = dist.all_reduce(x, twice, async_op=True)
        dist.all_reduce_coalesced([other, x[2:5]], twice, async_op=True)  # in any of the tensors that it reads
        gathered = [torch.zeros(4, device="cuda")]
        last = dist.all_gather(gathered, x[3:7], async_op=True)
        first = dist.all_reduce(x[:1], twice, async_op=True)
        last.wait()
        assert gathered[0].tolist() == [4, 4, 2, 2] and x.tolist() == [2, 2, 4, 4, 4, 2, 2, 2]
        x[3] = 7
        early.wait(), first.wait()
        assert x.tolist() == [4, 2, 4, 7, 4, 2, 2, 2]  # what has been there before is not written again
        torch.cuda.synchronize()
        assert x.tolist() == [4, 2, 4, 7, 4, 2, 2, 2]
