"""Checks for "Meet your GPUs": choosing a GPU or a pair, a GPU's number, and when two are faster than one."""

from itertools import pairwise
from unittest import mock

import torch

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
        ballast = torch.ones(2**20, device="cuda:1")
        found = answer(few)
        expect(found in few, "it must be one of the devices that were passed, and they may be some of all GPUs")
        expect(found == few[1], "of [cuda:1, cuda:2], cuda:1 holds more: the i-th in the list need not be GPU i")
        del ballast
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
def check_visible_gpus(answer):
    """visible_gpus(visible, installed): the numbers in nvidia-smi of cuda:0, cuda:1, ..."""
    for visible, installed, right, rule in (
        ("3,0,2", 4, [3, 0, 2], "the program numbers what it sees in the order of the list"),
        ("10,2", 16, [10, 2], "a number can have two digits"),
        (None, 2, [0, 1], "if the variable isn't set, nothing is hidden"),
        ("", 4, [], "an empty value hides all GPUs"),
        ("0,4", 4, [0], "four GPUs are numbered from 0 to 3"),
        ("0,7,1", 4, [0], "from the first invalid number on, everything is dropped"),
        ("0,2,-1,1", 4, [0, 2], "from the first invalid number on, everything is dropped"),
        ("1,1", 4, [], "with a GPU named twice, none is left"),
    ):
        got = answer(visible, installed)
        if visible:
            filled(got)
        case = f"CUDA_VISIBLE_DEVICES={visible!r}, {installed} GPUs: you say {got!r}"
        expect(
            got != [str(number) for number in right] or not right, f"{case}. These are texts; turn them into numbers"
        )
        expect(list(got) == right, f"{case}; {rule}")
    return "cuda:1 is GPU 0, and none of the rules is forgotten"


@exercise
def check_best_pair(answer):
    """best_pair(matrix): the two GPUs with the best path between them."""
    codes = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2", "NV12"]
    for worse, better in pairwise(codes):
        for pair in ((0, 1), (0, 2), (1, 2)):
            matrix = [["X" if i == j else better if {i, j} == set(pair) else worse for j in range(3)] for i in range(3)]
            found = filled(answer(matrix))
            expect(isinstance(found, tuple) and len(found) == 2, f"{found!r} is no tuple of two numbers")
            expect(found[0] != found[1], f"{found} is one GPU twice: X is the GPU itself")
            expect(found[0] < found[1], f"{found}: the smaller number first")
            expect(found == pair, f"{better} is better than {worse}, and joins {pair}; you say {found}")
    return "the best path, whatever it is"


@exercise
def check_break_even_ms(answer):
    """break_even_ms(megabytes, gbps): the step time on one GPU from which on two are faster."""
    for megabytes, gbps in ((44.7, 15.75), (100, 300)):
        right = 2 * megabytes / gbps
        got = float(filled(answer(megabytes, gbps)))
        case = f"{megabytes} MB at {gbps} GB/s: {got:.3g} ms"
        expect(
            abs(got - right / 2) > 1e-6, f"{case} is the transfer; the half of a step that is saved must outweigh it"
        )
        expect(abs(got - right / 1000) > 1e-6 * right, f"{case}: that is in seconds")
        expect(abs(got - right) < 1e-6 * right, f"{case}; with a step of {right:.3g} ms, both take equally long")
    return "5.7 ms for ResNet-18 over PCIe 3.0"
