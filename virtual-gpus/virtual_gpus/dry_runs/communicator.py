"""How the ranks of a dry run communicate: they meet in this process, and no values travel."""

from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.ranks.communicator import Communicator
from virtual_gpus.ranks.members import Members
from virtual_gpus.ranks.work import NcclWork


class DryCommunicator(Communicator):
    """An operation is done when those of its ranks that are run have called it; see `rendezvous` for the others."""

    def __init__(self, gpu: VirtualGPU, members: Members, **options):
        super().__init__(gpu, members, **options)
        if self.direction is not None:
            gpu.machine.rendezvous.require(members.ranks, members.parent)

    def arrive(self, work: NcclWork) -> dict[int, NcclWork]:
        ranks = self.members.ranks
        key = self.name, ranks[0], len(ranks), self.direction, work.call.number  # the same on all ranks
        return self.gpu.machine.rendezvous.arrive(key, ranks, self.members.this, work)

    def wait(self, work: NcclWork, seconds: float) -> None:
        self.gpu.machine.rendezvous.wait(work.done.is_set, work.status)

    def poll(self, work: NcclWork) -> None:
        """Waits: a program that asks again and again would never let the other ranks go on."""
        work.settle()
