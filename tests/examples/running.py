"""Running examples/train_ddp.py: each run has a time limit, and none of its processes is left, whatever happens."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import psutil
import torch
from ranks import TORCHRUN, Fork, happens

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SCRIPT = ROOT / "examples" / "train_ddp.py"
KILLING = HERE / "killing.py"
LIMIT = 2400  # seconds for a run
VANISHING = 400  # seconds for its processes to end by themselves, once the first one has
FORK = "fork"  # instead of a path to Python: run the program as forking.py does


def forked(command):
    """A command line of python, torchrun or virtual-gpus, as the command of a fork."""
    for script, module in {"torchrun ": "torch.distributed.run ", "virtual-gpus ": "virtual_gpus "}.items():
        command = command.replace(script, f"python -m {module}")
    return [FORK, *command.split()[1:]]


def write_data(folder, images=240, tests=61):
    """Files like Fashion-MNIST's with random images, of which each class has a brighter row."""
    raw, generator = Path(folder, "FashionMNIST", "raw"), np.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, count in ("train", images), ("t10k", tests):
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        pixels = generator.integers(0, 100, (count, 28, 28), dtype=np.uint8)
        pixels[np.arange(count), 2 * labels + 4] += 150
        (raw / f"{part}-images-idx3-ubyte").write_bytes(bytes(16) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(bytes(8) + labels.tobytes())
    return str(folder)


def planned(folder, *plan, script=SCRIPT):
    """The beginning of a command that follows a plan."""
    path = Path(folder, "plan.json")
    path.write_text(json.dumps(plan))
    return KILLING, path, script


class Run:
    """A command that runs in `folder`; `said` is what it has written so far."""

    def __init__(self, command, folder, **environment):
        command, self.log = list(map(str, command)), Path(folder, f"log-{uuid.uuid4().hex}.txt")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path} | environment
        with self.log.open("w") as log:
            if command[0] == FORK:
                self.process = Fork(command[1:], env, folder, self.log, self.log)
            else:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.process = subprocess.Popen(command, cwd=folder, env=env, **streams)

    @property
    def said(self):
        return self.log.read_text(errors="replace")

    def ended(self):
        """The exit status, as soon as there is one."""
        return self.process.wait(LIMIT)

    def family(self):
        """The processes of this run that are there, wherever they have got to: those that can write to its log."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(file.path == str(self.log) for file in process.open_files()):
                    found.append(process)
        return found

    def vanished(self):
        """Whether all processes of this run end by themselves."""
        return happens(lambda: not self.family(), VANISHING)

    def kill(self):
        while family := self.family():
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        self.process.wait(LIMIT)


@contextlib.contextmanager
def started(command, folder, **environment):
    run = Run(command, folder, **environment)
    try:
        yield run
    except BaseException:
        print(run.said)
        raise
    finally:
        run.kill()


def done(command, folder, status=0, **environment):
    """What a command says that must end with that exit status and leave no process."""
    with started(command, folder, **environment) as run:
        assert run.ended() == status, run.said
        assert run.vanished(), run.family()
        return run.said


@contextlib.contextmanager
def on_two_machines(folder, *arguments):
    """torchrun started twice, as on two machines with one rank each, which here share a folder."""
    meeting = "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"
    command = FORK, *TORCHRUN[:2], "--nnodes", 2, "--nproc-per-node", 1, *meeting, *arguments
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the script's docstring asks for
    with started(command, folder, **environment) as one, started(command, folder, **environment) as other:
        yield one, other


def lines(folder, name="run.csv"):
    path = Path(folder, name)
    return path.read_text().splitlines() if path.exists() else []


def stop_after(runs, folder, count, signum=signal.SIGTERM):
    """Send a signal to each run's first process once the metrics have `count` lines; their exit statuses."""
    processes = [run.process for run in runs]
    assert happens(lambda: len(lines(folder)) >= count or any(p.poll() is not None for p in processes), LIMIT)
    for run in runs:
        assert run.process.poll() is None, run.said
        run.process.send_signal(signum)
    return [run.ended() for run in runs]


def checkpoint(folder, name="run.pt"):
    return torch.load(Path(folder, name), map_location="cpu", weights_only=True)


def equal(a, b):
    """Whether two checkpoints hold the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def same_run(folder, other):
    """Whether two runs have left the same metrics and checkpoint, and nothing that they wrote on the way."""
    return (
        lines(folder) == lines(other)
        and equal(checkpoint(folder), checkpoint(other))
        and not Path(folder, "run.pt.new").exists()
    )


def free_port(ports=(0,)):
    """A port that nobody listens at: one of `ports`, or any."""
    for port in random.sample(ports, len(ports)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise OSError(f"no port of {ports} is free")
