"""The oracle of virtual GPUs: the same program on the CPU."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

GPU1 = torch.device("cuda", 1)


def check_same_on_a_gpu(program):
    """`program`, given a device, returns the same in any nest: tensors on that device, with equal values, strides and
    so on, and other things that are equal. And the GPU's memory comes back when nobody holds them any more, at once."""
    before, results = torch.cuda.memory_allocated(GPU1), []
    for device in ("cpu", GPU1):
        torch.manual_seed(0)
        results.append(tree_leaves(program(device)))
    for here, there in zip(*results, strict=True):
        if isinstance(here, Tensor):
            check_same(here, there)
        else:
            assert there == here and type(there) is type(here)
    del results, here, there
    assert torch.cuda.memory_allocated(GPU1) == before


def check_same(here, there):
    assert there.device == GPU1 and isinstance(there, nn.Parameter) == isinstance(here, nn.Parameter)
    for_both = [(t.layout, t.dtype, t.shape, t.requires_grad) for t in (here, there)]
    assert for_both[0] == for_both[1]
    if here.is_sparse:
        assert there.is_coalesced() == here.is_coalesced()
        check_same(here._indices(), there._indices())
        check_same(here._values(), there._values())
    else:
        assert there.stride() == here.stride() and there.is_contiguous() == here.is_contiguous()
        torch.testing.assert_close(there.detach().cpu(), here.detach())
