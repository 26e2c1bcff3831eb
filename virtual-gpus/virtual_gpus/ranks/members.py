"""The ranks of a process group, and how they find each other."""

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from virtual_gpus.compat import GlooOptions, get_default_store


class Members(NamedTuple):
    """The ranks of a group, the store by which they find each other, and how long they wait for each other."""

    store: dist.Store
    rank: int  # of this process in the group
    ranks: list[int]  # of all members in the whole program
    timeout: timedelta
    parent: list[int] | None = None  # the ranks of the group of which these are a subset

    @property
    def global_rank(self) -> int:
        """The rank of this process in the whole program."""
        return self.ranks[self.rank]

    def under(self, prefix: str) -> "Members":
        """The same ranks, with keys of their own in the store."""
        return self._replace(store=dist.PrefixStore(prefix, self.store))

    def subset(self, numbers: Sequence[int]) -> "Members":
        """The ranks with these `numbers` in the group. One of them is this process."""
        ranks = [self.ranks[number] for number in numbers]
        return self.under(f"ranks {numbers}")._replace(rank=numbers.index(self.rank), ranks=ranks, parent=self.ranks)

    def gloo(self, name: str) -> dist.ProcessGroupGloo:
        """A gloo group of them, on this computer unless GLOO_SOCKET_IFNAME names an interface to others."""
        options = GlooOptions()
        options._timeout, options._threads = self.timeout, 1
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        where = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
        options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), self.rank, len(self.ranks), options)

    # Where each rank waits, for the error message when one runs out of time

    def set_status(self, status: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have gone, with the rank that kept it
            self.status_store().set(str(self.global_rank), status)

    def status_of(self, rank: int) -> str:
        """What `rank` has set last; "" if it has set nothing."""
        with contextlib.suppress(RuntimeError):
            if self.status_store().check([str(rank)]):
                return self.status_store().get(str(rank)).decode()
        return ""

    def status_store(self) -> dist.Store:
        return dist.PrefixStore("where ranks wait", get_default_store())
