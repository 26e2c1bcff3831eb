"""Where the ranks of a dry run meet: those few that are run, of the many that the program believes in.

The others are taken to do what those do that are run: they join a collective at the same time, and gather the same
objects. Only a message has one sender and one receiver, so both are run.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch.distributed as dist

from virtual_gpus.dry_runs.scheduler import Scheduler
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.ranks.communicator import Communicator
from virtual_gpus.ranks.members import Members
from virtual_gpus.ranks.work import NcclWork
from virtual_gpus.unknown import Assumptions


class MissingRanks(BaseException):
    """`ranks` have to be run, too. No program that catches Exception holds it up."""

    def __init__(self, ranks: Sequence[int]):
        super().__init__(f"ranks {ranks} have to be run, too")
        self.ranks = ranks


class Rendezvous:
    """Of the `ranks` that are run, in a program of `world_size` processes; for switch_to see its Scheduler."""

    def __init__(
        self, world_size: int, ranks: list[int], switch_to: Callable[[int], None] | None, assumptions: Assumptions
    ):
        self.world_size, self.ranks, self.assumptions = world_size, ranks, assumptions
        self.store = dist.HashStore()
        self.default_groups: dict[int, dist.ProcessGroup] = {}  # that each rank found when it began
        self.scheduler = Scheduler(ranks, switch_to)
        self.works: dict[Hashable, dict[int, NcclWork]] = {}  # of each rank, by operation, until all have joined it
        self.counts: Counter = Counter()  # of all_gathers, by key and rank
        self.objects: defaultdict[Hashable, dict[int, Any]] = defaultdict(dict)  # of each rank, by all_gather
        self.sent: defaultdict[Hashable, deque] = defaultdict(deque)  # and not yet received

    def participants(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that are run."""
        return [rank for rank in ranks if rank in self.ranks]

    def require(self, ends: Sequence[int], group: Sequence[int]) -> None:
        """Both `ends` of a message must be run. If they aren't, MissingRanks asks for all of their `group`, unless that
        is the whole program: a pipeline's neighbors have neighbors, too."""
        if len(self.participants(ends)) < len(ends):
            raise MissingRanks(ends if len(group) == self.world_size else group)

    def join(self, key: Hashable, ranks: Sequence[int], rank: int, work: NcclWork) -> dict[int, NcclWork]:
        """`rank` comes with its `work` to the operation `key` of `ranks`: {rank: its work} if it is the last, or {}."""
        works, participants = self.works.setdefault(key, {}), self.participants(ranks)
        works[rank] = work
        if len(works) < len(participants):
            return {}
        del self.works[key]
        return {rank: works[rank] for rank in participants}

    def all_gather(
        self, key: Hashable, rank: int, ranks: Sequence[int], obj: Any, status: str = "waits for other ranks' objects"
    ) -> list:
        """The objects of all `ranks`, of which `rank` gives this one. Those that aren't run give the same.

        `status`: as for `Scheduler.wait`."""
        self.counts[key, rank] += 1
        objects, participants = self.objects[key, self.counts[key, rank]], self.participants(ranks)
        objects[rank] = obj
        self.scheduler.wait(lambda: len(objects) == len(participants), status)
        return [objects.get(other, obj) for other in ranks]

    def send(self, key: tuple, obj: Any) -> None:
        """To whoever receives with this key: (name of a group, sender, receiver)."""
        self.sent[key].append(obj)

    def recv(self, key: tuple) -> Any:
        self.scheduler.wait(lambda: self.sent[key], f"waits for objects from rank {key[-2]}")
        return self.sent[key].popleft()


class DryCommunicator(Communicator):
    """An operation has completed when those of its ranks that are run have called it; no values travel."""

    def __init__(self, gpu: VirtualGPU, members: Members, *options: Any):
        super().__init__(gpu, members, *options)
        if self.direction is not None:
            gpu.machine.rendezvous.require(members.ranks, members.parent)

    def join(self, work: NcclWork) -> dict[int, NcclWork]:
        ranks = self.members.ranks
        key = self.name, ranks[0], len(ranks), self.direction, work.number  # the same on all ranks
        return self.gpu.machine.rendezvous.join(key, ranks, self.members.global_rank, work)

    def wait(self, work: NcclWork, seconds: float) -> None:
        self.gpu.machine.rendezvous.scheduler.wait(work.completed.is_set, work.status)

    def poll(self, work: NcclWork) -> None:
        """Waits: a program that asks again and again would never let the other ranks go on."""
        work.wait_in_real_time()
