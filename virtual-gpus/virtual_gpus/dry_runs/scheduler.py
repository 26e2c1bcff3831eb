"""Several ranks of one program in this process, each in a thread of its own, of which one runs at a time.

A rank runs until it has to wait for another one; then it is the turn of the next that can go on. Nothing depends on how
fast a thread is, so all happens in the same order every time.
"""

import threading


class Cancelled(BaseException):
    """Ends a rank's thread where it waits. No program that catches Exception holds it up."""


class Scheduler:
    """`ranks` that take turns. enter(rank) is called, in its thread, whenever a rank's turn begins."""

    def __init__(self, ranks, enter):
        self.ranks, self.enter = list(ranks), enter
        self.turn = None  # the rank that runs; None: whoever called `run`
        self.tasks, self.results = {}, {}
        self.waiting = {}  # {rank: (whether it can go on, what it waits for in words)}
        self.error, self.ended = None, False
        self.changed = threading.Condition()
        self.threads = [threading.Thread(target=self.serve, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in self.threads:
            thread.start()

    def run(self, task):
        """{rank: task(rank)}, each in its rank's thread, when all are done. Raises the first error that one raises.

        RuntimeError if each of them waits for another one.
        """
        self.tasks, self.results = dict.fromkeys(self.ranks, task), {}
        self.hand_over(self.ranks[0])
        with self.changed:
            self.changed.wait_for(lambda: self.turn is None)
        if self.error is not None:
            raise self.error
        return self.results

    def wait(self, ready, word):
        """The rank that runs can't go on until ready(): meanwhile others have their turns. `word` says what it does."""
        rank = self.turn
        while not ready():
            self.waiting[rank] = ready, word
            self.hand_over(self.next())
            if not self.begins(rank):
                raise Cancelled
        self.waiting.pop(rank, None)

    def close(self):
        """End the threads, wherever they wait."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join()

    def serve(self, rank):
        """What a rank's thread does: one task after the other."""
        while self.begins(rank):
            try:
                self.results[rank] = self.tasks.pop(rank)(rank)
            except Cancelled:
                return
            except BaseException as error:
                self.error = self.error or error
            self.hand_over(self.next())

    def begins(self, rank):
        """Wait for the turn of `rank`; False: there will be none."""
        with self.changed:
            self.changed.wait_for(lambda: self.turn == rank or self.ended)
        if not self.ended:
            self.enter(rank)
        return not self.ended

    def hand_over(self, rank):
        with self.changed:
            self.turn = rank
            self.changed.notify_all()

    def next(self):
        """The rank whose turn comes now; None: all have done their tasks, or one has failed."""
        if self.error is not None:
            return None
        behind = self.ranks.index(self.turn) + 1
        for rank in self.ranks[behind:] + self.ranks[:behind]:
            if rank in self.tasks or (rank in self.waiting and self.waiting[rank][0]()):
                return rank
        if self.waiting:
            words = "".join(f"\n  rank {rank} {word}" for rank, (_, word) in sorted(self.waiting.items()))
            self.error = RuntimeError(f"the program would hang: each rank waits for another one{words}")
        return None
