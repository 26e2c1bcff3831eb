"""The all-reduce stepper: what each GPU holds, round by round, and the bytes that every link has carried."""

import traitlets

from mgpu_lib.collectives import ring, star, tree
from mgpu_lib.models import lenet_params
from mgpu_lib.widgets.base import InteractiveFigure, module

MAKE = {"star": star, "ring": ring, "tree": tree}
ITEM = 4  # bytes of a float32 number


class AllReduceStepper(InteractiveFigure):
    """An all-reduce of `kind` "star", "ring" or "tree" on `num_gpus` (2 to 8) GPUs after `step` of its rounds.

    Each GPU has a gradient of `nbytes` bytes of float32 numbers (LeNet's, if not given). The rounds are those of
    `mgpu_lib.collectives`. Raises ValueError for `nbytes` that can't be, TraitError for other bad values. Where the
    schedule that `kind` and `num_gpus` choose has fewer rounds than `step`, `step` becomes the last.
    """

    _esm = module("stepper.js")
    controls = ("kind", "num_gpus", "step")
    kind = traitlets.Enum(list(MAKE), "ring").tag(sync=True)
    num_gpus = traitlets.Int(4, min=2, max=8).tag(sync=True)
    step = traitlets.Int(0, min=0).tag(sync=True)
    caption = traitlets.Unicode(
        "All-reduce, round by round. Each GPU begins with its own gradient and must end with the sum of all. The "
        "blocks in a box, each at its own place, say whose gradients are in the sum so far. In a round a GPU sends at "
        "most one piece and receives at most one; arrows show what has just been sent. Compare the number of rounds "
        "and what each link carries."
    ).tag(sync=True)

    def __init__(self, nbytes=None, **values):
        nbytes = sum(p.nbytes for p in lenet_params()) if nbytes is None else nbytes
        if not isinstance(nbytes, int) or nbytes % ITEM or nbytes < 8192:
            raise ValueError(f"nbytes={nbytes!r}: give a multiple of {ITEM}, at least 8192, so that chunks have a KiB")
        schedules = {kind: [make(k) for k in range(2, 9)] for kind, make in MAKE.items()}
        super().__init__(data={"nbytes": nbytes, "schedules": schedules}, **values)

    def schedule(self):
        return MAKE[self.kind](self.num_gpus)

    @traitlets.validate("step")
    def _there(self, proposal):
        rounds = len(self.schedule())
        if proposal["value"] > rounds:
            what = f"a {self.kind} on {self.num_gpus} GPUs has {rounds} rounds"
            raise traitlets.TraitError(f"step={proposal['value']}: {what}; choose 0 to {rounds}")
        return proposal["value"]

    @traitlets.observe("kind", "num_gpus")
    def _fewer_rounds(self, change):
        self.step = min(self.step, len(self.schedule()))
