"""Starts the ranks of a script for torchrun, each in a process of its own on this computer, and ends with them.

A rank gets what torchrun would tell it. PyTorch is not imported here: the ranks do that.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid

from virtual_gpus.cli.main import machine_options
from virtual_gpus.clock.specs import find_gpu
from virtual_gpus.clock.topology import find_topology
from virtual_gpus.environment import torchrun_environment

LAUNCHER = "VIRTUAL_GPUS_LAUNCHER"  # the variable that tells a rank two file descriptors, see `rank`
POSIX = hasattr(signal, "SIGKILL")  # on Windows rank 0 opens the port, and ranks outlive a launcher that is killed
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GRACE = {signal.SIGINT: 0.7, signal.SIGTERM: 30.0}  # seconds that ranks get after a signal: as much as from torchrun
AFTER_A_FAILURE = 5.0
WAIT_FOR_THE_FIRST = 30.0  # that another rank has failed because of
NOT_THE_FIRST = 5  # exit status of a rank that failed because another one had gone


def run(options: argparse.Namespace) -> int:
    """Run the program in options.n processes; the exit status of the first that fails, or 0."""
    name = find_topology(options.link, find_gpu(options.gpu), options.network).name
    processes = f"{options.n} process{'es' * (options.n > 1)}"
    say(f"{processes} on {options.n} virtual {options.gpu}, {name}: values are real, times are modelled")
    received: list[int] = []  # signals: a handler that raised could leave the lock in a Popen taken, and poll() blind
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in GRACE}
    ranks: list[subprocess.Popen] = []
    try:
        start(ranks, options)
        rank, status = wait(ranks, received)
        if received:
            number = signal.Signals(received[0])
            end(ranks, number, GRACE[number])
            say(f"virtual-gpus: {processes} ended by {number.name}")
            return 128 + number
        if status:
            end(ranks, signal.SIGTERM, AFTER_A_FAILURE)
            how = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
            say(f"virtual-gpus: rank {rank} ended with {how}, so the others were ended")
        elif options.trace:
            say(f"{options.trace} opens at https://ui.perfetto.dev")
        return status if status >= 0 else 128 - status
    finally:
        end(ranks, None, math.inf)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def start(ranks: list[subprocess.Popen], options: argparse.Namespace) -> None:
    """Start the ranks, and enter them in the list."""
    here, _ = os.pipe()  # nothing is written: a rank that reads sees its end when this process has ended, however
    store = socket.create_server(("127.0.0.1", 0), backlog=max(128, options.n))
    descriptors, run = [here, store.fileno()], uuid.uuid4().hex
    given = {"gpus": options.n, **machine_options(options)}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    flags += ["--trace", options.trace] if options.trace else []
    flags += ["--account"] * options.account + ["-m"] * options.module
    command = [sys.executable, "-u", "-m", "virtual_gpus", *flags, options.program, *options.arguments]
    for rank in range(options.n):
        variables = torchrun_environment(rank, options.n, options.n, store.getsockname()[1], run)
        defaults = {"OMP_NUM_THREADS": "1"} if options.n > 1 else {}  # as torchrun
        if POSIX:
            variables[LAUNCHER] = " ".join(map(str, descriptors))
            defaults["GLOO_SOCKET_IFNAME"] = LOOPBACK
        env = defaults | os.environ | variables
        inherited = descriptors if POSIX else ()
        ranks.append(subprocess.Popen(command, env=env, start_new_session=POSIX, pass_fds=inherited))
    store.close()  # rank 0 has it


def wait(ranks: list[subprocess.Popen], received: list[int]) -> tuple[int, int]:
    """(the rank that failed first, its exit status); the latter is 0 if all have ended well, or a signal came."""
    deadline = math.inf
    while not received:
        states = [rank.poll() for rank in ranks]
        failed = {rank: state for rank, state in enumerate(states) if state}
        first = [item for item in failed.items() if item[1] != NOT_THE_FIRST]
        if first or (failed and (None not in states or time.monotonic() > deadline)):
            return (first or list(failed.items()))[0]
        if None not in states:
            return 0, 0
        if failed:  # because of another rank, which has gone and will have ended in a moment
            deadline = min(deadline, time.monotonic() + WAIT_FOR_THE_FIRST)
        time.sleep(0.01)
    return 0, 0


def end(ranks: list[subprocess.Popen], number: signal.Signals | None, seconds: float) -> None:
    """Send a signal (None: kill) to those that run still, and wait for them, so many `seconds` at most."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        if rank.poll() is not None:
            continue
        if number is None:
            os.killpg(rank.pid, signal.SIGKILL) if POSIX else rank.kill()
        elif POSIX or number is signal.SIGTERM:  # Windows itself sends Ctrl-C to all processes of a console
            rank.send_signal(number)
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
