"""The all-reduce stepper: what each GPU holds, round by round, and the bytes that every link has carried."""

import torch
import traitlets

from mgpu_lib.collectives import bytes_per_link, chunk_sizes, execute, ring, star, tree
from mgpu_lib.models import lenet_params

from .base import InteractiveFigure, module, rect, size, text
from .splitter import COLORS, join

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

    def holds(self):
        """For each GPU and chunk, the set of GPUs whose share is in it. A star and a tree don't cut: one chunk."""
        # The schedule itself, run on powers of two: the sum of any of them says which they were.
        data = [torch.full((self.num_gpus,), 2**gpu) for gpu in range(self.num_gpus)]
        execute(self.schedule()[: self.step], data)
        chunks = self.num_gpus if self.kind == "ring" else 1
        gpus = range(self.num_gpus)
        return [[{gpu for gpu in gpus if total >> gpu & 1} for total in row[:chunks].tolist()] for row in data]

    def links(self):
        """Bytes over each link so far, {(source, target): bytes}, for all that the schedule uses sooner or later."""
        return {**dict.fromkeys(self.all_links(), 0), **self._links(self.step)}

    def all_links(self):
        """Bytes over each link in all."""
        return self._links(None)

    def _links(self, step):
        return bytes_per_link(self.schedule()[:step], self.data["nbytes"], self.num_gpus)

    def times(self):
        """How long the rounds so far take, in whole tensors sent: the largest piece of each round counts."""
        sizes = {None: self.data["nbytes"], **dict(enumerate(chunk_sizes(self.data["nbytes"], self.num_gpus)))}
        largest = sum(max(sizes[send.chunk] for send in sends) for sends in self.schedule()[: self.step])
        hundredths = (200 * largest + self.data["nbytes"]) // (2 * self.data["nbytes"])
        return f"{hundredths / 100:g}"

    def sentence(self):
        k, rounds, now, nbytes = self.num_gpus, len(self.schedule()), self.step, self.data["nbytes"]
        name = f"{self.kind.capitalize()} on {k} GPUs"
        if now == 0:
            return f"{name}, before the first of {rounds} rounds: each GPU holds its own gradient of {size(nbytes)}."
        sends = self.schedule()[now - 1]
        what = ("adds it to its own", "add it to their own") if sends[0].reduce else ("keeps it", "keep it")
        if self.kind == "ring":
            happens = f"each GPU sends one chunk ({size(chunk_sizes(nbytes, k)[0])}) to the next, which {what[0]}"
        else:
            moves = [f"GPU {send.source} {'' if i else 'sends '}to GPU {send.target}" for i, send in enumerate(sends)]
            happens = f"{join(moves)}, which {what[len(sends) > 1]}"
        links = self.links()
        moved = f"{size(sum(links.values()))} have moved, at most {size(max(links.values()))} over one link"
        complete = [len(shares) == k for row in self.holds() for shares in row]
        if all(complete):
            state = f"every GPU holds the sum, in the time that {self.times()} whole gradients take over one link"
        else:
            things, verb = "chunks" if self.kind == "ring" else "GPUs", "is" if sum(complete) == 1 else "are"
            state = f"{sum(complete)} of {len(complete)} {things} {verb} complete"
        return f"{name}, round {now} of {rounds}: {happens}; {moved}; {state}."

    def picture(self):
        k, holds, links = self.num_gpus, self.holds(), self.links()
        title = f"{self.kind.capitalize()}, after {self.step} of {len(self.schedule())} rounds"
        elements, wide = [text(12, 24, title, weight=600)], 278 / len(holds[0])
        each, boxes = (wide - 4) / k, [[] for _ in range(k)]
        for gpu, row in enumerate(holds):
            elements.append(text(12, 56 + 30 * gpu, f"GPU {gpu}"))
            for chunk, shares in enumerate(row):
                x, y = 70 + wide * chunk, 40 + 30 * gpu
                for i in shares:
                    boxes[i].append(f"M{x + each * i:.1f},{y}h{each:.1f}v22h-{each:.1f}z")
                elements.append(rect(x, y, wide - 4, 22, "none", "#8a919c"))
        # One path for each color: eight GPUs would make five hundred rectangles.
        elements += [f'<path d="{"".join(path)}" fill="{color}"/>' for path, color in zip(boxes, COLORS)]
        total, end = sum(links.values()), sum(self.all_links().values())
        return [*elements, text(12, 54 + 30 * k, f"{size(total)} of {size(end)} have moved")], 66 + 30 * k
