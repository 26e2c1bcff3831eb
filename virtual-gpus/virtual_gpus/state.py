"""Which machine is on, and which of its GPUs is current."""

from typing import TYPE_CHECKING

import torch

from virtual_gpus.compat import TorchDispatchModeKey, get_dispatch_mode

if TYPE_CHECKING:
    from virtual_gpus.gpu import VirtualGPU
    from virtual_gpus.machine import Machine

RUNNING: list["Machine"] = []  # those that are on; the last one answers


def current() -> "Machine | None":
    """The machine that is on, or None."""
    return RUNNING[-1] if RUNNING else None


def current_index() -> int:
    """The number of this thread's current GPU."""
    return getattr(current().selected, "index", 0)


def select(index: int) -> int:
    """Make GPU `index` this thread's current one, and return the one it was; an error if there is no such GPU."""
    before = current_index()
    if index >= 0:
        current().look_up(index)
        current().selected.index = index
    return before


def find(device: torch.device | str | int | None) -> "VirtualGPU | None":
    """The virtual GPU that `device` (a torch.device, string or index) names, or None if it names no CUDA device.

    Under a FakeTensorMode none does: what PyTorch makes there, to see what shape a result will have, takes no memory
    and no time.
    """
    machine = current()
    if machine is None or device is None or get_dispatch_mode(TorchDispatchModeKey.FAKE) is not None:
        return None
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if named.type != "cuda":
        return None
    return machine.gpu(current_index() if named.index is None else named.index)
