"""torch.utils.checkpoint: what a backward pass computes once more is told apart from the first time, by its phase."""

from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from virtual_gpus.compat import recomputation_hook
from virtual_gpus.patches.patch import patch, replaces
from virtual_gpus.state import current


class Recomputation(recomputation_hook):
    """What use_reentrant=False computes in. Gradients that are taken inside belong to it: hence the range."""

    def __enter__(self):
        self.host = current().clock.host()
        self.host.recomputing += 1
        self.ranges = len(self.host.ranges)
        self.host.ranges.append("recomputation")
        return super().__enter__()

    def __exit__(self, *exc):
        self.host.recomputing -= 1
        del self.host.ranges[self.ranges :]  # also those that it was stopped in
        return super().__exit__(*exc)


patch(checkpoint, {"_recomputation_hook": Recomputation})


@replaces(CheckpointFunction)
def backward(original, ctx, *grads):
    """With use_reentrant=True: all but the part's own backward pass is recomputation, see `Clock.backward`."""
    host = current().clock.host()
    host.recomputing += 1
    try:
        return original(ctx, *grads)
    finally:
        host.recomputing -= 1
