"""torch.distributed.checkpoint.async_save: before it is written, what it is to write is copied to the CPU."""

import torch

from virtual_gpus.tensors.tensor import VirtualTensor

MODULE = "torch.distributed.checkpoint._state_dict_stager"  # imported by the programs that need it


def patches(module):
    """(owner, name, replacement), for patches.install, as soon as the module has been imported."""
    original = module.StateDictStager._offload_tensor

    def offload_tensor(self, x, memo, non_blocking=False):
        """A copy of `x`; of a DTensor, PyTorch's own comes here for the part that is in it."""
        if not isinstance(x, VirtualTensor):
            return original(self, x, memo, non_blocking)
        pin = self.pin_memory and x.nbytes >= self.pin_memory_min_bytes
        memo[id(x)] = torch.empty_like(x, device="cpu", pin_memory=pin).copy_(x.detach(), non_blocking=non_blocking)
        return memo[id(x)]

    yield module.StateDictStager, "_offload_tensor", offload_tensor
