"""Runs Python programs as forks of one process, which has imported PyTorch for all of them: most of what a run takes.

python forking.py reads a request a line, in JSON, and answers each with a line: the arguments of Fork, to start one,
with the process's number; that number with the exit status, or null while the process runs. It ends with its input.
torchrun's ranks are forks, too, of a process that it has for that; all else about it is as it is. So are the processes
of Python that a notebook's kernel starts, and, of itself, those of virtual-gpus run: it has no threads.
python forking.py -m torch.distributed.run ... is torchrun as a process of its own, with such ranks.

A fork is as a process of its own, but for three things: what is imported here, which isn't virtual_gpus, is there from
its start, all have one seed for Python's hashes, and Python isn't taken apart at the end.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
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
AT_THE_START = "PYTHON", "OMP_"  # variables that are read as Python starts, or imports PyTorch
APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT
TORCHRUN = ["-m", "torch.distributed.run"]
PROGRAMS = {"python": [], "torchrun": TORCHRUN}  # those on the path
PIPES = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
AT_FIRST = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}  # handlers
torch.set_num_threads(1)


class Fork:
    """A process for the command line `args`, [python, script, ...] or [python, "-m", module, ...].

    log, errors: paths of files that its stdout and stderr are added to, or None for those of this process.
    """

    def __init__(self, args, env, folder=None, log=None, errors=None):
        if not forkable(args, env) or "virtual_gpus" in sys.modules:
            raise ValueError(f"with virtual GPUs, or another {AT_THE_START}, a fork is no process of its own")
        self.args, self.returncode, self.pid = args, None, fork()
        if self.pid == 0:
            paths = {1: log, 2: errors}
            files = {n: os.open(path, APPENDING) for n, path in paths.items() if path is not None}
            end(exit_status(args, env, folder, files))

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


def forkable(args, env):
    """Whether a fork of a process with this one's environment can be a process of Python with `args` and `env`."""
    return args[0] in (sys.executable, *PROGRAMS) and "-c" not in args and at_the_start(env) == at_the_start(os.environ)


def at_the_start(env):
    """The variables of `env` that matter then, but for what turns on virtual GPUs."""
    found = {name: value for name, value in env.items() if name.startswith(AT_THE_START)}
    return found | {"PYTHONPATH": env.get("PYTHONPATH", "").removeprefix(f"{startup(env)}{os.pathsep}")}


def startup(env):
    """The folder of the sitecustomize that turns on the virtual GPUs which a process with `env` inherits, or ""."""
    return env.get("PYTHONPATH", "").partition(os.pathsep)[0] if env.get("VIRTUAL_GPUS") else ""


def fork():
    """os.fork(), for a process without threads: a fork of one that has some may wait for ever for what one of them
    held, such as the C library's lock on names of hosts, which torchrun's heartbeat looks up. The new process has a
    session of its own, so that whoever kills its group doesn't kill this one."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process that has threads can't be forked")
    pid = os.fork()
    if pid == 0:
        os.setsid()
    while os.getpgid(pid) != (pid or os.getpid()):
        time.sleep(0.001)
    return pid


class Popen(subprocess.Popen):
    """For a process with threads, such as torchrun or a notebook's kernel: where it starts Python, a fork of another
    process, see start_forking, that becomes a child of this one."""

    forker = None  # a socket to that process
    asking = threading.Lock()

    def _execute_child(self, args, *others):
        given = inspect.signature(super()._execute_child).bind(args, *others).arguments
        env = dict(os.environ if given["env"] is None else given["env"])
        if isinstance(args, str) or not forkable(args, env):
            return super()._execute_child(args, *others)
        streams = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        files = {n: n if file == -1 else file for n, file in streams.items()} | {n: n for n in given["pass_fds"]}
        request = [[str(arg) for arg in args], env, str(given["cwd"] or os.getcwd()), list(files)]
        with self.asking:
            socket.send_fds(self.forker, [json.dumps(request).encode()], list(files.values()))
            self.pid = int(self.forker.recv(99))
        self._child_created = True
        self._close_pipe_fds(*(given[pipe] for pipe in PIPES))


def start_forking():
    """Start the process that forks the others, before this one has threads. It ends when this one does."""
    Popen.forker, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # from now on its children's orphans are this one's children
    if fork() == 0:
        Popen.forker.close()
        fork_others(os.getppid(), there)
    there.close()


def fork_others(parent, asked):
    """Fork a process for every request. The new one, whose parent ends at once, says which process it is when it has
    become a child of `parent`."""
    while True:
        request, files, *_ = socket.recv_fds(asked, 2**20, 99)
        if not request:
            os._exit(0)
        child = fork()
        if child == 0:
            if fork() > 0:
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.001)
            asked.send(str(os.getpid()).encode())
            args, env, folder, numbers = json.loads(request)
            end(exit_status(args, env, folder, dict(zip(numbers, files, strict=True))))
        os.waitpid(child, 0)
        for file in files:
            os.close(file)


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
            end(exit_status(args, env, None, {n: n for n in pass_fds}))
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


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
    program = [*PROGRAMS.get(args[0], ()), *args[1:]]
    if program[0] == "-u":
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w"), write_through=True) for n in (1, 2))
        del program[0]
    if program[:2] == ["-X", "faulthandler"]:
        faulthandler.enable()
        del program[:2]
    if program[:2] == TORCHRUN or os.path.basename(program[0]) == "loopback.py":
        start_forking()
        subprocess_handler.Popen = Popen
    elif program[:2] == ["-m", "ipykernel_launcher"]:
        start_forking()
        subprocess.Popen = Popen
    elif program[:3] == ["-m", "virtual_gpus", "run"]:
        importlib.import_module("virtual_gpus.cli.processes").subprocess = SimpleNamespace(Popen=RankOfRun)
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
    """What a new process gets: environment, folder and random numbers of its own, and no open files but three and
    `files`, {number: which of this process's}."""
    files = {0: os.open(os.devnull, os.O_RDONLY)} | files
    above = {number: fcntl.fcntl(file, fcntl.F_DUPFD, 500) for number, file in files.items()}  # out of each other's way
    for number, file in above.items():
        os.dup2(file, number)
    for low, high in itertools.pairwise([2, *sorted(n for n in files if n > 2), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder or ".")
    if folder := startup(env):
        sys.path.insert(1, folder)
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch.default_generator.seed()  # Python's own numbers are new in each fork
    # In a fork, the first thread that asks for PyTorch's pool of threads remakes it. Two of autograd's in their first
    # backward pass may do so at once, and one of them finds none: "Invalid thread pool!", seen once in many runs.
    torch.set_num_threads(torch.get_num_threads())


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
