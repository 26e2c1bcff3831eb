"""Which machine is on, and which of its GPUs is current."""

import torch

from virtual_gpus.compat import TorchDispatchModeKey, get_dispatch_mode

_FAKE = TorchDispatchModeKey.FAKE
RUNNING = []  # machines that are on; the last one answers


def current():
    """The machine that is on, or None."""
    return RUNNING[-1] if RUNNING else None


def current_index():
    """The number of this thread's current GPU."""
    return getattr(current().selected, "index", 0)


def select(index):
    """Make GPU `index` this thread's current one, and return the one it was; an error if there is no such GPU."""
    before = current_index()
    if index >= 0:
        current().gpu(index)
        current().selected.index = index
    return before


def find(device):
    """The virtual GPU that `device` (a torch.device, string or index) names, or None if it names no CUDA device.

    Under a FakeTensorMode none does: what PyTorch makes there, to see what shape a result will have, takes no memory
    and no time.
    """
    machine = current()
    if machine is None or device is None or get_dispatch_mode(_FAKE) is not None:
        return None
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return None
    return machine.gpu(current_index() if device.index is None else device.index)
