"""What torch.distributed's operations do on virtual GPUs: "nccl" made of gloo.

PyTorch calls them by way of its dispatcher, as operations of the namespace c10d, from Python and from C++. Here each of
them becomes an operation of a `Communicator`: what moves the values, on the memory of virtual GPUs, and how long it
takes. What a tensor must be like, and the words for what is not, are NCCL's and those of PyTorch's ProcessGroupNCCL.
"""

import contextlib
import functools

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import DistBackendError, ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from virtual_gpus.clock.nccl import collective_seconds
from virtual_gpus.compat import unbox_reduce_op
from virtual_gpus.constants import reduced
from virtual_gpus.ranks import gloo
from virtual_gpus.ranks.communicator import Channel, Communicator, Peers, Transfer
from virtual_gpus.ranks.gloo import GlooCommunicator
from virtual_gpus.tensors.dispatch import NAMESPACES
from virtual_gpus.tensors.tensor import VirtualTensor, is_virtual, wrap
from virtual_gpus.tree import tensors_in

NUMBERS = {getattr(torch, name) for name in "float64 float32 float16 bfloat16 int64 int32 int8 uint8 bool".split()}
NCCL_TYPES = NUMBERS | {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
SUM, AVG, MAX, PREMUL_SUM = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM
REDUCTIONS = SUM, AVG, MAX, PREMUL_SUM, ReduceOp.MIN, ReduceOp.PRODUCT
FLYING = {}  # results of functional collectives that nobody has waited for, by their storage
GROUPS = {}  # the groups whose ranks have virtual GPUs, by the name of their process group


class Group:
    """A process group of PyTorch's, by its name there, whose ranks have virtual GPUs."""

    Communicator = Communicator

    def __init__(self, members, name):
        self.members, self.group_name, self.name = members, name, f"group {name}"
        self.communicators = {}  # by the number of this rank's GPU: usually one
        self.pairs, self.channels = {}, {}  # by ranks in the group
        self.coalesced = None  # the works of a block that coalesces them, while it is open

    def __len__(self):
        return len(self.members.ranks)

    def communicator(self, gpu):
        """All ranks of the group, this one with `gpu`."""
        if gpu.index not in self.communicators:
            members = self.members.under(f"communicator {len(self.communicators)}")
            self.communicators[gpu.index] = self.Communicator(gpu, members, self.name, self.row)
            gpu.communicators.append(self.communicators[gpu.index])
        return self.communicators[gpu.index]

    @property
    def row(self):
        """The row of its operations in a timeline: groups that the program has named, as meshes do, have their own."""
        named = c10d._resolve_process_group(self.group_name).group_desc.removeprefix("mesh_")
        return "collective" if named in ("default_pg", "undefined", "") else f"collective, {named}"

    def channel(self, gpu, source, target):
        """From rank `source` of the group to `target`, one of which is this one."""
        if source == target:
            raise ValueError("Invalid point-to-point operation: a rank can't send to itself")
        if (source, target) not in self.channels:
            ends = min(source, target), max(source, target)
            if ends not in self.pairs:
                self.pairs[ends] = Peers(self.members.subset(ends), f"{self.name}, ranks {ends[0]} and {ends[1]}")
            channel = Channel(gpu, self.pairs[ends], ends.index(source))
            self.channels[source, target] = channel
            gpu.communicators.append(channel)
        return self.channels[source, target]

    def close(self, seconds=None):
        """All that was begun is done, and the communicators' threads end."""
        for communicator in (*self.communicators.values(), *self.channels.values()):
            communicator.close(seconds)
        for pair in self.pairs.values():
            pair.close()

    def issue(self, name, tensors, nbytes, transfer, outputs, what="", combine=None):
        """An operation of all ranks with these `tensors`; `what` they have to agree in beside its name and type."""
        gpu = checked(tensors)
        communicator, topology = self.communicator(gpu), gpu.machine.topology
        gpus = topology.gpus_of(self.members.ranks)
        seconds = collective_seconds(name, nbytes, gpus, topology, topology.concurrent_groups(gpus))
        what = f"{name} of {type_name(tensors[0].dtype)}{what}"
        return self.entered(communicator.issue(name, what, nbytes, seconds, transfer, outputs, combine))

    def entered(self, work):
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work


class GlooGroup(Group):
    """The same with gloo."""

    Communicator = GlooCommunicator


def collective(rule, func, args, kwargs):
    """An operation of c10d on virtual tensors: a handler of `dispatch`."""
    group = next(group_of(arg) for arg in args if is_group(arg))
    if isinstance(group, GlooGroup):
        return gloo.call(group, func, args)
    return COLLECTIVES[func.overloadpacket.__name__](*args, **kwargs)


def functional(rule, func, args, kwargs):
    """A functional collective: PyTorch's own, in C++, calls those of c10d, with tensors that it makes for them.

    It notes which storage a work writes to. Views of a virtual tensor have others, so it is asked with the first.
    """
    with on_the_gpu_of(tensors_in(args), allocated=None):
        if func.overloadpacket.__name__.startswith("wait_tensor"):
            for tensor in tensors_in(args):
                wait_for(tensor)
            return args[0]
        out = func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    FLYING.update({tensor.untyped_storage()._cdata: tensor for tensor in tensors_in([out]) if is_virtual(tensor)})
    return out


def made_of_collectives(rule, func, args, kwargs):
    """What DTensor does in C++: PyTorch's own, which waits for the collectives that it calls."""
    with on_the_gpu_of(tensors_in(args), allocated=None):
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def wait_for(tensor):
    first = FLYING.pop(tensor.untyped_storage()._cdata, None)
    if first is not None:
        torch.ops._c10d_functional.wait_tensor.default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, first)


