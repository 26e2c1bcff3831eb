"""What a rank of a dry run holds in the course of a step, by kind."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtual_gpus.machine import Machine
from virtual_gpus.memory.ledger import MIN_BLOCK_SIZE, round_up
from virtual_gpus.state import current
from virtual_gpus.tensors.tensor import is_virtual
from virtual_gpus.tree import tensors_in

KINDS = "parameters", "gradients", "optimizer state", "in transit", "activations", "temporary", "other"


class Change(NamedTuple):
    """A block was allocated or, with less than 0 bytes, freed."""

    seconds: float  # when the host did so, which may be long before the GPU's turn
    kind: str
    nbytes: int


class StepMemory:
    """What all ledgers of `machine` tell of their blocks. `owned` has the addresses of those that are known to be of a
    kind; there is only one block that ever has an address. The kinds:

    parameters, optimizer state   those of the optimizers that take a step
    gradients      theirs, and those of whole parameters that FSDP2 is about to reduce-scatter (`patches.distributed`)
    in transit     what collectives read and write, and what was resized, as FSDP does for parameters that it gathers
    activations    what operations of a forward pass give, also when it is computed once more
    temporary      what those of a backward pass and of an optimizer give, and what CUDA graphs keep for their replays
    other          what was there before the step: buffers, frozen parameters, data
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self.owned: dict[str, set[int]] = {kind: set() for kind in KINDS}
        machine.step_memory = self
        for ledger in machine.ledgers:
            ledger.observer = self
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        held = (block for ledger in self.machine.ledgers for block in ledger.requested.items())
        # (when, on the host's clock; address; bytes, 0 when they are freed; kind unless it is owned)
        self.log = [(self.now(), address, nbytes, "other") for address, nbytes in held]
        for i, ledger in enumerate(self.machine.ledgers):
            if ledger.held:
                self.log.append((self.now(), -1 - i, ledger.held, "temporary"))  # at an address that no block has

    def now(self) -> float:
        host = self.machine.clock.host()
        return max([host.now, *(host.engine or {}).values()])

    def allocated(self, address: int, nbytes: int) -> None:
        host = self.machine.clock.host()
        forward = host.recomputing or (host.engine is None and torch.is_grad_enabled())
        self.log.append((self.now(), address, nbytes, "activations" if forward else "temporary"))

    def freed(self, address: int) -> None:
        self.log.append((self.now(), address, 0, ""))

    def own(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """`tensors` (inner ones) are of this kind."""
        blocks = (getattr(tensor.untyped_storage(), "block", None) for tensor in tensors)
        self.owned[kind].update(block.address for block in blocks if block is not None)

    def changes(self, origin: float, end: float) -> list[Change]:
        """What was held at begin(), and what has changed until `end`. It and `origin`, from which times count, are
        seconds of elapsed()."""
        changes, blocks, started = [], {}, self.machine.started
        for time, address, nbytes, kind in list(self.log):  # which goes on
            if time - started >= end:
                break
            if nbytes:
                kind = next((known for known in KINDS if address in self.owned[known]), kind)
                blocks[address] = kind, round_up(nbytes, MIN_BLOCK_SIZE)
                changes.append(Change(time - started - origin, *blocks[address]))
            else:
                kind, size = blocks.pop(address)
                changes.append(Change(time - started - origin, kind, -size))
        return changes


def at_the_peak(changes: Iterable[Change]) -> dict[str, int]:
    """{kind: bytes} when most was held."""
    held, most = dict.fromkeys(KINDS, 0), 0
    peak = dict(held)
    for _, kind, nbytes in changes:
        held[kind] += nbytes
        if nbytes > 0 and sum(held.values()) > most:
            peak, most = dict(held), sum(held.values())
    return peak


def own(kind: str, tensors: Any) -> None:
    """Tell the StepMemory of the machine, if it has one, that all `tensors` in nested lists and dicts are of a kind."""
    memory = current().step_memory if current() else None
    if memory is not None:
        local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(tensors))  # of a DTensor
        memory.own(kind, [tensor.inner for tensor in local if is_virtual(tensor)])


@contextlib.contextmanager
def observe_optimizers() -> Iterator[None]:
    """Inside, an optimizer that takes a step tells which tensors are its own."""

    def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        own("gradients", [parameter.grad for parameter in parameters(optimizer)])

    def after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        own("parameters", parameters(optimizer))
        own("optimizer state", optimizer.state.values())

    with register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after):
        yield
