"""Memory as PyTorch's allocator describes it: what lies under `torch.cuda.memory_snapshot` and its like.

Blocks have sizes, the lines that took them, and an address each, which no other block has had before. What the ledger
doesn't know has to be made up, so that PyTorch's viewers can draw it: where the blocks lie. It is done as PyTorch's
*expandable segments* would do it if the driver could hand out 512 bytes: memory is mapped to a range of addresses, the
blocks of a pool are laid into it one behind the other, and when its end is reached the memory of those that have died
is unmapped and mapped again behind the last one. Segments are what is mapped and hangs together. At each moment of a
trace the sizes of all segments add up to what is reserved, and those of the blocks in use to what is allocated.

The gaps between blocks therefore mean nothing: they never keep a block from fitting, while on a real GPU fragmentation
may. Nor does a block wait, after it was freed, for other streams that used it. Segments serve all streams and are said
to belong to the default one. The viewer's "Active Cached Memory Timeline" shows segments as they are in the end, as it
does with all expandable ones.
"""

import bisect
from typing import NamedTuple

from mgpu_lib.virtual.history import EMPTIED, NOWHERE, OUT_OF_MEMORY, RELEASED, TAKEN
from mgpu_lib.virtual.memory import BLOCK, SMALL, round_up

POOLS = "small", "large"
SETTINGS = {  # of PyTorch's allocator, as they are if nobody sets them, but for the segments
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": True,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "roundup_power2_divisions": {},
}


def snapshot(ledgers, traces=True):
    """What torch.cuda.memory._snapshot() returns, of all GPUs with these ledgers; without `traces` those are empty."""
    frames = Frames()
    described = [description(State.of(ledger), frames) for ledger in ledgers]
    for ledger in ledgers:
        if ledger.history is not None:
            with ledger.lock:
                ledger.history.looked_at(ledger.allocated)
    return {
        "segments": [segment for segments, _ in described for segment in segments],
        "device_traces": [trace if traces else [] for _, trace in described],
        "allocator_settings": dict(SETTINGS),
        "external_annotations": [],
    }


class State(NamedTuple):
    """What a ledger had at one moment.

    live       {address: bytes that were asked for}
    contexts   {address: history.Context} of some of them
    reserved   of the small and of the large pool; `start`: when the first of the `operations` began
    next       the address that the next block of each pool gets
    complete   whether all blocks that came and went since then are among the operations
    entries    how many a trace has at most
    """

    index: int
    live: dict
    contexts: dict
    reserved: tuple
    next: tuple
    operations: list
    start: tuple
    complete: bool
    entries: int

    @classmethod
    def of(cls, ledger):
        with ledger.lock:
            while True:  # until no block has died meanwhile, by garbage collection in this thread
                before = ledger.small.next, ledger.large.next, len(ledger.live)
                made = cls.copied(ledger)
                if (*made.next, len(ledger.live)) == before:
                    return made

    @classmethod
    def copied(cls, ledger):
        history, pools = ledger.history, (ledger.small, ledger.large)
        reserved = tuple(pool.reserved for pool in pools)
        copies = ledger.index, dict(ledger.live), dict(ledger.contexts), reserved, tuple(pool.next for pool in pools)
        if history is None:
            return cls(*copies, [], reserved, True, 0)
        return cls(*copies, list(history.operations), history.start, history.complete, history.settings.entries)


class Frames:
    """Stacks in PyTorch's form. What many entries share is one list, so that a file gets it once."""

    def __init__(self):
        self.lists, self.frames = {None: []}, {}

    def of(self, stack):
        if stack not in self.lists:
            self.lists[stack] = [self.frame(call) for call in stack]
        return self.lists[stack]

    def frame(self, call):
        if call not in self.frames:
            self.frames[call] = dict(zip(("filename", "line", "name"), call, strict=True))
        return self.frames[call]


def description(state, frames):
    """(segments, trace) of one GPU: lists of dictionaries."""
    pools = before(state) if state.complete else now(state)
    changes = [changed(pools, operation) if state.complete else [] for operation in state.operations]
    segments = [
        segment(state, name, pieces, frames)
        for name, mapped in zip(POOLS, pools, strict=True)
        for pieces in mapped.segments()
    ]
    trace = []
    for operation, parts in zip(state.operations, Whole(segments).fitted(changes), strict=True):
        trace += [entry(*part, operation, frames) for part in parts]
        trace += [entry(action, operation.address, operation.nbytes, operation, frames) for action in operation.actions]
    return segments, trace[-state.entries :]


def pool_of(nbytes):
    """Which of the POOLS a block of so many bytes comes from: its index."""
    return round_up(nbytes, BLOCK) > SMALL