class OnTheGPU(TorchDispatchMode):
    """Inside, what C++ takes for its own use on the device of its tensors, which it sees on the CPU, is on the GPU.

    That is each `torch.empty` of one of the types `allocated` (None: of any), and what it communicates.
    """

    def __init__(self, gpu, allocated):
        super().__init__()
        self.gpu, self.allocated = gpu, allocated

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and self.allocates(kwargs.get("dtype")):
            return wrap(func(*args, **kwargs | {"device": self.gpu.backing}), self.gpu)
        if func.namespace == "c10d":
            args = tree_map_only(Tensor, self.on_the_gpu, args)
        out = func(*args, **kwargs)
        if func.is_view and is_virtual(out):
            torch._functionalize_unsafe_set(out, args[0])  # C++ compares storages, to see what is a view of what
        return out

    def allocates(self, dtype):
        return self.allocated is None or (dtype or torch.get_default_dtype()) in self.allocated

    def on_the_gpu(self, tensor):
        return tensor if is_virtual(tensor) else wrap(tensor, self.gpu)


def on_the_gpu_of(tensors, allocated=()):
    """OnTheGPU for these, if they are on one."""
    gpu = next((tensor.gpu for tensor in tensors if is_virtual(tensor)), None)
    return contextlib.nullcontext() if gpu is None else OnTheGPU(gpu, allocated)


def is_group(argument):
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def group_of(script_object):
    process_group = c10d.ProcessGroup.unbox(script_object)
    group = GROUPS.get(process_group.group_name)
    if group is None or all(device.type != "cuda" for device in process_group._device_types):
        raise RuntimeError("No backend type associated with device type cuda")
    return group


def checked(tensors):
    """The GPU that all `tensors` are on; the errors of ProcessGroupNCCL for tensors that it does not take."""
    for tensor in tensors:
        if not isinstance(tensor, VirtualTensor):
            raise ValueError("Tensors must be CUDA and dense")
        if tensor.dtype not in NCCL_TYPES:
            kind = tensor.type().rpartition(".")[2].removesuffix("Tensor")
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {kind}")
        if tensor.gpu is not tensors[0].gpu:
            raise ValueError("Expected list of tensors on the same device")
    return tensors[0].gpu


def flat_numbers(tensor):
    """The numbers of `tensor` in a row, as they lie in memory: a view."""
    inner = tensor.inner
    if not (
        inner.is_contiguous() or any(inner.is_contiguous(memory_format=f) for f in CHANNELS_LAST.get(inner.dim(), []))
    ):
        raise ValueError("Tensors must be contiguous")
    return inner.as_strided((inner.numel(),), (1,))


CHANNELS_LAST = {4: [torch.channels_last], 5: [torch.channels_last_3d]}


def flat_bytes(tensor):
    """The bytes of `tensor`, as they lie in memory: a view."""
    return flat_numbers(tensor).view(torch.uint8)


# Reductions


def reduction_of(script_object, dtype):
    """(op, factor) of a reduction of numbers of type `dtype`; PyTorch's error for what NCCL does not do."""
    reduction = unbox_reduce_op(script_object)
    op = next((op for op in REDUCTIONS if reduction.op == op), None)
    if op is None:
        raise ValueError(f"Cannot use ReduceOp.{str(reduction.op).rpartition('.')[2]} with NCCL")
    if dtype in NCCL_TYPES - NUMBERS:
        raise TypeError(f"virtual GPUs can't reduce {dtype}: convert first")
    if dtype is torch.bool and op == ReduceOp.AVG:
        raise ValueError("Cannot use ReduceOp.AVG with Boolean inputs")
    return op, reduction.factor if op == ReduceOp.PREMUL_SUM else None


