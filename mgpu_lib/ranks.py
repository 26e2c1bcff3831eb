"""Many processes in a notebook: ranks that are started once, and then run one cell after the other.

ipyparallel's %%px does this, too, but shows what ranks print as it comes, in another order in each run, and for a cell
that takes a while a bar with the seconds: a stored notebook could not be tested with it.
"""

import atexit
import contextlib
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from mgpu_lib.devices import enough_real_gpus, environment_for
from mgpu_lib.launching import anywhere, own_frames, print_by_rank
from mgpu_lib.virtual import Setup, find_gpu, handed_down

PROGRAM = Path(__file__).with_name("rank_process.py")
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

    Each has a GPU: real ones if there are enough and MGPU_VIRTUAL isn't set, otherwise virtual ones named `gpu`. They
    end with stop(), or when the process that made them ends in whatever way. ValueError for less than one.
    """

    def __init__(self, n, gpu="A100-80"):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"start_ranks({n!r}): the number of ranks must be a whole number, at least 1")
        given = handed_down(Setup(n, {"gpu": find_gpu(gpu).key}))
        with contextlib.nullcontext() if enough_real_gpus(n) else given:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            started = [start(rank, n, place) for rank in range(n)]
        self.processes, self.connections = zip(*started, strict=True)
        atexit.register(self.stop)

    def run(self, code, seconds=300):
        """Run `code` on all ranks, and print what they print, rank 0 first.

        RuntimeError with the traceback of a rank that fails, TimeoutError after so many `seconds`: the ranks that are
        still at it are interrupted. If that doesn't help, or one has died, all are stopped.
        """
        if self.connections[0].closed:
            raise RuntimeError("these ranks have been stopped: start_ranks() makes new ones")
        for connection in self.connections:
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
                    answers[rank] = (
                        "",
                        "",
                        f"its process has ended, with exit status {self.processes[rank].wait(GRACE)}",
                    )
                if answers[rank][2] and not all_of_them:
                    deadline = min(deadline, time.monotonic() + GRACE)

    def stop(self):
        """End the processes."""
        atexit.unregister(self.stop)
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            process.kill()
            process.wait()


def start(rank, n, place):
    """(process, connection) of a new rank."""
    here, there = Pipe()
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    environment = (
        {"OMP_NUM_THREADS": "1"} | environment_for(n) | place | {name: str(value) for name, value in who.items()}
    )
    command = [sys.executable, str(PROGRAM), str(there.fileno())]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], start_new_session=True, **quiet)
    there.close()
    return process, here


def here(error):
    """A traceback as it is on every computer."""
    return "\n".join(anywhere(line, Path.cwd()) for line in error.splitlines())


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
