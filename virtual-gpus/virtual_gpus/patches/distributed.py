"""torch.distributed with "nccl": process groups whose ranks have virtual GPUs.

The groups, what they are called and who belongs to them stay PyTorch's own, as does all of DistributedDataParallel.
Only where PyTorch would make a backend of NCCL's is one made that leads to `ranks.collectives`; and what C++ allocates
for itself, it takes from a virtual GPU.
"""

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from virtual_gpus import compat
from virtual_gpus.compat import C, c10d, register_comm_hook
from virtual_gpus.patches import older
from virtual_gpus.patches.patch import PATCHES, after_import, patch, replaces
from virtual_gpus.ranks import collectives  # noqa: F401  (the operations of c10d find their way to it)
from virtual_gpus.ranks.functional import allocations_beside
from virtual_gpus.ranks.futures import Future
from virtual_gpus.ranks.members import Members
from virtual_gpus.ranks.process_groups import GROUPS, GlooGroup, Group
from virtual_gpus.state import current, current_index
from virtual_gpus.tensors.tensor import inner_of, is_virtual

ProcessGroup, Backend = dist.ProcessGroup, dist.Backend
EXIT_SECONDS = 1.0  # seconds that a program waits at its end for what it has begun


def create(options: Any, backend_options: Any) -> Any:
    """What PyTorch asks for a backend "nccl": the ranks' own way to each other. The object itself can do nothing."""
    if not current().start_cuda():
        raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
    GROUPS[options.group_id] = Group(members_of(options), options.group_id)
    return compat.create_refusing(options.group_rank, options.group_size)


def members_of(options: Any) -> Members:
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    members = Members(options.store, options.group_rank, list(ranks), options.timeout)
    if current().rank is None:  # the first group is that of all ranks
        current().rank, current().ranks = members.global_rank, len(ranks)
    return members


def create_gloo(options: Any, backend_options: Any) -> Any:
    """The same for a backend "gloo": PyTorch's own, but not in a dry run. What lies on the CPU has values there, and
    those of the other ranks are unknown. What lies on GPUs takes another way, unless nccl is there for it."""
    GROUPS.setdefault(options.group_id, GlooGroup(members_of(options), options.group_id))
    if current().rendezvous is not None:
        return compat.create_refusing(options.group_rank, options.group_size)
    return compat.create_gloo(options, backend_options)


nccl, gloo = (Backend._BackendPlugin(function, extended_api=True) for function in (create, create_gloo))
patch(Backend._plugins, {"NCCL": nccl, "NCCL2": nccl, "NCCL-LEGACY": nccl, "NCCL-LAZY": nccl, "GLOO": gloo})
for owner in (dist, distributed_c10d):
    patch(owner, {"is_nccl_available": lambda: True})
# What who is not in a new group calls.
patch(c10d.FakeProcessGroup, {"perform_nocolor_split": lambda self, device: None})
PATCHES.extend(older.patches(create, create_gloo))


@replaces(dist)
@replaces(distributed_c10d)
def rendezvous(original, url, rank=-1, world_size=-1, **options):
    """Under init_process_group. The ranks of a dry run find each other in this process, whatever the `url`."""
    if current().rendezvous is None:
        return original(url, rank, world_size, **options)
    known = os.environ["RANK"] if rank < 0 else rank, os.environ["WORLD_SIZE"] if world_size < 0 else world_size
    return iter([(current().rendezvous.store, *map(int, known))])


@replaces(dist)
@replaces(distributed_c10d)
def init_process_group(original, *args, **kwargs):
    """In a dry run there is one already, for programs that need it: this one takes its place."""
    groups = {} if current().rendezvous is None else current().rendezvous.default_groups
    if dist.is_initialized() and groups.pop(current().rank, None) is not None:
        dist.destroy_process_group()
    original(*args, **kwargs)


@replaces(dist)
@replaces(distributed_c10d)
def destroy_process_group(original, group=None):
    """What was begun is done first, as NCCL does it."""
    name = None if group is None or group == dist.GroupMember.WORLD else group.group_name
    for ended in list(GROUPS) if name is None else [name]:
        if ended in GROUPS:
            GROUPS.pop(ended).close()
    original(group)


@atexit.register
def at_exit():
    """A program that ends without destroy_process_group: its threads must not come back to a Python that is gone."""
    for group in GROUPS.values():
        group.close(EXIT_SECONDS)


def nccl_group(group: dist.ProcessGroup) -> Group | None:
    """The Group of a process group whose ranks have virtual GPUs by nccl, or None."""
    made = GROUPS.get(group.group_name)
    return None if isinstance(made, GlooGroup) else made


