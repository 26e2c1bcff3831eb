"""What each virtual GPU holds, its peak, and running out.

The unit of account is the *block*: one storage, rounded up to 512 bytes as PyTorch's caching allocator does. As there,
blocks of more than 1 MiB have a pool of their own, and blocks that are freed stay reserved, in steps of 2 MiB, until
`torch.cuda.empty_cache()`. Two things are left out: fragmentation, and the scratch memory that a kernel takes and gives
back while it runs. A block has an address, by which it is told from all that there ever were on its GPU; no address is
given away twice, so they don't say how full memory is.
"""

import threading

import torch

BLOCK = 512
SMALL = 1 << 20  # bytes of a block that the small pool still takes
SEGMENT = 2 << 20
ADDRESSES = 1 << 47  # that a pool has to give away: it can take 128 TiB, one block after the other


def round_up(nbytes, unit):
    """The least multiple of `unit` that holds `nbytes`."""
    return -(-nbytes // unit) * unit


class Block:
    """Memory that one storage takes; it is given back when the storage, and this object with it, dies."""

    __slots__ = ("address", "ledger")

    def __init__(self, ledger, address):  # that `ledger.take` has returned
        self.ledger, self.address = ledger, address

    def __del__(self):
        self.ledger.release(self.address)

    @property
    def nbytes(self):
        """What it takes."""
        return round_up(self.ledger.live.get(self.address, 0), BLOCK)

    def resize(self, nbytes):
        """Take `nbytes` from now on; torch.OutOfMemoryError, and nothing changes, if the GPU has no room for more.

        As with CUDA, new memory is taken before the old is given back, because what it holds is copied.
        """
        before, self.address = self.address, self.ledger.take(nbytes)
        self.ledger.release(before)


class Pool:
    """One of the allocator's two pools: bytes, blocks and reserved bytes, each now, at their peak, and taken ever.

    `next` is the address that its next block gets.
    """

    def __init__(self, address):
        self.next = address
        self.allocated = self.blocks = self.reserved = 0
        self.reset_peak()
        self.reset_accumulated()

    def reset_peak(self):
        self.peak, self.peak_blocks, self.peak_reserved = self.allocated, self.blocks, self.reserved

    def reset_accumulated(self):
        """Count anew what is taken and given back from now on."""
        self.ever_allocated = self.ever_blocks = self.ever_reserved = 0
        self.at_reset = self.blocks, self.allocated, self.reserved

    def stats(self):
        """For blocks, bytes, and reserved bytes: how many now, at most, taken ever, and how many when that began."""
        blocks, allocated, reserved = self.at_reset
        return (
            (self.blocks, self.peak_blocks, self.ever_blocks, blocks),
            (self.allocated, self.peak, self.ever_allocated, allocated),
            (self.reserved, self.peak_reserved, self.ever_reserved, reserved),
        )


class Ledger:
    """Bytes on one GPU: `allocated` now, `peak` so far, `reserved` from the driver, and its `capacity`.

    This process may take `fraction` of the capacity. `live` has the bytes that were asked for of all blocks there are,
    by address; `origins` the stack and the stream that took a block, if a history was recorded then. `history` is a
    `history.History` while one is recorded, and None otherwise.
    """

    allocated, blocks, reserved = (
        property(lambda self, name=name: getattr(self.small, name) + getattr(self.large, name))
        for name in ("allocated", "blocks", "reserved")
    )

    def __init__(self, index, capacity):
        self.index, self.capacity, self.fraction = index, capacity, 1.0
        self.sheet = capacity  # what the GPU's data sheet says, whatever the capacity is set to
        self.small, self.large = (Pool((2 * index + n) * ADDRESSES) for n in (1, 2))  # never at 0: that is no block
        self.live, self.origins, self.history = {}, {}, None
        self.syncs = self.driver_allocs = self.driver_frees = 0  # calls of the driver, which nothing resets
        self.reset_peak()
        self.reset_accumulated()
        self.lock = threading.RLock()  # re-entrant: a block may die while another is being made

    def take(self, nbytes):
        """Enter a block of `nbytes`, rounded up, and return its address; 0, and no block, if there are none.

        torch.OutOfMemoryError without room.
        """
        size = -(-nbytes // BLOCK) * BLOCK  # round_up(nbytes, BLOCK), which is called too often
        if not size:
            return 0
        small, large = self.small, self.large
        pool = small if size <= SMALL else large
        with self.lock:
            now = small.allocated + large.allocated + size
            if now > self.capacity or self.fraction < 1:
                self.check(size)
            pool.allocated += size
            pool.ever_allocated += size
            pool.blocks += 1
            pool.ever_blocks += 1
            if pool.blocks > pool.peak_blocks:
                pool.peak_blocks = pool.blocks
            if pool.allocated > pool.peak:
                pool.peak = pool.allocated
            if small.blocks + large.blocks > self.peak_blocks:
                self.peak_blocks = small.blocks + large.blocks
            if now > self.peak:
                self.peak = now
            if pool.allocated > pool.reserved:
                self.reserve(pool)
            address = pool.next
            pool.next = address + size
            self.live[address] = nbytes
            if self.history is not None:
                self.history.taken(address, nbytes)
        return address

    def release(self, address):
        """Give back the block at an address that `take` has returned."""
        if address:
            with self.lock:
                nbytes = self.live.pop(address)
                size = -(-nbytes // BLOCK) * BLOCK
                pool = self.small if size <= SMALL else self.large
                pool.allocated -= size
                pool.blocks -= 1
                if self.origins or self.history is not None:
                    origin = self.origins.pop(address, (None, 0))
                    if self.history is not None:
                        self.history.released(address, nbytes, *origin)

    def reserve(self, pool):
        """Take from the driver what `pool` needs; if that is too much, what nobody uses is given back first."""
        wanted = round_up(pool.allocated, SEGMENT)
        if self.reserved - pool.reserved + wanted > self.capacity:
            self.retries += 1
            self.empty_cache()
            wanted = min(wanted, self.capacity - self.reserved + pool.reserved)
        self.driver_allocs += 1
        pool.ever_reserved += wanted - pool.reserved
        pool.reserved = wanted
        pool.peak_reserved = max(pool.peak_reserved, wanted)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def check(self, nbytes):
        """Raise torch.OutOfMemoryError, in PyTorch's words, unless `nbytes` more fit."""
        if self.allocated + nbytes > self.fraction * self.capacity:
            self.out_of_memory += 1
            if self.history is not None:
                self.history.out_of_memory(nbytes, self.capacity - self.allocated)
            raise torch.OutOfMemoryError(self.complaint(nbytes))

    def complaint(self, nbytes):
        free = self.capacity - self.allocated
        whose = ": the capacity is a data sheet's" if self.capacity == self.sheet else ""
        allowed = "" if self.fraction == 1 else f"{readable(int(self.fraction * self.capacity))} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {readable(nbytes)}. GPU {self.index} has a total capacity of "
            f"{readable(self.capacity)} of which {readable(free)} is free. {allowed}Of the allocated memory "
            f"{readable(self.allocated)} is allocated by PyTorch, and {readable(self.reserved - self.allocated)} "
            f"is reserved by PyTorch but unallocated. (virtual GPU{whose})"
        )

    def empty_cache(self):
        with self.lock:
            self.syncs += 1  # with all streams, whose work might still need what is given back
            for pool in (self.small, self.large):
                needed = round_up(pool.allocated, SEGMENT)
                if needed < pool.reserved:
                    self.driver_frees += 1
                    pool.reserved = needed

    def reset_peak(self):
        self.peak, self.peak_blocks, self.peak_reserved = self.allocated, self.blocks, self.reserved
        self.small.reset_peak()
        self.large.reset_peak()

    def reset_accumulated(self):
        """Count anew what is taken and given back from now on."""
        self.out_of_memory = self.retries = 0
        self.small.reset_accumulated()
        self.large.reset_accumulated()

    def stats(self):
        """The nested dictionary that `torch.cuda.memory_stats` flattens."""
        pools = {"small_pool": self.small.stats(), "large_pool": self.large.stats()}
        peaks = self.peak_blocks, self.peak, self.peak_reserved
        sums = [[sum(both) for both in zip(*stats, strict=True)] for stats in zip(*pools.values(), strict=True)]
        pools["all"] = [(now, peak, *rest) for (now, _, *rest), peak in zip(sums, peaks, strict=True)]
        blocks, allocated, reserved, segments, none = (
            {pool: stat(*numbers(stats)) for pool, stats in pools.items()}
            for numbers in (
                lambda stats: stats[0],
                lambda stats: stats[1],
                lambda stats: stats[2],
                lambda stats: [-(-nbytes // SEGMENT) for nbytes in stats[2]],
                lambda stats: (0, 0, 0, 0),  # no block is ever split
            )
        )
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
            "num_oom_rejections": 0,  # of a setting that there is not
            "num_sync_all_streams": self.syncs,
            "num_device_alloc": self.driver_allocs,
            "num_device_free": self.driver_frees,
            "max_split_size": -1,  # as if nobody has set it
        }


def stat(current, peak, taken, before):
    """One row; `before` there were when counting what is taken began."""
    return {"current": current, "peak": peak, "allocated": taken, "freed": before + taken - current}


def readable(nbytes):
    """Bytes as PyTorch writes them in its out-of-memory error: 1.50 GiB, 20.00 MiB, 512 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
