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

from virtual_gpus.ranks.members import Members

LAYOUT = "d248s"  # of a Record as bytes: 256 of them


class Record(NamedTuple):
    """What a rank tells the others."""

    ready: float  # seconds on its clock, when its GPU could begin
    fingerprint: str  # the operation, its dtype and sizes: the same on all ranks (c10d's CollectiveFingerPrint)


def truncated(text: bytes, size: int) -> bytes:
    """`text` in at most `size` bytes: a longer one's beginning and end, and a hash of the whole between them."""
    digest = b" ... " + hashlib.blake2b(text, digest_size=8).hexdigest().encode() + b" ... "
    return text if len(text) <= size else text[: size - len(digest) - 40] + digest + text[-40:]


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
        sent = bytearray(struct.pack(LAYOUT, record.ready, truncated(record.fingerprint.encode(), 248)))
        received = bytearray(self.records.size() * len(sent))
        # the tensors share this memory: reading a tensor's elements would take longer than sending them
        output, x = (torch.frombuffer(data, dtype=torch.uint8) for data in (received, sent))
        self.records._allgather_base(output, x).wait()
        return [
            Record(t, words.rstrip(b"\0").decode(errors="replace")) for t, words in struct.iter_unpack(LAYOUT, received)
        ]


def check_gpus(gpus: list[str], ranks: Sequence[int]) -> None:
    """NCCL's error if two of `ranks` use the same one of `gpus`."""
    for rank, gpu in zip(ranks, gpus, strict=True):
        first = ranks[gpus.index(gpu)]
        if first != rank:
            raise dist.DistBackendError(
                f"NCCL error: invalid usage\nDuplicate GPU detected : rank {rank} and rank {first} both on {gpu}. "
                "Each rank needs a GPU of its own: torch.cuda.set_device(local_rank) before its first tensor"
            )
