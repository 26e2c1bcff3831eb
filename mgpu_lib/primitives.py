"""Data parallelism for any module: one forward pass on several GPUs, made of PyTorch's four parallel primitives."""

from itertools import chain

import torch
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

from virtual_gpus import tensors_in


def check_rows(inputs):
    """ValueError unless all tensors in `inputs` have the same number of rows."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(inputs)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(
            f"can't cut tensors of shapes {shapes} together: all must have the "
            "same number of rows. What is not per row belongs in a buffer of "
            "the module, or is a plain number"
        )


def check_parallel(module, inputs, device_ids):
    """ValueError for what the primitives refuse less clearly, or cut wrongly."""
    if len(device_ids) == 0:
        raise ValueError("device_ids is empty: name at least one GPU")
    home = torch.empty(0, device=device_ids[0]).device
    if home.type == "cpu":
        raise ValueError("device_ids begins with the CPU: name GPUs")
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != home:
            raise ValueError(f"{name} is on {tensor.device}: move the module to {home}, which is device_ids[0]")
    check_rows(inputs)


def data_parallel(module, input, device_ids, output_device=None, module_kwargs=None):
    """`module(*input, **module_kwargs)`, the batch divided among the GPUs `device_ids` and gathered on `output_device`.

    input: a tensor, or a tuple of positional inputs. Tensors in it and in module_kwargs, also inside lists, tuples and
    dicts, are cut along dim 0; everything else goes to each replica as it is. `module` lies on device_ids[0], which is
    the default of output_device too; backward sums the gradients there. A small batch leaves the last GPUs without
    work. Raises ValueError as `check_parallel` does; an exception in a replica is raised here, with the replica's
    number.
    """
    inputs = input if isinstance(input, tuple) else (input,)
    kwargs = module_kwargs or {}
    check_parallel(module, (inputs, kwargs), device_ids)
    parts = scatter((inputs, kwargs), device_ids)
    used = device_ids[: len(parts)]  # fewer than all for a small batch
    replicas = replicate(module, used)
    shards, shard_kwargs = zip(*parts)
    outputs = parallel_apply(replicas, shards, shard_kwargs, used)
    home = device_ids[0] if output_device is None else output_device
    return gather(outputs, home)
