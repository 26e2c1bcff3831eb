"""What torch.cuda, torch.accelerator and their like answer while virtual GPUs are on.

Most of `torch.cuda` is Python on top of some functions of `C`. Only those are replaced, so that the rest, its
checks and its error messages included, is PyTorch's own.
"""

import functools
import sys
import types
import warnings

import torch

from virtual_gpus.clock import streams
from virtual_gpus.compat import C, FakeTensorMode, HigherOrderOperator, get_device_index, nvml_based_avail
from virtual_gpus.errors import bad_fork, no_addresses, not_compiled
from virtual_gpus.patches.properties import properties_of
from virtual_gpus.state import current, current_index, select
from virtual_gpus.tensors.tensor import VirtualTensor


def ledger(index):
    return current().gpu(index).ledger


def not_imitated(what):
    def refuse(*args, **kwargs):
        raise RuntimeError(f"{what} can't be imitated by virtual GPUs; it needs real ones")

    return refuse


NOT_IMITATED = (
    "make_graphed_callables caching_allocator_alloc ipc_collect utilization temperature power_draw clock_rate".split()
)
CLASSES_NOT_IMITATED = "CUDAGraph graph MemPool ExternalStream".split()


def patches():
    """(owner, name, replacement), for patches.install."""
    for owner, names in ((torch.cuda, cuda_names), (C, c_names)):
        for name, value in names().items():
            yield owner, name, value
    yield torch.cuda.random, "device_count", device_count
    yield torch, "Stream", streams.AnyStream
    yield torch, "Event", streams.AnyEvent
    for name in NOT_IMITATED:
        yield torch.cuda, name, not_imitated(f"torch.cuda.{name}")
    for name in CLASSES_NOT_IMITATED:  # classes stay classes, for annotations and isinstance
        yield torch.cuda, name, type(name, (), {"__new__": not_imitated(f"torch.cuda.{name}")})
    for owner, name in ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch.utils.dlpack, "from_dlpack")):
        yield owner, name, dlpack(getattr(owner, name))
    for name, function in (("range_push", range_push), ("range_pop", range_pop), ("mark", lambda message: None)):
        yield torch.cuda.nvtx, name, function
    yield torch, "compile", compile_
    if eval_frame := sys.modules.get("torch._dynamo.eval_frame"):  # functions compiled before run as they are, too
        yield eval_frame, "_stance", eval_frame.DynamoStance("force_eager")
    yield HigherOrderOperator, "dispatch", dispatch_higher_order
    yield torch.autograd.profiler.profile, "__init__", profile
    yield torch.profiler.profiler, "supported_activities", lambda: {torch.profiler.ProfilerActivity.CPU}
    yield torch.backends.cudnn, "is_acceptable", lambda tensor: False
    # What PyTorch makes to see the shape of a result would start CUDA, as there are GPUs; none of them is CUDA's.
    yield FakeTensorMode, "avoid_device_init", property(lambda self: True)
    for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        module = sys.modules[name]
        yield module, "_foreach_supported_types", [*module._foreach_supported_types, VirtualTensor]
    yield from without_nccl()


def without_nccl():
    """The same for the operations of NCCL with many GPUs in one process."""
    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
        yield torch.cuda.nccl, name, not_imitated(f"NCCL (torch.cuda.nccl.{name})")
    if not hasattr(C, "_nccl_version"):  # in a build without CUDA; asked for when a collective has failed
        yield torch.cuda.nccl, "version", lambda: (2, 28, 9)


def compile_(model=None, **options):
    """torch.compile, also as a decorator: the function as it is, which computes the same."""
    if model is None:
        return functools.partial(compile_, **options)
    warnings.warn(
        "virtual GPUs don't compile: functions give the same values as they are, and modelled times are of these",
        stacklevel=2,
    )
    return model


def dispatch_higher_order(self, key, /, *args, **kwargs):
    """Operators that take a function, as flex_attention does, are made by compiling it."""
    try:
        return _dispatch_higher_order(self, key, *args, **kwargs)
    except NotImplementedError as error:
        if "no rule registered" in str(error) and VirtualTensor.__name__ in str(error):
            raise not_compiled(self._name) from None
        raise


def profile(self, *args, use_device=None, **kwargs):
    """Under torch.profiler.profile: the host's part of it."""
    if use_device is not None:
        warnings.warn(
            "the profiler sees what the host does for virtual GPUs; what they do, and when, is in their timeline",
            stacklevel=3,
        )
    _profile(self, *args, use_device=None, **kwargs)


def dlpack(original):
    """DLPack hands over raw pointers: for tensors on the CPU only."""

    def hand_over(tensor, *args, **kwargs):
        if isinstance(tensor, VirtualTensor):
            raise no_addresses()
        return original(tensor, *args, **kwargs)

    return hand_over


def cuda_names():
    return {
        "is_available": is_available,
        "device_count": device_count,
        "_initialized": True,
        "_tls": types.SimpleNamespace(is_initializing=True),  # so that PyTorch's own Python doesn't look for a driver
        "is_initialized": lambda: current().used and not current().forked,
        "get_arch_list": lambda: ["sm_{}{}".format(*current().spec.capability)],
        "_is_in_bad_fork": lambda: current().forked,
        "_lazy_init": no_driver,
        "_exchange_device": select,
        "_maybe_exchange_device": select,
        "_get_device_properties": get_properties,
        "get_device_properties": get_device_properties,
        "default_generators": Generators(),
        "cudart": Runtime,
        "_check_stray_context": lambda index: None,
        "Stream": streams.Stream,
        "Event": streams.CudaEvent,
        "stream": streams.stream_context,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "is_current_stream_capturing": lambda: False,
    }


