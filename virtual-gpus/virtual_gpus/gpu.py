"""One virtual GPU: what it holds, what it runs, what it sends, and its random numbers."""

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from virtual_gpus.clock.clock import name_of
from virtual_gpus.clock.streams import CurrentStream, Stream, current_stream_of
from virtual_gpus.compat import Generator
from virtual_gpus.constants import call_by_values, propagate_constants
from virtual_gpus.errors import GENERATORS, check_waiting, no_cpu_kernel, no_values
from virtual_gpus.memory.ledger import Ledger
from virtual_gpus.meta_cache import cached_call, key_of
from virtual_gpus.ops.device_asserts import is_assert, record_assert

if TYPE_CHECKING:
    from virtual_gpus.machine import Machine


class VirtualGPU:
    """One GPU of `machine`: its `number` in there, the `index` by which a program knows it, what it holds, its streams,
    and its random numbers.

    What all GPUs share is asked of the machine, so that it has one owner.
    """

    spec, backing, clock = (property(attrgetter(f"machine.{name}")) for name in ("spec", "backing", "clock"))

    def __init__(self, number: int, machine: "Machine"):
        self.number, self.machine = number, machine
        self.ledger = Ledger(number, machine.spec.memory)
        self.set_index(number)
        self.generator = VirtualGenerator(gpu=self)
        self.streams, self.current_stream = [], CurrentStream()
        self.communicators = []  # of many processes, see `communicator`: each has a stream of its own
        self.occupancies = []  # contention.Occupancy of those whose collectives slow its kernels
        self.callbacks = None  # the stream of what is added to their futures, if anything is
        Stream(gpu=self)  # the default one enters itself as the first

    def set_index(self, index: int) -> None:
        """Have the program know it as cuda:`index`."""
        self.index = self.ledger.index = index
        self.device = torch.device("cuda", index)
        self.name = str(self.device)

    def microseconds(self) -> int:
        """This thread's modelled time since the machine was started."""
        host = self.clock.host()
        host = self.clock.shared if host.paused else host  # one that is paused has no time of its own
        return round(1e6 * (host.time(self.index) - self.machine.started))

    def stream_number(self) -> int:
        """The number of this thread's current stream."""
        return current_stream_of(self).stream_id

    def run(self, func: Callable, args: Sequence, kwargs: dict, key: tuple | None = None) -> Any:
        """func(*args, **kwargs) on inner tensors, and on the clock.

        func: an operation, a kernel of ops.table.CUDA_KERNELS, or a function that makes a tensor. key: see
        meta_cache.key_of; of a kernel it is that of its operation.
        """
        machine = self.machine
        if machine.unusable is not None and not (machine.asserted and getattr(func, "is_view", False)):
            raise machine.unusable()
        key = key or key_of(func, args, kwargs)
        if machine.capture is not None and (capture := self.capturing()) is not None:
            return capture.run(self, func, args, kwargs, key)
        try:
            if machine.is_meta:
                out = cached_call(func, args, kwargs, key)
            else:
                out = getattr(func, "_op", func)(*args, **kwargs)  # an OpOverload without the Python around it
        except (RuntimeError, IndexError) as error:
            dry = machine.rendezvous is not None and isinstance(error, NotImplementedError)
            out = call_by_values(func, args, kwargs) if dry else None
            if out is None:
                if (better := self.explain_error(error, func)) is not None:
                    raise better from error
                if not is_assert(func, error):
                    raise
                out = record_assert(machine, func, args, kwargs, error)
        machine.clock.record_op(self, func, args, kwargs, out, key)
        if machine.rendezvous is not None:
            propagate_constants(func, args, kwargs, out)
        return out

    def capturing(self) -> Any:
        """The graphs.Capture that this thread's current stream takes part in, or None."""
        return None if self.machine.capture is None else current_stream_of(self).capture

    def call(self, function: Callable, *args: Any) -> None:
        """function(*args), with inner tensors, beside the clock: it is part of an operation. Replays call it again."""
        capture = self.capturing()
        if capture is None:
            function(*args)
        else:
            capture.call(function, *args)

    def explain_error(self, error: Exception, func: Callable) -> Exception | None:
        """An error that says more than `error` about a virtual GPU, or None."""
        if self.backing.type == "meta" and (isinstance(error, NotImplementedError) or "meta tensor" in str(error)):
            return no_values(str(func.overloadpacket if hasattr(func, "overloadpacket") else func.__name__))
        if isinstance(error, NotImplementedError) and "Could not run '" in str(error):
            return no_cpu_kernel(func)
        if str(error) == "ZeroDivisionError":
            return RuntimeError(
                "ZeroDivisionError: whole numbers were divided by zero. A real GPU says nothing, and gives an "
                "arbitrary number; virtual GPUs compute on the CPU, where this is an error."
            )
        if asked := re.search(r"DefaultCPUAllocator.* tried to allocate (\d+) bytes", str(error), re.DOTALL):
            self.ledger.check(int(asked[1]))  # perhaps the virtual GPU has no room, either
            return RuntimeError(
                f"{self.device} is made of this computer's memory, and that is full: {error}. The "
                f'virtual GPU itself has room. Use less, or backing="meta" (shapes only).'
            )
        return None


