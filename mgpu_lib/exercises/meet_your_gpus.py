"""Checks for "Meet your GPUs": choosing a GPU, its number, and what of a network is on another device."""

from unittest import mock

import torch
from torch import nn

from mgpu_lib.exercises.framework import exercise, expect, filled
from virtual_gpus import virtual_gpus


@exercise
def check_emptiest_gpu(answer):
    """emptiest_gpu(devices): the one with the most free memory."""
    alone = [0, 0, 0]
    for held, others in (
        ([3, 1, 2], alone),
        ([0, 2, 3], alone),
        ([2, 3, 0], alone),
        ([1, 1, 1], alone),
        ([0, 2, 3], [8, 1, 4]),
    ):
        with virtual_gpus(3) as machine, others_hold(others):
            ballast = [torch.ones(max(mib, 1), 2**18, device=f"cuda:{gpu}") for gpu, mib in enumerate(held)]
            del ballast[held.index(min(held))]
            torch.cuda.empty_cache()
            found = filled(answer(list(machine.devices)))
            expect(isinstance(found, torch.device), f"{found!r} is no device: return one of `devices`")
            expect(found in machine.devices, f"{found} isn't among {machine.devices}")
            free = {device: torch.cuda.mem_get_info(device)[0] for device in machine.devices}
            del ballast
        best = max(free.values())
        expect(
            others == alone or free[found] == best,
            f"{found} has {free[found] >> 20} MiB free, and another GPU has {best >> 20} MiB. Others use this "
            "machine, too: memory_allocated and memory_reserved count only what your own program holds",
        )
        expect(
            free[found] != min(free.values()) or free[found] == best,
            f"{found} has the least free memory of all, {free[found] >> 20} MiB; the most is {best >> 20} MiB",
        )
        expect(free[found] == best, f"{found} has {free[found] >> 20} MiB free, and another GPU has {best >> 20} MiB")
    few = [torch.device("cuda", 1), torch.device("cuda", 2)]
    with virtual_gpus(3):
        expect(answer(few) in few, "it must be one of the devices that were passed, and they may be some of all GPUs")
    return "the one with the most free memory, wherever it is"


def others_hold(gib):
    """While it is on, other people's programs hold so many GiB of each virtual GPU: only the driver knows of them."""
    driver = type(torch.cuda.cudart())  # the virtual GPUs', which are on
    memory_info = driver.cudaMemGetInfo

    def info(self, index=None):
        free, total = memory_info(self, index)
        return free - (gib[torch.cuda.current_device() if index is None else index] << 30), total

    return mock.patch.object(driver, "cudaMemGetInfo", info)


@exercise
def check_physical(answer):
    """physical(i, visible): the number in nvidia-smi of cuda:i, when CUDA_VISIBLE_DEVICES is `visible`."""
    for visible in ("3,0,2", "0,1", "5", "10,2"):
        right = [int(number) for number in visible.split(",")]
        for i, number in enumerate(right):
            got = filled(answer(i, visible))
            case = f"CUDA_VISIBLE_DEVICES={visible}: cuda:{i} is GPU {number} of nvidia-smi, you say {got!r}"
            expect(got != str(number), f"{case}. It is a text; turn it into a number")
            expect(got == number, f"{case}. The program numbers what it sees from 0 on, in the order of the list")
    return "cuda:i is the i-th number of the list"


@exercise
def check_strays(answer):
    """strays(net, device): the names of a network's parameters and buffers that are not on `device`."""

    def make_net():
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))

    with virtual_gpus(2):
        device, net = torch.device("cuda", 0), make_net().to("cuda:0")
        found = list(filled(answer(net, device)))
        expect(not found, f"all of the network is on {device}, and you name {found[:1]}")
        net[2].to("cuda:1")
        found = list(answer(net, device))
        expect(all(isinstance(name, str) for name in found), "return the names, not the tensors")
        expect(found, "2.weight is on cuda:1 and not on cuda:0: compare the whole device, not its type")
        expect(found == ["2.weight"], f"only 2.weight is on another device, and you name {found}")
        net[1].cpu()
        found, right = set(answer(net, device)), {name for name in net.state_dict() if name[0] in "12"}
        buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        expect(found != right - buffers, "buffers, such as 1.running_mean, can be left behind: net.named_buffers()")
        expect(found == right, f"expected {sorted(right)}, you name {sorted(found)}")
    return "parameters and buffers, by name"