def reduce(reduction, call, options, values, result, size):
    """`call(result, values, options)` of gloo, over `size` ranks, gives `result`. What goes in may be written to."""
    op, factor = reduction
    given = result
    if values.dtype is torch.bool:  # which NCCL takes for bytes, and their sum for the largest
        values, result, op = values.view(torch.uint8), result.view(torch.uint8), MAX if op == SUM else op
    if op == PREMUL_SUM:
        values.mul_(factor)
    options.reduceOp = SUM if op in (AVG, PREMUL_SUM) else op
    call(result, values, options).wait()
    if op == AVG:
        result.copy_(result.div(size, rounding_mode=None if result.is_floating_point() else "trunc"))
    return given


def all_reduce(gloo, reduction, values):
    """In place."""
    options = c10d.AllreduceOptions()
    return reduce(reduction, lambda out, x, o: gloo.allreduce([x], o), options, values, values, gloo.size())


def reduce_scatter(gloo, reduction, values):
    options, result = c10d.ReduceScatterOptions(), values.new_empty(len(values) // gloo.size())
    return reduce(reduction, gloo._reduce_scatter_base, options, values, result, gloo.size())


def all_gather(gloo, x):
    result = x.new_empty(len(x) * gloo.size())
    gloo._allgather_base(result, x, c10d.AllgatherOptions()).wait()
    return result


def all_to_all(gloo, name, parts, sizes):
    """Part i of this rank's bytes goes to rank i, from which it gets sizes[i] bytes: a list, one for each rank."""
    check_sizes(gloo, name, [len(x) for x in parts], sizes)
    sent, received = torch.cat(parts), torch.empty(sum(sizes), dtype=torch.uint8)
    gloo.alltoall_base(received, sent, sizes, [len(x) for x in parts], c10d.AllToAllOptions()).wait()
    return received.split(sizes)


def check_sizes(gloo, name, sent, expected):
    """An error, on all ranks, where one expects other bytes than another sends."""
    said = torch.empty(gloo.size(), 2, gloo.size(), dtype=torch.long)
    gloo._allgather_base(said.view(-1), torch.tensor([*sent, *expected]), c10d.AllgatherOptions()).wait()
    sends, expects = said[:, 0], said[:, 1].T  # both from rank i to rank j
    for source, target in (sends != expects).nonzero().tolist():
        raise DistBackendError(
            f"{name}: rank {source} sends {sends[source, target]} bytes to rank {target}, which expects "
            f"{expects[source, target]}; NCCL would hang, or mix values up (ranks are those of the group)"
        )


# The operations of c10d. Their arguments are those of its schemas; what they return is, too.


def allreduce_(tensors, group, op, sparse_indices=None, async_op=True, timeout=-1):
    work = allreduce_coalesced_(tensors, group, op)
    return tensors, work


def allreduce_coalesced_(tensors, group, op, async_op=True, timeout=-1):
    reduction, values = reduction_of(op, tensors[0].dtype), [flat_numbers(x) for x in tensors]

    transfer = Transfer(lambda gloo, sent: [all_reduce(gloo, reduction, x) for x in sent], values, values)
    group, what = group_of(group), f"{[len(x) for x in values]}, {reduction[0].name}"
    combine = functools.partial(reduced, reduction[0].name, len(group))
    return group.issue("all_reduce", tensors, size_of(tensors), transfer, tensors, what, combine).boxed()


def broadcast_(tensors, group, root, root_tensor, async_op=True, timeout=-1):
    values, options = [flat_bytes(x) for x in tensors], c10d.BroadcastOptions()
    options.rootRank = root

    def move(gloo, sent):
        gloo.broadcast(sent, options).wait()
        return sent

    transfer = Transfer(move, values, values)
    group, what = group_of(group), f"{sizes_of(tensors)} from rank {root}"
    source = group.members.ranks[root]
    work = group.issue("broadcast", tensors, size_of(tensors), transfer, tensors, what, lambda said: said.get(source))
    return tensors, work.boxed()


def reduce_(tensors, group, op, root, root_tensor, async_op=True, timeout=-1):
    group, [values] = group_of(group), [flat_numbers(x) for x in tensors]
    reduction = reduction_of(op, values.dtype)

    def move(gloo, sent):
        result = all_reduce(gloo, reduction, *sent)
        return [result] if at_root else []

    at_root = group.members.rank == root
    transfer = Transfer(move, [values], [values] if at_root else [])
    what = f"{sizes_of(tensors)} to rank {root}, {reduction[0].name}"
    return group.issue("reduce", tensors, size_of(tensors), transfer, tensors, what).boxed()


def allgather_(outputs, tensors, group, async_op=True, timeout=-1):
    group, [x], [results] = group_of(group), [flat_bytes(x) for x in tensors], outputs
    if len(results) != len(group):
        raise ValueError("Tensor list input to scatter/gather must match number of collective participants")
    parts = [flat_bytes(result) for result in results]
    even = all(len(part) == len(x) for part in parts)

    def move(gloo, sent):
        if even:
            return all_gather(gloo, *sent).view(len(group), len(x)).unbind()
        return all_to_all(gloo, "all_gather", sent * len(group), [len(part) for part in parts])

    transfer = Transfer(move, [x], parts)
    what = sizes_of(tensors) if even else f"{sizes_of(results)} in all"
    return outputs, group.issue("all_gather", [*tensors, *results], size_of(results), transfer, outputs, what).boxed()


def _allgather_base_(output, tensor, group, async_op=True, timeout=-1):
    return output, allgather_into_tensor_coalesced_([output], [tensor], group)


def allgather_into_tensor_coalesced_(outputs, tensors, group, async_op=True):
    group = group_of(group)
    for output, x in zip(outputs, tensors, strict=True):
        if output.dtype != x.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if output.numel() != x.numel() * len(group):
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
    reads, writes = [flat_bytes(x) for x in tensors], [flat_bytes(output) for output in outputs]
    transfer = Transfer(lambda gloo, sent: [all_gather(gloo, x) for x in sent], reads, writes)
    given = [*tensors, *outputs]
    return group.issue("all_gather", given, size_of(outputs), transfer, outputs, sizes_of(tensors)).boxed()


def reduce_scatter_(outputs, tensors, group, op, async_op=True, timeout=-1):
    group, [result], [parts] = group_of(group), [flat_numbers(x) for x in outputs], tensors
    if len(parts) != len(group):
        raise ValueError("Tensor list input to scatter/gather must match number of collective participants")
    reduction, parts = reduction_of(op, result.dtype), [flat_numbers(part) for part in parts]
    even = all(len(part) == len(result) for part in parts)

    def move(gloo, sent):
        values = torch.cat(sent)
        if even:
            return [reduce_scatter(gloo, reduction, values)]
        return [all_reduce(gloo, reduction, values).split([len(part) for part in parts])[gloo.rank()]]

    transfer = Transfer(move, parts, [result])
    given, what = [*outputs, *tensors[0]], f"{sizes_of(tensors[0])}, {reduction[0].name}"
    return outputs, group.issue("reduce_scatter", given, size_of(tensors[0]), transfer, outputs, what).boxed()


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
    reads, writes = [flat_numbers(x) for x in tensors], [flat_numbers(output) for output in outputs]
    transfer = Transfer(lambda gloo, sent: [reduce_scatter(gloo, reduction, x) for x in sent], reads, writes)
    given, what = [*tensors, *outputs], f"{sizes_of(tensors)}, {reduction[0].name}"
    return group.issue("reduce_scatter", given, size_of(tensors), transfer, outputs, what).boxed()


def alltoall_(outputs, tensors, group, async_op=True, timeout=-1):
    group = group_of(group)
    if not len(outputs) == len(tensors) == len(group):
        raise ValueError("Number of tensor lists must match the number of ranks")
    return outputs, exchange(group, "all_to_all", outputs, tensors, outputs)


def alltoall_base_(output, tensor, group, output_splits, input_splits, async_op=True, timeout=-1):
    group = group_of(group)
    results, parts = split(output, output_splits, len(group)), split(tensor, input_splits, len(group))
    return exchange(group, "all_to_all", results, parts, [output], [output, tensor])


def gather_(outputs, tensors, group, root, async_op=True, timeout=-1):
    group, nothing = group_of(group), tensors[0][:0]
    at_root = group.members.rank == root
    if len(tensors) != 1 or (at_root and len(outputs[0]) != len(group)):
        raise ValueError(f"Incorrect output list size {len(outputs[0])}. Output list size should be {len(group)}")
    results = outputs[0] if at_root else [nothing] * len(group)
    parts = [tensors[0] if rank == root else nothing for rank in range(len(group))]
    return exchange(group, "gather", results, parts, outputs, what=f" to rank {root}")


def gather_into_tensor_(output, tensor, group, root, async_op=True, timeout=-1):
    parts = [*output.chunk(len(group_of(group)))] if group_of(group).members.rank == root else []
    return output, gather_([parts], [tensor], group, root)


def scatter_(outputs, tensors, group, root, async_op=True, timeout=-1):
    group, nothing = group_of(group), outputs[0][:0]
    at_root = group.members.rank == root
    if at_root and len(tensors[0]) != len(group):
        raise ValueError(f"Incorrect input list size {len(tensors[0])}. Input list size should be {len(group)}")
    results = [outputs[0] if rank == root else nothing for rank in range(len(group))]
    parts = tensors[0] if at_root else [nothing] * len(group)
    return outputs, exchange(group, "scatter", results, parts, outputs, what=f" from rank {root}")


def send(tensors, group, target, tag):
    """`tag` is not looked at, as with NCCL."""
    return point_to_point(tensors, group_of(group), True, target)


def recv_(tensors, group, source, tag):
    return point_to_point(tensors, group_of(group), False, source)


def recv_any_source_(tensors, group, tag):
    raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")


def barrier(tensor, group, device_ids, async_op=True, timeout=-1):
    return group_of(group).issue("barrier", [tensor], 0, Transfer(lambda gloo, sent: []), []).boxed()


COLLECTIVES = {
    function.__name__: function
    for function in (
        *(allreduce_, allreduce_coalesced_, broadcast_, reduce_, allgather_, _allgather_base_),
        *(allgather_into_tensor_coalesced_, reduce_scatter_, _reduce_scatter_base_, reduce_scatter_tensor_coalesced_),
        *(alltoall_, alltoall_base_, gather_, gather_into_tensor_, scatter_, send, recv_, recv_any_source_, barrier),
    )
}


# What they share


def exchange(group, name, results, parts, outputs, given=None, what=""):
    """Part i of each rank goes to rank i."""
    given = [*results, *parts] if given is None else given
    results, parts = [flat_bytes(x) for x in results], [flat_bytes(x) for x in parts]
    nbytes = max(sum(map(len, results)), sum(map(len, parts)))
    sizes = [len(x) for x in results]
    transfer = Transfer(lambda gloo, sent: all_to_all(gloo, name, sent, sizes), parts, results)
    return group.issue(name, given, nbytes, transfer, outputs, what).boxed()


def split(tensor, sizes, n):
    """`tensor` in `n` parts of these `sizes` along its first dimension; none: of equal sizes."""
    if not sizes and len(tensor) % n:
        raise ValueError("Tensor's dim 0 does not divide equally across group size")
    if sizes and sum(sizes) != len(tensor):
        raise ValueError("Split sizes doesn't match total dim 0 size")
    flat_numbers(tensor)  # it must be contiguous
    return tensor.split(sizes or len(tensor) // n) if len(tensor) else [tensor] * n


def point_to_point(tensors, group, sends, other):
    """A message from or to rank `other`."""
    [x], gpu = [flat_bytes(x) for x in tensors], checked(tensors)
    source, target = (group.members.rank, other) if sends else (other, group.members.rank)
    if gpu.machine.rendezvous is not None:
        gpu.machine.rendezvous.need([group.members.ranks[source], group.members.ranks[target]], group.members.ranks)
    channel = group.channel(gpu, source, target)

    def move(gloo, sent):
        buffers = sent or [torch.empty_like(x)]
        (gloo.send if sends else gloo.recv)(buffers, 1 - gloo.rank(), channel.direction).wait()
        return [] if sends else buffers

    transfer = Transfer(move, [x], []) if sends else Transfer(move, [], [x])
    topology = gpu.machine.topology
    gpus = topology.gpus_of(group.members.ranks)
    ends = gpus[source], gpus[target]
    seconds = collective_seconds("send", len(x), ends, topology, topology.concurrent_groups(gpus))
    what = f"message of {type_name(tensors[0].dtype)}{sizes_of(tensors)}"
    name, sender = "send" if sends else "recv", group.members.ranks[source]
    work = channel.issue(name, what, len(x), seconds, transfer, tensors, lambda said: said.get(sender))
    return group.entered(work).boxed()


def type_name(dtype):
    return str(dtype).removeprefix("torch.")


def sizes_of(tensors):
    return str([x.numel() for x in tensors])


def size_of(tensors):
    """Bytes of all `tensors`."""
    return sum(x.nbytes for x in tensors)


NAMESPACES.update({"c10d": collective, "_c10d_functional": functional, "_dtensor": made_of_collectives})