@replaces(ProcessGroup)
def barrier(original, self, opts=None, **options):
    """With NCCL an operation of all GPUs, and the host waits for it."""
    opts, rendezvous = opts or c10d.BarrierOptions(), current().rendezvous
    if opts.device is not None and nccl_group(self) is None:
        opts.device = torch.device("cpu")  # gloo's may be bound to a GPU, where C++ would make a tensor
    on_cpu = opts.device is not None and opts.device.type == "cpu"
    if rendezvous is not None and on_cpu:
        rendezvous.all_gather((self.group_name, "barrier"), dist.get_rank(), dist.get_process_group_ranks(self), None)
        return Works([])
    if nccl_group(self) is None or on_cpu:
        return original(self, opts, **options)
    index = opts.device_ids[0] if opts.device_ids else current_index()
    flag = torch.zeros(1, device=torch.device("cuda", index))
    work = c10d.Work.unbox(torch.ops.c10d.barrier(flag, self.boxed(), [index]))
    if not opts.asyncOp:
        work.wait()
        flag.gpu.clock.synchronize(flag.gpu, [flag.gpu.streams[0]])
    return work


@replaces(ProcessGroup)
def split_group(original, self, new_ranks, timeout=None, **options):
    """Under torch.distributed's: `new_ranks` are numbers in this group."""
    split, whole = original if compat.HAS_SPLITTING else older.split_group, GROUPS.get(self.group_name)
    made = split(self, new_ranks, timeout=timeout, **options)
    if made is not None and whole is not None and any(device.type == "cuda" for device in made._device_types):
        whole.splits[tuple(new_ranks)] += 1  # no name: before 2.14 PyTorch may give the group another on each rank
        members = whole.members.subset(list(new_ranks)).under(f"split {whole.splits[tuple(new_ranks)]}")
        members = members._replace(timeout=timeout or members.timeout)
        GROUPS[made.group_name] = type(whole)(members, made.group_name)
    return made


@replaces(ProcessGroup)
def _start_coalescing(original, self, device):
    if nccl_group(self) is None:
        return original(self, device)
    nccl_group(self).coalesced = []


@replaces(ProcessGroup)
def _end_coalescing(original, self, device):
    """One work for all that the block was given."""
    group = nccl_group(self)
    if group is None:
        return original(self, device)
    works, group.coalesced = group.coalesced, None
    return Works(works)


@replaces(C)
def _collect_all(original, futures):
    """Under torch.futures.collect_all and wait_all: C++ would take NCCL's for done, as they are complete at once."""
    for future in futures:
        if isinstance(future, Future):
            future.source.wait()
    return original(futures)


@replaces(dist)
def _register_builtin_comm_hook(reducer, kind):
    """The hooks that DistributedDataParallel has in C++: the same in Python."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # only here, because it takes its time

    half = kind == dist.BuiltinCommHookType.FP16_COMPRESS
    hook = default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook
    register_comm_hook(reducer, reducer.group, hook)


class Works(c10d.Work):
    """Several works as one."""

    def __init__(self, works):
        super().__init__()
        self.works = works

    def wait(self, timeout=None):
        for work in self.works:
            work.wait()
        return True

    def is_completed(self):
        return all([work.is_completed() for work in self.works])


@replaces(dist)
class Reducer(dist.Reducer):
    """What DistributedDataParallel leaves to C++: its buckets lie on the GPU."""

    def __init__(self, parameters, *args, **kwargs):
        self.parameters, self.types = parameters, {parameter.dtype for parameter in parameters}
        self.group = args[2]
        with allocations_beside(parameters, self.types | {torch.int32}):  # its map of the parameters that were used
            super().__init__(parameters, *args, **kwargs)

    def _rebuild_buckets(self):
        with allocations_beside(self.parameters, self.types):
            return super()._rebuild_buckets()

    def _set_mixed_precision_param_dtype(self, dtype):
        """C++ converts the buckets, but not the views by which they are filled until they are made anew."""
        raise NotImplementedError(
            "DistributedDataParallel(mixed_precision=...): in the first step PyTorch averages memory that nothing has "
            "been written to. What that holds on a real GPU can't be imitated; use torch.autocast."
        )

    def _run_allreduce_hook(self, bucket):
        """What happens to a bucket without a hook. C++ would hand out a future that nobody can wait for in Python."""
        if not is_virtual(bucket.buffer()):
            return super()._run_allreduce_hook(bucket)
        return dist.all_reduce(bucket.buffer(), group=self.group, async_op=True).get_future()

    def _set_static_graph(self):
        with allocations_beside(self.parameters, {torch.int32}):
            super()._set_static_graph()

    def _set_forward_pass_work_handle(self, work, *args):
        """C++ asks the work for its future, which only an object that Python still has can give."""
        self.forward_work = work
        super()._set_forward_pass_work_handle(work, *args)


@replaces(dist)
def _broadcast_coalesced(original, *args):
    with current().clock.in_cpp():
        return original(*args)


@replaces(dist)
def _verify_params_across_processes(original, group, tensors, *args):
    """Whether all ranks have the same parameters; in a dry run there is one rank."""
    if any(inner_of(tensor).is_meta for tensor in tensors):
        return None
    with allocations_beside(tensors):
        return original(group, tensors, *args)


@after_import("torch.distributed.fsdp._fully_shard._fsdp_param_group")
def patch_fsdp2(module):
    def foreach_reduce(original, params, unsharded_grads, *args, **kwargs):
        """A dry run hears which gradients these are."""
        if current().step_memory is not None:
            current().step_memory.own("gradients", map(inner_of, unsharded_grads))
        return original(params, unsharded_grads, *args, **kwargs)

    yield module, "foreach_reduce", foreach_reduce