ASKED, SEEDED = (  # CUDAGeneratorImpl.cpp
    "Cannot call CUDAGeneratorImpl::{} during CUDA graph capture. If you need this call to be captured, please file an "
    "issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive",
    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the "
    "original seed. (virtual GPU: and not even then)",
)


def not_captured(name: str, refusal: str) -> Callable:
    """Generator's method `name`; while its GPU captures a CUDA graph, whose replay draws other numbers, an error."""

    def call(self, *args):
        if self.gpu.capturing() is not None:
            raise RuntimeError(refusal)
        return getattr(Generator, name)(self, *args)

    return call


class VirtualGenerator(Generator):
    """torch.Generator(device='cuda:i')."""

    def __new__(cls, *, gpu: VirtualGPU):
        kind = "cpu" if gpu.backing.type == "meta" else gpu.backing
        self = super().__new__(cls, kind)
        self.gpu = gpu
        GENERATORS[self._cdata] = self
        return self.manual_seed(torch.initial_seed())

    device = property(lambda self: self.gpu.device)

    get_state = not_captured("get_state", ASKED.format("current_seed"))
    initial_seed = not_captured("initial_seed", ASKED.format("current_seed"))
    seed = not_captured("seed", ASKED.format("seed"))
    set_state, manual_seed = not_captured("set_state", SEEDED), not_captured("manual_seed", SEEDED)

    def refuse(self, *args: Any) -> NoReturn:
        raise RuntimeError(
            f"a generator's offset and state for CUDA graphs can't be imitated by virtual GPUs: {self.device} draws "
            "as a CPU does. get_state() and set_state() bring it back to where it was"
        )

    get_offset = set_offset = graphsafe_get_state = graphsafe_set_state = refuse

    def clone_state(self) -> torch.Generator:
        return generator_on(self.device, self.get_state())

    def __reduce__(self):
        return generator_on, (self.device, self.get_state())


def generator_on(device: torch.device, state: torch.Tensor) -> torch.Generator:
    return torch.Generator(device).set_state(state)


def check_copy(source: VirtualGPU | None, target: VirtualGPU | None, memory: str, non_blocking: bool) -> Any:
    """The graphs.Capture that a copy is part of, or None; an error if CUDA, or we, can't do this copy in one."""
    capture = next((c for c in (gpu.capturing() for gpu in (source, target) if gpu is not None) if c is not None), None)
    if capture is None:
        return None
    if source is not None and target is not None:
        raise RuntimeError("virtual GPUs capture what one GPU does, without copies to another")
    if memory != "pinned":  # aten/src/ATen/native/cuda/Copy.cu
        raise RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
            "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
        )
    if not non_blocking:
        raise capture.refusal()
    return capture


def record_copy(
    nbytes: int,
    source: VirtualGPU | None,
    target: VirtualGPU | None,
    memory: str = "pageable",
    non_blocking: bool = False,
) -> None:
    """Record a copy between two virtual GPUs, or one and the CPU (None), in the machine's traffic and on its clock."""
    if source is not target:
        machine = (target or source).machine
        if machine.capture is not None:
            check_copy(source, target, memory, non_blocking)
        if machine.unusable is not None:
            raise machine.unusable()
        machine.raise_assert()
        if not non_blocking and (source is None or target is None):
            check_waiting(machine)
        machine.traffic[name_of(source), name_of(target)] += nbytes
        machine.clock.copy(source, target, nbytes, memory, non_blocking)
