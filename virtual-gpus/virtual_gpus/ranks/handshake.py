"""The handshake before each operation: every rank tells the others what it calls, and when its GPU is ready.

From these records follow the time at which the operation starts (when the last rank is ready), the same on all ranks,
and whether all call the same. Where NCCL would hang or mix values up, there is an error that says who called what.
"""

import hashlib
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from virtual_gpus.ranks.members import Members

RECORD_BYTES = 256


class Record(NamedTuple):
    """What a rank tells the others."""

    ready: float  # seconds on its clock, when its GPU could begin
    what: str  # the operation, its type and size: the same on all ranks

    def pack(self) -> Tensor:
        """As uint8, RECORD_BYTES of them."""
        data = struct.pack("d", self.ready) + shorten(self.what.encode(), RECORD_BYTES - 8)
        return torch.frombuffer(bytearray(data.ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpack(cls, record: Tensor) -> "Record":
        data = bytes(record.tolist())
        return cls(struct.unpack("d", data[:8])[0], data[8:].rstrip(b"\0").decode(errors="replace"))


def shorten(text: bytes, size: int) -> bytes:
    """`text` in at most `size` bytes: a longer one's beginning and end, and a hash of the whole between them."""
    digest = b" ... " + hashlib.blake2b(text, digest_size=8).hexdigest().encode() + b" ... "
    return text if len(text) <= size else text[: size - len(digest) - 40] + digest + text[-40:]


class Connection:
    """Two gloo groups of `members`, for the records and for the values.

    `gpu` names this rank's GPU where each needs one of its own; None where ranks may share one.
    """

    def __init__(self, members: Members, gpu: str | None):
        self.records, self.values = members.gloo("records"), members.gloo("values")
        if gpu is not None:
            check_gpus([record.what for record in self.exchange(Record(0.0, gpu))], members.ranks)

    def exchange(self, record: Record) -> list[Record]:
        """The records of all ranks, of which `record` is this one's."""
        size = self.records.size()
        received = torch.empty(size * RECORD_BYTES, dtype=torch.uint8)
        self.records._allgather_base(received, record.pack()).wait()
        return [Record.unpack(row) for row in received.view(size, RECORD_BYTES)]


class PairConnection:
    """One direction of a Pair's connection: the tag of its messages is the number of the rank that sends them."""

    def __init__(self, connection: Connection, direction: int):
        self.records, self.values, self.direction = connection.records, connection.values, direction

    def exchange(self, record: Record) -> list[Record]:
        this, received = self.records.rank(), torch.empty(RECORD_BYTES, dtype=torch.uint8)
        works = (
            self.records.send([record.pack()], 1 - this, self.direction),
            self.records.recv([received], 1 - this, self.direction),
        )
        for work in works:
            work.wait()
        other = Record.unpack(received)
        return [other, record] if this else [record, other]


class Pair:
    """Two ranks that send to each other. Both directions share a connection, and else nothing."""

    def __init__(self, members: Members, name: str):
        self.members, self.name = members, name
        self.lock, self.connection = threading.Lock(), None

    def connect(self, direction: int, gpu: str | None) -> PairConnection:
        with self.lock:
            self.connection = self.connection or Connection(self.members, gpu)
        return PairConnection(self.connection, direction)

    def close(self) -> None:
        """Both directions have ended."""
        self.connection = None


def check_gpus(gpus: list[str], ranks: Sequence[int]) -> None:
    """NCCL's error if two of `ranks` use the same one of `gpus`."""
    for rank, gpu in zip(ranks, gpus, strict=True):
        first = ranks[gpus.index(gpu)]
        if first != rank:
            raise dist.DistBackendError(
                f"NCCL error: invalid usage\nDuplicate GPU detected : rank {rank} and rank {first} both on {gpu}. "
                "Each rank needs a GPU of its own: torch.cuda.set_device(local_rank) before its first tensor"
            )
