"""What a PyTorch built without CUDA needs replaced: that of most laptops and CI machines, and of every Mac."""

import logging
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from virtual_gpus import compat
from virtual_gpus.patches.patch import PATCHES, StandIn

CPU_BUILD = not torch.backends.cuda.is_built()
Device = torch.device


class DeviceType(StandIn, type):
    """torch.device(0) is cuda:0. C++ takes no number where it was built for no accelerator, and a Mac's for an MPS."""

    original = Device

    def __call__(cls, *args, **kwargs):
        return Device("cuda", *args) if len(args) == 1 and type(args[0]) is int else Device(*args, **kwargs)

    def __instancecheck__(cls, value):
        return isinstance(value, Device)

    def __getattr__(cls, name):
        return getattr(Device, name)


REPLACED = [
    (torch, "device", DeviceType("device", (), {"__module__": "torch"})),
    (torch.version, "cuda", "13.0"),
    (torch.backends.cuda, "is_built", lambda: True),
    (logging.getLogger("torch.utils.flop_counter"), "disabled", True),  # where there is CUDA, it misses Triton
    (torch.cuda.nccl, "version", lambda: (2, 28, 9)),  # asked for when a collective has failed
    (distributed_c10d, "default_pg_nccl_timeout", timedelta(minutes=10)),
]
if CPU_BUILD:
    PATCHES.extend(REPLACED)
    if compat.HAS_PLUGINS and not hasattr(distributed_c10d, "ProcessGroupNCCL"):
        PATCHES.append((distributed_c10d, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {})))
