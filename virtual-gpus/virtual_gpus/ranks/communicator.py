"""The ranks of a process group, and one GPU of each: what NCCL calls a communicator.

The values travel by gloo. Before them travels what each rank says when it comes to an operation: the time on its clock,
and what it calls. So all ranks know when the last of them was ready, which is when the operation starts, and that they
call the same. A thread of each communicator does this, one operation after the other, while the program goes on as it
would with NCCL: no program waits for a time unless it waits for the values. What it sees never depends on how far the
thread is.
"""

import contextlib
import hashlib
import os
import queue
import struct
import threading
import traceback
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from virtual_gpus.clock.rates import HOST_COPY
from virtual_gpus.clock.streams import Stream, current_stream_of
from virtual_gpus.constants import forget, known, remember
from virtual_gpus.errors import bad_fork
from virtual_gpus.tensors.tensor import VirtualTensor, wrap
from virtual_gpus.tree import tensors_in

RECORD = 256  # bytes of what a rank says
PATIENCE = 0.25  # part of the time limit after which a rank that waits leaves word of where
GONE = "Connection closed", "Connection reset", "Broken pipe", "onnect"  # in what gloo says of a rank that is gone


class Call(NamedTuple):
    """What a rank says when it comes to an operation."""

    ready: float  # seconds on its clock, when its GPU could begin
    what: str  # the operation, its type and size: the same on all ranks

    def packed(self):
        data = struct.pack("d", self.ready) + in_brief(self.what.encode(), RECORD - 8)
        return torch.frombuffer(bytearray(data.ljust(RECORD, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, record):
        data = bytes(record.tolist())
        return cls(*struct.unpack("d", data[:8]), data[8:].rstrip(b"\0").decode(errors="replace"))


def in_brief(text, size):
    """`text`, in bytes; of a longer one than `size` beginning and end, and between them a digest of the whole."""
    digest = b" ... " + hashlib.blake2b(text, digest_size=8).hexdigest().encode() + b" ... "
    return text if len(text) <= size else text[: size - len(digest) - 40] + digest + text[-40:]


class Members(NamedTuple):
    """Ranks that communicate: where they meet, which of them this one is, and how long they wait for each other."""

    store: object
    rank: int
    ranks: list  # their numbers in the whole program
    timeout: timedelta

    @property
    def this(self):
        """The number of this rank in the whole program."""
        return self.ranks[self.rank]

    def under(self, name):
        """The same ranks, in another place."""
        return self._replace(store=dist.PrefixStore(name, self.store))

    def subset(self, numbers):
        """Those with these `numbers`, one of which is this rank's."""
        name, ranks = f"ranks {numbers}", [self.ranks[number] for number in numbers]
        return self.under(name)._replace(rank=numbers.index(self.rank), ranks=ranks)

    def gloo(self, name):
        """A gloo group of them, on this computer unless GLOO_SOCKET_IFNAME names an interface to others."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = self.timeout, 1
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        where = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
        options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        store = dist.PrefixStore(name, self.store.clone())  # while one waits for the others, its connection is taken
        return dist.ProcessGroupGloo(store, self.rank, len(self.ranks), options)

    def leave_word(self, word):
        """Let the other ranks know where this one waits, for the case that somebody runs out of time."""
        with contextlib.suppress(RuntimeError):  # the store may have gone, with the rank that kept it
            self.board().set(str(self.this), word)

    def words_of(self, rank):
        """What `rank` has left word of; nothing if it does not wait."""
        with contextlib.suppress(RuntimeError):
            if self.board().check([str(rank)]):
                return self.board().get(str(rank)).decode()
        return ""

    def board(self):
        return dist.PrefixStore("where ranks wait", dist.distributed_c10d._get_default_store())


class Transfer:
    """How the values of an operation travel: move(gloo, sent) gives what this rank receives.

    `sent` are copies of what it `reads`, as that is when the program calls the operation. What is received goes to what
    it `writes` when the program waits for it, or for a later operation: the stream keeps their order.
    """

    def __init__(self, move, reads=(), writes=()):
        self.move, self.reads, self.writes = move, reads, writes
        self.sent = self.received = None
        self.before = []  # transfers of the same stream which will have written to what this one reads
        self.ended = False

    def begin(self, pending):
        """The program calls the operation, when those in `pending` haven't been waited for."""
        self.before = [other for other in pending if any(overlap(x, y) for x in self.reads for y in other.writes)]
        self.sent = [x.clone() for x in self.reads]

    def run(self, gloo):
        with torch.inference_mode():  # which may write to tensors of both kinds
            for other in self.before:
                for target, values in zip(other.writes, other.received, strict=True):
                    for x, copy in zip(self.reads, self.sent, strict=True):
                        overlay(copy, x, values, target)
            self.received = self.move(gloo, self.sent)
        self.before = self.sent = None

    def end(self):
        if self.received is not None and not self.ended:  # nothing is received where it failed, or in a dry run
            self.ended = True
            with torch.inference_mode():
                for target, values in zip(self.writes, self.received, strict=True):
                    target.copy_(values)


def overlap(x, y):
    """(start, end) of the memory that two tensors share whose numbers lie in a row; None without."""
    start, end = max(x.data_ptr(), y.data_ptr()), min(x.data_ptr() + x.nbytes, y.data_ptr() + y.nbytes)
    return (start, end) if start < end else None


def overlay(copy, x, values, target):
    """What writing `values` to `target` changes in `x`, in a `copy` of x."""
    if shared := overlap(x, target):
        (to, till), (since, until) = ([at - whole.data_ptr() for at in shared] for whole in (x, target))
        copy.view(torch.uint8)[to:till] = values.view(torch.uint8)[since:until]


class NcclWork(torch._C._distributed_c10d.Work):
    """An operation that a communicator was given: what torch.distributed hands out for async_op=True."""

    def __init__(self, communicator, call, seconds, transfer, outputs, combine):
        super().__init__()
        self.communicator, self.call, self.seconds = communicator, call, seconds
        self.transfer, self.outputs, self.combine, self.booked = transfer, outputs, combine, None
        self.number, self.done, self.error = communicator.issued, threading.Event(), None

    def wait(self, timeout=timedelta(0)):
        """The GPU's current stream waits for the operation; in real time, the program does."""
        self.settle(timeout.total_seconds())
        stream = current_stream_of(self.communicator.gpu)
        stream.free = max(stream.free, self.end)
        return True

    def synchronize(self):
        self.wait()

    def block_current_stream(self):
        self.wait()

    def settle(self, seconds=0.0):
        """Wait, in real time, until the values are there; the first time it is entered in the timeline."""
        communicator, rendezvous = self.communicator, self.communicator.gpu.machine.rendezvous
        if rendezvous is not None:
            rendezvous.wait(
                self.done.is_set, f"waits in {self.call.what}, operation {self.number} of {communicator.name}"
            )
        elif not self.done.wait(PATIENCE * (seconds or communicator.members.timeout.total_seconds())):
            communicator.members.leave_word(
                f"waits in {self.call.what}, operation {self.number} of {communicator.name}"
            )
            self.done.wait()  # the communicator's thread keeps the time limit
            if self.error is None:
                communicator.members.leave_word("")
        self.deliver()
        if self.error is not None:
            raise self.error
        if self.booked is not None:
            gpu, row = communicator.gpu, communicator.row
            times = {"start": self.start, "end": self.end}
            gpu.clock.log.record(kind="collective", gpu=gpu.index, row=row, bound="link", **times, **self.booked)
            gpu.clock.log.pending.pop(self, None)
            self.booked = None

    def deliver(self):
        """The operation is done, and all before it: their results go where the program looks for them."""
        with self.communicator.lock:
            for number, work in self.communicator.pending.items():
                if number <= self.number:
                    work.transfer.end()
            self.communicator.pending.pop(self.number, None)
            self.transfer = None  # what it reads is kept until here, as with NCCL, and not until the thread has read it

    def is_completed(self):
        """Whether the values are there. That is decided in real time, so what follows from it may differ next time."""
        if self.communicator.gpu.machine.rendezvous is None:
            self.communicator.gpu.clock.reproducible = False
        else:  # a program that asks again and again would never let the others go on
            self.settle()
        if self.done.is_set():
            self.deliver()
        return self.done.is_set()

    def is_success(self):
        return self.done.is_set() and self.error is None

    def exception(self):
        return self.error

    def result(self):
        self.wait()
        return self.outputs

    def get_future(self):
        return Future(self, self.outputs, self.communicator.gpu)


class Communicator:
    """The `members` of a group, each with a GPU of its own; this rank's is `gpu`.

    Without values there is nothing to send: in a dry run the ranks come to a `rendezvous`, and without one there are no
    others, and what they would do is what this one does, at the same time.
    """

    Work, exclusive = NcclWork, True  # exclusive: each rank needs a GPU of its own

    def __init__(self, gpu, members, name, row):
        self.gpu, self.members = gpu, members
        self.name, self.row = name, row  # what errors call it, and the timeline
        self.place = name, members.ranks[0], len(members.ranks)  # tells it from others, on all its ranks
        self.own = f"GPU {gpu.number} of node {os.environ.get('GROUP_RANK', 0)}"
        self.issued, self.pending = 0, {}  # operations, by number, until the program has waited for them
        self.lock = threading.Lock()  # for what several threads wait for
        self.free, self.broken = 0.0, None  # when the stream is free, as far as the thread has come; why it stopped
        self.queue, self.thread = queue.SimpleQueue(), None
        self.dry = gpu.machine.dry is not None
        if not self.dry:
            self.thread = threading.Thread(target=self.serve, daemon=True, name=f"virtual NCCL, {name}")
            self.thread.start()

    def issue(self, name, what, nbytes, seconds, transfer, outputs, combine=None):
        """Hand an operation over: an NcclWork, whose Transfer runs in the communicator's thread.

        It starts when the streams of all ranks have come to it, and takes `seconds` from there. `what` is what all of
        them must call, `outputs` what the work hands out, and combine({rank: values}), in a dry run, what becomes of
        known numbers in them.
        """
        self.check(what)
        gpu, host = self.gpu, self.gpu.clock.host_in_use()
        called, launched = (host.now, host.now) if host.paused else host.advance(HOST_COPY, gpu.index)
        ready = max(launched, current_stream_of(gpu).free)
        self.issued += 1
        work = self.Work(self, Call(ready, what), seconds, transfer, outputs, combine)
        if not host.paused:
            when = {"called": called, "launched": launched, "thread": host.thread, "phase": host.phase}
            work.booked = {"name": name, "nbytes": nbytes, **when}
            if gpu.machine.dry is not None:
                gpu.clock.log.pending[work] = ready
        if not self.dry:
            with self.lock:
                transfer.begin([other.transfer for other in self.pending.values()])
            self.queue.put(work)
        elif gpu.machine.rendezvous is not None:
            meet(gpu.machine.rendezvous.enter(self.place, self.members.ranks, work))
        else:
            meet({self.members.this: work})
        with self.lock:
            self.pending[work.number] = work
        return work

    def check(self, what):
        """An error if no more operations, such as `what`, can be handed over."""
        if self.gpu.machine.forked:
            raise bad_fork()
        if self.broken is None and not self.dry and not self.thread.is_alive():
            rank = f"rank {self.members.this}, {what} ({self.name})"
            self.broken = dist.DistBackendError(f"{rank}: the thread that communicates for it has ended")
        if self.broken is not None:
            raise self.broken

    def serve(self):
        """What the communicator's thread does: connect, and one operation after the other, until one fails.

        The connection ends with it: a thread of gloo's that is left, and frees a tensor when Python ends, aborts.
        """
        connection = None
        while (work := self.queue.get()) is not None:
            try:
                if self.broken is None:
                    connection = connection or self.connect()
                    self.run(work, *connection)
            except BaseException as error:
                self.broken = self.explained(error, work)
                traceback.clear_frames(error.__traceback__)  # all but this one, and they have the connection
            work.error, done, work = self.broken, work.done, None  # whoever waits for it may free its tensors at once
            done.set()
        connection = None  # which an error's traceback would keep, with this frame

    def connect(self):
        """(records, values): gloo groups for what the ranks say, and for what they send."""
        records, values = self.members.gloo("records"), self.members.gloo("values")
        if self.exclusive:
            check_gpus([call.what for call in gathered(records, Call(0.0, self.own))], self.members.ranks)
        return records, values

    def run(self, work, records, values):
        self.schedule(work, self.exchange(records, work.call))
        work.transfer.run(values)

    def schedule(self, work, calls):
        """From when to when an operation runs that the ranks have come to with these `calls`, the same for all."""
        if len({call.what for call in calls}) > 1:
            raise dist.DistBackendError(self.disagreement(calls))
        work.start = max([self.free, *(call.ready for call in calls)])
        work.end = self.free = work.start + work.seconds

    def exchange(self, records, call):
        """What all ranks say, this one `call`."""
        return gathered(records, call)

    def synchronize(self):
        """All that it was given is done."""
        with self.lock:
            pending = list(self.pending.values())
        for work in pending:
            work.settle()

    def close(self, seconds=None):
        """The same, and there will be no more. Waits no longer than so many `seconds`, unless that is None."""
        if self.thread is not None:
            self.queue.put(None)
            self.thread.join(seconds)
        self.members = self.members._replace(store=None)  # so that the next group of these ranks gets another store

    # What goes wrong

    def disagreement(self, calls):
        ranks = (
            self.gpu.machine.rendezvous.here(self.members.ranks) if self.gpu.machine.rendezvous else self.members.ranks
        )
        said = "".join(f"\n  rank {rank}: {call.what}" for rank, call in zip(ranks, calls, strict=True))
        return f"the ranks of {self.name} called different operations; NCCL would hang, or mix values up.{said}"

    def explained(self, error, work):
        """`error`, met in `work`, as one that says who waits for whom, where that is what it is about."""
        head = f"rank {self.members.this}, {work.call.what} ({self.name})"
        if any(words in str(error) for words in GONE):
            return dist.DistBackendError(f"{head}: another rank has gone ({error})")
        if "imed out" in str(error) or "imeout" in str(error):
            seconds = f"{self.members.timeout.total_seconds():g} s"
            return dist.DistBackendError(f"{head}: not all ranks came within {seconds}{self.whereabouts(work)}")
        return error

    def whereabouts(self, work):
        """Of each rank, where it waits, in words."""
        lines = []
        for rank in self.members.ranks:
            if rank == self.members.this:
                word = f"waits in {work.call.what}, operation {work.number} of {self.name}"
            else:
                word = self.members.words_of(rank) or "waits nowhere: it computes, or has left"
            lines.append(f"\n  rank {rank} {word}")
        return "".join(lines)


class Channel(Communicator):
    """From one of two ranks to the other. `pair`: the Peers of them; `direction`: the sender's number in it."""

    def __init__(self, gpu, pair, direction):
        self.pair, self.direction = pair, direction
        super().__init__(gpu, pair.members, pair.name, "messages")
        self.place = *self.place, direction

    def connect(self):
        return self.pair.connected(super().connect)

    def exchange(self, records, call):
        there, theirs = 1 - self.members.rank, torch.empty(RECORD, dtype=torch.uint8)
        works = records.send([call.packed()], there, self.direction), records.recv([theirs], there, self.direction)
        for work in works:
            work.wait()
        said = {self.members.rank: call, there: Call.unpacked(theirs)}
        return [said[0], said[1]]


class Peers:
    """Two ranks that send to each other: both directions share a connection, and else nothing."""

    def __init__(self, members, name):
        self.members, self.name = members, name
        self.lock, self.connection = threading.Lock(), None

    def connected(self, connect):
        with self.lock:
            self.connection = self.connection or connect()
        return self.connection

    def close(self):
        """Both directions have ended."""
        self.connection = None


def meet(works):
    """All ranks that are run have come to an operation, in this process: {rank: its work}. Or none: some have not."""
    calls = [work.call for work in works.values()]
    for work in works.values():
        if work.number == 1 and work.communicator.exclusive:
            check_gpus([other.communicator.own for other in works.values()], list(works))
        work.communicator.schedule(work, calls)
    for tensors in zip(*(tensors_in([work.outputs]) for work in works.values())):
        carry_over(works, [tensor.inner for tensor in tensors])
    for work in works.values():
        work.done.set()


def carry_over(works, inner):
    """What becomes of known numbers in an output of `works`, of each rank that is run."""
    combine = next(iter(works.values())).combine
    result = combine and combine(dict(zip(works, map(known, inner), strict=True)))
    if result is None:
        forget(inner)
    else:
        for tensor in inner:
            remember(tensor, result)


def gathered(records, call):
    """What all ranks say, by rank."""
    size = records.size()
    said = torch.empty(size * RECORD, dtype=torch.uint8)
    records._allgather_base(said, call.packed()).wait()
    return [Call.unpacked(record) for record in said.view(size, RECORD)]


def check_gpus(owned, ranks):
    """NCCL's error if two ranks use one GPU; `owned` are the GPUs of the `ranks`."""
    for rank, gpu in zip(ranks, owned, strict=True):
        first = ranks[owned.index(gpu)]
        if first != rank:
            raise dist.DistBackendError(
                f"NCCL error: invalid usage\nDuplicate GPU detected : rank {rank} and rank {first} both on {gpu}. "
                "Each rank needs a GPU of its own: torch.cuda.set_device(local_rank) before its first tensor"
            )


class Awaited(VirtualTensor):
    """A result that may still be on its way: whatever is done with it waits for it first, in the current stream."""

    @classmethod
    def of(cls, tensor, source):
        """The values of `tensor`, as soon as `source.wait()` is done."""
        made = wrap(tensor.inner, tensor.gpu)
        torch._functionalize_unsafe_set(made, tensor)  # C++ compares storages, to see what is a view of what
        made.__class__, made.source = cls, source
        return made

    def arrived(self):
        self.source.wait()
        made = wrap(self.inner, self.gpu)
        torch._functionalize_unsafe_set(made, self)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Awaited, Awaited.arrived, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.is_view:
            torch._functionalize_unsafe_set(out, args[0])
        return out


class Future(torch.futures.Future):
    """What Work.get_future() hands out. As with NCCL it is complete at once, and its tensors are waited for on the GPU.

    What `then` adds runs in a stream of its own. It may look at whatever the operation wrote to, so in real time, too,
    it comes after it.
    """

    def __init__(self, source, outputs, gpu):
        super().__init__()
        self.source, self.gpu = source, gpu
        self.set_result(tree_map_only(VirtualTensor, lambda tensor: Awaited.of(tensor, source), outputs))

    def wait(self):
        return tree_map_only(Awaited, Awaited.arrived, super().wait())

    def then(self, callback):
        self.gpu.callbacks = stream = self.gpu.callbacks or Stream(gpu=self.gpu)
        with stream:
            self.source.wait()
            outputs = tree_map_only(Awaited, Awaited.arrived, callback(self))
        return Future(stream.record_event(), outputs, self.gpu)

    def add_done_callback(self, callback):
        self.then(callback)
