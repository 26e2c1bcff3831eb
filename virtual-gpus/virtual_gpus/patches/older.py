"""What PyTorch from 2.10 to 2.14 needs replaced and newer versions don't. Each part asks for a feature of `compat`."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import ReduceOp, distributed_c10d

from virtual_gpus import compat
from virtual_gpus.compat import c10d
from virtual_gpus.patches.patch import Patch

ProcessGroup, FakeProcessGroup = c10d.ProcessGroup, c10d.FakeProcessGroup
REDUCING = "allreduce allreduce_coalesced reduce reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced"
new_group: dict[str, Any] = {}  # of the group that distributed_c10d is making: what it doesn't tell the backends


def patches(create: Callable, create_gloo: Callable) -> Iterator[Patch]:
    """(owner, name, replacement), for patches.install; create(options, None) and create_gloo make backends."""
    if not compat.HAS_UNBOX:
        for name in REDUCING.split():
            yield ProcessGroup, name, note_factor
        for owner in (torch.cuda, torch.cuda.random):  # a seed would be kept until a driver starts, and none does
            yield owner, "_lazy_call", lambda call, **options: call()
    if not compat.HAS_PLUGINS:
        yield distributed_c10d, "_new_process_group_helper", new_process_group_helper
        real = getattr(distributed_c10d, "ProcessGroupNCCL", None)
        yield distributed_c10d, "ProcessGroupNCCL", stand_in(real, create)
        yield distributed_c10d, "ProcessGroupGloo", stand_in(distributed_c10d.ProcessGroupGloo, create_gloo)
        yield FakeProcessGroup, "_set_sequence_number_for_group", lambda self: None
        # NCCL's options would take a part of a group, where it has a bound device, from a ProcessGroupNCCL only.
        yield distributed_c10d, "_get_split_source", lambda group: None
    if not compat.HAS_SPLITTING:
        yield FakeProcessGroup, "supports_splitting", True
        yield FakeProcessGroup, "options", property(lambda self: Options())


def note_factor(original, self, *args, **kwargs):
    """A method of ProcessGroup that calls C++, which comes back in the same thread."""
    options = next((arg for arg in (*args, *kwargs.values()) if hasattr(arg, "reduceOp")), None)
    op, factor = (None, None) if options is None else options.reduceOp.__getstate__()
    compat.noted.factor = factor if op == ReduceOp.PREMUL_SUM else None
    try:
        return original(self, *args, **kwargs)
    finally:
        compat.noted.factor = None


def new_process_group_helper(original, size, rank, ranks, backend, store, group_name, *args, **kwargs):
    new_group.update(group_id=group_name, global_ranks_in_group=ranks)
    return original(size, rank, ranks, backend, store, group_name, *args, **kwargs)


class Options:
    """ProcessGroupNCCL.Options in a build without NCCL, as far as torch.distributed and programs fill them in."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace()


def stand_in(real: type | None, create: Callable) -> type:
    """What stands for a class of backends: calling it is `create`, and what that makes is an instance."""

    class Type(type):
        def __call__(cls, store, rank, size, options=None, timeout=None):
            timeout = timeout or options._timeout
            given = {"store": store, "group_rank": rank, "group_size": size, "timeout": timeout}
            return create(SimpleNamespace(**given, **new_group), None)

        def __instancecheck__(cls, backend):
            return isinstance(backend, (real or FakeProcessGroup, FakeProcessGroup))

    return Type("ProcessGroup", (), {"Options": getattr(real, "Options", Options)})


def split_group(self: Any, ranks: list[int], timeout=None, opts=None, group_name=None, group_desc=None, **_) -> Any:
    """ProcessGroup.split_group: a FakeProcessGroup can't be split, so its parts are made as new_group makes them."""
    backends = {device: self._get_backend(device) for device in self._device_types}
    if self.rank() not in ranks:
        return None
    store, rank = c10d.PrefixStore(f"{group_name}/", self.get_group_store()), ranks.index(self.rank())
    made, Type = ProcessGroup(store, rank, len(ranks)), ProcessGroup.BackendType
    made._set_default_backend(Type.NCCL)
    given = {"group_rank": rank, "group_size": len(ranks), "timeout": timeout or distributed_c10d.default_pg_timeout}
    for device, backend in backends.items():
        if isinstance(backend, FakeProcessGroup):
            part = compat.create_refusing(rank, len(ranks))
        else:
            part = compat.create_gloo(SimpleNamespace(store=c10d.PrefixStore(f"{device.type}/", store), **given), None)
        made._register_backend(device, Type.NCCL if device.type == "cuda" else Type.GLOO, part)
    made._set_group_name(group_name)
    made._set_group_desc(group_desc or "undefined")
    return made
