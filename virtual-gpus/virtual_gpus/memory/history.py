"""The history of memory and snapshots of it: what PyTorch's memory viewers read.

A snapshot has the blocks that are in use, with the lines that took them, and while a history is recorded the trace of
what was taken and given back. The viewers draw memory over time from it, and add it up by lines. Where blocks lie isn't
imitated: the viewers count a segment's blocks from its beginning, so each block is a segment of its own, and what a
pool keeps for later is one more. Their pictures of segments therefore say nothing about a real GPU.

A history may keep no tensor alive: of a stack it keeps files, line numbers and the names of functions.
"""

import functools
import os
import sys
from collections import deque
from typing import NamedTuple

from virtual_gpus.memory.ledger import BLOCK, SMALL, round_up

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
CONTEXTS = None, "state", "alloc", "all"  # what gets a stack: nothing; blocks; what takes them, too; what frees, too
STATE, ALLOC, ALL = 1, 2, 3
SETTINGS = {  # of PyTorch's allocator, as they are if nobody sets them
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "roundup_power2_divisions": {},
}


class Settings(NamedTuple):
    """What is recorded: a stack for what CONTEXTS says, so many `entries` at most, none of the actions in `skipped`."""

    context: str | None
    entries: int
    skipped: frozenset


class Entry(NamedTuple):
    """One of a trace. `address` is that of the block, or the bytes left if memory ran out; `time` in microseconds."""

    action: str
    address: int
    nbytes: int
    stack: tuple | None
    stream: int
    time: int


class History:
    """What happens to the memory of `gpu` (a `gpu.VirtualGPU`), as Settings say; `before`: a History to go on with."""

    def __init__(self, gpu, settings, before=None):
        self.gpu, self.settings, self.depth = gpu, settings, CONTEXTS.index(settings.context)
        self.entries = deque(before.entries if before else (), settings.entries)
        self.stacks = {}

    def taken(self, address, nbytes):
        stack, stream = self.stack(STATE), self.gpu.stream_number()
        self.gpu.ledger.origins[address] = stack, stream
        self.enter("alloc", address, nbytes, stack if self.depth >= ALLOC else None, stream)

    def released(self, address, nbytes, stack, stream):
        """`stack` and `stream` are those that took the block; without those of releases they stand for them."""
        shown = self.stack(ALL) or (stack if self.depth >= ALLOC else None)
        for action in ("free_requested", "free_completed"):  # at once: no block waits for a stream
            self.enter(action, address, nbytes, shown, stream)

    def out_of_memory(self, nbytes, free):
        self.enter("oom", free, nbytes, self.stack(ALLOC), self.gpu.stream_number())

    def enter(self, action, *values):
        if action not in self.settings.skipped:
            self.entries.append(Entry(action, *values, self.gpu.microseconds()))

    def stack(self, depth):
        """The calls that led here, the innermost first, without those of this package: (file, line, function)."""
        if self.depth < depth:
            return None
        calls, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(OURS):
                calls.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        stack = tuple(calls)
        return self.stacks.setdefault(stack, stack)  # a loop comes to the same lines again and again


def record(gpus, settings, anew=False):
    """Record what happens to the memory of `gpus` from now on, and forget what has been recorded if it starts `anew`.

    `settings` are Settings, or None: recording ends, and its trace is forgotten. Blocks keep their stacks.
    """
    for gpu in gpus:
        with gpu.ledger.lock:
            gpu.ledger.history = settings and History(gpu, settings, None if anew else gpu.ledger.history)


def forget_history(gpus):
    """Leave nothing of what was recorded."""
    record(gpus, None)
    for gpu in gpus:
        gpu.ledger.origins.clear()


def snapshot(ledgers, traces=True):
    """What torch.cuda.memory._snapshot() returns, of all GPUs with these ledgers; without `traces` those are empty."""
    frames = functools.cache(frames_of)  # what many entries share is one list, so that a file gets it once
    described = [description(ledger, frames) for ledger in ledgers]
    return {
        "segments": [segment for segments, _ in described for segment in segments],
        "device_traces": [trace if traces else [] for _, trace in described],
        "allocator_settings": dict(SETTINGS),
        "external_annotations": [],
    }


def frames_of(stack):
    return [dict(zip(("filename", "line", "name"), call, strict=True)) for call in stack or ()]


def description(ledger, frames):
    """(segments, trace) of one GPU: lists of dictionaries."""
    with ledger.lock:  # the entries last: garbage collection, even here, may release blocks
        live, origins = dict(ledger.live), dict(ledger.origins)
        entries = list(ledger.history.entries) if ledger.history else []
    gone = {entry.address for entry in entries if entry.action == "free_completed"}
    segments = []
    for name, pool in (("small", ledger.small), ("large", ledger.large)):
        in_use = {a: n for a, n in live.items() if pool_of(n) == name and a not in gone}
        for address, nbytes in in_use.items():
            stack, _ = origins.get(address, (None, 0))
            segments.append(segment(ledger.index, name, address, round_up(nbytes, BLOCK), nbytes, frames(stack)))
        rest = pool.reserved - sum(round_up(nbytes, BLOCK) for nbytes in in_use.values())
        if rest > 0:
            segments.append(segment(ledger.index, name, pool.next, rest, 0, frames(None)))
    return segments, [described(entry, frames) for entry in entries]


def pool_of(nbytes):
    return "small" if round_up(nbytes, BLOCK) <= SMALL else "large"


def segment(index, name, address, size, requested, frames):
    """A segment of the pool `name` with one block: in use if something was `requested`, kept for later if not."""
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
        "segment_type": name,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


def described(entry, frames):
    """An entry of a trace in PyTorch's form. Without a stack it has no frames, as there."""
    made = {
        "action": entry.action,
        "device_free" if entry.action == "oom" else "addr": entry.address,
        "size": entry.nbytes,
        "stream": entry.stream,
        "time_us": entry.time,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
    }
    return made if entry.stack is None else {**made, "frames": frames(entry.stack)}
