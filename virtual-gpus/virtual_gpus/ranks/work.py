"""An operation that a rank has called: what torch.distributed returns for async_op=True."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from virtual_gpus.clock.host import Launch
from virtual_gpus.clock.streams import current_stream_of
from virtual_gpus.compat import c10d
from virtual_gpus.constants import invalidate_constants
from virtual_gpus.errors import capture_error
from virtual_gpus.ranks.futures import Future
from virtual_gpus.ranks.handshake import Record
from virtual_gpus.ranks.transfer import Transfer

if TYPE_CHECKING:
    from virtual_gpus.ranks.communicator import Communicator


class Call(NamedTuple):
    """An operation that a rank calls."""

    name: str  # in the timeline
    fingerprint: str  # the operation, its dtype and sizes, in words: the same on all ranks
    nbytes: int
    seconds: float  # that it takes, from when the streams of all ranks have come to it
    result: Any  # what Work.result() returns
    # in a dry run: combine({rank: what it held}, i) is what the i-th tensor of `result` holds afterwards, None if that
    # is unknown. What a rank held are the constants, or None, of that tensor; or `given`, those of each of its inputs
    combine: Callable | None = None
    given: Sequence[Tensor | None] | None = None


class NcclWork(c10d.Work):
    """With nccl, streams wait for an operation and the host goes on.

    number      of the operation on its communicator, from 1
    record      what this rank tells the others
    launch      None after it has been recorded in the timeline, or if it is not to be
    start, end  seconds on the clock, the same on all ranks; there as soon as it is `completed`
    """

    exclusive = True  # each rank needs a GPU of its own

    def __init__(
        self, communicator: "Communicator", call: Call, ready: float, launch: Launch | None, transfer: Transfer | None
    ):
        super().__init__()
        self.communicator, self.number, self.call = communicator, communicator.issued, call
        self.record, self.launch, self.transfer = Record(ready, call.fingerprint), launch, transfer
        self.start = self.end = 0.0
        self.completed = threading.Event()
        self.error: BaseException | None = None

    @property
    def status(self) -> str:
        return f"waits in {self.call.fingerprint}, operation {self.number} of {self.communicator.name}"

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """The GPU's current stream waits for the operation; in real time, the program does."""
        self.wait_in_real_time(timeout.total_seconds())
        stream = current_stream_of(self.communicator.gpu)
        stream.done_at = max(stream.done_at, self.end)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def wait_in_real_time(self, seconds: float = 0.0) -> None:
        """Wait until the values are there, and record the operation. On the modelled clock nobody waits."""
        communicator, call = self.communicator, self.call
        communicator.wait(self, seconds)
        self.write_outputs()
        if self.error is not None:
            raise self.error
        if self.launch is not None:
            log, gpu = communicator.gpu.clock.log, communicator.gpu.index
            event = call.name, "collective", gpu, communicator.row, self.start, self.end, "link", call.nbytes
            log.record(self.launch, *event)
            if communicator.occupancy is not None:
                communicator.occupancy.end(self.launch, call.name, self.end)
            log.pending.pop(self, None)
            self.launch = None

    def write_outputs(self) -> None:
        """The operation has completed, and all before it."""
        with self.communicator.lock:
            for number, work in self.communicator.pending.items():
                if number <= self.number:
                    work.transfer.write_outputs()
            self.communicator.pending.pop(self.number, None)
            self.transfer = None  # as with NCCL, its inputs are kept until here, however early they were read

    def is_completed(self) -> bool:
        self.communicator.poll(self)
        if self.completed.is_set():
            self.write_outputs()
        return self.completed.is_set()

    def is_success(self) -> bool:
        return self.completed.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        self.wait()
        return self.call.result

    def get_future(self) -> Future:
        return Future(self, self.call.result, self.communicator.gpu)


class GlooWork(NcclWork):
    """The host waits for it, and not a stream."""

    exclusive = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        super().wait(timeout)
        self.communicator.gpu.clock.wait(self.communicator.gpu, self.end)
        return True


class CapturedWork(NcclWork):
    """What is returned for an operation during the capture of a graph."""

    def __init__(self, communicator: "Communicator", call: Call, transfer: Transfer):
        super().__init__(communicator, call, 0.0, None, None)
        self.repeated = Repeated(communicator, call._replace(result=(), combine=None, given=None), transfer.fn)
        self.capture = communicator.gpu.capturing()
        self.capture.works.add(self)  # C++ has no methods of a Python object that is gone
        communicator.gpu.call(self.repeated.issue, transfer.inputs, transfer.outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.capture.works.discard(self)
        self.communicator.gpu.call(self.repeated.wait)
        return True

    def is_completed(self) -> bool:
        raise capture_error(907)


class Repeated:
    """An operation that each replay of a graph calls, and waits for where the program did. It keeps no tensors."""

    def __init__(self, communicator: "Communicator", call: Call, fn: Callable):
        self.communicator, self.call, self.fn = communicator, call, fn
        self.last: NcclWork | None = None  # of the replay that goes on

    def issue(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self.communicator.gpu.machine.is_meta:
            invalidate_constants(outputs)
        self.last = self.communicator.issue(self.call, Transfer(self.fn, inputs, outputs))

    def wait(self) -> None:
        if self.last is None:
            raise RuntimeError("an operation of a captured graph can be waited for in that capture only")
        self.last.wait()
