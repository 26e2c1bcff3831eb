"""Where the ranks of a dry run meet: those few that are run, of the many that the program believes in.

The others are taken to do what those do that are run: they come to a collective at the same time, and exchange the same
objects. Only a message has one sender and one receiver, so both are run.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch.distributed as dist

from virtual_gpus.dry_runs.scheduler import Scheduler


class MissingRanks(BaseException):
    """`ranks` have to be run, too. No program that catches Exception holds it up."""

    def __init__(self, ranks: Sequence[int]):
        super().__init__(f"ranks {ranks} have to be run, too")
        self.ranks = ranks


class Rendezvous:
    """Of the `ranks` that are run, in a program of `world_size` processes; switch_to(rank) makes this process a rank.

    A single rank needs no scheduler: it runs in the caller's thread, and has nobody to wait for.
    """

    def __init__(self, world_size: int, ranks: Sequence[int], switch_to: Callable[[int], None] | None):
        self.world_size, self.ranks = world_size, list(ranks)
        self.store = dist.HashStore()
        self.default_groups: dict[int, dist.ProcessGroup] = {}  # that each rank found when it began
        self.scheduler = Scheduler(ranks, switch_to) if len(self.ranks) > 1 else None
        self.works: dict[Hashable, dict[int, Any]] = {}  # of each rank, by operation, until all have come to it
        self.counts: Counter = Counter()  # of exchanges, by key and rank
        self.messages: dict[Hashable, dict[int, Any]] = {}  # of each rank, by exchange
        self.mailboxes: dict[Hashable, deque] = {}

    def run(self, task: Callable[[int], Any]) -> dict[int, Any]:
        """{rank: task(rank)} for all ranks that are run."""
        return self.scheduler.run(task) if self.scheduler else {rank: task(rank) for rank in self.ranks}

    def wait(self, ready: Callable[[], Any], status: str) -> None:
        """The rank that is running waits until ready(). `status`: what it does meanwhile, for an error."""
        if self.scheduler:
            self.scheduler.wait(ready, status)

    def close(self) -> None:
        if self.scheduler:
            self.scheduler.close()

    def run_here(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that are run."""
        return [rank for rank in ranks if rank in self.ranks]

    def require(self, ends: Sequence[int], group: Sequence[int]) -> None:
        """Both `ends` of a message must be run. If they aren't, MissingRanks asks for all of their `group`, unless that
        is the whole program: a pipeline's neighbors have neighbors, too."""
        if len(self.run_here(ends)) < len(ends):
            raise MissingRanks(ends if len(group) == self.world_size else group)

    def arrive(self, key: Hashable, ranks: Sequence[int], rank: int, work: Any) -> dict[int, Any]:
        """`rank` comes with its `work` to the operation `key` of `ranks`: {rank: its work} if it is the last, or {}."""
        works, here = self.works.setdefault(key, {}), self.run_here(ranks)
        works[rank] = work
        if len(works) < len(here):
            return {}
        del self.works[key]
        return {rank: works[rank] for rank in here}

    def exchange(self, key: Hashable, rank: int, ranks: Sequence[int], message: Any) -> list:
        """All-gather of objects: the message of each of `ranks`, of which `rank` gives this one. Those that aren't run
        give the same."""
        self.counts[key, rank] += 1
        messages = self.messages.setdefault((key, self.counts[key, rank]), {})
        messages[rank], here = message, self.run_here(ranks)
        self.wait(lambda: len(messages) == len(here), "waits for the objects of other ranks")
        return [messages.get(other, message) for other in ranks]

    def send(self, key: tuple, message: Any) -> None:
        """To whoever receives with this key: (name of a group, sender, receiver)."""
        self.mailboxes.setdefault(key, deque()).append(message)

    def receive(self, key: tuple) -> Any:
        mailbox = self.mailboxes.setdefault(key, deque())
        self.wait(lambda: mailbox, f"waits for objects from rank {key[-2]}")
        return mailbox.popleft()
