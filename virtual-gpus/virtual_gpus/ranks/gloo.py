"""torch.distributed's backend "gloo" with tensors on virtual GPUs.

Real gloo copies them to the host's memory, does there what it does for tensors on the CPU, and copies the results back;
the program waits for that. So here PyTorch's own gloo gets copies of them, and only the time is modelled.
"""

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_map_only

from virtual_gpus.clock.costs import link_seconds
from virtual_gpus.ranks.communicator import Communicator, NcclWork, Transfer
from virtual_gpus.tensors.tensor import VirtualTensor
from virtual_gpus.tree import tensors_in

# What ProcessGroupGloo.cpp does for CUDA. It makes a scattered reduction of a whole one.
TWICE = "allreduce_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"
ALIKE = "allreduce_", "broadcast_", "reduce_"  # all ranks have tensors of one size
OFFERED = {
    *(*TWICE, *ALIKE, "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_", "alltoall_base_"),
    *("gather_", "gather_into_tensor_", "scatter_"),
}
# Assumed, as nobody has published them: bytes per second of a TCP connection within a computer, and a message's latency
LOOPBACK, LATENCY = 3e9, 50e-6


class GlooWork(NcclWork):
    """The host waits for it, and not a stream."""

    def wait(self, *timeout):
        super().wait(*timeout)
        self.communicator.gpu.clock.wait(self.communicator.gpu, self.end)
        return True


class GlooCommunicator(Communicator):
    Work, exclusive = GlooWork, False  # ranks may share a GPU

    def connect(self):
        """The values travel by a process group, in which PyTorch's operations find gloo."""
        records, values = super().connect()
        group = dist.ProcessGroup(dist.HashStore(), values.rank(), values.size())
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, values)
        return records, group


def call(group, func, args):
    """An operation `func` of c10d on tensors of which some are on virtual GPUs, in a Group of gloo's."""
    name, tensors, written = func.overloadpacket.__name__, list(tensors_in(args)), list(tensors_in([args[0]]))
    gpu = check(name, tensors)
    outputs = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
    place = [argument.name for argument in func._schema.arguments].index("process_group")

    def move(gloo, sent):
        copies = {x: flat.as_strided(x.size(), x.stride()) for x, flat in zip(tensors, sent, strict=True)}
        given = tree_map_only(torch.Tensor, copies.__getitem__, list(args))
        given[place] = gloo.boxed()
        result = func(*given)
        c10d.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        return [in_a_row(copies[x]) for x in written]

    transfer = Transfer(move, [in_a_row(x.inner) for x in tensors], [in_a_row(x.inner) for x in written])
    what = f"{name.strip('_')} of {str(tensors[0].dtype).removeprefix('torch.')}, with gloo"
    what += f", {[x.numel() for x in tensors]}" if name in ALIKE else ""
    nbytes = max(sum(x.nbytes for x in each) for each in (written, tensors_in(args[1:])))
    seconds = gloo_seconds(name, nbytes, group, gpu.machine.topology)
    work = group.communicator(gpu).issue(name.strip("_"), what, nbytes, seconds, transfer, outputs)
    return (args[0], work.boxed()) if len(func._schema.returns) == 2 else work.boxed()


def check(name, tensors):
    """The GPU that all `tensors` are on; an error for what gloo does not do with them."""
    if name not in OFFERED:
        name = name.strip("_")
        raise RuntimeError(f"gloo has no {name} for tensors on a GPU: copy them to the CPU first, or use nccl")
    for tensor in tensors:
        if not isinstance(tensor, VirtualTensor) or tensor.gpu is not tensors[0].gpu:
            raise ValueError("ProcessGroupGloo: tensors need to be on the same device")
    return tensors[0].gpu


def in_a_row(tensor):
    """The numbers of a tensor that has no gaps, as they lie in memory: a view."""
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise ValueError("virtual GPUs give gloo only tensors whose numbers lie in memory without gaps: .contiguous()")
    return tensor.as_strided((tensor.numel(),), (1,))


def gloo_seconds(name, nbytes, group, topology):
    """Seconds from when the GPUs could begin to when they have the results, an estimate: to pinned memory of the host,
    around a ring over TCP, for a sum twice, and back."""
    gpus = topology.gpus_of(group.members.ranks)
    steps = (len(gpus) - 1) * (2 if name in TWICE else 1)
    network = len({topology.node(gpu) for gpu in gpus}) > 1
    rate = min(LOOPBACK, topology.network.bandwidth) if network else LOOPBACK
    around = steps * (LATENCY + nbytes / len(gpus) / rate)
    return 2 * link_seconds(nbytes, topology.pcie, "pinned") + around
