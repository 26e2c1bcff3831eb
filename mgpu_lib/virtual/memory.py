"""What each virtual GPU holds, its peak, and running out.

The unit of account is the *block*: one storage, rounded up to 512 bytes as PyTorch's caching allocator does. Blocks
that are freed stay reserved, in steps of 2 MiB, until `torch.cuda.empty_cache()`. Two things are left out:
fragmentation, and the scratch memory that a kernel takes and gives back while it runs.
"""

import threading

import torch

BLOCK = 512
SEGMENT = 2 << 20


def round_up(nbytes, unit):
    """The least multiple of `unit` that holds `nbytes`."""
    return -(-nbytes // unit) * unit


class Block:
    """Memory that one storage takes; it is given back when the storage, and this object with it, dies."""

    __slots__ = ("ledger", "nbytes")

    def __init__(self, ledger, nbytes):  # that `ledger.take` has entered
        self.ledger, self.nbytes = ledger, nbytes

    def __del__(self):
        self.ledger.release(self.nbytes)

    def resize(self, nbytes):
        """Take `nbytes` from now on; torch.OutOfMemoryError, and nothing changes, if the GPU has no room for more."""
        nbytes, before = round_up(nbytes, BLOCK), self.nbytes
        if nbytes > before:
            self.ledger.take(nbytes - before, blocks=0 if before else 1)
        else:
            self.ledger.release(before - nbytes, blocks=0 if nbytes else 1)
        self.nbytes = nbytes


class Ledger:
    """Bytes on one GPU: `allocated` now, `peak` so far, `reserved` from the driver, and its `capacity`.

    This process may take `fraction` of the capacity.
    """

    def __init__(self, index, capacity):
        self.index, self.capacity, self.fraction = index, capacity, 1.0
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0
        self.blocks = self.peak_blocks = 0
        self.reset_accumulated()
        self.lock = threading.RLock()  # re-entrant: a block may die while another is being made

    def take(self, nbytes, blocks=1):
        """Enter `nbytes`, rounded up, in so many new blocks, and return them; torch.OutOfMemoryError without room."""
        size = -(-nbytes // BLOCK) * BLOCK  # round_up(nbytes, BLOCK), which is called too often
        if not size:
            return 0
        with self.lock:
            now = self.allocated + size
            if now > self.capacity or self.fraction < 1:
                self.check(size)
            self.allocated = now
            self.ever_allocated += size
            self.blocks += blocks
            self.ever_blocks += blocks
            if self.blocks > self.peak_blocks:
                self.peak_blocks = self.blocks
            if now > self.peak:
                self.peak = now
            if now > self.reserved:
                wanted = min(round_up(now, SEGMENT), self.capacity)
                self.ever_reserved += wanted - self.reserved
                self.reserved = wanted
                self.peak_reserved = max(self.peak_reserved, wanted)
        return size

    def release(self, nbytes, blocks=1):
        """Give back what `take` took."""
        if nbytes:
            with self.lock:
                self.allocated -= nbytes
                self.blocks -= blocks

    def check(self, nbytes):
        """Raise torch.OutOfMemoryError, in PyTorch's words, unless `nbytes` more fit."""
        if self.allocated + nbytes > self.fraction * self.capacity:
            self.out_of_memory += 1
            raise torch.OutOfMemoryError(self.complaint(nbytes))

    def complaint(self, nbytes):
        free = self.capacity - self.allocated
        allowed = "" if self.fraction == 1 else f"{readable(int(self.fraction * self.capacity))} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {readable(nbytes)}. GPU {self.index} has a total capacity of "
            f"{readable(self.capacity)} of which {readable(free)} is free. {allowed}Of the allocated memory "
            f"{readable(self.allocated)} is allocated by PyTorch, and {readable(self.reserved - self.allocated)} "
            "is reserved by PyTorch but unallocated. (virtual GPU: the capacity is a data sheet's)"
        )

    def empty_cache(self):
        self.reserved = round_up(self.allocated, SEGMENT)

    def reset_peak(self):
        self.peak, self.peak_reserved, self.peak_blocks = self.allocated, self.reserved, self.blocks

    def reset_accumulated(self):
        """Count anew what is taken and given back from now on."""
        self.ever_blocks = self.ever_allocated = self.ever_reserved = self.out_of_memory = 0
        self.at_reset = self.blocks, self.allocated, self.reserved

    def stats(self):
        """The nested dictionary that `torch.cuda.memory_stats` flattens; no split into pools."""

        def stat(current, peak, taken, at_reset):
            freed = at_reset + taken - current
            return {"all": {"current": current, "peak": peak, "allocated": taken, "freed": freed}}

        blocks = stat(self.blocks, self.peak_blocks, self.ever_blocks, self.at_reset[0])
        allocated = stat(self.allocated, self.peak, self.ever_allocated, self.at_reset[1])
        reserved = stat(self.reserved, self.peak_reserved, self.ever_reserved, self.at_reset[2])
        none = stat(0, 0, 0, 0)  # no block is ever split, and a request is never tried twice
        return {
            "allocation": blocks,
            "active": blocks,
            "allocated_bytes": allocated,
            "active_bytes": allocated,
            "requested_bytes": allocated,
            "reserved_bytes": reserved,
            "inactive_split": none,
            "inactive_split_bytes": none,
            "num_alloc_retries": 0,
            "num_ooms": self.out_of_memory,
        }


def readable(nbytes):
    """Bytes as PyTorch writes them in its out-of-memory error: 1.50 GiB, 20.00 MiB, 512 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
