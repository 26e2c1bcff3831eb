"""Python objects that the ranks of a dry run send each other.

They have values, which tensors of a dry run lack, and take no time: programs send objects before the first step, or to
write a checkpoint. They travel pickled, because each rank has classes of its own (see `process_state.ProcessState`).
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import distributed_c10d

from virtual_gpus.patches.patch import patch
from virtual_gpus.state import current

Group: TypeAlias = dist.ProcessGroup | None  # None: all ranks


def in_dry_runs(function: Callable) -> Callable:
    """Decorates what takes the place of torch.distributed's function of that name, in dry runs."""

    def call(original, *args, **kwargs):
        return (original if current().rendezvous is None else function)(*args, **kwargs)

    for owner in (dist, distributed_c10d):
        patch(owner, {function.__name__: call})
    return function


@in_dry_runs
def all_gather_object(object_list, obj, group=None, weights_only=False):
    object_list[:] = gathered(obj, group)


@in_dry_runs
def gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None, weights_only=False):
    objects = gathered(obj, group)
    if dist.get_rank(group) == number_of(dst, group_dst, group):
        object_gather_list[:] = objects


@in_dry_runs
def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None, weights_only=False):
    source = number_of(src, group_src, group)
    object_list[:] = from_rank(source, gathered(list(object_list), group), group)


@in_dry_runs
def scatter_object_list(
    scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, group_src=None, weights_only=False
):
    objects = from_rank(number_of(src, group_src, group), gathered(scatter_object_input_list, group), group)
    scatter_object_output_list[0] = objects[dist.get_rank(group)]


@in_dry_runs
def send_object_list(
    object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False, weights_only=False
):
    here, there = dist.get_rank(), ranks_of(group)[number_of(dst, group_dst, group)]
    rendezvous_of([here, there], group).send((group_name(group), here, there), pickle.dumps(list(object_list)))


@in_dry_runs
def recv_object_list(
    object_list, src=None, group=None, device=None, group_src=None, use_batch=False, weights_only=False
):
    if src is None and group_src is None:
        raise RuntimeError("a dry run can't receive objects from any source: name the rank that sends them")
    here, there = dist.get_rank(), ranks_of(group)[number_of(src, group_src, group)]
    object_list[:] = pickle.loads(rendezvous_of([here, there], group).recv((group_name(group), there, here)))
    return there


def gathered(obj: Any, group: Group) -> list:
    """The object of each rank of the group, of which this one gives `obj`."""
    key = group_name(group), "objects"
    objects = current().rendezvous.all_gather(key, dist.get_rank(), ranks_of(group), pickle.dumps(obj))
    return [pickle.loads(each) for each in objects]


def from_rank(source: int, objects: list, group: Group) -> Any:
    """Those of number `source` of the group. RuntimeError if that rank isn't run: what it would send is unknown."""
    rank = ranks_of(group)[source]
    if not current().rendezvous.participants([rank]):
        raise RuntimeError(
            f"rank {dist.get_rank()} waits for objects of rank {rank}, which a dry run of that one has: use rank={rank}"
        )
    return objects[source]


def rendezvous_of(ends: Sequence[int], group: Group) -> Any:
    current().rendezvous.require(ends, ranks_of(group))
    return current().rendezvous


def number_of(rank: int | None, number: int | None, group: Group) -> int:
    """A rank's number in the group, from that or from its number in the whole program; without both, 0."""
    if number is not None:
        return number
    return 0 if rank is None else ranks_of(group).index(rank)


def ranks_of(group: Group) -> list[int]:
    return dist.get_process_group_ranks(group)


def group_name(group: Group) -> str:
    return (group or dist.GroupMember.WORLD).group_name
