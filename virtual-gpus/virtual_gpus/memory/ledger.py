"""What PyTorch's caching allocator would say of each virtual GPU: bytes allocated and reserved, peaks, running out.

The unit is the *block*: one storage, rounded up to 512 bytes as in CUDACachingAllocator.cpp. As there, blocks of more
than 1 MiB come from a pool of their own, and blocks that are freed stay reserved, in segments of 2 MiB, until
`torch.cuda.empty_cache()`. Two things are left out: fragmentation, and the workspace that a kernel takes and gives back
while it runs. A block has an address, by which it is told from all that there ever were on its GPU; no address is given
out twice, so they don't say how full memory is.
"""

import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from virtual_gpus.memory.history import History

MIN_BLOCK_SIZE = 512  # bytes; every block is a multiple of it
SMALL_SIZE = 1 << 20  # bytes of the largest block in the small pool
SEGMENT_SIZE = 2 << 20  # bytes
ADDRESSES = 1 << 47  # that a pool has to give out: 128 TiB, one block after the other


def round_up(nbytes: int, unit: int) -> int:
    """The least multiple of `unit` that holds `nbytes`."""
    return -(-nbytes // unit) * unit


class Block:
    """Memory that one storage takes; it is freed when the storage, and this object with it, dies."""

    __slots__ = ("address", "ledger")

    def __init__(self, ledger: "Ledger", address: int):  # that `ledger.allocate` has returned
        self.ledger, self.address = ledger, address

    def __del__(self):
        self.ledger.free(self.address)

    @property
    def nbytes(self) -> int:
        """The block's size."""
        return round_up(self.ledger.requested.get(self.address, 0), MIN_BLOCK_SIZE)

    def resize(self, nbytes: int) -> None:
        """Take `nbytes` from now on; torch.OutOfMemoryError, and nothing changes, if the GPU has no room for more.

        As with CUDA, new memory is allocated before the old is freed, because what it holds is copied.
        """
        before, self.address = self.address, self.ledger.allocate(nbytes)
        self.ledger.free(before)


class Pool:
    """One of the allocator's two pools: bytes, blocks and reserved bytes, each now, at their peak, and in all.

    `next` is the address that its next block gets.
    """

    def __init__(self, address: int):
        self.next = address
        self.allocated = self.blocks = self.reserved = 0
        self.held = 0  # bytes that GraphPools have free, for nobody else
        self.reset_peak()
        self.reset_accumulated()

    def reset_peak(self) -> None:
        self.peak, self.peak_blocks, self.peak_reserved = self.allocated, self.blocks, self.reserved

    def reset_accumulated(self) -> None:
        """Count anew what is allocated and freed from now on."""
        self.total_allocated = self.total_blocks = self.total_reserved = 0
        self.at_reset = self.blocks, self.allocated, self.reserved

    def stats(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of blocks, bytes, and reserved bytes: how many now, at most, allocated in all, and before that was reset."""
        blocks, allocated, reserved = self.at_reset
        return (
            (self.blocks, self.peak_blocks, self.total_blocks, blocks),
            (self.allocated, self.peak, self.total_allocated, allocated),
            (self.reserved, self.peak_reserved, self.total_reserved, reserved),
        )


class GraphPool:
    """Memory of captured graphs: what their blocks have taken stays theirs until the last of the `graphs` is gone.

    free  {Pool: bytes of it that no block has now}
    """

    def __init__(self, ledger: "Ledger"):
        self.ledger, self.graphs = ledger, 0
        self.free: Counter[Pool] = Counter()

    def put(self, pool: Pool, nbytes: int) -> None:
        """So many bytes are free again, or fewer are if they are negative."""
        if self.graphs:
            self.free[pool] += nbytes
            pool.held += nbytes

    def take(self, pool: Pool, address: int, spare: int) -> None:
        """There is a block, of which so many bytes were free before."""
        self.put(pool, -spare)
        self.ledger.graph_blocks[address] = self

    def leave(self) -> None:
        """One graph fewer."""
        with self.ledger.lock:
            self.graphs -= 1
            if not self.graphs:
                for pool, nbytes in self.free.items():
                    pool.held -= nbytes
                self.free.clear()


class Ledger:
    """The allocator's statistics of one GPU.

    allocated, peak  bytes in blocks, now and at most since `reset_peak`
    held             bytes that the pools of CUDA graphs have free, and `most`, of those and what is allocated, ever
    reserved         bytes in segments, from the driver
    capacity         bytes that the GPU has, of which this process may take a `fraction`
    requested        {address of a block: the bytes that were asked for}
    contexts         {address: (stack, stream)} of the blocks that were allocated while a history was recorded
    graph_pool       where blocks come from during a capture, or None; `graph_pools` has those that have a name
    graph_blocks     {address: its GraphPool} of blocks that were allocated there
    history          the History that the program records (torch.cuda.memory._record_memory_history), or None
    observer         in a dry run its StepMemory, or None
    """

    peak: int
    peak_blocks: int
    peak_reserved: int
    allocated = property(lambda self: self.small.allocated + self.large.allocated)
    blocks = property(lambda self: self.small.blocks + self.large.blocks)
    reserved = property(lambda self: self.small.reserved + self.large.reserved)
    held = property(lambda self: self.small.held + self.large.held)

    def __init__(self, index: int, capacity: int):
        self.index, self.capacity, self.fraction = index, capacity, 1.0
        self.spec_capacity = capacity  # what the GPU's data sheet says, whatever the capacity is set to
        self.small, self.large = (Pool((2 * index + n) * ADDRESSES) for n in (1, 2))  # never at 0: that is no block
        self.requested: dict[int, int] = {}
        self.most = 0
        self.contexts: dict[int, tuple[tuple | None, int]] = {}
        self.graph_pool: GraphPool | None = None
        self.graph_pools: weakref.WeakValueDictionary[tuple[int, int], GraphPool] = weakref.WeakValueDictionary()
        self.graph_blocks: dict[int, GraphPool] = {}
        self.history: History | None = None
        self.observer: Any = None
        self.syncs = self.driver_allocs = self.driver_frees = 0  # calls of the driver, which nothing resets
        self.reset_peak()
        self.reset_accumulated()
        self.lock = threading.RLock()  # re-entrant: a block may die while another is being made

    def allocate(self, nbytes: int) -> int:
        """Allocate a block of `nbytes`, rounded up, and return its address; 0, and no block, for no bytes.

        torch.OutOfMemoryError without room.
        """
        size = -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE  # round_up: this runs for every tensor
        if not size:
            return 0
        small, large = self.small, self.large
        pool = small if size <= SMALL_SIZE else large
        with self.lock:
            now = small.allocated + large.allocated + size
            spare = 0 if self.graph_pool is None else min(size, self.graph_pool.free[pool])
            taken = now + small.held + large.held - spare
            if taken > self.capacity or self.fraction < 1:
                self.check(size - spare)
            self.most = max(self.most, taken)
            pool.allocated += size
            pool.total_allocated += size
            pool.blocks += 1
            pool.total_blocks += 1
            if pool.blocks > pool.peak_blocks:
                pool.peak_blocks = pool.blocks
            if pool.allocated > pool.peak:
                pool.peak = pool.allocated
            if small.blocks + large.blocks > self.peak_blocks:
                self.peak_blocks = small.blocks + large.blocks
            if now > self.peak:
                self.peak = now
            address = pool.next
            pool.next = address + size
            self.requested[address] = nbytes
            if self.graph_pool is not None:
                self.graph_pool.take(pool, address, spare)
            if pool.allocated + pool.held > pool.reserved:
                self.reserve(pool)
            if self.history is not None:
                self.history.record_alloc(address, nbytes)
            if self.observer is not None:
                self.observer.allocated(address, nbytes)
        return address

    def free(self, address: int) -> None:
        """Free the block at an address that `allocate` has returned."""
        if address:
            with self.lock:
                nbytes = self.requested.pop(address)
                size = -(-nbytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
                pool = self.small if size <= SMALL_SIZE else self.large
                pool.allocated -= size
                pool.blocks -= 1
                if self.graph_blocks and (owner := self.graph_blocks.pop(address, None)) is not None:
                    owner.put(pool, size)
                if self.contexts or self.history is not None:
                    context = self.contexts.pop(address, (None, 0))
                    if self.history is not None:
                        self.history.record_free(address, nbytes, *context)
                if self.observer is not None:
                    self.observer.freed(address)

    def reserve(self, pool: Pool) -> None:
        """Get from the driver what `pool` needs; if that is too much, unused segments are given back first."""
        wanted = round_up(pool.allocated + pool.held, SEGMENT_SIZE)
        if self.reserved - pool.reserved + wanted > self.capacity:
            self.retries += 1
            self.empty_cache()
            wanted = min(wanted, self.capacity - self.reserved + pool.reserved)
        self.driver_allocs += 1
        pool.total_reserved += wanted - pool.reserved
        pool.reserved = wanted
        pool.peak_reserved = max(pool.peak_reserved, wanted)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def check(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError, in PyTorch's words, unless `nbytes` more fit."""
        if self.allocated + self.held + nbytes > self.fraction * self.capacity:
            self.out_of_memory += 1
            if self.history is not None:
                self.history.record_oom(nbytes, self.capacity - self.allocated - self.held)
            raise torch.OutOfMemoryError(self.oom_message(nbytes))

    def oom_message(self, nbytes: int) -> str:
        free = self.capacity - self.allocated - self.held
        whose = ": the capacity is a data sheet's" if self.capacity == self.spec_capacity else ""
        allowed = "" if self.fraction == 1 else f"{readable(int(self.fraction * self.capacity))} allowed; "
        private = f"with {readable(self.held)} held by private pools of CUDA graphs, " if self.held else ""
        return (
            f"CUDA out of memory. Tried to allocate {readable(nbytes)}. GPU {self.index} has a total capacity of "
            f"{readable(self.capacity)} of which {readable(free)} is free. {allowed}Of the allocated memory "
            f"{readable(self.allocated)} is allocated by PyTorch, {private}and "
            f"{readable(self.reserved - self.allocated)} "
            f"is reserved by PyTorch but unallocated. (virtual GPU{whose})"
        )

    def empty_cache(self) -> None:
        """Give the segments that no block needs back to the driver."""
        with self.lock:
            self.syncs += 1  # with all streams, whose work might still need what is given back
            for pool in (self.small, self.large):
                needed = round_up(pool.allocated + pool.held, SEGMENT_SIZE)
                if needed < pool.reserved:
                    self.driver_frees += 1
                    pool.reserved = needed

    def reset_peak(self) -> None:
        self.peak, self.peak_blocks, self.peak_reserved = self.allocated, self.blocks, self.reserved
        self.small.reset_peak()
        self.large.reset_peak()

    def reset_accumulated(self) -> None:
        """Count anew what is allocated and freed from now on."""
        self.out_of_memory = self.retries = 0
        self.small.reset_accumulated()
        self.large.reset_accumulated()

    def stats(self) -> dict:
        """The nested dictionary that `torch.cuda.memory_stats` flattens."""
        small, large = self.small.stats(), self.large.stats()
        peaks = self.peak_blocks, self.peak, self.peak_reserved  # of both pools together: not the sum of their peaks
        sums = [[sum(pair) for pair in zip(*rows, strict=True)] for rows in zip(small, large, strict=True)]
        both = [(now, peak, *rest) for (now, _, *rest), peak in zip(sums, peaks, strict=True)]
        pools = {"small_pool": small, "large_pool": large, "all": both}
        blocks, allocated, reserved = ({pool: stat(*rows[i]) for pool, rows in pools.items()} for i in range(3))
        segments = {pool: stat(*(-(-n // SEGMENT_SIZE) for n in rows[2])) for pool, rows in pools.items()}
        none = dict.fromkeys(pools, stat(0, 0, 0, 0))  # no block is ever split
        return {
            "allocation": blocks,
            "active": blocks,
            "segment": segments,
            "allocated_bytes": allocated,
            "active_bytes": allocated,
            "requested_bytes": allocated,
            "reserved_bytes": reserved,
            "inactive_split": none,
            "inactive_split_bytes": none,
            "oversize_allocations": none["all"],
            "oversize_segments": none["all"],
            "num_alloc_retries": self.retries,
            "num_ooms": self.out_of_memory,
            "num_oom_rejections": 0,  # there is no such setting here
            "num_sync_all_streams": self.syncs,
            "num_device_alloc": self.driver_allocs,
            "num_device_free": self.driver_frees,
            "max_split_size": -1,  # as if nobody has set it
        }


def stat(current: int, peak: int, allocated: int, before: int) -> dict[str, int]:
    """One statistic; `before`: how many there were when counting what is allocated began."""
    return {"current": current, "peak": peak, "allocated": allocated, "freed": before + allocated - current}


def readable(nbytes: int) -> str:
    """Bytes as PyTorch writes them in its out-of-memory error: 1.50 GiB, 20.00 MiB, 512 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
