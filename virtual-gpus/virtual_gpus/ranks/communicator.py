"""A communicator orders the operations of a group's ranks, each with its GPU, as NCCL's does.

An operation starts when the streams of all ranks have come to it. Where values exist, a RealCommunicator sends them by
gloo, in a thread of its own, while the program goes on: nobody waits for another rank's time unless it waits for the
values. In a dry run there is nothing to send, see `dry_runs.rendezvous`.
"""

import os
import queue
import threading
import traceback
from typing import Any

import torch.distributed as dist

from virtual_gpus.clock.contention import Occupancy
from virtual_gpus.clock.nccl import collective_channels
from virtual_gpus.clock.rates import HOST_COPY
from virtual_gpus.clock.streams import current_stream_of
from virtual_gpus.constants import constant_of, invalidate_constants, set_constant
from virtual_gpus.errors import bad_fork
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.ranks.handshake import Connection, Record, check_gpus
from virtual_gpus.ranks.members import Members
from virtual_gpus.ranks.transfer import Transfer
from virtual_gpus.ranks.work import Call, CapturedWork, NcclWork
from virtual_gpus.tree import tensors_in

STATUS_AFTER = 0.25  # part of the time limit after which a rank that waits tells the others where
DISCONNECTED = "Connection closed", "Connection reset", "Broken pipe", "onnect"  # in gloo's errors


class Communicator:
    """This rank's end of a group, on `gpu`.

    This class is for a machine without values, backing="meta", that no dry run has made: the other ranks are taken to
    do the same at the same time, and each operation is done as soon as it is called.

    name        what errors call it
    row         its row in the timeline
    work_class  the NcclWork of its operations, or GlooWork
    direction   between two ranks, which of them sends; None: a collective's
    """

    def __init__(
        self,
        gpu: VirtualGPU,
        members: Members,
        name: str,
        row: str,
        work_class: type[NcclWork] = NcclWork,
        direction: int | None = None,
    ):
        self.gpu, self.members, self.name, self.row = gpu, members, name, row
        self.work_class, self.direction = work_class, direction
        exclusive = work_class.exclusive
        self.gpu_name = f"GPU {gpu.number} of node {os.environ.get('GROUP_RANK', 0)}" if exclusive else None
        self.issued = 0  # operations
        self.pending: dict[int, NcclWork] = {}  # by number, until the program has waited for them
        self.lock = threading.Lock()  # several threads may wait for what is pending
        self.done_at = 0.0  # when its stream has done all operations, as far as is known
        self.broken: BaseException | None = None  # why nothing works any more
        topology = gpu.machine.topology
        taken = collective_channels(topology.gpus_of(members.ranks), topology) if direction is None and exclusive else 0
        self.occupancy = Occupancy(gpu, taken) if taken else None  # of messages, it isn't known
        gpu.communicators.append(self)

    def issue(self, call: Call, transfer: Transfer) -> NcclWork:
        """An operation begins when the streams of all ranks have come to it."""
        self.check(call)
        if self.gpu.capturing() is not None:
            return CapturedWork(self, call, transfer)
        gpu, host = self.gpu, self.gpu.clock.host_in_use()
        launch = None if host.paused else host.launch(HOST_COPY, gpu.index)
        ready = max(launch.launched if launch else host.now, current_stream_of(gpu).done_at)
        self.issued += 1
        if gpu.machine.step_memory is not None:
            gpu.machine.step_memory.own("in transit", (*transfer.inputs, *transfer.outputs))
        work = self.work_class(self, call, ready, launch, transfer)
        self.start(work)
        if launch is not None and self.occupancy is not None:
            self.occupancy.begin(launch, call.name, ready, call.seconds)
        with self.lock:
            self.pending[self.issued] = work
        return work

    def check(self, call: Call) -> None:
        """An error if no more operations, such as this one, can be called."""
        if self.gpu.machine.forked:
            raise bad_fork()
        if self.broken is not None:
            raise self.broken

    def start(self, work: NcclWork) -> None:
        if work.launch is not None:
            self.gpu.clock.log.pending[work] = work.record.ready
        complete(self.join(work))

    def join(self, work: NcclWork) -> dict[int, NcclWork]:
        """{rank: its work} of the ranks that are run, if all have come to the operation; or {}."""
        return {self.members.global_rank: work}

    def wait(self, work: NcclWork, seconds: float) -> None:
        """Wait, in real time, until it is done. `seconds`: the program's own time limit, 0: the group's."""

    def poll(self, work: NcclWork) -> None:
        """The program asks whether it is done. Real time decides, so what follows from it may differ next time."""
        self.gpu.clock.reproducible = False

    def schedule(self, work: NcclWork, records: dict[int, Record]) -> None:
        """From when to when an operation runs, by the records of its ranks."""
        if len({record.fingerprint for record in records.values()}) > 1:
            calls = "".join(f"\n  rank {rank}: {record.fingerprint}" for rank, record in records.items())
            raise dist.DistBackendError(
                f"the ranks of {self.name} called different operations; NCCL would hang, or mix values up.{calls}"
            )
        work.start = max([self.done_at, *(record.ready for record in records.values())])
        work.end = self.done_at = work.start + work.call.seconds

    def synchronize(self) -> None:
        """Wait for all operations."""
        with self.lock:
            pending = list(self.pending.values())
        for work in pending:
            work.wait_in_real_time()

    def close(self, seconds: float | None = None) -> None:
        """There will be no more operations. Waits for those there are, but no longer than `seconds`."""
        # nothing keeps the store, so that the next group of these ranks gets another one
        self.members = self.members._replace(store=None)


