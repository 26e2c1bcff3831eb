"""What PyTorch from 2.10 to 2.14 does in another way than later ones.

Each part asks for a feature, not for a version. What older versions need replaced is in `patches/older.py`.
"""

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import ReduceOp, distributed_c10d

# What a collective reduces by. From 2.15 on ReduceOp.unbox opens the script object that comes to __torch_dispatch__;
# before, the object says its number, and not the factor of PREMUL_SUM: that `patches/older.py` notes on its way.

HAS_UNBOX = hasattr(ReduceOp, "unbox")
OPS = {int(op): op for op in ReduceOp.RedOpType.__members__.values()}
noted = threading.local()  # .factor: that of the PREMUL_SUM which this thread is asking for


def unbox_reduce_op(script_object: torch.ScriptObject) -> Any:
    """What has the `op` and the `factor` of the ReduceOp."""
    if HAS_UNBOX:
        return ReduceOp.unbox(script_object)
    op, factor = OPS[script_object.op()], getattr(noted, "factor", None)
    if op == ReduceOp.PREMUL_SUM and factor is None:
        raise RuntimeError(
            "before PyTorch 2.15 virtual GPUs know the factor of PREMUL_SUM only where a program calls "
            "torch.distributed's functions, not for operations of torch.ops.c10d"
        )
    return SimpleNamespace(op=op, factor=factor)


# Who makes a process group's backends. From 2.14 on plugins do; before, a chain of ifs in distributed_c10d.

HAS_PLUGINS = hasattr(distributed_c10d, "_create_gloo_process_group")
_ProcessGroupGloo = distributed_c10d.ProcessGroupGloo


def create_gloo(options: Any, backend_options: Any) -> Any:
    """PyTorch's own ProcessGroupGloo."""
    if HAS_PLUGINS:
        return distributed_c10d._create_gloo_process_group(options, backend_options)
    return _ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)


def create_refusing(rank: int, size: int) -> Any:
    """A backend that can do nothing."""
    settings = c10d.FakeProcessGroup.Options()
    settings.error_on_collective = True
    return c10d.FakeProcessGroup._create_internal(rank, size, settings)


HAS_SPLITTING = create_refusing(0, 1).supports_splitting  # from 2.14 on
