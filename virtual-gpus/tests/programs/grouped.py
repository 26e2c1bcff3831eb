"""Groups of ranks, however they are made, and backends beside NCCL."""

from datetime import timedelta

import torch
import torch.distributed as dist
from checking import check, raises
from torch.distributed.device_mesh import init_device_mesh

from virtual_gpus import gather_timeline


def summed(group, number, device="cuda"):
    x = torch.tensor([float(number)], device=device)
    dist.all_reduce(x, group=group)
    return x.item()


@check
def split_groups(rank, n):
    if torch.__version__ < "2.15" and dist.distributed_c10d._get_default_group().bound_device_id is None:
        raises(RuntimeError, "No device associated with the default pg", dist.split_group, split_ranks=[[0, 1], [2, 3]])
        return
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert dist.get_backend(half) == dist.get_backend()
    assert dist.get_process_group_ranks(half) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert summed(half, rank) == (1, 5)[rank // 2]
    some = dist.split_group(split_ranks=[[1, 3]])
    assert summed(some, rank) == 4 if rank % 2 else some in (None, dist.GroupMember.NON_GROUP_MEMBER)


@check
def groups_known_to_their_members_only(rank, n):
    if torch.__version__ < "2.14":
        return  # on ranks that have been in other groups before, PyTorch gives this one another name, and it hangs
    mine = [rank % 2, rank % 2 + 2]
    group = dist.new_group(mine, use_local_synchronization=True)
    assert summed(group, rank) == sum(mine) and dist.get_group_rank(group, rank) == rank // 2


@check
def groups_with_options(rank, n):
    group = dist.new_group([0, 1], pg_options=None, device_id=torch.device("cuda", rank))
    assert rank > 1 or summed(group, rank) == 1
    dist.barrier()
    if rank < 2:
        dist.destroy_process_group(group)


@check
def meshes(rank, n):
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
    assert mesh.device_type == "cuda" and list(mesh.get_coordinate()) == [rank // 2, rank % 2]
    assert summed(mesh.get_group("rows"), rank) == (2, 4)[rank % 2]
    assert summed(mesh["columns"].get_group(), rank) == (1, 5)[rank // 2]
    assert summed(mesh["rows", "columns"]._flatten().get_group(), rank) == 6
    assert torch.cuda.current_device() == rank


@check
def two_backends(rank, n):
    """Tensors on the CPU go by gloo, those on a GPU by NCCL."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert summed(group, rank) == summed(group, rank, "cpu") == 6
    everybody = [None] * n
    dist.all_gather_object(everybody, rank, group=group)
    assert everybody == list(range(n))


@check
def programs_that_start_otherwise(rank, n):
    """Without a backend, with their device's number, and with a backend for each kind of tensor."""
    store, device = dist.distributed_c10d._get_default_store(), torch.device("cuda", rank)
    both = {"backend": "cpu:gloo,cuda:nccl"}
    for again, options in enumerate(({}, both, {"device_id": device, "pg_options": None})):
        dist.destroy_process_group()
        place = {"store": dist.PrefixStore(f"group {again}", store), "rank": rank, "world_size": n}
        dist.init_process_group(**options, **place, timeout=timedelta(seconds=30))
        assert summed(None, rank) == 6 and dist.distributed_c10d._get_default_group().bound_device_id in (None, device)
        assert options is not both or summed(None, rank, "cpu") == 6
        some = dist.new_group([0, 2])
        assert rank % 2 or summed(some, rank) == 2
        dist.barrier(dist.new_group(backend="gloo"))  # which was once made on a real GPU, of a group with a device


@check
def monitored_barriers(rank, n):
    raises(ValueError, "monitored_barrier ", dist.monitored_barrier)
    dist.monitored_barrier(dist.new_group(backend="gloo"))


@check
def timelines(rank, n):
    """The first rank gets those of all, on one clock."""
    summed(None, rank)
    gathered = gather_timeline()
    assert (gathered is None) == (rank > 0)
    for number, timeline in enumerate(gathered or []):
        last, first = ([e for e in one if e.name == "all_reduce"][-1] for one in (timeline, gathered[0]))
        assert (last.gpu, last.start, last.end) == (number, first.start, first.end)
