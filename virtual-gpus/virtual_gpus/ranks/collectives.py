"""torch.distributed's operations with the backend "nccl".

PyTorch calls them by way of its dispatcher, as operations of the namespace c10d, from Python and from C++. Each becomes
an operation of a communicator: a Transfer that moves the values by gloo, and how long NCCL would take. What a tensor
must be like, and the words for what is not, are NCCL's and those of PyTorch's ProcessGroupNCCL.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import ScriptObject, Tensor
from torch.distributed import ReduceOp

from virtual_gpus.clock.nccl import collective_seconds
from virtual_gpus.compat import c10d, unbox_reduce_op
from virtual_gpus.constants import all_reduce_constants, gathered_constants
from virtual_gpus.ops.table import NAMESPACE_HANDLERS, Op
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
from virtual_gpus.ranks.work import Call

REDUCTIONS = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM, ReduceOp.MIN, ReduceOp.PRODUCT


def collective(op: Op, args: tuple, kwargs: dict) -> Any:
    """An operation of c10d on virtual tensors: a handler of `dispatch`."""
    resolved = [group_of(arg) if is_group(arg) else arg for arg in args]
    group = next(arg for arg in resolved if isinstance(arg, Group))
    if isinstance(group, GlooGroup):
        return gloo_backend.issue(group, op.func, args)
    return COLLECTIVES[op.func.overloadpacket.__name__](*resolved, **kwargs)


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


def exchange(
    group: Group, name: str, detail: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **options: Any
) -> ScriptObject:
    """inputs[i] of each rank goes to rank i, and outputs[i] comes from it. `options`: of `Group.collective`."""
    sizes = [x.nbytes for x in outputs]

    def fn(gloo, inputs):
        return all_to_all(gloo, name, inputs, sizes)

    return group.collective(name, detail, inputs, outputs, fn, **options)


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

    def fn(gloo, inputs):
        buffers = inputs or [torch.empty_like(x)]
        (gloo.send if sends else gloo.recv)(buffers, 1 - gloo.rank(), 0).wait()
        return [] if sends else buffers

    gpus = topology.gpus_of(ranks)
    at_once = topology.concurrent_groups(gpus)
    seconds = collective_seconds("send", len(x), (gpus[source], gpus[target]), topology, at_once)
    fingerprint = f"message of {type_name(tensors[0].dtype)}{sizes_of(tensors)}"
    call = Call("send" if sends else "recv", fingerprint, len(x), seconds, tensors, lambda c, i: c.get(ranks[source]))
    transfer = Transfer(fn, [x], []) if sends else Transfer(fn, [], [x])
    return group.coalesce(group.channel(gpu, source, target).issue(call, transfer)).boxed()


# The operations of c10d, as its schemas say: of each, the arguments after those named here are not looked at. They are
# how long to wait, and whether the caller does. A Work is boxed, for C++.

Tensors: TypeAlias = list[Tensor]
Work: TypeAlias = ScriptObject


def allreduce_(tensors: Tensors, group: Group, op: ScriptObject, *options: Any) -> tuple[Tensors, Work]:
    return tensors, allreduce_coalesced_(tensors, group, op)


def allreduce_coalesced_(tensors: Tensors, group: Group, op: ScriptObject, *options: Any) -> Work:
    reduction = reduction_of(op, tensors[0].dtype)

    def fn(gloo, inputs):
        return [all_reduce(gloo, reduction, x) for x in inputs]

    def combine(constants, i):
        return all_reduce_constants(reduction.op.name, len(group), constants)

    sizes = sizes_of(tensors)
    return group.collective("all_reduce", sizes, tensors, tensors, fn, reduction=reduction, combine=combine)


def broadcast_(tensors: Tensors, group: Group, root: int, *options: Any) -> tuple[Tensors, Work]:
    from_root = c10d.BroadcastOptions()
    from_root.rootRank, source = root, group.members.ranks[root]

    def fn(gloo, inputs):
        gloo.broadcast(inputs, from_root).wait()
        return inputs

    detail = f"{sizes_of(tensors)} from rank {root}"
    return tensors, group.collective(
        "broadcast", detail, tensors, tensors, fn, combine=lambda constants, i: constants.get(source)
    )


def reduce_(tensors: Tensors, group: Group, op: ScriptObject, root: int, *options: Any) -> Work:
    """Only the root's tensor is written to; the others get the sum, too, and drop it."""
    reduction, at_root = reduction_of(op, tensors[0].dtype), group.members.rank == root

    def fn(gloo, inputs):
        return [all_reduce(gloo, reduction, x) for x in inputs][: int(at_root)]

    detail, outputs = f"{sizes_of(tensors)} to rank {root}", tensors if at_root else []
    return group.collective("reduce", detail, tensors, outputs, fn, result=tensors, reduction=reduction)


