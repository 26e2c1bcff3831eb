"""A training step of DistributedDataParallel, or a forward pass, as published tables time them."""

import contextlib
import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from virtual_gpus import current, dry_run, find_gpu


def seconds(
    net: nn.Module,
    X: torch.Tensor,
    gpu: str,
    n_gpus: int = 1,
    precision: str = "fp32",
    link: str | None = None,
    network: str | None = None,
    training: bool = True,
) -> float:
    """What the clock says of a step of `net`, which classifies the images X of all GPUs; both are on the meta device.

    precision: "fp32" (no TF32 at all), "tf32", or "amp" (autocast to FP16). SGD has momentum. The images are on the
    GPUs already. link, network: as `virtual_gpus` takes them.
    """
    link = link or ("nvlink" if find_gpu(gpu).nvlink else "pcie")

    def program():
        current().clock.tf32 = (precision == "tf32",) * 2
        mine = copy.deepcopy(net).train(training).to_empty(device="cuda")
        images = torch.empty_like(X.tensor_split(n_gpus)[0], device="cuda")
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        wrapped = DistributedDataParallel(mine, device_ids=[0]) if n_gpus > 1 and training else mine

        def step():
            casting = torch.autocast("cuda", torch.float16) if precision == "amp" else contextlib.nullcontext()
            with torch.set_grad_enabled(training), casting:
                out = wrapped(images)
                loss = classified(out) if training else None
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return step

    return dry_run(program, n_gpus, gpu, per_node=None, link=link, network=network).seconds


def classified(out: torch.Tensor) -> torch.Tensor:
    labels = torch.empty(len(out), dtype=torch.long, device=out.device)
    return nn.functional.cross_entropy(out, labels, reduction="sum")
