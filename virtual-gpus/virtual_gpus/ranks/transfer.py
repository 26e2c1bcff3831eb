"""How the values of one operation travel, in the order that a stream would give them.

The thread of a communicator moves values while the program goes on, and what the program sees must not depend on how
far that thread has come. So the inputs of an operation are copied when it is called, and its outputs are written when
the program waits. That alone would break the order of a stream, in which each operation sees what those before it have
written, waited for or not:

    program    all_reduce(x)            all_gather(y, x[1:3])              wait()
    stream     | reads x, writes x .....| reads x[1:3], writes y .....|
    x          0 1 2 3                  0 1 2 3                            4 5 6 7
                                          ^^^ copied now, but the GPU would read 5 6 here

A Transfer therefore remembers the ones that it has to come after (`before`), and, when it runs, lays what these have
received over its copies, byte by byte where the memory overlaps.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo


class Transfer:
    """fn(gloo, copies of `inputs`) returns what this rank receives: a tensor for each of `outputs`.

    Inputs and outputs are flat views of inner tensors.
    """

    def __init__(self, fn: Callable, inputs: Sequence[Tensor], outputs: Sequence[Tensor]):
        self.fn, self.inputs, self.outputs = fn, inputs, outputs
        self.copies: list[Tensor] = []
        self.received: Sequence[Tensor] | None = None  # None: not yet, or nothing, as without values
        self.before: list[Transfer] = []
        self.written = False

    def copy_inputs(self, pending: Iterable["Transfer"]) -> None:
        """The program calls the operation, and has not waited for those in `pending`."""
        unwritten = [other for other in pending if not other.written]
        self.before = [other for other in unwritten if any(overlap(x, y) for x in self.inputs for y in other.outputs)]
        self.copies = [x.clone() for x in self.inputs]

    def run(self, gloo: ProcessGroupGloo) -> None:
        with torch.inference_mode():  # which may write to tensors of both kinds
            for other in self.before:
                for target, values in zip(other.outputs, other.received, strict=True):
                    self.overlay(target, values)
            self.received = self.fn(gloo, self.copies)
        self.before, self.copies = [], []

    def overlay(self, target: Tensor, values: Tensor) -> None:
        """Bring the copies to what they would be if `values` had been written to `target` before."""
        for x, copy in zip(self.inputs, self.copies, strict=True):
            if shared := overlap(x, target):
                (to, to_end), (start, end) = ([address - t.data_ptr() for address in shared] for t in (x, target))
                copy.view(torch.uint8)[to:to_end] = values.view(torch.uint8)[start:end]

    def write_outputs(self) -> None:
        """The program has waited for the operation, or for a later one of the same stream."""
        if self.received is not None and not self.written:
            self.written = True
            with torch.inference_mode():
                for target, values in zip(self.outputs, self.received, strict=True):
                    target.copy_(values)


def overlap(x: Tensor, y: Tensor) -> tuple[int, int] | None:
    """(start, end) of the memory that two flat tensors share, as addresses."""
    start, end = max(x.data_ptr(), y.data_ptr()), min(x.data_ptr() + x.nbytes, y.data_ptr() + y.nbytes)
    return (start, end) if start < end else None