def allgather_(outputs: list[Tensors], tensors: Tensors, group: Group, *options: Any) -> tuple[list[Tensors], Work]:
    """tensors: [(n, ...)], outputs: [[(n, ...) of each rank]]. Tensors of other sizes on other ranks, which NCCL
    broadcasts one by one, are sent to each rank."""
    [x], [results] = tensors, outputs
    if len(results) != len(group):
        raise ValueError("Tensor list input to scatter/gather must match number of collective participants")
    sizes = [y.nbytes for y in results]
    even = all(size == x.nbytes for size in sizes)

    def fn(gloo, inputs):
        if even:
            return all_gather(gloo, *inputs).view(len(group), len(inputs[0])).unbind()
        return all_to_all(gloo, "all_gather", inputs * len(group), sizes)

    def combine(given, i):
        return gathered_constants(results[i].shape, group.members.ranks[i : i + 1], given, 0)

    detail = sizes_of(tensors) if even else f"{sizes_of(results)} in all"
    return outputs, group.collective("all_gather", detail, tensors, results, fn, result=outputs, combine=combine)


def _allgather_base_(output: Tensor, tensor: Tensor, group: Group, *options: Any) -> tuple[Tensor, Work]:
    """tensor: (n, ...), output: (ranks * n, ...)."""
    return output, allgather_into_tensor_coalesced_([output], [tensor], group)


def allgather_into_tensor_coalesced_(outputs: Tensors, tensors: Tensors, group: Group, *options: Any) -> Work:
    for output, x in zip(outputs, tensors, strict=True):
        if output.dtype != x.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if output.numel() != x.numel() * len(group):
            raise ValueError("output tensor size must be equal to world_size times input tensor size")

    def fn(gloo, inputs):
        return [all_gather(gloo, x) for x in inputs]

    def combine(given, i):
        return gathered_constants(outputs[i].shape, group.members.ranks, given, i)

    return group.collective("all_gather", sizes_of(tensors), tensors, outputs, fn, combine=combine)


def reduce_scatter_(
    outputs: Tensors, tensors: list[Tensors], group: Group, op: ScriptObject, *options: Any
) -> tuple[Tensors, Work]:
    """tensors: [[(n, ...) for each rank]], outputs: [(n, ...)]."""
    [result], [parts] = outputs, tensors
    if len(parts) != len(group):
        raise ValueError("Tensor list input to scatter/gather must match number of collective participants")
    reduction, sizes = reduction_of(op, result.dtype), [x.numel() for x in parts]
    even = all(size == result.numel() for size in sizes)

    def fn(gloo, inputs):
        x = torch.cat(inputs)
        if even:
            return [reduce_scatter(gloo, reduction, x)]
        return [all_reduce(gloo, reduction, x).split(sizes)[gloo.rank()]]

    return outputs, group.collective("reduce_scatter", sizes_of(parts), parts, outputs, fn, reduction=reduction)


def _reduce_scatter_base_(
    output: Tensor, tensor: Tensor, group: Group, op: ScriptObject, *options: Any
) -> tuple[Tensor, Work]:
    """tensor: (ranks * n, ...), output: (n, ...)."""
    return output, reduce_scatter_tensor_coalesced_([output], [tensor], group, op)


