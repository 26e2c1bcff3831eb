"""What starting on virtual GPUs costs: `python -m virtual_gpus script.py` against `python script.py`.

    python -m benchmarks.starting    # prints the seconds and their bounds; exit code 1 if one is not kept

The script imports torch and ends. Both ways run one right after the other, since a busy machine slows both, and the
median of their differences is quoted; and so for the processes that a program starts, against those of a plain one.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from virtual_gpus import LaunchConfig, child_environment

PAIRS = 11
PLAIN = [sys.executable]
BOUND = 0.5  # seconds


def seconds(*command):
    start = time.perf_counter()
    subprocess.run(command, check=True, timeout=120)
    return time.perf_counter() - start


def added(start, inherits, program):
    """differences: the seconds that `start` takes for `program`, less those that Python takes."""
    for _ in range(PAIRS):
        before = seconds(*PLAIN, *program)
        if inherits:
            with child_environment(LaunchConfig(4, {})):
                yield seconds(*start, *program) - before
        else:
            yield seconds(*start, *program) - before


def main():
    print(f"torch {torch.__version__}; seconds added: median (quartiles) [bound]")
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        script, empty = Path(folder, "script.py"), Path(folder, "empty.py")
        script.write_text("import torch\n")
        empty.touch()
        for name, start, inherits, program in (
            ("python -m virtual_gpus", [*PLAIN, "-m", "virtual_gpus"], False, script),
            ("virtual-gpus run -n 1", [*PLAIN, "-m", "virtual_gpus", "run", "-n", "1"], False, script),
            ("a process that it starts", PLAIN, True, script),
            ("a process that imports no torch", PLAIN, True, empty),
        ):
            low, median, high = statistics.quantiles(added(start, inherits, [str(program)]), n=4)
            kept &= median <= BOUND
            print(f"{name:<32} {median:6.3f} ({low:.3f} to {high:.3f}) [{BOUND:.2f}]", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
