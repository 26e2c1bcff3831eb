"""Writing down what an experiment found, and how it came about."""

import contextlib
import datetime
import json
import platform
import subprocess
from pathlib import Path

import torch
import torchvision

from virtual_gpus import replacing

ROOT = Path(__file__).parents[1]


def provenance(module):
    """How to find the same again, beside the recipe: with which command, code and libraries, when, and on what."""
    versions = {package.__name__: package.__version__.split("+")[0] for package in (torch, torchvision)}
    return {
        "command": f"python -m {module}",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions},
        "processor": processor(),
    }


def commit():
    """That of this code, with "-dirty" where it was changed since; None outside of a Git repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def processor():
    """What the processor is called, and the instructions that PyTorch's kernels use of it."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def write(path, result):
    """Write `result` as JSON; the file is replaced as a whole."""
    with replacing(path) as new:
        new.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
