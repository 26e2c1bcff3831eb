"""What torch.cuda, torch.accelerator and their like answer while virtual GPUs are on.

Most of `torch.cuda` is Python on top of some functions of `C`. Only those are replaced, so that the rest, its
checks and its error messages included, is PyTorch's own.
"""

import ctypes
import functools
import sys
import types
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from virtual_gpus.clock import streams
from virtual_gpus.compat import C, FakeTensorMode, HigherOrderOperator, nvml_based_avail
from virtual_gpus.errors import bad_fork, is_cpu_scalar, no_addresses
from virtual_gpus.frames import program_line
from virtual_gpus.memory.ledger import Ledger
from virtual_gpus.patches.patch import after_import, patch, replaces
from virtual_gpus.patches.properties import properties_of
from virtual_gpus.state import current, current_index, select
from virtual_gpus.tensors.tensor import VirtualDenseTensor, VirtualTensor

# What can't be imitated


def not_imitated(what: str, instead: str = "; it needs real ones") -> Callable:
    """What takes the place of a function that isn't imitated, whatever it is called with: RuntimeError."""

    def refuse(*args, **kwargs):
        raise RuntimeError(f"{what} can't be imitated by virtual GPUs{instead}")

    return refuse


REFUSED = "caching_allocator_alloc caching_allocator_delete ipc_collect utilization temperature power_draw clock_rate"
patch(torch.cuda, {name: not_imitated(f"torch.cuda.{name}") for name in REFUSED.split()})
patch(torch.cuda, {"MemPool": type("MemPool", (), {"__new__": not_imitated("torch.cuda.MemPool")})})  # stays a class
for name in "all_reduce broadcast reduce all_gather reduce_scatter".split():  # of many GPUs in one process
    patch(torch.cuda.nccl, {name: not_imitated(f"NCCL (torch.cuda.nccl.{name})")})


@replaces(torch, "to_dlpack")
@replaces(torch.utils.dlpack, "to_dlpack from_dlpack")
def dlpack(original, tensor, *args, **kwargs):
    """DLPack hands over raw pointers: for tensors on the CPU only."""
    if isinstance(tensor, VirtualTensor):
        raise no_addresses()
    return original(tensor, *args, **kwargs)


@replaces(torch, "compile")
def compile_(model=None, **options):
    """torch.compile, also as a decorator: the function as it is, which computes the same."""
    if model is None:
        return functools.partial(compile_, **options)
    if options.get("disable"):
        return model
    rendezvous = current().rendezvous
    if rendezvous is not None and "flex_attention" not in getattr(model, "__name__", ""):  # one kernel as it is
        rendezvous.assumptions.note(
            f"torch.compile at {program_line()}: planned as eager code; fused kernels are faster"
        )
    warnings.warn(
        "virtual GPUs don't compile: functions give the same values as they are, and modelled times are of these",
        stacklevel=2,
    )
    return model


@after_import("torch._dynamo.eval_frame")
def run_eagerly(module):
    """Functions that were compiled before run as they are, too."""
    yield module, "_stance", module.DynamoStance("force_eager")


@replaces(HigherOrderOperator)
def dispatch(original, self, key, /, *args, **kwargs):
    """Operators that take a function, as torch.cond does, are made by compiling it. (flex_attention: see `flex`.)"""
    try:
        return original(self, key, *args, **kwargs)
    except NotImplementedError as error:
        if "no rule registered" in str(error) and VirtualTensor.__name__ in str(error):
            raise NotImplementedError(
                f"{self._name} takes a function and compiles it, and virtual GPUs don't compile. Use operations that "
                "take tensors, or a real GPU."
            ) from None
        raise


def run_kernel(self, *args, **kwargs):
    """A Triton kernel, tuned or not; it would look for a driver."""
    raise NotImplementedError(
        f"{getattr(self, 'base_fn', self.fn).__name__} is a Triton kernel, and virtual GPUs run PyTorch's own "
        "operations. Libraries that bring such kernels can mostly do without: choose that, or a real GPU"
    )


