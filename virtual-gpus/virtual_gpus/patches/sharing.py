"""multiprocessing: processes that it spawns have the GPUs, too, and tensors go to them through queues and pipes, as by
CUDA's shared memory (IPC)."""

from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler

import torch

from virtual_gpus.compat import default_collate_fn_map
from virtual_gpus.environment import naming_gpus
from virtual_gpus.memory.ledger import Block
from virtual_gpus.patches.patch import patch, replaces
from virtual_gpus.state import current
from virtual_gpus.tensors.subclasses import virtual_class
from virtual_gpus.tensors.tensor import VirtualDenseTensor, VirtualTensor, cpu_class, wrap

# A worker of a DataLoader makes a batch of tensors on GPUs; PyTorch would put it into memory of the CPU.
patch(default_collate_fn_map, {VirtualDenseTensor: lambda batch, *, collate_fn_map=None: torch.stack(batch)})


@replaces(SpawnProcess)
def _Popen(original, process):
    """Under the start method "spawn". GPUs that a program finds are named in its environment; those that it has made
    itself are named for this process."""
    machine = current()
    if machine.reads_environment:
        return original(process)
    with naming_gpus({"gpus": len(machine.installed), "machine": machine.options, "reads_environment": False}):
        return original(process)


@replaces(ForkingPickler)
def reducer_override(self, value):
    """What Python asks before it looks for another way to pickle `value`."""
    if not isinstance(value, VirtualTensor):
        return NotImplemented
    if value.requires_grad and not value.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries.  If you just want to transfer the data, call detach() on the tensor before "
            "serializing (e.g., putting it on the queue)."
        )
    if isinstance(getattr(value.inner.untyped_storage(), "block", None), Received):
        raise RuntimeError(
            "Attempted to send CUDA tensor received from another process; this is not currently supported. Consider "
            "cloning before sending."
        )
    notes = dict(vars(value))  # of a parameter, too, that it is one
    return received, (value.inner.detach(), value.gpu.index, cpu_class(type(value)), notes, value.requires_grad)


class Received(Block):
    """What a tensor from another process takes: it is entered there, where it was made."""

    __slots__ = ()


def received(inner: torch.Tensor, index: int, kind: type, notes: dict, requires_grad: bool) -> VirtualTensor:
    """The tensor in the other process: on the GPU of the same number, in the memory that it has in the first."""
    if current() is None:
        raise RuntimeError(
            f"a tensor on the virtual GPU cuda:{index} was sent to a process that has no virtual GPUs. In a program "
            "started with python -m virtual_gpus all processes have them"
        )
    gpu = current().gpu(index)
    storage = inner.untyped_storage()
    if not hasattr(storage, "block"):  # in the process that made it, it is the same storage
        storage.block = Received(gpu.ledger, 0)
    made = wrap(inner, gpu)
    made.__class__ = virtual_class(kind)
    made.__dict__.update(notes)
    return made.requires_grad_(requires_grad)