def reduce_scatter_tensor_coalesced_(
    outputs: Tensors, tensors: Tensors, group: Group, op: ScriptObject, *options: Any
) -> Work:
    for output, x in zip(outputs, tensors, strict=True):
        if output.dtype != x.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if x.numel() != output.numel() * len(group):
            raise ValueError("input tensor must be the same size as output size times world size")
    reduction = reduction_of(op, tensors[0].dtype)

    def fn(gloo, inputs):
        return [reduce_scatter(gloo, reduction, x) for x in inputs]

    return group.collective("reduce_scatter", sizes_of(tensors), tensors, outputs, fn, reduction=reduction)


def alltoall_(outputs: Tensors, tensors: Tensors, group: Group, *options: Any) -> tuple[Tensors, Work]:
    """tensors: [(n, ...) for each rank], outputs: [(n, ...) of each rank]."""
    if not len(outputs) == len(tensors) == len(group):
        raise ValueError("Number of tensor lists must match the number of ranks")
    return outputs, exchange(group, "all_to_all", "", tensors, outputs)


def alltoall_base_(
    output: Tensor, tensor: Tensor, group: Group, output_splits: list[int], input_splits: list[int], *options: Any
) -> Work:
    """tensor: (sum(input_splits), ...), output: (sum(output_splits), ...); no splits: equal ones."""
    inputs, outputs = split(tensor, input_splits, len(group)), split(output, output_splits, len(group))
    return exchange(group, "all_to_all", "", inputs, outputs, result=[output], parts_of=[output, tensor])


def gather_(outputs: list[Tensors], tensors: Tensors, group: Group, root: int, *options: Any) -> Work:
    at_root, nothing = group.members.rank == root, tensors[0][:0]
    if len(tensors) != 1 or (at_root and len(outputs[0]) != len(group)):
        raise ValueError(f"Incorrect output list size {len(outputs[0])}. Output list size should be {len(group)}")
    results = outputs[0] if at_root else [nothing] * len(group)
    inputs = [tensors[0] if rank == root else nothing for rank in range(len(group))]
    return exchange(group, "gather", f" to rank {root}", inputs, results, result=outputs)


def gather_into_tensor_(output: Tensor, tensor: Tensor, group: Group, root: int, *options: Any) -> tuple[Tensor, Work]:
    parts = [*output.chunk(len(group))] if group.members.rank == root else []
    return output, gather_([parts], [tensor], group, root)


def scatter_(outputs: Tensors, tensors: list[Tensors], group: Group, root: int, *options: Any) -> tuple[Tensors, Work]:
    at_root, nothing = group.members.rank == root, outputs[0][:0]
    if at_root and len(tensors[0]) != len(group):
        raise ValueError(f"Incorrect input list size {len(tensors[0])}. Input list size should be {len(group)}")
    results = [outputs[0] if rank == root else nothing for rank in range(len(group))]
    inputs = tensors[0] if at_root else [nothing] * len(group)
    return outputs, exchange(group, "scatter", f" from rank {root}", inputs, results, result=outputs)


def send(tensors: Tensors, group: Group, target: int, tag: int) -> Work:
    """`tag` is not looked at, as with NCCL."""
    return point_to_point(tensors, group, target, sends=True)


def recv_(tensors: Tensors, group: Group, source: int, tag: int) -> Work:
    return point_to_point(tensors, group, source, sends=False)


def recv_any_source_(tensors: Tensors, group: Group, tag: int) -> Work:
    raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")


def barrier(tensor: Tensor, group: Group, *options: Any) -> Work:
    return group.collective("barrier", "", [], [], lambda gloo, inputs: [], parts_of=[tensor])


COLLECTIVES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(allreduce_, allreduce_coalesced_, broadcast_, reduce_, allgather_, _allgather_base_),
        *(allgather_into_tensor_coalesced_, reduce_scatter_, _reduce_scatter_base_, reduce_scatter_tensor_coalesced_),
        *(alltoall_, alltoall_base_, gather_, gather_into_tensor_, scatter_, send, recv_, recv_any_source_, barrier),
    )
}
NAMESPACE_HANDLERS["c10d"] = collective
