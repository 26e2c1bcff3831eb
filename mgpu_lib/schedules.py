"""What a rank of a pipeline did, pass by pass: stages that mark their passes on the timeline, and how to read them."""

import torch
from torch.distributed.pipelining import PipelineStage

CHANGE = {"F": 1, "B": 0, "W": -1}  # in the micro-batches that a rank holds, where the backward pass is split


class MarkedStage(PipelineStage):
    """A PipelineStage whose passes have names on the timeline: F3 is micro-batch 3's forward pass, B3 its backward.

    W3 is the part of it that computes the weights' gradients, where the schedule splits it off. A prime, as in F3',
    marks the later of the two stages of a rank.
    """

    def name(self, kind, number):
        return f"{kind}{number}" + ("'" if self.stage_index >= self.group_size else "")

    def marked(self, name):
        """The context that a pass runs in."""
        return torch.cuda.nvtx.range(name)

    def forward_one_chunk(self, number, *args, **kwargs):
        with self.marked(self.name("F", number)):
            return super().forward_one_chunk(number, *args, **kwargs)

    def backward_one_chunk(self, number, *args, **kwargs):
        with self.marked(self.name("B", number)):
            return super().backward_one_chunk(number, *args, **kwargs)

    def backward_weight_one_chunk(self, number, *args, **kwargs):
        with self.marked(self.name("W", number)):
            return super().backward_weight_one_chunk(number, *args, **kwargs)


def passes(timeline):
    """[(name, start, end)] of the passes on `timeline`, in ms, each from its first kernel to its last."""
    found = []
    for e in timeline:
        if e.phase[:1] in CHANGE and e.kind != "collective":
            if found and found[-1][0] == e.phase:
                found[-1] = (*found[-1][:2], 1e3 * e.end)
            else:
                found.append((e.phase, 1e3 * e.start, 1e3 * e.end))
    return found


def most_held(names):
    """How many micro-batches' activations a stage holds at most, if its passes have these `names`, in this order.

    A micro-batch is held from its forward pass until the last of its backward passes. Two stages of one rank count
    separately, so that one micro-batch can count twice.
    """
    split = any(name.startswith("W") for name in names)
    most = held = 0
    for name in names:
        held += CHANGE[name[0]] if split or name[0] == "F" else -1
        most = max(most, held)
    return most
