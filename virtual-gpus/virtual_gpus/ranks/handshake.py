"""The handshake before each operation: every rank tells the others what it calls, and when its GPU is ready.

From these records follow the time at which the operation starts (when the last rank is ready), the same on all ranks,
and whether all call the same. Where NCCL would hang or mix values up, there is an error that says who called what.
"""

import hashlib
import struct
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
    fingerprint: str  # the operation, its dtype and sizes: the same on all ranks (c10d's CollectiveFingerPrint)

    def pack(self) -> bytearray:
        data = struct.pack("d", self.ready) + shorten(self.fingerprint.encode(), RECORD_BYTES - 8)
        return bytearray(data.ljust(RECORD_BYTES, b"\0"))

    @classmethod
    def unpack(cls, data: bytearray) -> "Record":
        return cls(struct.unpack("d", data[:8])[0], data[8:].rstrip(b"\0").decode(errors="replace"))


def shorten(text: bytes, size: int) -> bytes:
    """`text` in at most `size` bytes: a longer one's beginning and end, and a hash of the whole between them."""
    digest = b" ... " + hashlib.blake2b(text, digest_size=8).hexdigest().encode() + b" ... "
    return text if len(text) <= size else text[: size - len(digest) - 40] + digest + text[-40:]


def tensor_on(data: bytearray) -> Tensor:
    """What is written to it is written to `data`: reading a tensor's elements would take longer than sending them."""
    return torch.frombuffer(data, dtype=torch.uint8)


class Connection:
    """Two gloo groups of `members`, for the records and for the values.

    `gpu` names this rank's GPU where each needs one of its own; None where ranks may share one.
    """

    def __init__(self, members: Members, gpu: str | None):
        members = members._replace(store=members.store.clone())  # a store that waits blocks its connection
        self.records, self.values = members.gloo("records"), members.gloo("values")
        if gpu is not None:
            check_gpus([record.fingerprint for record in self.all_gather(Record(0.0, gpu))], members.ranks)

    def all_gather(self, record: Record) -> list[Record]:
        """The records of all ranks, of which `record` is this one's."""
        received = bytearray(self.records.size() * RECORD_BYTES)
        self.records._allgather_base(tensor_on(received), tensor_on(record.pack())).wait()
        return [Record.unpack(received[i : i + RECORD_BYTES]) for i in range(0, len(received), RECORD_BYTES)]


def check_gpus(gpus: list[str], ranks: Sequence[int]) -> None:
    """NCCL's error if two of `ranks` use the same one of `gpus`."""
    for rank, gpu in zip(ranks, gpus, strict=True):
        first = ranks[gpus.index(gpu)]
        if first != rank:
            raise dist.DistBackendError(
                f"NCCL error: invalid usage\nDuplicate GPU detected : rank {rank} and rank {first} both on {gpu}. "
                "Each rank needs a GPU of its own: torch.cuda.set_device(local_rank) before its first tensor"
            )
