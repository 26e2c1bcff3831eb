"""Running a script in many processes from a notebook: torchrun, with what its ranks print in order."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import virtual_gpus
from mgpu_lib import loopback
from mgpu_lib.devices import enough_real_gpus, environment_for

LIBRARIES = Path(__file__).parent, Path(virtual_gpus.__file__).parent
TORCHRUN = sys.executable, str(LIBRARIES[0] / "loopback.py")
OPTIONS = "--standalone", "--local-addr", loopback.HOST, "--redirects", "3"
ENDING = 45  # seconds: torchrun ends its ranks when it is asked to, and after 30 by force
EXIT = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")  # in what torchrun says of a failure
FRAME = re.compile(r' *File "(.+?)", line \d+')
TRACEBACK = re.compile(r'^(Traceback \(most recent call last\):| *File ".+", line \d+)$', re.MULTILINE)
LOGGED = re.compile(r"\[?[IWEF]\d{4} \d\d:")  # a line with a time stamp, from C++
BY_TORCHRUN = -signal.SIGTERM  # the exit status of a rank that torchrun ended because another one failed


class Output(NamedTuple):
    """What a rank has written."""

    stdout: str
    stderr: str  # without the traceback
    traceback: str  # of the program's own frames; "" without an error
    written: int  # when it wrote last to stderr, in nanoseconds


def launch(script, ranks, *arguments, gpu="A100-80", seconds=300):
    """Run `script` with torchrun in so many processes, and print what they print: rank 0 first, nothing else between.

    Each rank has a GPU: real ones if there are enough and the environment variable MGPU_VIRTUAL isn't set, otherwise
    virtual ones named `gpu`. If one fails, RuntimeError with its traceback; if they aren't done after so many
    `seconds`, they are ended, and TimeoutError. ValueError for less than one rank, FileNotFoundError without a script.
    """
    loopback.check_platform()
    script = Path(script)
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"launch(ranks={ranks!r}): the number of ranks must be a whole number, at least 1")
    if not script.is_file():
        raise FileNotFoundError(f"launch({str(script)!r}): there is no such file in {os.getcwd()}")
    virtual = [] if enough_real_gpus(ranks) else ["-m", "virtual_gpus", "--gpu", virtual_gpus.find_gpu(gpu).key]
    with tempfile.TemporaryDirectory() as folder:
        options = *OPTIONS, "--nproc-per-node", str(ranks), "--log-dir", folder
        command = [*options, *virtual, str(script), *map(str, arguments)]
        status, said = torchrun(command, environment_for(ranks), folder, seconds)
        outputs = [output_of(Path(folder), rank, script.resolve().parent) for rank in range(ranks)]
    print_by_rank([(output.stdout, output.stderr) for output in outputs])
    if status is None:
        raise TimeoutError(f"{script.name} was still running on {ranks} ranks after {seconds} s, and was ended")
    if status:
        raise RuntimeError(what_failed(said, outputs))


def print_by_rank(outputs):
    """Print what each rank has written to (stdout, stderr), with PyTorch's mark of a rank before each line."""
    for rank, texts in enumerate(outputs):
        for text, stream in zip(texts, (sys.stdout, sys.stderr), strict=True):
            print("".join(f"[rank{rank}]: {line}\n" for line in text.splitlines()), end="", file=stream, flush=True)


def torchrun(arguments, environment, folder, seconds):
    """The exit status of torchrun (None: it took too long), and what it said. None of its processes is left, also
    where this one is killed."""
    here, there = os.pipe()
    with Path(folder, "torchrun.log").open("w+") as log, open(there, "wb"):
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        command = [*TORCHRUN, str(here), *arguments]
        process = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[here], **streams)
        os.close(here)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
        log.seek(0)
        return status, log.read()


def end(process):
    """Have torchrun end its ranks, and itself: by force if it takes too long, or is interrupted at it."""
    if process.poll() is None:
        ranks = children(process.pid)
        process.terminate()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                for group in ranks:  # which each of them leads
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(group, signal.SIGKILL)
                process.kill()
                process.wait()


def children(pid):
    """The processes that process `pid` has started; Linux says so."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def output_of(folder, rank, home):
    """The Output of `rank`; `home` is the folder of the script."""
    texts, written = {"stdout": "", "stderr": ""}, 0
    for path in folder.glob(f"*/attempt_0/{rank}/std*.log"):
        texts[path.stem] = path.read_text(errors="replace")
        written = path.stat().st_mtime_ns if path.stem == "stderr" else written
    lines = (line.removeprefix(f"[rank{rank}]: ") for line in texts["stderr"].splitlines())
    stderr = "\n".join(anywhere(line, home) for line in lines if not LOGGED.match(line))
    found = TRACEBACK.search(stderr)
    start = len(stderr) if found is None else found.start()
    return Output(texts["stdout"], stderr[:start], own_frames(stderr[start:]), written)


def anywhere(line, home):
    """`line` as it is on every computer: files of the script's folder, or of a package, without what leads there."""
    for library in LIBRARIES:
        line = line.replace(str(library), f"<packages>/{library.name}")
    line = line.replace(f"{home}{os.sep}", "")
    return re.sub(r"[^\s\"']*(site|dist)-packages/", "<packages>/", line)


def own_frames(traceback):
    """A traceback without the frames of Python, of packages, and of this library."""
    kept, keep = [], True
    for line in traceback.splitlines():
        frame = FRAME.match(line)
        if frame is not None:
            path = frame.group(1)
            keep = path == "<cell>" or not (os.path.isabs(path) or path.startswith("<"))
        elif not line.startswith("  "):  # the error itself
            keep = True
        kept += [line] * keep
    return "\n".join(kept)


def what_failed(said, outputs):
    """The error of the rank that failed first, in words; the others fail because of it, or torchrun ends them."""
    statuses = {int(rank): int(status) for rank, status in EXIT.findall(said)}
    if not statuses:
        return f"torchrun failed before its ranks ran:\n{said}"
    killed = [rank for rank, status in statuses.items() if status < 0 and status != BY_TORCHRUN]
    failed = sorted((rank for rank in statuses if outputs[rank].traceback), key=lambda rank: outputs[rank].written)
    rank = [*killed, *failed, *reversed(statuses)][0]  # torchrun names the one that it noticed first at the end
    if rank in killed:
        return f"rank {rank} was ended by signal {-statuses[rank]} ({signal.Signals(-statuses[rank]).name})"
    if rank in failed:
        return f"rank {rank} failed\n{outputs[rank].traceback}"
    return f"rank {rank} ended with exit status {statuses[rank]}"
