"""Runs Python programs as forks of one process, which has imported PyTorch for all of them: most of what a run takes.

python forking.py reads a request a line, in JSON, and answers each with a line: the arguments of Fork, to start one,
with the process's number; that number with the exit status, or null while the process runs. It ends with its input.
torchrun starts its ranks as forks, too, of itself; all else about it is as it is. python forking.py script ... or
-m module ... does the same in this process: it is for what has to be a process of its own, with many ranks.

A fork is as a process of its own, but for three things: what is imported here is there from its start (mgpu_lib isn't),
all have one seed for Python's hashes, and Python isn't taken apart at the end.
"""

import atexit
import gc
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import torch
import torch._dynamo  # what an optimizer imports with its first step
import torch.distributed.launcher.api  # and what torchrun does
import torchvision.models  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT  # torchrun has handlers of its own for them
AT_THE_START = "PYTHON", "OMP_", "MGPU_VIRTUAL_GPUS"  # variables that are read as Python starts, or imports PyTorch
torch.set_num_threads(1)  # a process that has started threads can't be forked


class Fork:
    """What torchrun needs of subprocess.Popen([python, script, ...]) or [python, "-m", module, ...].

    stdout and stderr: files, or None for those of this process.
    """

    def __init__(self, args, env, stdout=None, stderr=None, start_new_session=True, folder=None):
        names = [name for name in {*env, *os.environ} if name.startswith(AT_THE_START)]
        if "mgpu_lib" in sys.modules or any(env.get(name) != os.environ.get(name) for name in names):
            raise ValueError(f"with virtual GPUs, or another {AT_THE_START}, a fork is no process of its own")
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            end(exit_status(args, env, folder, (stdout, stderr)))

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode


def exit_status(args, env, folder, files):
    """Be the program that `args` name until it ends."""
    try:
        settle(env, folder, files)
        run(args)
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return 1


def run(args):
    """What Python does with a command line."""
    program = [arg for arg in args[1:] if arg != "-u"]
    if "-u" in args:
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w"), write_through=True) for n in (1, 2))
    if program[0] == "-m":
        sys.argv, sys.path[0] = program[1:], os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = program, os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


def end(status):
    """As Python ends, but for taking its modules apart: that copies all the memory which forks share."""
    threading._shutdown()  # waits for threads that aren't daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def settle(env, folder, files):
    """What a new process gets: a session, signals, environment, folder and random numbers of its own, and no open
    files but three."""
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files, start=1):
        if file is not None:
            os.dup2(file.fileno(), number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder or ".")
    tempfile.tempdir = None
    np.random.seed()
    torch.default_generator.seed()  # Python's own numbers are new in each fork


def started(args, env, folder, log, errors):
    """The Fork that a request asks for; `log` and `errors` are the paths of what it writes."""
    with open(log, "a") as stdout, open(errors, "a") as stderr:
        return Fork(args, env, stdout, stderr, folder=folder)


def serve():
    gc.freeze()  # or else a fork that looks for garbage copies all the memory that it shares with others
    forks = {}
    for request in map(json.loads, sys.stdin):
        if isinstance(request, dict):
            fork = started(**request)
            forks[fork.pid] = fork
            answer = fork.pid
        else:
            answer = forks[request].poll()
        print(json.dumps(answer), flush=True)
    for fork in forks.values():
        if fork.poll() is None:  # torchrun ends its ranks, too
            os.kill(fork.pid, signal.SIGTERM)
    end(0)


if __name__ == "__main__":
    subprocess_handler.Popen = Fork
    if sys.argv[1:]:
        run(sys.argv)
    else:
        serve()
