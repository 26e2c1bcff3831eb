"""Runs Python programs as forks of one process, which has imported PyTorch for all of them: most of what a run takes.

python forking.py reads a request a line, in JSON, and answers each with a line: the arguments of Fork, to start one,
with the process's number; that number with the exit status, or null while the process runs. It ends with its input.
torchrun's ranks are forks, too, of a process that it has for that; all else about it is as it is. So are those of
virtual-gpus run, of itself: it has no threads.
python forking.py -m torch.distributed.run ... is torchrun as a process of its own, with such ranks.

A fork is as a process of its own, but for three things: what is imported here, which isn't virtual_gpus, is there from
its start, all have one seed for Python's hashes, and Python isn't taken apart at the end.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import torch
import torch._dynamo  # what an optimizer imports with its first step
import torch.distributed.launcher.api  # and what torchrun does
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

with contextlib.suppress(ImportError):
    import torchvision.models  # noqa: F401

PR_SET_CHILD_SUBREAPER = 36  # (linux/prctl.h)
AT_THE_START = "PYTHON", "OMP_", "VIRTUAL_GPUS"  # variables that are read as Python starts, or imports PyTorch
AT_FIRST = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}  # handlers
torch.set_num_threads(1)


class Fork:
    """A process for the command line `args`, [python, script, ...] or [python, "-m", module, ...].

    log, errors: paths of files that its stdout and stderr are added to, or None for those of this process.
    """

    def __init__(self, args, env, folder=None, log=None, errors=None):
        check(env)
        self.args, self.returncode, self.pid = args, None, fork()
        if self.pid == 0:
            end(exit_status(args, env, folder, (log, errors)))

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


def check(env):
    names = [name for name in {*env, *os.environ} if name.startswith(AT_THE_START)]
    if "virtual_gpus" in sys.modules or any(env.get(name) != os.environ.get(name) for name in names):
        raise ValueError(f"with virtual GPUs, or another {AT_THE_START}, a fork is no process of its own")


def fork():
    """os.fork(), for a process without threads: a fork of one that has some may wait for ever for what one of them
    held, such as the C library's lock on names of hosts, which torchrun's heartbeat looks up."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process that has threads can't be forked")
    return os.fork()


class Rank(Fork):
    """What torchrun, which has threads, needs of subprocess.Popen: a fork of another process, see start_forking, that
    becomes a child of this one."""

    pipe = None  # to that process and back

    def __init__(self, args, env, stdout, stderr, start_new_session):
        check(env)
        paths = [file and file.name for file in (stdout, stderr)]
        print(json.dumps([args, env, None, *paths]), file=self.pipe, flush=True)
        self.args, self.returncode, self.pid = args, None, int(self.pipe.readline())


def start_forking():
    """Start the process that forks torchrun's ranks, before torchrun has threads. It ends when torchrun does."""
    here, there = socket.socketpair()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # from now on its children's orphans are this one's children
    if fork() == 0:
        here.close()
        fork_ranks(os.getppid(), there.makefile("rw"))
    there.close()
    Rank.pipe, subprocess_handler.Popen = here.makefile("rw"), Rank


def fork_ranks(parent, pipe):
    """Fork a rank for every line of `pipe`. The rank, whose parent ends at once, says which process it is when it has
    become a child of `parent`."""
    for line in pipe:
        child = fork()
        if child == 0:
            if fork() > 0:
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            print(os.getpid(), file=pipe, flush=True)
            args, env, folder, *files = json.loads(line)
            end(exit_status(args, env, folder, files))
        os.waitpid(child, 0)
    os._exit(0)


class RankOfRun(Fork):
    """What virtual-gpus run needs of subprocess.Popen."""

    def __init__(self, args, env, start_new_session, pass_fds):
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in handlers:
            signal.signal(number, AT_FIRST[number])
        self.args, self.returncode, self.pid = args, None, fork()
        if self.pid == 0:
            for name in [name for name in sys.modules if name.partition(".")[0] == "virtual_gpus"]:
                del sys.modules[name]
            end(exit_status(args, env, None, (None, None), pass_fds))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        while os.getpgid(self.pid) != self.pid:  # it has no session of its own yet
            time.sleep(0.001)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def exit_status(args, env, folder, files, kept=()):
    """Be the program that `args` name until it ends."""
    try:
        settle(env, folder, files, kept)
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
        if program[1] == "torch.distributed.run":
            start_forking()
        elif program[1:3] == ["virtual_gpus", "run"]:
            importlib.import_module("virtual_gpus.cli.processes").subprocess = SimpleNamespace(Popen=RankOfRun)
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


def settle(env, folder, files, kept):
    """What a new process gets: a session, environment, folder and random numbers of its own, and no open files but
    three and those `kept`."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(files, start=1):
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    for low, high in itertools.pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder or ".")
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch.default_generator.seed()  # Python's own numbers are new in each fork


def serve():
    gc.freeze()  # or else a fork that looks for garbage copies all the memory that it shares with others
    forks = {}
    for request in map(json.loads, sys.stdin):
        if isinstance(request, dict):
            fork = Fork(**request)
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
    if sys.argv[1:]:
        run(sys.argv)
    else:
        serve()
