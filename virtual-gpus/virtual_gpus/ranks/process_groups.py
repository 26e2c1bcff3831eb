"""The process groups whose ranks have virtual GPUs. What they are called and who belongs to them is PyTorch's."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from virtual_gpus.clock.nccl import collective_seconds
from virtual_gpus.compat import c10d, resolve_process_group
from virtual_gpus.constants import constants_now
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.ranks.communicator import Communicator
from virtual_gpus.ranks.gloo_collectives import Reduction
from virtual_gpus.ranks.members import Members
from virtual_gpus.ranks.transfer import Transfer
from virtual_gpus.ranks.work import Call, GlooWork, NcclWork
from virtual_gpus.tensors.tensor import VirtualTensor

REDUCIBLE = {getattr(torch, name) for name in "float64 float32 float16 bfloat16 int64 int32 int8 uint8 bool".split()}
NCCL_TYPES = REDUCIBLE | {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}
CHANNELS_LAST = {4: [torch.channels_last], 5: [torch.channels_last_3d]}
GROUPS: dict[str, "Group"] = {}  # {name of a process group: its Group}


class Group:
    """A process group of PyTorch's with the backend "nccl", by its name there."""

    work_class: type[NcclWork] = NcclWork

    def __init__(self, members: Members, name: str):
        self.members, self.group_name, self.name = members, name, f"group {name}"
        self.communicators: dict[int, Communicator] = {}  # by the index of this rank's GPU: usually one
        self.channels: dict[tuple[int, int], Communicator] = {}  # by sender and receiver
        self.splits: Counter[tuple[int, ...]] = Counter()  # how often some of its ranks have been made a group
        self.coalesced: list[NcclWork] | None = None  # the works of a block that coalesces them, while it is open

    def __len__(self) -> int:
        return len(self.members.ranks)

    def communicator(self, gpu: VirtualGPU) -> Communicator:
        """Of all ranks, this one with `gpu`."""
        if gpu.index not in self.communicators:
            members = self.members.under(f"communicator {len(self.communicators)}")
            made = gpu.machine.communicator_class(gpu, members, self.name, self.row, self.work_class)
            self.communicators[gpu.index] = made
        return self.communicators[gpu.index]

    @property
    def row(self) -> str:
        """The row of its operations in a timeline: groups that the program has named, as meshes do, have their own."""
        named = resolve_process_group(self.group_name).group_desc.removeprefix("mesh_")
        return "collective" if named in ("default_pg", "undefined", "") else f"collective, {named}"

    def channel(self, gpu: VirtualGPU, source: int, target: int) -> Communicator:
        """From rank `source` of the group to rank `target`, one of which is this process."""
        if source == target:
            raise ValueError("Invalid point-to-point operation: a rank can't send to itself")
        if (source, target) not in self.channels:
            ends = min(source, target), max(source, target)
            name, direction = f"{self.name}, ranks {ends[0]} and {ends[1]}", ends.index(source)
            members = self.members.subset(ends).under(f"direction {direction}")
            made = gpu.machine.communicator_class(gpu, members, name, "messages", self.work_class, direction)
            self.channels[source, target] = made
        return self.channels[source, target]

    def close(self, seconds: float | None = None) -> None:
        """Wait for all operations, but for no communicator longer than `seconds`; there will be no more."""
        for communicator in (*self.communicators.values(), *self.channels.values()):
            communicator.close(seconds)

    def collective(
        self,
        name: str,
        detail: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        fn: Callable,
        *,
        result: Any = None,
        reduction: Reduction | None = None,
        combine: Callable | None = None,
        parts_of: Sequence[Tensor] | None = None,
    ) -> torch.ScriptObject:
        """Call a collective of all ranks, which reads `inputs` and writes `outputs`: its Work, as C++ has it.

        detail    what all ranks must agree in beside its name and dtype
        fn        fn(gloo, inputs) returns the values of `outputs`, all of them flat: elements for a `reduction`, which
                  gloo does for each dtype in its own way, or else bytes
        result    what its Work hands out; None: `outputs`
        combine   see `Call`
        parts_of  the tensors that the program has given, if inputs and outputs are parts of them
        """
        view, reduced = (flat_bytes, "") if reduction is None else (flat, f", {reduction.op.name}")
        transfer = Transfer(fn, [view(x) for x in inputs], [view(x) for x in outputs])
        tensors = parts_of or [*inputs, *outputs]
        gpu = check_tensors(tensors)
        topology, nbytes = gpu.machine.topology, max(sum(x.nbytes for x in each) for each in (inputs, outputs))
        gpus = topology.gpus_of(self.members.ranks)
        seconds = collective_seconds(name, nbytes, gpus, topology, topology.concurrent_groups(gpus))
        fingerprint = f"{name} of {type_name(tensors[0].dtype)}{detail}{reduced}"
        given = [constants_now(x.inner) for x in inputs] if name == "all_gather" else None
        call = Call(name, fingerprint, nbytes, seconds, outputs if result is None else result, combine, given)
        return self.coalesce(self.communicator(gpu).issue(call, transfer)).boxed()

    def coalesce(self, work: NcclWork) -> NcclWork:
        """`work`, which is part of the block that coalesces works, if one is open."""
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work


class GlooGroup(Group):
    """The same with the backend "gloo", whose operations `gloo_backend` calls."""

    work_class = GlooWork


def is_group(argument: Any) -> bool:
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def group_of(script_object: torch.ScriptObject) -> Group:
    """The Group of the process group in an operation's arguments."""
    process_group = c10d.ProcessGroup.unbox(script_object)
    group = GROUPS.get(process_group.group_name)
    if group is None or all(device.type != "cuda" for device in process_group._device_types):
        raise RuntimeError("No backend type associated with device type cuda")
    return group


def check_tensors(tensors: Sequence[Tensor]) -> VirtualGPU:
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


def flat(tensor: Tensor) -> Tensor:
    """(elements,): a view of all of the inner tensor, in the order of memory."""
    inner = tensor.inner
    if inner.is_sparse:
        raise ValueError("Tensors must be CUDA and dense")
    formats = torch.contiguous_format, *CHANNELS_LAST.get(inner.dim(), [])
    if not any(inner.is_contiguous(memory_format=f) for f in formats):
        raise ValueError("Tensors must be contiguous")
    return inner.as_strided((inner.numel(),), (1,))


def flat_bytes(tensor: Tensor) -> Tensor:
    """(bytes,): the same of its bytes."""
    return flat(tensor).view(torch.uint8)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
