"""The functions of C++ under PyTorch's snapshots and histories of memory; its Python on top of them stays as it is."""

import torch

from mgpu_lib.virtual import history
from mgpu_lib.virtual.running import current
from mgpu_lib.virtual.snapshot import snapshot


def patches():
    """(owner, name, replacement), for patches.install."""
    for name, value in (
        ("_cuda_memorySnapshot", memory_snapshot),
        ("_cuda_record_memory_history", record_memory_history),
        ("_cuda_record_memory_history_legacy", record_memory_history_legacy),
        ("_cuda_isHistoryEnabled", lambda: any(ledger.history is not None for ledger in current().ledgers)),
        ("_cuda_allocationTraceback", by_address),
        ("_cuda_annotateMemory", by_address),
        ("_cuda_memoryMetadataSupported", lambda: False),
        ("_cuda_getMemoryMetadata", lambda: ""),
        ("_cuda_setMemoryMetadata", no_metadata),
        ("_cuda_attach_out_of_memory_observer", no_observer),
    ):
        yield torch._C, name, value


def memory_snapshot(pool=None):
    """Under torch.cuda.memory_snapshot. `pool`: (0, 0), perhaps with whether to include traces; None: with them."""
    first, second, traces = (*(pool or (0, 0)), True)[:3]
    if (first, second) != (0, 0):
        raise RuntimeError(f"mempool_id=({first}, {second}): virtual GPUs have one memory pool, (0, 0)")
    return snapshot(current().ledgers, traces)


def record_memory_history(
    enabled,
    context,
    stacks,
    max_entries,
    clear_history=False,
    compile_context=False,
    annotations=False,
    skip_actions=(),
    pinned=False,
    cuda=True,
):
    """Under torch.cuda.memory._record_memory_history. Stacks have Python's frames only, also those of "all": C++ does
    something else here than on a GPU. There is nothing to say of compiled code, as nothing is compiled."""
    check_option(enabled, (None, "state", "all"), "expected state to be 'state', 'all', or None")
    check_option(context, history.CONTEXTS, "expected context to be 'state', 'alloc', 'all', or None")
    check_option(stacks, ("python", "all"), "expected stacks to be 'python', or 'all'")
    check_parts(annotations, pinned)
    if not cuda:
        return
    entries = max(1, max_entries) if enabled == "all" else 1  # in PyTorch, too, at least one stays
    settings = history.Settings(context, entries, frozenset(skip_actions))
    history.record(current().gpus, settings if enabled else None, clear_history)


def record_memory_history_legacy(
    enabled,
    context,
    max_entries,
    trace_context,
    cpp_context=False,
    clear_history=False,
    compile_context=False,
    annotations=False,
    skip_actions=(),
    pinned=False,
    cuda=True,
):
    """The same for calls as they were before 2023, with enabled=True or False."""
    level = "alloc" if trace_context else "state" if context else None
    more = clear_history, compile_context, annotations, skip_actions, pinned, cuda
    record_memory_history("all" if enabled else None, level, "python", max_entries, *more)


def check_option(value, known, message):
    if value not in known:
        raise RuntimeError(message)


def check_parts(annotations, pinned):
    """RuntimeError for what would be missing from the history."""
    for name, wanted in (("record_pinned_host_memory", pinned), ("global_record_annotations", annotations)):
        if wanted:
            raise RuntimeError(f"{name}=True can't be imitated by virtual GPUs: they record the memory of GPUs only")


def by_address(address, *args):
    """What looks a block up by its pointer."""
    raise RuntimeError(
        "data_ptr() of a tensor on a virtual GPU is not the address of its block, so this can't be imitated: look for "
        "the block in torch.cuda.memory_snapshot(), by its size or its frames"
    )


def no_metadata(text):
    raise RuntimeError("metadata of memory can't be imitated by virtual GPUs: no entry of a trace would hold it")


def no_observer(observer):
    raise RuntimeError("observers of out-of-memory errors can't be imitated by virtual GPUs: catch the error instead")
