"""Ranks in a grid: one dimension for each way to split a training run."""

import math

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def device_mesh(**sizes):
    """A DeviceMesh of all ranks with these dimensions, such as device_mesh(data=2, tensor=4) for eight ranks.

    Ranks that differ only in the last dimension are neighbors. ValueError unless the product is the number of ranks.
    """
    ranks, product = dist.get_world_size(), math.prod(sizes.values())
    if product != ranks:
        named = " × ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"{named} makes {product} ranks, but there are {ranks}: start {product}, or change a factor")
    return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
