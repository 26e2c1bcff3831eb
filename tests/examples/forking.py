"""Runs Python programs as forks of one process, which has imported PyTorch for all of them: most of what a run takes.

python forking.py reads a request a line, in JSON, and answers each with a line: the arguments of Fork, to start one,
with the process's number; that number with the exit status, or null while the process runs. It ends with its input.
torchrun starts its ranks as forks, too, of itself; all else about it is as it is.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import time

import torch
import torch._dynamo  # what an optimizer imports with its first step
import torch.distributed.launcher.api  # and what torchrun does
import torchvision.models  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT  # torchrun has handlers of its own for them
torch.set_num_threads(1)  # a process that has started threads can't be forked


class Fork:
    """What torchrun needs of subprocess.Popen([python, script, ...]) or [python, "-m", module, ...]."""

    def __init__(self, args, env, stdout=None, stderr=None, start_new_session=True, folder=None, log=None):
        if (stdout, stderr, start_new_session) != (None, None, True):
            raise ValueError("ranks that write to files, or share their launcher's session, can't be forked")
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(exit_status(args, env, folder, log))

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


def exit_status(args, env, folder, log):
    """Be the program that `args` name until it ends."""
    try:
        settle(env, folder, log)
        program = [arg for arg in args[1:] if arg != "-u"]
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def settle(env, folder, log):
    """What a new process gets: a session, signals, environment and folder of its own, and no open files but three."""
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log:
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder or ".")


def serve():
    subprocess_handler.Popen = Fork
    forks = {}
    for request in map(json.loads, sys.stdin):
        if isinstance(request, dict):
            fork = Fork(**request)
            forks[fork.pid] = fork
            answer = fork.pid
        else:
            answer = forks[request].poll()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
