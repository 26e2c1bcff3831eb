"""What a rank of a dry run holds, by kind, at the moment of a step when it holds most."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from virtual_gpus.machine import Machine
from virtual_gpus.memory.ledger import MIN_BLOCK_SIZE, round_up
from virtual_gpus.state import current
from virtual_gpus.tensors.tensor import is_virtual
from virtual_gpus.tree import tensors_in

KINDS = "parameters", "gradients", "optimizer state", "in transit", "activations", "temporary", "other"


class StepMemory:
    """Listens to the ledgers of `machine`, where a `memory.history.History` would be. `owned` has the addresses of
    blocks that are known to be of a kind; there is only one block that ever has an address. The kinds:

    parameters, gradients, optimizer state   those of the optimizers that take a step
    in transit     what collectives read and write, and what was resized, as FSDP does for parameters that it gathers
    activations    what operations of a forward pass give, also when it is computed once more
    temporary      what those of a backward pass and of an optimizer give
    other          what was there before the step: buffers, frozen parameters, data
    """

    entries, settings = (), None  # of a History

    def __init__(self, machine: Machine):
        self.machine = machine
        self.owned: dict[str, set[int]] = {kind: set() for kind in KINDS}
        machine.step_memory = self
        for ledger in machine.ledgers:
            ledger.history = self
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.before = {
            address: nbytes for ledger in self.machine.ledgers for address, nbytes in ledger.requested.items()
        }
        self.log: list[tuple[int, int, str]] = []  # address, bytes (0: given back), kind unless it is owned

    def record_alloc(self, address: int, nbytes: int) -> None:
        host = self.machine.clock.host()
        forward = host.recomputing or (host.engine is None and torch.is_grad_enabled())
        self.log.append((address, nbytes, "activations" if forward else "temporary"))

    def record_free(self, address: int, *rest: object) -> None:
        self.log.append((address, 0, ""))

    def record_oom(self, nbytes: int, free: int) -> None:
        pass

    def own(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """`tensors` (inner ones) are of this kind."""
        blocks = (getattr(tensor.untyped_storage(), "block", None) for tensor in tensors)
        self.owned[kind].update(block.address for block in blocks if block is not None)

    def at_the_peak(self) -> dict[str, int]:
        """{kind: bytes} when the GPUs held most since begin(); empty if the program records a history of its own."""
        if any(ledger.history is not self for ledger in self.machine.ledgers):
            return {}
        log = list(self.log)  # which goes on
        blocks = {address: (nbytes, "other") for address, nbytes in self.before.items()}
        sizes, changes = dict(self.before), []
        for address, nbytes, _ in log:
            changes.append(size_of(nbytes) if nbytes else -size_of(sizes.pop(address)))
            if nbytes:
                sizes[address] = nbytes
        held = [0, *itertools.accumulate(changes)]
        for address, nbytes, kind in log[: held.index(max(held))]:
            if nbytes:
                blocks[address] = nbytes, kind
            else:
                del blocks[address]
        found = dict.fromkeys(KINDS, 0)
        for address, (nbytes, kind) in blocks.items():
            found[next((known for known in KINDS if address in self.owned[known]), kind)] += round_up(
                nbytes, MIN_BLOCK_SIZE
            )
        return found


def size_of(nbytes: int) -> int:
    """Of a block."""
    return round_up(nbytes, MIN_BLOCK_SIZE)


@contextlib.contextmanager
def optimizers_are_seen() -> Iterator[None]:
    """Inside, each optimizer that takes a step says to the StepMemory of its machine what is its own."""

    def own(kind, tensors):
        memory = current() and current().step_memory
        if memory is not None:
            local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(tensors))  # of a DTensor
            memory.own(kind, [tensor.inner for tensor in local if is_virtual(tensor)])

    def parameters(optimizer):
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before(optimizer: Optimizer, args, kwargs):
        own("gradients", [parameter.grad for parameter in parameters(optimizer)])

    def after(optimizer: Optimizer, args, kwargs):
        own("parameters", parameters(optimizer))
        own("optimizer state", optimizer.state.values())

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
