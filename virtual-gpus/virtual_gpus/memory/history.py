"""The history of memory and snapshots of it: what PyTorch's memory viewers read.

A snapshot has the blocks in use, with the stacks that allocated them, and while a history is recorded the trace of
allocations and frees. The viewers draw memory over time from it, and add it up by lines. Where blocks lie isn't
imitated: the viewers count a segment's blocks from its beginning, so each block is a segment of its own, and what a
pool has reserved beside them is one more. Their pictures of segments therefore say nothing about a real GPU.

A history may keep no tensor alive: of a stack it keeps files, line numbers and the names of functions.
"""

import functools
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from virtual_gpus.memory.ledger import MIN_BLOCK_SIZE, SMALL_SIZE, Ledger, round_up

if TYPE_CHECKING:
    from virtual_gpus.gpu import VirtualGPU

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
CONTEXTS = None, "state", "alloc", "all"  # what gets a stack: nothing; blocks; their allocation, too; frees, too
STATE, ALLOC, ALL = 1, 2, 3


class Settings(NamedTuple):
    """What is recorded."""

    context: str | None  # one of CONTEXTS
    max_entries: int
    skip_actions: frozenset[str]


class TraceEntry(NamedTuple):
    """One entry of a trace, its fields named as in PyTorch's."""

    action: str
    addr: int  # of the block; the bytes left if memory ran out
    size: int  # bytes
    stack: tuple | None
    stream: int
    time_us: int


class History:
    """What happens to the memory of `gpu`, as `settings` say; `before`: a History to go on with."""

    def __init__(self, gpu: "VirtualGPU", settings: Settings, before: "History | None" = None):
        self.gpu, self.settings, self.depth = gpu, settings, CONTEXTS.index(settings.context)
        self.entries: deque[TraceEntry] = deque(before.entries if before else (), settings.max_entries)
        self.stacks: dict[tuple, tuple] = {}

    def record_alloc(self, address: int, nbytes: int) -> None:
        stack, stream = self.stack(STATE), self.gpu.stream_number()
        self.gpu.ledger.contexts[address] = stack, stream
        self.record("alloc", address, nbytes, stack if self.depth >= ALLOC else None, stream)

    def record_free(self, address: int, nbytes: int, stack: tuple | None, stream: int) -> None:
        """`stack` and `stream` are those that allocated the block; where frees have no stack it stands for them."""
        shown = self.stack(ALL) or (stack if self.depth >= ALLOC else None)
        for action in ("free_requested", "free_completed"):  # at once: no block waits for a stream
            self.record(action, address, nbytes, shown, stream)

    def record_oom(self, nbytes: int, free: int) -> None:
        self.record("oom", free, nbytes, self.stack(ALLOC), self.gpu.stream_number())

    def record(self, action: str, address: int, nbytes: int, stack: tuple | None, stream: int) -> None:
        if action not in self.settings.skip_actions:
            self.entries.append(TraceEntry(action, address, nbytes, stack, stream, self.gpu.microseconds()))

    def stack(self, depth: int) -> tuple | None:
        """The calls that led here, the innermost first, without those of this package: (file, line, function)."""
        if self.depth < depth:
            return None
        calls = ((f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(sys._getframe(1)))
        stack = tuple(call for call in calls if not call[0].startswith(OURS))
        return self.stacks.setdefault(stack, stack)  # a loop comes to the same lines again and again


def record(gpus: Iterable["VirtualGPU"], settings: Settings | None, clear: bool = False) -> None:
    """Record what happens to the memory of `gpus` from now on; `clear`: forget what has been recorded.

    settings: None ends recording, and its trace is forgotten. Blocks keep their stacks.
    """
    for gpu in gpus:
        with gpu.ledger.lock:
            gpu.ledger.history = settings and History(gpu, settings, None if clear else gpu.ledger.history)


def forget_history(gpus: Iterable["VirtualGPU"]) -> None:
    """End recording, and forget the blocks' stacks, too."""
    record(gpus, None)
    for gpu in gpus:
        gpu.ledger.contexts.clear()


def snapshot(ledgers: Iterable[Ledger], traces: bool = True) -> dict:
    """What torch.cuda.memory._snapshot() returns, of all GPUs with these ledgers; without `traces` those are empty."""
    frames = functools.cache(frames_of)  # what many entries share is one list, so that a file gets it once
    described = [segments_and_trace(ledger, frames) for ledger in ledgers]
    return {
        "segments": [segment for segments, _ in described for segment in segments],
        "device_traces": [trace if traces else [] for _, trace in described],
        "allocator_settings": {},  # nobody has set any
        "external_annotations": [],
    }


def frames_of(stack: tuple | None) -> list[dict]:
    return [dict(zip(("filename", "line", "name"), call, strict=True)) for call in stack or ()]


def segments_and_trace(ledger: Ledger, frames: Callable[[tuple | None], list[dict]]) -> tuple[list[dict], list[dict]]:
    """The part of a snapshot that is about one GPU."""
    with ledger.lock:  # the entries last: garbage collection, even here, may free blocks
        requested, contexts = dict(ledger.requested), dict(ledger.contexts)
        entries = list(ledger.history.entries) if ledger.history else []
    freed = {entry.addr for entry in entries if entry.action == "free_completed"}
    sizes = {address: round_up(n, MIN_BLOCK_SIZE) for address, n in requested.items() if address not in freed}
    segments = []
    for name, pool in (("small", ledger.small), ("large", ledger.large)):
        in_use = [address for address, size in sizes.items() if (size <= SMALL_SIZE) == (name == "small")]
        for address in in_use:
            stack, _ = contexts.get(address, (None, 0))
            segments.append(segment(ledger.index, name, address, sizes[address], requested[address], frames(stack)))
        rest = pool.reserved - sum(sizes[address] for address in in_use)
        if rest > 0:
            segments.append(segment(ledger.index, name, pool.next, rest, 0, frames(None)))
    return segments, [trace_entry(entry, frames) for entry in entries]


def segment(index: int, pool: str, address: int, size: int, requested: int, frames: list[dict]) -> dict:
    """A segment of a pool with one block: in use if something was `requested`, only reserved if not."""
    state, used = ("active_allocated", size) if requested else ("inactive", 0)
    block = {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
    return {
        "device": index,
        "address": address,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": requested,
        "stream": 0,
        "segment_type": pool,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


def trace_entry(entry: TraceEntry, frames: Callable[[tuple | None], list[dict]]) -> dict:
    """An entry of a trace in PyTorch's form. Without a stack it has no frames, as there."""
    made = entry._asdict() | {"compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    if made.pop("stack") is not None:
        made["frames"] = frames(entry.stack)
    if entry.action == "oom":
        made["device_free"] = made.pop("addr")
    return made