def c_names():
    # Not _cuda_getDeviceCount: by its presence PyTorch tells a build with CUDA from one without.
    return {
        "_cuda_getDevice": current_index,
        "_cuda_setDevice": select,
        "_cuda_exchangeDevice": select,
        "_cuda_maybeExchangeDevice": select,
        "_cuda_setStream": choose_stream,
        "_cuda_sleep": sleep,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(current(), "sync_debug", mode),
        "_cuda_get_sync_debug_mode": lambda: current().sync_debug,
        "_cuda_synchronize": lambda: synchronize(current_index()),
        "_cuda_canDeviceAccessPeer": lambda a, b: a != b,
        "_cuda_memoryStats": lambda index: ledger(index).stats(),
        "_cuda_resetPeakMemoryStats": lambda index: ledger(index).reset_peak(),
        "_cuda_resetAccumulatedMemoryStats": lambda index: ledger(index).reset_accumulated(),
        "_cuda_emptyCache": empty_cache,
        "_cuda_setMemoryFraction": set_memory_fraction,
        "_cuda_getMemoryFraction": lambda index: ledger(index).fraction,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_get_accelerator": lambda *args: torch.device("cuda"),
        "_accelerator_getDeviceIndex": current_index,
        "_accelerator_setDeviceIndex": select,
        "_accelerator_exchangeDevice": select,
        "_accelerator_maybeExchangeDevice": select,
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": lambda index: ledger(index).stats(),
        "_accelerator_resetPeakStats": lambda index: ledger(index).reset_peak(),
        "_accelerator_resetAccumulatedStats": lambda index: ledger(index).reset_accumulated(),
        "_accelerator_getMemoryInfo": memory_info,
        "_accelerator_emptyCache": empty_cache,
        "_accelerator_getStream": streams.current_stream,
        "_accelerator_setStream": streams.set_stream,
        "_group_tensors_by_device_and_dtype": group_tensors,
    }


def range_push(message):
    """torch.cuda.nvtx.range_push: what follows is the phase `message` on the timeline."""
    ranges = current().clock.host().ranges
    ranges.append(message)
    return len(ranges) - 1


def range_pop():
    ranges = current().clock.host().ranges
    depth = len(ranges) - 1  # of the range that ends; NVTX, too, says something negative if there is none
    del ranges[-1:]
    return depth


def choose_stream(stream_id, device_index, device_type):
    """Under torch.cuda.set_stream."""
    streams.set_stream(current().gpu(device_index).streams[stream_id])


def sleep(cycles):
    """torch.cuda._sleep: a kernel that does nothing for so many cycles of the GPU's clock."""
    gpu = current().gpu(current_index())
    gpu.clock.launch(gpu, "sleep", cycles / gpu.spec.frequency)


def synchronize(index):
    """The host waits for all streams of GPU `index`, and of no other."""
    gpu = current().gpu(index)
    for communicator in gpu.communicators:
        communicator.synchronize()
    gpu.clock.synchronize(gpu, [*gpu.streams, *gpu.communicators])


def no_driver():
    """torch.cuda's own Python may go on; C++ that wants the driver went around the virtual GPUs."""
    if current().forked:
        raise bad_fork()
    if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
        raise RuntimeError(
            "this call went around the virtual GPUs to a CUDA driver. Was the function looked up in "
            "torch before they were on, and kept in a list, say? Look up torch.zeros when you call it."
        )
    current().use()


def is_available():
    """Asking starts CUDA, unless PYTORCH_NVML_BASED_CUDA_CHECK=1."""
    return bool(current().gpus if nvml_based_avail() else current().settle())


def device_count():
    return len(current().gpus)


def get_properties(index):
    gpu = current().gpu(index)
    return properties_of(gpu.spec, index, gpu.number)


def get_device_properties(device=None):
    index = get_device_index(device, optional=True)
    if index < 0 or index >= torch.cuda.device_count():
        raise AssertionError("Invalid device id")
    return get_properties(index)


class Generators:
    """torch.cuda.default_generators: one for each GPU of the machine that is on. To seed them uses no GPU yet."""

    def __getitem__(self, index):
        return current().gpus[index].generator

    def __len__(self):
        return len(current().gpus)


class Runtime:
    """torch.cuda.cudart(): what mem_get_info asks for, nothing else."""

    def cudaMemGetInfo(self, index=None):
        return memory_info(current_index() if index is None else index)


def memory_info(index):
    """Free bytes, and all."""
    held = ledger(index)
    return held.capacity - held.reserved, held.capacity


def empty_cache():
    for gpu in current().gpus:
        gpu.ledger.empty_cache()


def set_memory_fraction(fraction, index):
    ledger(index).fraction = fraction


def group_tensors(tensorlistlist, with_indices=False):
    """Tensors by device and dtype, in order; C++ would find all of them on the CPU."""
    groups = {}
    for i, first in enumerate(tensorlistlist[0]):
        lists, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in tensorlistlist], []))
        for group, tensors in zip(lists, tensorlistlist, strict=True):
            if tensors:
                group.append(tensors[i])
                check_same_place(first, tensors[i])
        if with_indices:
            indices.append(i)
    return groups


def check_same_place(first, tensor):
    if tensor is not None and tensor.device != first.device and (tensor.dim() or tensor.device.type != "cpu"):
        raise RuntimeError(
            "Tensors of the same index must be on the same device and the same dtype except `step` "
            "tensors that can be CPU and float32/64 notwithstanding"
        )


_profile = torch.autograd.profiler.profile.__init__
_dispatch_higher_order = HigherOrderOperator.dispatch
