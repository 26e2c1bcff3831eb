"""Where the ranks of a dry run meet: those few that are run, of the many that the program believes in.

Ranks that aren't run are taken to do what those do that are: they come to a collective at the same time, and say the
same. Only a message has one sender and one receiver, so both are run.
"""

from collections import Counter, deque

import torch.distributed as dist

from virtual_gpus.dry_runs.scheduler import Scheduler


class MissingRanks(BaseException):
    """A rank communicates with `ranks` that have to be run, too. No program that catches Exception holds it up."""

    def __init__(self, ranks):
        super().__init__(f"ranks {ranks} have to be run, too")
        self.ranks = ranks


class Rendezvous:
    """The `ranks` that are run, of a program in `size` processes; enter(rank) makes this process that rank."""

    def __init__(self, size, ranks, enter):
        self.size, self.ranks = size, list(ranks)
        self.store = dist.HashStore()
        self.default_groups = {}  # {rank: the process group that it found when it began}
        self.scheduler = Scheduler(ranks, enter) if len(self.ranks) > 1 else None
        self.works = {}  # {key of an operation: {rank: its work}}, until all have come to it
        self.counts, self.said, self.mail = Counter(), {}, {}  # what ranks exchange as objects

    def run(self, task):
        """{rank: task(rank)} for all ranks that are run."""
        return self.scheduler.run(task) if self.scheduler else {rank: task(rank) for rank in self.ranks}

    def wait(self, ready, word):
        """The rank that runs waits until ready()."""
        if self.scheduler:
            self.scheduler.wait(ready, word)

    def close(self):
        if self.scheduler:
            self.scheduler.close()

    def here(self, ranks):
        """Those of `ranks` that are run."""
        return [rank for rank in ranks if rank in self.ranks]

    def need(self, ends, group):
        """Both `ends` of a message must be run. If they aren't, MissingRanks asks for all of their `group`, unless that
        is the whole program: a pipeline's neighbors have neighbors, too."""
        if len(self.here(ends)) < len(ends):
            raise MissingRanks(ends if len(group) == self.size else group)

    def arrive(self, key, ranks, rank, work):
        """`rank` comes with its `work` to the operation `key` of `ranks`: {rank: its work} if it is the last, or {}."""
        works, here = self.works.setdefault(key, {}), self.here(ranks)
        works[rank] = work
        if len(works) < len(here):
            return {}
        del self.works[key]
        return {rank: works[rank] for rank in here}

    def exchange(self, place, rank, ranks, said):
        """What each of `ranks` says, a list, when this one, `rank`, says `said`: those that aren't run say the same."""
        self.counts[place, rank] += 1
        place = place, self.counts[place, rank]
        words, here = self.said.setdefault(place, {}), self.here(ranks)
        words[rank] = said
        self.wait(lambda: len(words) == len(here), "waits for the objects of other ranks")
        return [words.get(other, said) for other in ranks]

    def send(self, place, said):
        """Leave something for the rank at the other end of `place`."""
        self.mail.setdefault(place, deque()).append(said)

    def receive(self, place):
        """What was left there first, as soon as there is something."""
        mail = self.mail.setdefault(place, deque())
        self.wait(lambda: mail, f"waits for objects from rank {place[-2]}")
        return mail.popleft()
