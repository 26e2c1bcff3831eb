"""Many processes in a notebook: ranks that are started once, and then run one cell after the other.

ipyparallel's %%px does this, too, but shows what ranks print as it comes, in another order in each run, and for a cell
that takes a while a bar with the seconds: a stored notebook could not be tested with it.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from mgpu_lib.devices import enough_real_gpus, environment_for
from mgpu_lib.launching import anywhere, own_frames, print_by_rank
from mgpu_lib.loopback import HOST, check_platform, listening
from mgpu_lib.rank_process import CELL, OWN_FILE
from virtual_gpus import LaunchConfig, child_environment, find_gpu

PROGRAM = Path(__file__).with_name("rank_process.py")
LAST = 20  # lines that are shown of what a process said which has died
GRACE = 5.0  # seconds that the other ranks have when one has failed: they may wait for it


_started = None  # the ranks of the notebook


def start_ranks(n, gpu="A100-80"):
    """Start `n` ranks, and have notebook cells that begin with %%ranks run on all of them; returns the Ranks.

    %%ranks --local runs a cell in the notebook, too. Ranks that were started before are stopped.
    """
    global _started
    if _started is not None:
        _started.stop()
    _started = ranks = Ranks(n, gpu)
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        shell.register_magic_function(lambda line, cell: run_cell(shell, ranks, line, cell), "cell", "ranks")
    return ranks


def run_cell(shell, ranks, line, cell):
    """Run a notebook's `cell` that begins with %%ranks, or with %%ranks --local: then in the notebook, too."""
    if line.split() not in ([], ["--local"]):
        raise ValueError(f"%%ranks {line}: write %%ranks alone, or %%ranks --local to run the cell here, too")
    ranks.run(cell)
    if line:
        shell.run_cell(cell)


class Ranks:
    """`n` processes, which can meet by init_process_group(): the environment says who they are, as under torchrun.

    To meet once more they call destroy_process_group() in a cell of its own; a rank that is ahead of the others would
    else be let in by the group that rank 0 is about to leave.

    Each has a GPU: real ones if there are enough and MGPU_VIRTUAL isn't set, otherwise virtual ones named `gpu`. They
    end with stop(), or when the process that made them ends in whatever way. ValueError for less than one.
    """

    def __init__(self, n, gpu="A100-80"):
        check_platform()
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"start_ranks({n!r}): the number of ranks must be a whole number, at least 1")
        given = child_environment(LaunchConfig(n, {"gpu": find_gpu(gpu).key}))
        with contextlib.nullcontext() if enough_real_gpus(n) else given, listening() as place:
            started = [start(rank, n, place) for rank in range(n)]
        self.processes, self.connections, self.said = zip(*started, strict=True)
        atexit.register(self.stop)

    def run(self, code, seconds=300):
        """Run `code` on all ranks, and print what they print, rank 0 first.

        RuntimeError with the traceback of a rank that fails, TimeoutError after so many `seconds`: the ranks that are
        still at it are interrupted. If that doesn't help, or one has died, all are stopped.
        """
        if self.connections[0].closed:
            raise RuntimeError("these ranks have been stopped: start_ranks() makes new ones")
        for connection in self.connections:
            with contextlib.suppress(OSError):  # of a rank that has died: `collect` hears of it, too
                connection.send(code)
        answers = {}
        try:
            self.collect(answers, time.monotonic() + seconds)
        finally:
            late = [rank for rank in range(len(self.processes)) if rank not in answers]
            for rank in late:
                self.processes[rank].send_signal(signal.SIGINT)
            self.collect(answers, time.monotonic() + GRACE, all_of_them=True)
            if len(answers) < len(self.processes) or any(process.poll() is not None for process in self.processes):
                self.stop()
        outputs = [answers.get(rank, ("", "", "stopped")) for rank in range(len(self.processes))]
        print_by_rank([output[:2] for output in outputs])
        errors = {rank: error for rank, (_, _, error) in enumerate(outputs) if error and rank not in late}
        for rank, error in errors.items():
            raise RuntimeError(f"rank {rank} failed\n{own_frames(here(error))}")
        if late:
            raise TimeoutError(f"rank {', '.join(map(str, late))}: still running after {seconds} s, and interrupted")

    def collect(self, answers, deadline, all_of_them=False):
        """Enter what the ranks answer until `deadline`; when one has failed, the others have only a little time."""
        waiting = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    answers[rank] = "", "", self.ending(rank)
                if answers[rank][2] and not all_of_them:
                    deadline = min(deadline, time.monotonic() + GRACE)

    def ending(self, rank):
        """How the process of a rank has ended, and its last words."""
        status = self.processes[rank].wait(GRACE)
        how = f"signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exit status {status}"
        self.said[rank].seek(0)
        words = [line for line in self.said[rank].read().splitlines() if not line.startswith("Extension modules:")]
        return "\n".join([f"its process has ended, with {how}", *words[-LAST:]])

    def stop(self):
        """End the processes, and what they have started."""
        atexit.unregister(self.stop)
        for process, connection, said in zip(self.processes, self.connections, self.said, strict=True):
            connection.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # of macOS where all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said.close()


def start(rank, n, place):
    """(process, connection, file of what it says that is no cell's) of a new rank. They meet at `place`, a socket."""
    here, there = Pipe()
    said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (until the rank is stopped)
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    who |= {"MASTER_ADDR": HOST, "MASTER_PORT": place.getsockname()[1]}
    environment = {"OMP_NUM_THREADS": "1"} | environment_for(n) | {name: str(value) for name, value in who.items()}
    given = [there.fileno(), place.fileno()][: 1 if rank else 2]
    command = [sys.executable, "-X", "faulthandler", str(PROGRAM), *map(str, given)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
    process = subprocess.Popen(command, env=environment, pass_fds=given, start_new_session=True, **streams)
    there.close()
    return process, here, said


def here(error):
    """A traceback as it is on every computer."""
    return "\n".join(anywhere(OWN_FILE.sub(CELL, line), Path.cwd()) for line in error.splitlines())
