"""The functions of C++ under PyTorch's snapshots and histories of memory; its Python on top of them stays as it is."""

from virtual_gpus.compat import C
from virtual_gpus.memory import history
from virtual_gpus.patches.cuda import not_imitated
from virtual_gpus.patches.patch import patch, replaces
from virtual_gpus.state import current

REFUSED = {
    "_cuda_allocationTraceback": "finding a block by its address",  # data_ptr() is not one
    "_cuda_annotateMemory": "annotating a block by its address",
    "_cuda_setMemoryMetadata": "metadata of memory",
    "_cuda_attach_out_of_memory_observer": "an observer of out-of-memory errors",
}
INSTEAD = (
    ". What they offer instead: torch.cuda.memory_snapshot() has every block in use with its size and, if "
    "torch.cuda.memory._record_memory_history() was called, its stack"
)
patch(C, {name: not_imitated(what, INSTEAD) for name, what in REFUSED.items()})


@replaces(C)
def _cuda_isHistoryEnabled():
    return any(ledger.history for ledger in current().ledgers)


@replaces(C)
def _cuda_memorySnapshot(pool=None):
    """Under torch.cuda.memory_snapshot. `pool`: (0, 0), perhaps with whether to include traces; None: with them."""
    first, second, traces = (*(pool or (0, 0)), True)[:3]
    if (first, second) != (0, 0):
        raise RuntimeError(f"mempool_id=({first}, {second}): virtual GPUs have one memory pool, (0, 0)")
    return history.snapshot(current().ledgers, traces)


@replaces(C, "_cuda_record_memory_history")
def record_memory_history(
    enabled, context, stacks, entries, clear=False, compiled=False, annotations=False, skip=(), pinned=False, cuda=True
):
    """Under torch.cuda.memory._record_memory_history. Stacks have Python's frames only, also those of "all": C++ does
    something else here than on a GPU. There is nothing to say of compiled code, as nothing is compiled."""
    check_option("state", enabled, ("state", "all", None))
    check_option("context", context, ("state", "alloc", "all", None))
    check_option("stacks", stacks, ("python", "all"))
    for name, wanted in (("record_pinned_host_memory", pinned), ("global_record_annotations", annotations)):
        if wanted:
            not_imitated(f"{name}=True", INSTEAD)()
    if cuda:
        max_entries = max(1, entries) if enabled == "all" else 1  # in PyTorch, too, at least one stays
        settings = history.Settings(context, max_entries, frozenset(skip))
        history.record(current().gpus, settings if enabled else None, clear)


@replaces(C)
def _cuda_record_memory_history_legacy(enabled, context, max_entries, trace_context, cpp_context=False, *more):
    """The same for calls as they were before 2023, with enabled=True or False."""
    level = "alloc" if trace_context else "state" if context else None
    record_memory_history("all" if enabled else None, level, "python", max_entries, *more)


def check_option(name: str, value: str | None, known: tuple) -> None:
    """RuntimeError, in PyTorch's words."""
    if value not in known:
        *others, last = ("None" if option is None else f"'{option}'" for option in known)
        raise RuntimeError(f"expected {name} to be {', '.join(others)}, or {last}")
