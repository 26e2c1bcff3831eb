"""Programs of many processes: torchrun, on virtual GPUs. And a quick way to run them: as forks, see forking.py."""

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"
VIRTUAL = "-m", "virtual_gpus"
FORKING = Path(__file__).with_name("forking.py")
ASKING = threading.Lock()


def happens(condition, seconds=600):
    """Whether `condition()` comes to hold. Only what never does takes so many seconds, however busy the machine is."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@functools.cache
def fork_server():
    """It ends with this process. In a session of its own it doesn't hear of a Ctrl-C that is meant for pytest."""
    command, env = [sys.executable, FORKING], os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    atexit.register(server.communicate)
    return server


def ask(request):
    """The fork server's answer."""
    with ASKING:
        server = fork_server()
        print(json.dumps(request), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())


class Fork:
    """What tests need of subprocess.Popen(["python", *arguments], cwd=folder, ...), for a fork."""

    stdin = stdout = stderr = None

    def __init__(self, arguments, env, folder, log, errors):
        paths = {"folder": str(folder), "log": str(log), "errors": str(errors)}
        self.pid = ask({"args": [sys.executable, *map(str, arguments)], "env": env, **paths})

    def poll(self):
        return ask(self.pid)

    def wait(self, seconds=600):
        assert happens(lambda: self.poll() is not None, seconds), f"{self.pid} still runs after {seconds} s"
        return self.poll()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """End it and the ranks that it has started, unless it has ended."""
        while self.poll() is None:
            for pid in reversed(family(self.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def family(pid):
    """The numbers of a process and of those that it has started, and so on."""
    parents, found = {}, [pid]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def python(*arguments, folder=".", fork=True, check=True, seconds=2400, **environment):
    """Run Python with these arguments, a script's or -m a module's; a CompletedProcess with its text."""
    env, command = os.environ | {"OMP_NUM_THREADS": "1"} | environment, [sys.executable, *map(str, arguments)]
    if fork:
        done = forked(command, env, folder, seconds)
    else:
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0 or not check, done.stderr
    done.stdout = re.sub(r"^\[Gloo\] Rank .*\n", "", done.stdout, flags=re.M)  # before PyTorch 2.11
    return done


def forked(command, env, folder, seconds):
    """What subprocess.run says of it."""
    with tempfile.TemporaryDirectory() as said:
        log, errors = Path(said, "log"), Path(said, "errors")
        process = Fork(command[1:], env, Path(folder).absolute(), log, errors)
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, status, log.read_text(), errors.read_text())


def torchrun(n, program, *arguments, options=(), **how):
    """Run `program`, a path, on `n` ranks with as many virtual GPUs, as `python` does."""
    return python(*TORCHRUN, n, *VIRTUAL, *options, program, *arguments, **how)


def wanted(request, name):
    """The values of the parameter `name` that this run of pytest has chosen for the tests of the request's file."""
    items = [item for item in request.session.items if item.path == request.path]
    items = [item for item in items if not any(mark.args[0] for mark in item.iter_markers("skipif"))]
    return [item.callspec.params[name] for item in items if hasattr(item, "callspec") and name in item.callspec.params]


def passed(request, program):
    """The names of the checks of `program` that passed on four ranks, of those that the tests of this file want.

    The first one that fails ends the program, so those after it are missing, too: stderr, printed here, says which it
    was.
    """
    done = torchrun(4, program, *wanted(request, "name"), check=False)
    print(done.stderr)
    return re.findall(r"^ok (\w+)$", done.stdout, re.M)
