"""A program that runs another one and kills it on the way: python killing.py PLAN.json script.py [arguments].

The plan is a list of Kill. Each start of the program takes the first one that hasn't happened; those that have are
counted in the file PLAN.json.done. The moments are given by the program's progress, not by a clock.
"""

import json
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

MOMENTS = "step", "half", "fsync", "replace", "replaced"  # half: some bytes of a checkpoint are written


class Kill(NamedTuple):
    moment: str  # one of MOMENTS
    count: int  # the how manieth of these in the process
    rank: int  # on which rank the moment is looked for
    victim: str = "rank"  # or "agent"
    share: float = 0.5  # of the bytes, for "half"
    how: str = "SIGKILL"  # or another signal; "error": the rank raises one


def drawn(seed, kills, ranks, victim="rank"):
    """As many kills, drawn from a seed. Checkpoints are written by rank 0; steps are everybody's."""
    generator, plan = random.Random(seed), []
    for _ in range(kills):
        moment = generator.choice(("step", "step", *MOMENTS))
        rank = generator.randrange(ranks) if moment == "step" else 0
        count = generator.randint(1, 7) if moment == "step" else generator.randint(1, 2)
        plan.append(Kill(moment, count, rank, victim, generator.random()))
    return plan


def happened(plan):
    """How many kills of the plan, a file, have happened."""
    path = Path(f"{plan}.done")
    return len(path.read_text().splitlines()) if path.exists() else 0


def prepare(plan):
    """Have this process killed as the next entry of the plan says."""
    kills = [Kill(*entry) for entry in json.loads(Path(plan).read_text())]
    if happened(plan) == len(kills):
        return
    kill, seen = kills[happened(plan)], 0
    if int(os.environ.get("RANK", 0)) != kill.rank:
        return

    def die():
        with Path(f"{plan}.done").open("a") as file:
            file.write(f"{kill}\n")
        if kill.how == "error":
            raise RuntimeError("an error on one rank")
        os.kill(os.getppid() if kill.victim == "agent" else os.getpid(), signal.Signals[kill.how])
        if kill.how == "SIGKILL":
            time.sleep(30)  # whoever is left when its launcher is gone would now go on

    def counted(moment):
        nonlocal seen
        seen += moment == kill.moment
        if moment == kill.moment and seen == kill.count:
            die()

    watch(counted, kill)


def watch(counted, kill):
    """Call `counted` at each moment that the script comes to."""
    import torch

    fsync, replace, opened = os.fsync, os.replace, Path.open

    def counting(step):
        def counted_step(*args, **kwargs):
            result = step(*args, **kwargs)
            counted("step")
            return result

        return counted_step

    def counted_fsync(file):
        counted("fsync")
        fsync(file)

    def counted_replace(*paths):
        counted("replace")
        replace(*paths)
        counted("replaced")

    def counted_open(path, mode="r", *args, **kwargs):
        file = opened(path, mode, *args, **kwargs)
        return Halves(file, counted, kill.share) if path.name.endswith(".pt.new") else file

    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        optimizer.step = counting(optimizer.step)
    os.fsync, os.replace, Path.open = counted_fsync, counted_replace, counted_open


class Halves:
    """A file that is written in two parts, with a moment between them."""

    def __init__(self, file, counted, share):
        self.file, self.counted, self.share = file, counted, share

    def write(self, content):
        middle = int(len(content) * self.share)
        self.file.write(content[:middle])
        self.file.flush()
        self.counted("half")
        self.file.write(content[middle:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def run(plan, script, arguments):
    prepare(plan)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3:])
