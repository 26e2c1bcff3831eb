"""The history of memory: what was taken and given back on a GPU while it is recorded, when, and by which lines.

It may keep no tensor alive: of a stack it keeps files, line numbers and the names of functions.
"""

import os
import sys
from collections import deque
from typing import NamedTuple

from mgpu_lib.virtual.memory import BLOCK, round_up

OURS = os.path.dirname(__file__) + os.sep
CONTEXTS = None, "state", "alloc", "all"  # what gets a stack: nothing; blocks; what takes them, too; what frees, too
TAKEN, RELEASED, EMPTIED, OUT_OF_MEMORY, LOOKED_AT = "taken", "released", "emptied", "out of memory", "looked at"
ACTIONS = {  # what PyTorch calls each, one entry of a trace after the other
    TAKEN: ("alloc",),
    RELEASED: ("free_requested", "free_completed"),  # at once: no block waits for a stream
    EMPTIED: (),  # seen only by what becomes of the addresses
    OUT_OF_MEMORY: ("oom",),
    LOOKED_AT: ("snapshot",),
}


class Settings(NamedTuple):
    """What is recorded: a stack for what CONTEXTS says, so many `entries` at most, none of the actions in `skipped`."""

    context: str | None
    entries: int
    skipped: frozenset

    def actions(self, kind):
        return tuple(action for action in ACTIONS[kind] if action not in self.skipped)


class Context(NamedTuple):
    """Where a block was taken, as a stack or None, and the number of the stream that was current."""

    stack: tuple | None
    stream: int


class Operation:
    """Something that happened to a ledger, and the `actions` that stand for it in a trace.

    address   of the block; what the driver has left, if memory ran out
    nbytes    that were asked for; what is allocated, if the ledger was looked at
    reserved  of the small and of the large pool, when it was over
    time      in microseconds
    """

    __slots__ = "actions", "address", "kind", "nbytes", "reserved", "stack", "stream", "time"

    def __init__(self, kind, actions, address, nbytes, context, time, reserved):
        self.kind, self.actions, self.address, self.nbytes = kind, actions, address, nbytes
        self.stack, self.stream = context
        self.time, self.reserved = time, reserved


class History:
    """What happens to the memory of `gpu` (a `gpu.VirtualGPU`), as Settings say; `before` is a History to go on with.

    A block may be released at any moment, even here: by garbage collection, which may run wherever Python makes an
    object. So an operation is made first, and then entered by what makes none. A block that is taken is entered when
    the pool has counted it, one that is released before, so that a pool never seems to hold more than it has reserved.
    """

    def __init__(self, gpu, settings, before=None):
        self.gpu, self.ledger, self.settings = gpu, gpu.ledger, settings
        self.operations = deque(before.operations if before else (), settings.entries)
        self.stacks = before.stacks if before else {}
        self.complete = before.complete if before else True  # whether it has all blocks that came and went
        self.first = before.first if before else self.reserved()
        self.count = before.count if before else 0  # of operations ever; the oldest may be gone
        self.actions = {kind: settings.actions(kind) for kind in ACTIONS}
        self.complete = self.complete and all(self.actions[kind] for kind in (TAKEN, RELEASED))
        self.depth = CONTEXTS.index(settings.context)

    def reserved(self):
        """Bytes that the small and the large pool have."""
        return self.ledger.small.reserved, self.ledger.large.reserved

    @property
    def start(self):
        """What they had when the oldest of the operations began, or was over if the one before it is gone."""
        return self.first if self.count == len(self.operations) else self.operations[0].reserved

    def taken(self, pool, nbytes):
        """Enter a block of `nbytes` that `pool` has counted, in the ledger, too, and return its address."""
        context, size = self.context("state"), round_up(nbytes, BLOCK)
        shown = context if self.depth >= CONTEXTS.index("alloc") else context._replace(stack=None)
        operation = self.operation(TAKEN, None, nbytes, shown)
        address = operation.address = pool.next  # blocks are entered in the order of their addresses:
        pool.next = address + size  # nothing may come in between
        if operation.actions:
            self.operations.append(operation)
            self.count += 1
        self.ledger.live[address] = nbytes
        self.ledger.contexts[address] = context
        return address

    def released(self, address):
        """Enter a release. Its stack is the one of the release or, if those aren't recorded, of the block."""
        context = self.ledger.contexts.pop(address, NOWHERE)
        if self.depth == CONTEXTS.index("all"):
            context = context._replace(stack=self.stack())
        elif self.depth < CONTEXTS.index("alloc"):
            context = context._replace(stack=None)
        operation = self.operation(RELEASED, address, self.ledger.live[address], context)
        if operation.actions:
            self.enter(operation)

    def emptied(self):
        """Enter that reserved memory was given back to the driver."""
        operation = self.operation(EMPTIED, 0, 0, self.context("all"))
        if self.complete:
            self.enter(operation)

    def out_of_memory(self, nbytes):
        """Enter that `nbytes` didn't fit."""
        free = self.ledger.capacity - self.ledger.allocated
        operation = self.operation(OUT_OF_MEMORY, free, round_up(nbytes, BLOCK), self.context("alloc"))
        if operation.actions:
            self.enter(operation)

    def looked_at(self, allocated):
        """Enter that a snapshot was taken."""
        operation = self.operation(LOOKED_AT, 0, allocated, NOWHERE)
        if operation.actions:
            self.enter(operation)

    def operation(self, kind, address, nbytes, context):
        return Operation(kind, self.actions[kind], address, nbytes, context, self.gpu.microseconds(), self.reserved())

    def enter(self, operation):
        """Add an operation; the oldest one goes if there are too many."""
        self.operations.append(operation)
        self.count += 1

    def context(self, needed):
        """The Context of what is being done, with a stack if at least `needed` is recorded."""
        stack = self.stack() if self.depth >= CONTEXTS.index(needed) else None
        return Context(stack, self.gpu.stream_number())

    def stack(self):
        """The calls that led here, the innermost first, without those of this package: (file, line, function)."""
        calls, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(OURS):
                calls.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        stack = tuple(calls)
        return self.stacks.setdefault(stack, stack)  # a loop comes to the same lines again and again


NOWHERE = Context(None, 0)


def record(gpus, settings, anew=False):
    """Record what happens to the memory of `gpus` from now on, and forget what has been recorded if it starts `anew`.

    `settings` are Settings, or None: recording ends, and what was recorded is forgotten. Blocks keep their contexts.
    """
    for gpu in gpus:
        ledger = gpu.ledger
        with ledger.lock:
            for address in list(ledger.contexts):
                if address not in ledger.live:  # it died while nothing was recorded
                    ledger.contexts.pop(address, None)
            before = None if anew else ledger.history
            ledger.history = settings and History(gpu, settings, before)


def forget_history(gpus):
    """Leave nothing of what was recorded."""
    record(gpus, None)
    for gpu in gpus:
        gpu.ledger.contexts.clear()
