"""Checkpoints of wrapped networks: the `module.` in front of every name, there and back, and a file that is whole."""

import torch
from torch import nn

from virtual_gpus import replacing

PREFIX = "module."  # DataParallel and DistributedDataParallel keep the network they wrap in an attribute of this name


def strip_prefix(state):
    """A new dict like the state dict `state`, without the `module.` that a wrapper puts in front of every name.

    A state dict without it comes back equal. Values are the same tensors, and only one prefix goes, and only at the
    front. (A plain network that has all its parameters in a part called `module` looks wrapped, too.)
    Raises ValueError when some names have the prefix and others don't: two checkpoints were mixed, or a network has a
    part called `module` beside others, and nobody but the caller knows which.

    >>> strip_prefix({"module.weight": 1, "module.bias": 2})
    {'weight': 1, 'bias': 2}
    """
    wrapped = [name for name in state if name.startswith(PREFIX)]
    if wrapped and len(wrapped) < len(state):
        plain = next(name for name in state if not name.startswith(PREFIX))
        raise ValueError(
            f"{len(wrapped)} of {len(state)} names begin with {PREFIX!r}, such as {wrapped[0]!r}, others "
            f"don't, such as {plain!r}: two checkpoints were mixed, or the network has a part called 'module'"
        )
    return renamed(state, lambda name: name.removeprefix(PREFIX), lambda part: (part + ".").removeprefix(PREFIX)[:-1])


def add_prefix(state):
    """A new dict like the state dict `state`, with `module.` in front of every name: what a wrapped network loads.

    Raises ValueError when every name has it already.
    """
    if state and all(name.startswith(PREFIX) for name in state):
        raise ValueError(f"all {len(state)} names begin with {PREFIX!r} already: load the state dict as it is")
    return renamed(state, lambda name: PREFIX + name, lambda part: (PREFIX + part).rstrip("."))


def renamed(state, name_of, part_of):
    """`state` with other names; also those in `_metadata`, which tell load_state_dict the version of each part."""
    new = type(state)((name_of(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):
        new._metadata = type(state._metadata)((part_of(part), value) for part, value in state._metadata.items())
    return new


def save_checkpoint(net, path):
    """Write the state dict of `net`, without a prefix if it is wrapped in nn.DataParallel, to the file `path`.

    A file that is there is replaced in one step: a run that dies while it writes leaves the old one whole.
    """
    net = net.module if isinstance(net, nn.DataParallel) else net
    with replacing(path) as new:
        torch.save(net.state_dict(), new)
