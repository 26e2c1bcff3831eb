"""Collectives of flat CPU tensors, by gloo: they carry the values of NCCL's operations.

`gloo` is a ProcessGroupGloo. What gloo lacks is made of what it has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistBackendError, ProcessGroupGloo, ReduceOp

from virtual_gpus.compat import c10d

SUM, AVG, MAX, PREMUL_SUM = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM


class Reduction(NamedTuple):
    op: ReduceOp.RedOpType
    factor: float | Tensor | None  # PREMUL_SUM's


def reduce(
    gloo: ProcessGroupGloo, call: Callable, options: Any, reduction: Reduction, inputs: Tensor, result: Tensor
) -> None:
    """call(result, inputs, options) of gloo, with this reduction. It may write to the `inputs`."""
    op, factor = reduction
    if inputs.dtype is torch.bool:  # which NCCL takes for bytes, and their sum for the largest
        inputs, result, op = inputs.view(torch.uint8), result.view(torch.uint8), MAX if op == SUM else op
    if op == PREMUL_SUM:
        inputs.mul_(factor)
    options.reduceOp = SUM if op in (AVG, PREMUL_SUM) else op
    call(result, inputs, options).wait()
    if op == AVG:
        result.copy_(result.div(gloo.size(), rounding_mode=None if result.is_floating_point() else "trunc"))


def all_reduce(gloo: ProcessGroupGloo, reduction: Reduction, x: Tensor) -> Tensor:
    """In place, x: (numbers,)."""
    reduce(gloo, lambda _, x, options: gloo.allreduce([x], options), c10d.AllreduceOptions(), reduction, x, x)
    return x


def reduce_scatter(gloo: ProcessGroupGloo, reduction: Reduction, x: Tensor) -> Tensor:
    """(ranks * numbers,) -> (numbers,): this rank's part of the sum."""
    result = x.new_empty(len(x) // gloo.size())
    reduce(gloo, gloo._reduce_scatter_base, c10d.ReduceScatterOptions(), reduction, x, result)
    return result


def all_gather(gloo: ProcessGroupGloo, x: Tensor) -> Tensor:
    """(numbers,) -> (ranks * numbers,)."""
    result = x.new_empty(len(x) * gloo.size())
    gloo._allgather_base(result, x, c10d.AllgatherOptions()).wait()
    return result


def all_to_all(gloo: ProcessGroupGloo, name: str, parts: list[Tensor], sizes: list[int]) -> tuple[Tensor, ...]:
    """parts[i] (bytes) goes to rank i, from which sizes[i] bytes come: (sizes[i],) for each rank i. Errors call it
    `name`."""
    check_sizes(gloo, name, [len(x) for x in parts], sizes)
    sent, received = torch.cat(parts), torch.empty(sum(sizes), dtype=torch.uint8)
    gloo.alltoall_base(received, sent, sizes, [len(x) for x in parts], c10d.AllToAllOptions()).wait()
    return received.split(sizes)


def check_sizes(gloo: ProcessGroupGloo, name: str, sent: list[int], expected: list[int]) -> None:
    """An error, on all ranks, where one expects other bytes than another sends."""
    sizes = torch.empty(gloo.size(), 2, gloo.size(), dtype=torch.long)
    gloo._allgather_base(sizes.view(-1), torch.tensor([*sent, *expected]), c10d.AllgatherOptions()).wait()
    sends, expects = sizes[:, 0], sizes[:, 1].T  # (source, target)
    for source, target in (sends != expects).nonzero().tolist():
        raise DistBackendError(
            f"{name}: rank {source} sends {sends[source, target]} bytes to rank {target}, which expects "
            f"{expects[source, target]}; NCCL would hang, or mix values up (ranks are those of the group)"
        )