after_import("triton.runtime.jit")(lambda module: [(module.JITFunction, "run", run_kernel)])
after_import("triton.runtime.autotuner")(lambda module: [(module.Autotuner, "run", run_kernel)])


@replaces(torch.autograd.profiler.profile, "__init__")
def profile(original, self, *args, use_device=None, **kwargs):
    """Under torch.profiler.profile: the host's part of it."""
    if use_device is not None:
        warnings.warn(
            "the profiler sees what the host does for virtual GPUs; what they do, and when, is in their timeline",
            stacklevel=4,
        )
    original(self, *args, use_device=None, **kwargs)


patch(torch.profiler.profiler, {"supported_activities": lambda: {torch.profiler.ProfilerActivity.CPU}})
patch(torch.backends.cudnn, {"is_acceptable": lambda tensor: False})
# What PyTorch makes to see the shape of a result would start CUDA, as there are GPUs; none of them is CUDA's.
patch(FakeTensorMode, {"avoid_device_init": property(lambda self: True)})

# The GPUs and their properties


def no_driver() -> None:
    """torch.cuda's own Python may go on; C++ that wants the driver went around the virtual GPUs."""
    if current().forked:
        raise bad_fork()
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
        raise RuntimeError(
            "this call went around the virtual GPUs to a CUDA driver. Was the function looked up in "
            "torch before they were on, and kept in a list, say? Look up torch.zeros when you call it."
        )
    current().use()


@replaces(torch.cuda)
def is_available():
    """Asking starts CUDA, unless PYTORCH_NVML_BASED_CUDA_CHECK=1."""
    return bool(current().gpus if nvml_based_avail() else current().start_cuda())


@replaces(torch.cuda)
@replaces(torch.cuda.random)
def device_count():
    return len(current().gpus)


@replaces(torch.cuda)
def _get_device_properties(index):
    gpu = current().look_up(index)
    return properties_of(gpu.spec, index, gpu.number)


class Generators:
    """torch.cuda.default_generators: one for each GPU of the machine that is on. To seed them uses no GPU yet."""

    def __getitem__(self, index):
        return current().gpus[index].generator

    def __len__(self):
        return len(current().gpus)


patch(
    torch.cuda,
    {
        "_initialized": True,
        "_tls": types.SimpleNamespace(is_initializing=True),  # so that PyTorch's own Python doesn't look for a driver
        "is_initialized": lambda: current().used and not current().forked,
        "get_arch_list": lambda: ["sm_{}{}".format(*current().spec.capability)],
        "_is_in_bad_fork": lambda: current().forked,
        "_lazy_init": no_driver,
        "_exchange_device": select,
        "_maybe_exchange_device": select,
        "default_generators": Generators(),
    },
)
# Not _cuda_getDeviceCount: by its presence PyTorch tells a build with CUDA from one without.
patch(
    C,
    {
        "_cuda_getDevice": current_index,
        "_cuda_setDevice": select,
        "_cuda_canDeviceAccessPeer": lambda a, b: a != b,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(current(), "sync_debug", mode),
        "_cuda_get_sync_debug_mode": lambda: current().sync_debug,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_get_accelerator": lambda *args: torch.device("cuda"),
        "_accelerator_getDeviceIndex": current_index,
        "_accelerator_setDeviceIndex": select,
        "_accelerator_exchangeDevice": select,
        "_accelerator_maybeExchangeDevice": select,
    },
)

# Streams


@replaces(C)
def _cuda_setStream(stream_id, device_index, device_type):
    streams.set_stream(current().gpu(device_index).streams[stream_id])


@replaces(C)
def _cuda_sleep(cycles):
    """A kernel that does nothing for so many cycles of the GPU's clock."""
    gpu = current().gpu(current_index())
    gpu.clock.launch(gpu, "sleep", cycles / gpu.spec.frequency)


def synchronize(index: int) -> None:
    """The host waits for all streams of GPU `index`, and of no other."""
    gpu = current().gpu(index)
    for communicator in gpu.communicators:
        communicator.synchronize()
    gpu.clock.synchronize(gpu, [*gpu.streams, *gpu.communicators])


