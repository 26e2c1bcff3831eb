"""Writing down what a program found, and how it came about."""

import contextlib
import datetime
import json
import platform
import pprint
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision

from virtual_gpus import replacing

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"


def provenance(name: str) -> dict:
    """How the program `name` of this folder was run: command, day, commit, versions, and on which processor."""
    command, commit = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # outside of a Git repository
        commit = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout.strip()
    versions = {package.__name__: package.__version__.split("+")[0] for package in (torch, torchvision)}
    return {
        "command": f"python -m calibration.{name}",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "versions": {"python": platform.python_version(), **versions},
        "processor": processor(),
    }


def processor() -> str:
    """What the processor is called, and the instructions that PyTorch's kernels use of it."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def write(path: Path, result: dict) -> None:
    """Write `result` as JSON; the file is replaced as a whole."""
    with replacing(path) as new:
        new.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def save(name: str, result: dict) -> None:
    """Write what the program `name` found to `recorded`, and print its summary."""
    write(RECORDED / f"{name}.json", {"provenance": provenance(name), **result})
    pprint.pprint(result["summary"], width=120, sort_dicts=False)


def record_missing(cases: dict[str, tuple], record: Callable, path: Path) -> dict[str, dict]:
    """{key of a case: record(*case)}. What is done is kept in the file `path`: a program that was ended goes on."""
    runs = json.loads(path.read_text()) if path.exists() else {}
    for key in cases:
        if key not in runs:
            runs[key] = record(*cases[key])
            write(path, runs)
    return {key: runs[key] for key in cases}