class Mapped:
    """The addresses of one pool that have memory: its `blocks`, {address: size}; `gaps` where there were others; and
    behind them all, from `end` on, `tail` bytes that no block has had. `used` are the bytes of the blocks."""

    def __init__(self, blocks, end, reserved):
        self.blocks, self.gaps, self.end = blocks, {}, end
        self.used = sum(blocks.values())
        self.tail = reserved - self.used

    def take(self, address, size, reserved):
        """Lay a block behind the others; what has to be mapped for it, as (action, address, size)."""
        changes = [] if size <= self.tail else self.settle(max(reserved, self.used + size))
        self.blocks[address] = size
        self.end, self.used, self.tail = address + size, self.used + size, self.tail - size
        return changes

    def release(self, address):
        self.gaps[address] = self.blocks.pop(address)
        self.used -= self.gaps[address]

    def settle(self, reserved):
        """Have all that is `reserved` and not used in the tail; what is unmapped and mapped for that."""
        changes = [("segment_unmap", *gap) for gap in joined(self.gaps)]
        self.gaps, before = {}, self.tail
        self.tail = reserved - self.used
        if self.tail > before:
            changes.append(("segment_map", self.end + before, self.tail - before))
        if self.tail < before:
            changes.append(("segment_unmap", self.end + self.tail, before - self.tail))
        return changes

    def segments(self):
        """What hangs together, each as pieces: (address, size, whether it is a block)."""
        free = joined({**self.gaps, self.end: self.tail} if self.tail else self.gaps)
        pieces = sorted([(*block, True) for block in self.blocks.items()] + [(*piece, False) for piece in free])
        found = []
        for piece in pieces:
            if found and sum(found[-1][-1][:2]) == piece[0]:
                found[-1].append(piece)
            else:
                found.append([piece])
        return found


def joined(ranges):
    """`ranges`, {address: size}, as (address, size) by address, those that touch as one."""
    found = []
    for address, size in sorted(ranges.items()):
        if found and sum(found[-1]) == address:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((address, size))
    return found


def now(state):
    """How the pools may be Mapped, for all that is known of them."""
    return mapped_pools(state.live, state.next, state.reserved)


def before(state):
    """The same before the first of the operations, with all blocks that there were then."""
    live, ends = dict(state.live), list(state.next)
    for operation in reversed(state.operations):
        if operation.kind == TAKEN:
            ends[pool_of(operation.nbytes)] = operation.address
            del live[operation.address]
        elif operation.kind == RELEASED:
            live[operation.address] = operation.nbytes
    return mapped_pools(live, ends, state.start)


def mapped_pools(live, ends, reserved):
    blocks = {}, {}
    for address, nbytes in live.items():
        blocks[pool_of(nbytes)][address] = round_up(nbytes, BLOCK)
    return [Mapped(*pool) for pool in zip(blocks, ends, reserved, strict=True)]


def changed(pools, operation):
    """Carry out an operation in the pools; what is mapped and unmapped for it, as (action, address, size)."""
    if operation.kind == EMPTIED:
        return [change for pool, held in zip(pools, operation.reserved, strict=True) for change in pool.settle(held)]
    which = pool_of(operation.nbytes)
    if operation.kind == TAKEN:
        size = round_up(operation.nbytes, BLOCK)
        return pools[which].take(operation.address, size, operation.reserved[which])
    if operation.kind == RELEASED:
        pools[which].release(operation.address)
    return []


class Whole:
    """What is mapped, as the viewer has it that undoes a trace from its end, where these `segments` are.

    It can undo a mapping only within one whole; and what is mapped again by undoing stays a whole of its own, as long
    as only the default stream is used.
    """

    def __init__(self, segments):
        self.sizes = {made["address"]: made["total_size"] for made in segments}
        self.starts = sorted(self.sizes)

    def fitted(self, changes):
        """The same `changes`, lists of (action, address, size), with mappings in parts that can be undone."""
        return [list(self.undo(parts)) for parts in reversed(changes)][::-1]

    def undo(self, parts):
        found = []
        for action, address, size in reversed(parts):
            if action == "segment_unmap":
                self.add(address, size)
                found.append((action, address, size))
            else:
                found += self.cut(action, address, size)
        return reversed(found)

    def add(self, address, size):
        if size:
            bisect.insort(self.starts, address)
            self.sizes[address] = size

    def cut(self, action, address, size):
        """Take a range out of the wholes: a part for each that it lies in."""
        while size:
            start = self.starts.pop(bisect.bisect(self.starts, address) - 1)
            held = start + self.sizes.pop(start) - address
            if held <= 0:
                raise AssertionError(f"{size} bytes at {address} are mapped in the trace and not where it ends")
            part = min(size, held)
            self.add(start, address - start)
            self.add(address + part, held - part)
            yield action, address, part
            address, size = address + part, size - part


def entry(action, address, size, operation, frames):
    """One of a trace. Without a stack it has no frames, as in PyTorch."""
    made = {
        "action": action,
        "device_free" if operation.kind == OUT_OF_MEMORY else "addr": address,
        "size": size,
        "stream": 0 if action.startswith("segment") else operation.stream,
        "time_us": operation.time,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
    }
    return made if operation.stack is None else {**made, "frames": frames.of(operation.stack)}


def segment(state, name, pieces, frames):
    """A segment of the pool `name`, made of `pieces`."""
    blocks = [block(state, *piece, frames) for piece in pieces]
    used = sum(size for _, size, is_block in pieces if is_block)
    return {
        "device": state.index,
        "address": pieces[0][0],
        "total_size": sum(size for _, size, _ in pieces),
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(made["requested_size"] for made in blocks),
        "stream": 0,
        "segment_type": name,
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }


def block(state, address, size, is_block, frames):
    """A block in use, with the stack that took it as far as it is known, or a piece of a segment that nobody uses."""
    return {
        "address": address,
        "size": size,
        "requested_size": state.live[address] if is_block else 0,
        "state": "active_allocated" if is_block else "inactive",
        "frames": frames.of(state.contexts.get(address, NOWHERE).stack),
    }
