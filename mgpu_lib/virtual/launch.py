"""Run a program that knows nothing of this library on virtual GPUs.

    python -m mgpu_lib.virtual [options] script.py [arguments]
    python -m mgpu_lib.virtual [options] -m module [arguments]

The program is the same as on a machine with that many GPUs: its arguments, its exit status and its errors are its own.
"""

import argparse
import contextlib
import itertools
import os
import runpy
import statistics
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

from mgpu_lib.virtual.machine import Machine
from mgpu_lib.virtual.memory import readable
from mgpu_lib.virtual.specs import GPUS, LINKS
from mgpu_lib.virtual.topology import MACHINES, NETWORKS


def main(arguments=None):
    """Run the program that the command line names; returns nothing, or raises what the program does."""
    options = parse(arguments)
    with Machine(options.gpus, **options.machine) as machine, reporting(machine, options):
        run(options.program, options.arguments, options.module)


def parse(arguments):
    parser = argparse.ArgumentParser("python -m mgpu_lib.virtual", description="Run a program on virtual GPUs.")
    parser.add_argument("--gpus", type=int, help="how many (default: 4; under torchrun as many as local ranks)")
    parser.add_argument("--gpu", help=f"which: {', '.join(GPUS)}")
    links = ", ".join([*LINKS, *MACHINES])
    parser.add_argument("--link", help=f"what joins them, or a machine type: {links} (default: the best they have)")
    parser.add_argument("--network", help=f"what joins machines of a type: {', '.join(NETWORKS)}")
    parser.add_argument("--trace", metavar="FILE", help="write a timeline that https://ui.perfetto.dev opens")
    parser.add_argument("--account", action="store_true", help="at the end, say what the GPUs did, on standard error")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", help="a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    options = parser.parse_args(arguments)
    if options.gpus is None:
        options.gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 4))
    options.machine = {
        name: value for name in ("gpu", "link", "network") if (value := getattr(options, name)) is not None
    }
    try:
        Machine(options.gpus, **options.machine)
    except ValueError as error:
        parser.error(str(error))
    if not options.module and not os.path.exists(options.program):
        parser.error(f"there is no file {options.program!r}")
    return options


def run(program, arguments, is_module):
    """What `python program arguments` does, or `python -m program arguments`."""
    sys.argv = [program, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


@contextlib.contextmanager
def reporting(machine, options):
    """Around a program: what `options` want to know of it, also where it fails."""
    steps = []
    hook = register_optimizer_step_post_hook(lambda *args: steps.append(machine.elapsed()))
    try:
        yield
    finally:
        hook.remove()
        if options.trace:
            machine.timeline.to_chrome_trace(options.trace)
        if options.account:
            print(account(machine, steps), file=sys.stderr)


def account(machine, steps):
    """What the GPUs of `machine` did, in words; `steps` are the times at which an optimizer had stepped."""
    lines = [f"{len(machine.gpus)} virtual {machine.spec.key}, {machine.link.name} (all times are modelled)"]
    if len(steps) > 1:
        between = [after - before for before, after in itertools.pairwise(steps)]
        lines.append(f"{1e3 * statistics.median(between):.3f} ms from one optimizer step to the next (median)")
    timeline = machine.timeline
    whole, overlap = timeline.end - timeline.start, timeline.overlap()
    for gpu in timeline.gpus:
        share = timeline.communication(gpu) / whole
        hidden = f", {overlap[gpu]:.0%} of it behind kernels" if share else ""
        peak = readable(machine.ledgers[gpu].peak)
        lines.append(f"cuda:{gpu}: at most {peak}, {share:.0%} of the time in copies and collectives{hidden}")
    return "\n".join(lines)
