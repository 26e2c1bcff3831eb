"""torch.distributed's backend "gloo" with tensors on virtual GPUs.

Real gloo copies them to the host's memory, does there what it does for tensors on the CPU, and copies the results back;
the program waits for that. So here PyTorch's own gloo gets copies of them, and only the time is modelled.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from virtual_gpus.clock.costs import link_seconds
from virtual_gpus.clock.topology import Topology
from virtual_gpus.compat import OpOverload, c10d, tree_map_only
from virtual_gpus.gpu import VirtualGPU, check_copy
from virtual_gpus.ranks.members import Members
from virtual_gpus.ranks.process_groups import Group, type_name
from virtual_gpus.ranks.transfer import Transfer
from virtual_gpus.ranks.work import Call
from virtual_gpus.tensors.tensor import VirtualTensor
from virtual_gpus.tree import tensors_in

# What ProcessGroupGloo.cpp does for CUDA. It makes a scattered reduction of a whole one.
ALL_REDUCES = "allreduce_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"
SAME_SIZES = "allreduce_", "broadcast_", "reduce_"  # on all ranks
SUPPORTED = {
    *(*ALL_REDUCES, *SAME_SIZES, "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"),
    *("alltoall_base_", "gather_", "gather_into_tensor_", "scatter_"),
}
# Assumed, as nobody has published them: bytes per second of a TCP connection within a computer, and a message's latency
LOOPBACK, LATENCY = 3e9, 50e-6


def issue(group: Group, func: OpOverload, args: tuple) -> Any:
    """An operation `func` of c10d on tensors of which some are on virtual GPUs."""
    name, tensors, outputs = func.overloadpacket.__name__, list(tensors_in(args)), list(tensors_in([args[0]]))
    gpu = check(name, tensors)
    check_copy(gpu, None, "pageable", False)
    place = [argument.name for argument in func._schema.arguments].index("process_group")

    def fn(gloo, inputs):
        copies = {x: copy.as_strided(x.size(), x.stride()) for x, copy in zip(tensors, inputs, strict=True)}
        given = tree_map_only(Tensor, copies.__getitem__, list(args))
        process_group = dist.ProcessGroup(dist.HashStore(), gloo.rank(), gloo.size())  # where `func` finds gloo
        process_group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        given[place] = process_group.boxed()
        result = func(*given)
        c10d.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        return [flat(copies[x]) for x in outputs]

    nbytes = max(sum(x.nbytes for x in each) for each in (outputs, tensors_in(args[1:])))
    sizes = f", {[x.numel() for x in tensors]}" if name in SAME_SIZES else ""
    fingerprint = f"{name.strip('_')} of {type_name(tensors[0].dtype)}, with gloo{sizes}"
    seconds = gloo_seconds(name, nbytes, group.members, gpu.machine.topology)
    call = Call(name.strip("_"), fingerprint, nbytes, seconds, [args[0]] if isinstance(args[0], Tensor) else args[0])
    transfer = Transfer(fn, [flat(x.inner) for x in tensors], [flat(x.inner) for x in outputs])
    work = group.communicator(gpu).issue(call, transfer)
    return (args[0], work.boxed()) if len(func._schema.returns) == 2 else work.boxed()


def check(name: str, tensors: Sequence[Tensor]) -> VirtualGPU:
    """The GPU that all `tensors` are on; an error for what gloo does not do with them."""
    if name not in SUPPORTED:
        name = name.strip("_")
        raise RuntimeError(f"gloo has no {name} for tensors on a GPU: copy them to the CPU first, or use nccl")
    for tensor in tensors:
        if not isinstance(tensor, VirtualTensor) or tensor.gpu is not tensors[0].gpu:
            raise ValueError("ProcessGroupGloo: tensors need to be on the same device")
        if tensor.is_sparse:
            raise ValueError("virtual GPUs give gloo dense tensors, not sparse ones: to_dense()")
    return tensors[0].gpu


def flat(tensor: Tensor) -> Tensor:
    """(elements,): a view of all of `tensor` in the order of memory, which must have no gaps."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise ValueError("virtual GPUs give gloo only tensors whose numbers lie in memory without gaps: .contiguous()")
    return tensor.as_strided((tensor.numel(),), (1,))


def gloo_seconds(name: str, nbytes: int, members: Members, topology: Topology) -> float:
    """Seconds from when the GPUs could begin to when they have the results, an estimate: to pinned memory of the host,
    around a ring over TCP, for a sum twice, and back."""
    gpus = topology.gpus_of(members.ranks)
    steps = (len(gpus) - 1) * (2 if name in ALL_REDUCES else 1)
    network = len({topology.node(gpu) for gpu in gpus}) > 1
    rate = min(LOOPBACK, topology.network.bandwidth) if network else LOOPBACK
    around = steps * (LATENCY + nbytes / len(gpus) / rate)
    return 2 * link_seconds(nbytes, topology.pcie, "pinned") + around
