"""A cooperative scheduler: ranks of one program in this process, in a thread each, of which one runs at a time.

A rank runs until it has to wait for another one; then the next one runs that can go on. Nothing depends on how fast a
thread is, so all happens in the same order every time.
"""

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

PATIENCE = 0.5  # seconds that a rank gets to end after Ctrl-C


class Cancelled(BaseException):
    """Ends a rank's thread where it waits. No program that catches Exception holds it up."""


class Scheduler:
    """Of `ranks`. switch_to(rank) is called, in its thread, whenever a rank begins or goes on to run.

    A single rank runs in the caller's thread, and has nobody to wait for.
    """

    def __init__(self, ranks: list[int], switch_to: Callable[[int], None] | None):
        self.ranks, self.switch_to = ranks, switch_to
        self.running: int | None = None  # the rank that runs; None: whoever called `run`
        self.threads: dict[int, threading.Thread] = {}
        self.results: dict[int, Any] = {}
        self.waiting: dict[int, tuple[Callable[[], Any], str]] = {}  # whether it can go on, what it waits for in words
        self.error: BaseException | None = None
        self.closed = False
        self.changed = threading.Condition()

    def run(self, task: Callable[[int], Any]) -> dict[int, Any]:
        """{rank: task(rank)}, each in its rank's thread, when all are done. Raises the first error that one raises.

        RuntimeError if each of them waits for another one; KeyboardInterrupt, from where the running rank is: Ctrl-C
        comes to this thread, and is meant for that one.
        """
        if len(self.ranks) == 1:
            return {rank: task(rank) for rank in self.ranks}
        for rank in self.ranks:
            self.waiting[rank] = (lambda: True), "has not begun"
            self.threads[rank] = threading.Thread(target=self.serve, args=(rank, task), daemon=True)
            self.threads[rank].start()
        self.hand_over(self.ranks[0])
        try:
            with self.changed:
                self.changed.wait_for(lambda: self.running is None)
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(self.stack()) from None
        if self.error is not None:
            raise self.error
        return self.results

    def wait(self, ready: Callable[[], Any], status: str) -> None:
        """The running rank can't go on until ready(): meanwhile others run. `status` says what it does, for an
        error."""
        if len(self.ranks) > 1 and not ready():
            rank = self.running
            self.waiting[rank] = ready, status
            self.hand_over(self.next())
            self.resume(rank)

    def close(self) -> None:
        """End the threads, wherever they wait. After Ctrl-C one of them runs, and may take long."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads.values():
            thread.join(None if self.running is None else PATIENCE)

    def stack(self) -> TracebackType | None:
        """Where the running rank is."""
        if self.running is None:
            return None
        frame = sys._current_frames().get(self.threads[self.running].ident)
        entry = None
        while frame is not None:
            entry, frame = TracebackType(entry, frame, frame.f_lasti, frame.f_lineno), frame.f_back
        return entry

    def serve(self, rank: int, task: Callable[[int], Any]) -> None:
        """What a rank's thread does."""
        try:
            self.resume(rank)
            self.results[rank] = task(rank)
        except Cancelled:
            return
        except BaseException as error:
            self.error = self.error or error
        self.hand_over(self.next())

    def resume(self, rank: int) -> None:
        """Wait until `rank` may run. Cancelled if it never will."""
        with self.changed:
            self.changed.wait_for(lambda: self.running == rank or self.closed)
        if self.closed:
            raise Cancelled
        del self.waiting[rank]
        self.switch_to(rank)

    def hand_over(self, rank: int | None) -> None:
        with self.changed:
            self.running = rank
            self.changed.notify_all()

    def next(self) -> int | None:
        """The rank that runs after this one, round-robin; None: all have done the task, or one has failed."""
        if self.error is not None:
            return None
        behind = self.ranks.index(self.running) + 1
        for rank in self.ranks[behind:] + self.ranks[:behind]:
            if rank in self.waiting and self.waiting[rank][0]():
                return rank
        if self.waiting:
            statuses = "".join(f"\n  rank {rank} {status}" for rank, (_, status) in sorted(self.waiting.items()))
            self.error = RuntimeError(f"the program would hang: each rank waits for another one{statuses}")
        return None