@replaces(torch.cuda.nvtx)
def range_push(message):
    """What follows is the phase `message` on the timeline."""
    ranges = current().clock.host().ranges
    ranges.append(message)
    return len(ranges) - 1


@replaces(torch.cuda.nvtx)
def range_pop():
    ranges = current().clock.host().ranges
    depth = len(ranges) - 1  # of the range that ends; NVTX, too, says something negative if there is none
    del ranges[-1:]
    return depth


patch(torch.cuda.nvtx, {"mark": lambda message: None})
patch(torch, {"Stream": streams.AnyStream, "Event": streams.AnyEvent})
patch(
    torch.cuda,
    {
        "Stream": streams.Stream,
        "ExternalStream": streams.ExternalStream,
        "get_stream_from_external": streams.ExternalStream,
        "Event": streams.CudaEvent,
        "stream": streams.stream_context,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
    },
)
patch(
    C,
    {
        "_cuda_synchronize": lambda: synchronize(current_index()),
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_getStream": streams.current_stream,
        "_accelerator_setStream": streams.set_stream,
    },
)

# Memory


def ledger(index: int) -> Ledger:
    return current().look_up(index).ledger


@replaces(C)
def _accelerator_getMemoryInfo(index):
    """Free bytes, and all."""
    held = current().gpu(index).ledger
    return held.capacity - held.reserved, held.capacity


@replaces(torch.cuda, "cudart")
class Runtime:
    """torch.cuda.cudart(): what mem_get_info asks for, and streams as other libraries make them; nothing else."""

    def cudaMemGetInfo(self, index=None):
        return _accelerator_getMemoryInfo(current_index() if index is None else index)

    def cudaStreamCreate(self, address):
        """Writes the handle of a new stream to `address`; 0 is success."""
        ctypes.c_void_p.from_address(address).value = streams.Stream().cuda_stream
        return 0

    def cudaStreamDestroy(self, stream):
        """What it did stays on the clock."""
        return 0

    def __getattr__(self, name):
        return not_imitated(f"{name} of the CUDA runtime")


@replaces(C, "_cuda_emptyCache _accelerator_emptyCache")
def empty_cache():
    for gpu in current().gpus:
        gpu.ledger.empty_cache()


@replaces(C)
def _cuda_setMemoryFraction(fraction, index):
    ledger(index).fraction = fraction


patch(C, {"_cuda_getMemoryFraction": lambda index: ledger(index).fraction})
patch(C, {"_accelerator_isAllocatorInitialized": lambda: True})
patch(C, dict.fromkeys(("_cuda_memoryStats", "_accelerator_getDeviceStats"), lambda index: ledger(index).stats()))
for name in "_cuda_resetPeakMemoryStats _accelerator_resetPeakStats".split():
    patch(C, {name: lambda index: ledger(index).reset_peak()})
for name in "_cuda_resetAccumulatedMemoryStats _accelerator_resetAccumulatedStats".split():
    patch(C, {name: lambda index: ledger(index).reset_accumulated()})

# The optimizers' foreach kernels


@replaces(C)
def _group_tensors_by_device_and_dtype(tensorlistlist, with_indices=False):
    """In order, always with indices; C++ would find all of them on the CPU."""
    groups = {}
    for i, first in enumerate(tensorlistlist[0]):
        lists, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in tensorlistlist], []))
        for group, tensors in zip(lists, tensorlistlist, strict=True):
            if tensors:
                group.append(tensors[i])
                check_same_place(first, tensors[i])
        indices.append(i)
    return groups


def check_same_place(first: Tensor, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.device != first.device and not is_cpu_scalar(tensor):
        raise RuntimeError(
            "Tensors of the same index must be on the same device and the same dtype except `step` "
            "tensors that can be CPU and float32/64 notwithstanding"
        )


for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
    types_of_tensors = [*sys.modules[name]._foreach_supported_types, VirtualDenseTensor]
    patch(sys.modules[name], {"_foreach_supported_types": types_of_tensors})
