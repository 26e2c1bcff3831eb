"""Which GPUs are there: real ones, virtual ones, or none."""

import os
import subprocess

import torch

from mgpu_lib import loopback
from mgpu_lib.table import Table
from virtual_gpus import current, virtual_gpus

COLUMNS = {  # of gpu_table for real GPUs, and what nvidia-smi calls them
    "GPU": "index",
    "name": "name",
    "memory used": "memory.used",
    "memory": "memory.total",
    "utilization": "utilization.gpu",
}
_started = None  # the machine that use_gpus has started


def try_gpu(i=0):
    """The torch.device of GPU `i`, or of the CPU, with a line that says so, if there is no such GPU."""
    if 0 <= i < gpu_count():
        return torch.device("cuda", i)
    print(f"There is no GPU {i} ({gpu_count()} in all): falling back to the CPU.")
    return torch.device("cpu")


def gpu_count():
    """How many GPUs PyTorch can use. torch.cuda.device_count() alone asks NVML, which counts GPUs for which the driver
    is too old, too."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def try_all_gpus():
    """The torch.devices of all GPUs, or `[torch.device('cpu')]` when there is none."""
    return [torch.device("cuda", i) for i in range(gpu_count())] or [torch.device("cpu")]


def use_gpus(n, gpu="A100-80"):
    """`n` GPUs, as a list of torch.devices, and a line saying of which kind they are.

    Real GPUs, if there are n of them and the environment variable MGPU_VIRTUAL isn't set. Otherwise virtual ones,
    named `gpu` (see `virtual_gpus.GPUS`), which stay on until `use_gpus` is asked for another kind. Asked for more of
    them, it adds some. ValueError if n isn't at least 1, or no GPU has that name.
    """
    global _started
    wanted = virtual_gpus(n, gpu)
    if enough_real_gpus(n):
        print(f"Using {n} real GPU{'s' * (n > 1)}: {', '.join(torch.cuda.get_device_name(i) for i in range(n))}.")
        return [torch.device("cuda", i) for i in range(n)]
    idle = 0 if current() or os.environ.get("MGPU_VIRTUAL") else gpu_count()
    if current() is not None and current() is _started and _started.spec is not wanted.spec:
        _started.stop()
    if current() is None:
        _started = wanted.start()
    machine = current()
    machine.grow(n)
    if len(machine.gpus) < n:
        raise ValueError(f"use_gpus({n}): this program sees fewer GPUs{machine.hidden()}")
    kind = "GPU" if n == 1 else "GPUs"
    print(f"Using {n} virtual {kind} ({machine.spec.key}), made of this computer's memory.")
    if idle:
        print(f"Your {idle} real GPU{'s' * (idle > 1)} won't be used. use_gpus({idle}) in a restarted kernel would.")
    return machine.devices[:n]


def enough_real_gpus(n):
    """Whether `n` GPUs are real ones: there are so many, none are virtual, and MGPU_VIRTUAL isn't set."""
    return current() is None and not os.environ.get("MGPU_VIRTUAL") and n <= gpu_count()


def environment_for(n):
    """The environment of ranks that need `n` GPUs: CUDA_VISIBLE_DEVICES is about real ones, and kept for those."""
    real = enough_real_gpus(n)
    inherited = {name: value for name, value in os.environ.items() if real or name != "CUDA_VISIBLE_DEVICES"}
    return loopback.ENVIRONMENT | inherited


def gpu_table():
    """What nvidia-smi shows, one row per GPU. `.rows` has the same as a list of dicts.

    For virtual GPUs the figures come from the memory ledger; for real ones from nvidia-smi itself.
    """
    rows = real_rows() if current() is None else virtual_rows(current())
    return Table(rows, "No NVIDIA GPU here. mgpu.use_gpus(4) makes four virtual ones.")


def virtual_rows(machine):
    return [
        {
            "GPU": gpu.index,
            "name": f"{gpu.spec.name} (virtual)",
            "memory used": f"{gpu.ledger.reserved >> 20} MiB",
            "memory": f"{gpu.ledger.capacity >> 20} MiB",
            "utilization": "not modelled",
        }
        for gpu in machine.gpus
    ]


def real_rows():
    """One row for each GPU that nvidia-smi finds; none where there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(COLUMNS.values())}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip("[] ") for field in line.split(",")] for line in said.splitlines()]  # [N/A]: part of a GPU
    return [dict(zip(COLUMNS, (int(index), *fields))) for index, *fields in rows]
