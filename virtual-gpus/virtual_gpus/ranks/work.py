"""An operation that a rank has called: what torch.distributed returns for async_op=True."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from virtual_gpus.clock.host import Launch
from virtual_gpus.clock.streams import current_stream_of
from virtual_gpus.compat import c10d
from virtual_gpus.ranks.futures import Future
from virtual_gpus.ranks.handshake import Record
from virtual_gpus.ranks.transfer import Transfer


class Call(NamedTuple):
    """What a rank has called."""

    name: str  # in the timeline
    nbytes: int
    number: int  # of the operation on its communicator, from 1
    record: Record  # for the other ranks
    seconds: float  # from when all ranks are ready
    outputs: Any  # what Work.result() returns
    combine: Callable | None  # see Communicator.issue


class NcclWork(c10d.Work):
    """With nccl, streams wait for an operation and the host goes on.

    launch      None after it has been recorded in the timeline, or if it is not to be
    start, end  seconds on the clock, the same on all ranks; there as soon as it is `done`
    """

    def __init__(self, communicator, call: Call, launch: Launch | None, transfer: Transfer | None):
        super().__init__()
        self.communicator, self.call, self.launch, self.transfer = communicator, call, launch, transfer
        self.start = self.end = 0.0
        self.done = threading.Event()
        self.error: BaseException | None = None

    @property
    def status(self) -> str:
        return f"waits in {self.call.record.what}, operation {self.call.number} of {self.communicator.name}"

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The GPU's current stream waits for the operation; in real time, the program does."""
        self.settle(timeout.total_seconds())
        stream = current_stream_of(self.communicator.gpu)
        stream.done_at = max(stream.done_at, self.end)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def settle(self, seconds: float = 0.0) -> None:
        """Wait, in real time, until the values are there, and record the operation. The host's clock stands still."""
        communicator, call = self.communicator, self.call
        communicator.wait(self, seconds)
        self.deliver()
        if self.error is not None:
            raise self.error
        if self.launch is not None:
            log, gpu, row = communicator.gpu.clock.log, communicator.gpu.index, communicator.row
            event = {"name": call.name, "kind": "collective", "nbytes": call.nbytes, "bound": "link"}
            log.record(gpu=gpu, row=row, start=self.start, end=self.end, **event, **self.launch._asdict())
            log.pending.pop(self, None)
            self.launch = None

    def deliver(self) -> None:
        """The operation is done, and all before it: write what they have received."""
        with self.communicator.lock:
            for number, work in self.communicator.pending.items():
                if number <= self.call.number:
                    work.transfer.end()
            self.communicator.pending.pop(self.call.number, None)
            self.transfer = None  # as with NCCL, what it reads is kept until here, however early it was read

    def is_completed(self) -> bool:
        self.communicator.poll(self)
        if self.done.is_set():
            self.deliver()
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        self.wait()
        return self.call.outputs

    def get_future(self) -> Future:
        return Future(self, self.call.outputs, self.communicator.gpu)
