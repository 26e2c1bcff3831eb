"""Ranks for a check: threads on the CPU that meet in the collectives of torch.distributed, which are imitated."""

import threading
from unittest import mock

import torch
import torch.distributed as dist

from mgpu_lib.exercises.framework import expect

SECONDS = 5  # that a rank waits for the others

REDUCE = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax}


class Meeting:
    """Where the threads of `ranks` ranks exchange tensors; `numbers` counts what each rank was sent by another."""

    def __init__(self, ranks):
        self.ranks, self.numbers = ranks, [0] * ranks
        self.barrier, self.slots, self.mine = (
            threading.Barrier(ranks, timeout=SECONDS),
            [None] * ranks,
            threading.local(),
        )

    @property
    def rank(self):
        return self.mine.rank

    def exchange(self, name, tensors):
        """What all ranks bring to the collective `name`: one entry for each rank."""
        self.slots[self.rank] = name, [tensor.detach().clone() for tensor in tensors]
        self.barrier.wait()
        names, brought = zip(*self.slots, strict=True)
        self.barrier.wait()
        expect(len({*names}) == 1, f"the ranks call different collectives: {', '.join(names)}; on GPUs they would hang")
        return brought

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        summands = torch.stack([one for (one,) in self.exchange("all_reduce", [tensor])])
        self.numbers[self.rank] += tensor.numel()
        with torch.no_grad():
            tensor.copy_(REDUCE[op](summands, dim=0))

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        brought = self.exchange("all_gather", [tensor])
        for target, (source,) in zip(tensor_list, brought, strict=True):
            self.numbers[self.rank] += source.numel()
            put(target, source)

    def reduce_scatter(self, output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        brought = self.exchange("reduce_scatter", input_list)
        self.numbers[self.rank] += output.numel()
        put(output, REDUCE[op](torch.stack([pieces[self.rank] for pieces in brought]), dim=0))


def put(target, source):
    """`source` into `target`, as NCCL would; it writes nothing into a tensor of another size."""
    expect(target.shape == source.shape, f"a tensor of {[*target.shape]} can't take one of {[*source.shape]}")
    expect(target.is_contiguous(), "collectives need contiguous tensors")
    with torch.no_grad():
        target.copy_(source)


def on_ranks(ranks, program):
    """([what program(rank) returns on each rank], [numbers that each rank was sent]); raises what the first raises."""
    meeting, results, errors = Meeting(ranks), [None] * ranks, []

    def run(rank):
        meeting.mine.rank = rank
        try:
            results[rank] = program(rank)
        except threading.BrokenBarrierError:
            errors.append(AssertionError("the ranks don't all call the same collectives: on GPUs they would hang"))
        except Exception as error:
            errors.insert(0, error)
            meeting.barrier.abort()

    stand_ins = {"get_rank": lambda group=None: meeting.rank, "get_world_size": lambda group=None: ranks}
    stand_ins |= {name: getattr(meeting, name) for name in ("all_reduce", "all_gather", "reduce_scatter")}
    with mock.patch.multiple(dist, **stand_ins):
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
    if errors:
        raise errors[0]
    return results, meeting.numbers
