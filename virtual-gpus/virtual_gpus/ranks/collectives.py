"""torch.distributed's operations with the backend "nccl".

PyTorch calls them by way of its dispatcher, as operations of the namespace c10d, from Python and from C++. Each becomes
an operation of a communicator: a Transfer that moves the values by gloo, and how long NCCL would take. What a tensor
must be like, and the words for what is not, are NCCL's and those of PyTorch's ProcessGroupNCCL.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import ScriptObject, Tensor
from torch.distributed import ReduceOp

from virtual_gpus.clock.nccl import collective_seconds
from virtual_gpus.compat import c10d, unbox_reduce_op
from virtual_gpus.constants import all_reduce_constants
from virtual_gpus.ops.table import NAMESPACE_HANDLERS
from virtual_gpus.ranks import gloo_backend
from virtual_gpus.ranks.gloo_collectives import Reduction, all_gather, all_reduce, all_to_all, reduce_scatter
from virtual_gpus.ranks.process_groups import (
    NCCL_TYPES,
    REDUCIBLE,
    GlooGroup,
    Group,
    check_tensors,
    flat,
    flat_bytes,
    group_of,
    is_group,
    type_name,
)
from virtual_gpus.ranks.transfer import Transfer

REDUCTIONS = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM, ReduceOp.MIN, ReduceOp.PRODUCT


def collective(op, args, kwargs):
    """An operation of c10d on virtual tensors: a handler of `dispatch`."""
    group = next(group_of(arg) for arg in args if is_group(arg))
    if isinstance(group, GlooGroup):
        return gloo_backend.call(group, op.func, args)
    return COLLECTIVES[op.func.overloadpacket.__name__](*args, **kwargs)


# What they share


def sizes_of(tensors: Sequence[Tensor]) -> str:
    return str([x.numel() for x in tensors])


def reduction_of(script_object: ScriptObject, dtype: torch.dtype) -> Reduction:
    """The reduction in an operation's arguments; PyTorch's error for one that NCCL does not do with such a dtype."""
    reduction = unbox_reduce_op(script_object)
    op = next((op for op in REDUCTIONS if reduction.op == op), None)
    if op is None:
        raise ValueError(f"Cannot use ReduceOp.{str(reduction.op).rpartition('.')[2]} with NCCL")
    if dtype in NCCL_TYPES - REDUCIBLE:
        raise TypeError(f"virtual GPUs can't reduce {dtype}: convert first")
    if dtype is torch.bool and op == ReduceOp.AVG:
        raise ValueError("Cannot use ReduceOp.AVG with Boolean inputs")
    return Reduction(op, reduction.factor if op == ReduceOp.PREMUL_SUM else None)


def exchange(group: Group, *, name: str, results: Sequence[Tensor], **options: Any) -> ScriptObject:
    """inputs[i] of each rank goes to rank i, and results[i] comes from it. `options`: of `Group.issue`."""
    sizes = [x.nbytes for x in results]
    return group.issue(
        name=name, results=results, move=lambda gloo, inputs: all_to_all(gloo, name, inputs, sizes), **options
    )


def split(tensor: Tensor, sizes: list[int], n: int) -> Sequence[Tensor]:
    """`tensor` in `n` parts of these `sizes` along its first dimension; none: of equal sizes."""
    if not sizes and len(tensor) % n:
        raise ValueError("Tensor's dim 0 does not divide equally across group size")
    if sizes and sum(sizes) != len(tensor):
        raise ValueError("Split sizes doesn't match total dim 0 size")
    flat(tensor)  # it must be contiguous
    return tensor.split(sizes or len(tensor) // n) if len(tensor) else [tensor] * n


def point_to_point(tensors: Sequence[Tensor], group: Group, other: int, sends: bool) -> ScriptObject:
    """A message to or from rank `other` of the group."""
    [x], gpu = [flat_bytes(x) for x in tensors], check_tensors(tensors)
    this, ranks, topology = group.members.rank, group.members.ranks, gpu.machine.topology
    source, target = (this, other) if sends else (other, this)
    channel = group.channel(gpu, source, target)

    def move(gloo, sent):
        buffers = sent or [torch.empty_like(x)]
        (gloo.send if sends else gloo.recv)(buffers, 1 - gloo.rank(), channel.direction).wait()
        return [] if sends else buffers

    gpus = topology.gpus_of(ranks)
    at_once = topology.concurrent_groups(gpus)
    work = channel.issue(
        name="send" if sends else "recv",
        what=f"message of {type_name(tensors[0].dtype)}{sizes_of(tensors)}",
        nbytes=len(x),
        seconds=collective_seconds("send", len(x), (gpus[source], gpus[target]), topology, at_once),
        transfer=Transfer(move, [x], []) if sends else Transfer(move, [], [x]),
        outputs=tensors,
        combine=lambda values: values.get(ranks[source]),
    )
    return group.coalesce(work).boxed()


# The operations of c10d: they take and return what its schemas say


def allreduce_(tensors, group, op, sparse_indices=None, async_op=True, timeout=-1):
    return tensors, allreduce_coalesced_(tensors, group, op)


def allreduce_coalesced_(tensors, group, op, async_op=True, timeout=-1):
    group, reduction = group_of(group), reduction_of(op, tensors[0].dtype)
    return group.issue(
        name="all_reduce",
        what=sizes_of(tensors),
        inputs=tensors,
        results=tensors,
        outputs=tensors,
        move=lambda gloo, inputs: [all_reduce(gloo, reduction, x) for x in inputs],
        reduction=reduction,
        combine=functools.partial(all_reduce_constants, reduction.op.name, len(group)),
    )


def broadcast_(tensors, group, root, root_tensor, async_op=True, timeout=-1):
    group, options = group_of(group), c10d.BroadcastOptions()
    options.rootRank, source = root, group.members.ranks[root]

    def move(gloo, inputs):
        gloo.broadcast(inputs, options).wait()
        return inputs

    return tensors, group.issue(
        name="broadcast",
        what=f"{sizes_of(tensors)} from rank {root}",
        inputs=tensors,
        results=tensors,
        outputs=tensors,
        move=move,
        combine=lambda values: values.get(source),
    )


def reduce_(tensors, group, op, root, root_tensor, async_op=True, timeout=-1):
    group, reduction, [x] = group_of(group), reduction_of(op, tensors[0].dtype), tensors
    at_root = group.members.rank == root

    def move(gloo, inputs):
        result = all_reduce(gloo, reduction, *inputs)
        return [result] if at_root else []

    return group.issue(
        name="reduce",
        what=f"{sizes_of(tensors)} to rank {root}",
        inputs=[x],
        results=[x] if at_root else [],
        outputs=tensors,
        move=move,
        reduction=reduction,
    )


def allgather_(outputs, tensors, group, async_op=True, timeout=-1):
    group, [x], [results] = group_of(group), tensors, outputs
    if len(results) != len(group):
        raise ValueError("Tensor list input to scatter/gather must match number of collective participants")
    sizes = [y.nbytes for y in results]
    even = all(size == x.nbytes for size in sizes)

    def move(gloo, inputs):
        if even:
            return all_gather(gloo, *inputs).view(len(group), x.nbytes).unbind()
        return all_to_all(gloo, "all_gather", inputs * len(group), sizes)

    return outputs, group.issue(
        name="all_gather",
        what=sizes_of(tensors) if even else f"{sizes_of(results)} in all",
        inputs=tensors,
        results=results,
        outputs=outputs,
        move=move,
    )


def _allgather_base_(output, tensor, group, async_op=True, timeout=-1):
    return output, allgather_into_tensor_coalesced_([output], [tensor], group)


def allgather_into_tensor_coalesced_(outputs, tensors, group, async_op=True):
    group = group_of(group)
    for output, x in zip(outputs, tensors, strict=True):
        if output.dtype != x.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if output.numel() != x.numel() * len(group):
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
    return group.issue(
        name="all_gather",
        what=sizes_of(tensors),
        inputs=tensors,
        results=outputs,
        outputs=outputs,
        move=lambda gloo, inputs: [all_gather(gloo, x) for x in inputs],
    )


def reduce_scatter_(outputs, tensors, group, op, async_op=True, timeout=-1):
    group, [result], [inputs] = group_of(group), outputs, tensors
    if len(inputs) != len(group):
        raise ValueError("Tensor list input to scatter/gather must match number of collective participants")
    reduction, sizes = reduction_of(op, result.dtype), [x.numel() for x in inputs]

    def move(gloo, inputs):
        x = torch.cat(inputs)
        if all(size == result.numel() for size in sizes):
            return [reduce_scatter(gloo, reduction, x)]
        return [all_reduce(gloo, reduction, x).split(sizes)[gloo.rank()]]

    return outputs, group.issue(
        name="reduce_scatter",
        what=sizes_of(inputs),
        inputs=inputs,
        results=outputs,
        outputs=outputs,
        move=move,
        reduction=reduction,
    )


def _reduce_scatter_base_(output, tensor, group, op, async_op=True, timeout=-1):
    return output, reduce_scatter_tensor_coalesced_([output], [tensor], group, op)


def reduce_scatter_tensor_coalesced_(outputs, tensors, group, op, async_op=True, timeout=-1):
    group = group_of(group)
    for output, x in zip(outputs, tensors, strict=True):
        if output.dtype != x.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if x.numel() != output.numel() * len(group):
            raise ValueError("input tensor must be the same size as output size times world size")
    reduction = reduction_of(op, tensors[0].dtype)
    return group.issue(
        name="reduce_scatter",
        what=sizes_of(tensors),
        inputs=tensors,
        results=outputs,
        outputs=outputs,
        move=lambda gloo, inputs: [reduce_scatter(gloo, reduction, x) for x in inputs],
        reduction=reduction,
    )


def alltoall_(outputs, tensors, group, async_op=True, timeout=-1):
    group = group_of(group)
    if not len(outputs) == len(tensors) == len(group):
        raise ValueError("Number of tensor lists must match the number of ranks")
    return outputs, exchange(group, name="all_to_all", inputs=tensors, results=outputs, outputs=outputs)


def alltoall_base_(output, tensor, group, output_splits, input_splits, async_op=True, timeout=-1):
    group = group_of(group)
    return exchange(
        group,
        name="all_to_all",
        results=split(output, output_splits, len(group)),
        inputs=split(tensor, input_splits, len(group)),
        outputs=[output],
        parts_of=[output, tensor],
    )


def gather_(outputs, tensors, group, root, async_op=True, timeout=-1):
    group, nothing = group_of(group), tensors[0][:0]
    at_root = group.members.rank == root
    if len(tensors) != 1 or (at_root and len(outputs[0]) != len(group)):
        raise ValueError(f"Incorrect output list size {len(outputs[0])}. Output list size should be {len(group)}")
    results = outputs[0] if at_root else [nothing] * len(group)
    inputs = [tensors[0] if rank == root else nothing for rank in range(len(group))]
    return exchange(group, name="gather", what=f" to rank {root}", inputs=inputs, results=results, outputs=outputs)


def gather_into_tensor_(output, tensor, group, root, async_op=True, timeout=-1):
    parts = [*output.chunk(len(group_of(group)))] if group_of(group).members.rank == root else []
    return output, gather_([parts], [tensor], group, root)


def scatter_(outputs, tensors, group, root, async_op=True, timeout=-1):
    group, nothing = group_of(group), outputs[0][:0]
    at_root = group.members.rank == root
    if at_root and len(tensors[0]) != len(group):
        raise ValueError(f"Incorrect input list size {len(tensors[0])}. Input list size should be {len(group)}")
    results = [outputs[0] if rank == root else nothing for rank in range(len(group))]
    inputs, what = tensors[0] if at_root else [nothing] * len(group), f" from rank {root}"
    return outputs, exchange(group, name="scatter", what=what, inputs=inputs, results=results, outputs=outputs)


def send(tensors, group, target, tag):
    """`tag` is not looked at, as with NCCL."""
    return point_to_point(tensors, group_of(group), target, sends=True)


def recv_(tensors, group, source, tag):
    return point_to_point(tensors, group_of(group), source, sends=False)


def recv_any_source_(tensors, group, tag):
    raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")


def barrier(tensor, group, device_ids, async_op=True, timeout=-1):
    nothing = {"inputs": [], "results": [], "outputs": [], "move": lambda gloo, inputs: []}
    return group_of(group).issue(name="barrier", parts_of=[tensor], **nothing)


COLLECTIVES = {
    function.__name__: function
    for function in (
        *(allreduce_, allreduce_coalesced_, broadcast_, reduce_, allgather_, _allgather_base_),
        *(allgather_into_tensor_coalesced_, reduce_scatter_, _reduce_scatter_base_, reduce_scatter_tensor_coalesced_),
        *(alltoall_, alltoall_base_, gather_, gather_into_tensor_, scatter_, send, recv_, recv_any_source_, barrier),
    )
}
NAMESPACE_HANDLERS["c10d"] = collective