def complete(works: dict[int, NcclWork]) -> None:
    """All ranks that are run have come to an operation, {rank: its work}, and it has no values to send."""
    records = {rank: work.record for rank, work in works.items()}
    for work in works.values():
        if work.number == 1 and work.communicator.gpu_name is not None:
            check_gpus([other.communicator.gpu_name for other in works.values()], list(works))
        work.communicator.schedule(work, records)
    for i, tensors in enumerate(zip(*(tensors_in([work.call.result]) for work in works.values()))):
        combine_constants(works, i, [tensor.inner for tensor in tensors])
    for work in works.values():
        work.completed.set()


def combine_constants(works: dict[int, NcclWork], i: int, inner: list) -> None:
    """What is known of the numbers in the i-th output, `inner` on each rank of `works`, after the operation."""
    call = next(iter(works.values())).call
    given = map(constant_of, inner) if call.given is None else (work.call.given for work in works.values())
    result = call.combine and call.combine(dict(zip(works, given, strict=True)), i)
    if result is None:
        invalidate_constants(inner)
    else:
        for tensor in inner:
            set_constant(tensor, result, follows=True)


class RealCommunicator(Communicator):
    """The ranks are processes, and their GPUs hold values.

    A thread does one operation after the other, until one fails.
    """

    def __init__(self, gpu: VirtualGPU, members: Members, name: str, *options: Any):
        super().__init__(gpu, members, name, *options)
        self.queue: queue.SimpleQueue[NcclWork | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.serve, daemon=True, name=f"virtual NCCL, {name}")
        self.thread.start()

    def check(self, call: Call) -> None:
        if self.broken is None and not self.thread.is_alive():
            self.broken = dist.DistBackendError(f"{self.head(call)}: the thread that communicates for it has ended")
        super().check(call)

    def head(self, call: Call) -> str:
        """What an error message begins with."""
        return f"rank {self.members.global_rank}, {call.fingerprint} ({self.name})"

    def start(self, work: NcclWork) -> None:
        with self.lock:
            work.transfer.copy_inputs([other.transfer for other in self.pending.values()])
        self.queue.put(work)

    def serve(self) -> None:
        """What the thread does. The connection ends with it: a thread of gloo's that is left, and frees a tensor when
        Python ends, aborts."""
        connection = None
        while (work := self.queue.get()) is not None:
            try:
                if self.broken is None:
                    connection = connection or Connection(self.members, self.gpu_name)
                    records = connection.all_gather(work.record)
                    self.schedule(work, dict(zip(self.members.ranks, records, strict=True)))
                    work.transfer.run(connection.values)
            except BaseException as error:
                self.broken = self.explained(error, work)
                traceback.clear_frames(error.__traceback__)  # all but this one, and they have the connection
            work.error, completed = self.broken, work.completed
            work = None  # whoever waits for it may free its tensors at once
            completed.set()
        connection = None  # which an error's traceback would keep, with this frame

    def wait(self, work: NcclWork, seconds: float) -> None:
        if not work.completed.wait(STATUS_AFTER * (seconds or self.members.timeout.total_seconds())):
            self.members.set_status(work.status)
            work.completed.wait()  # the thread keeps the time limit
            if work.error is None:
                self.members.set_status("")

    def explained(self, error: BaseException, work: NcclWork) -> BaseException:
        """`error`, met in `work`; one of gloo's as one that says which ranks have gone, or wait where."""
        if any(words in str(error) for words in DISCONNECTED):
            return dist.DistBackendError(f"{self.head(work.call)}: another rank has gone ({error})")
        if "imed out" in str(error) or "imeout" in str(error):
            words = f"not all ranks came within {self.members.timeout.total_seconds():g} s{self.statuses(work)}"
            return dist.DistBackendError(f"{self.head(work.call)}: {words}")
        return error

    def statuses(self, work: NcclWork) -> str:
        """A line for each rank: where it waits."""
        lines = []
        for rank in self.members.ranks:
            other = self.members.status_of(rank) or "waits nowhere: it computes, or has left"
            lines.append(f"\n  rank {rank} {work.status if rank == self.members.global_rank else other}")
        return "".join(lines)

    def close(self, seconds: float | None = None) -> None:
        self.queue.put(None)
        self.thread.join(seconds)
        super().close()
