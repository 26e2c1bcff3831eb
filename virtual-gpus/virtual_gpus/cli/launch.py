"""Run a program that knows nothing of this library on virtual GPUs.

    python -m virtual_gpus [options] script.py [arguments]
    python -m virtual_gpus [options] -m module [arguments]
    torchrun --nproc-per-node 4 -m virtual_gpus [options] script.py [arguments]
    python -m virtual_gpus --dry-run --gpus 64 --gpu H100 --per-node 8 [options] script.py [arguments]

The program is the same as on a machine with that many GPUs: its arguments, its exit status and its errors are its own.
Processes that it starts have virtual GPUs like it: see `inheriting`. In a dry run it is one of as many processes as
there are GPUs, and is ended as soon as it is clear what a step takes: see `dry`.
"""

import argparse
import functools
import os
import runpy
import sys
import uuid

from virtual_gpus.children import Setup, handed_down
from virtual_gpus.clock.machine_types import MACHINES, NETWORKS
from virtual_gpus.clock.specs import GPUS, LINKS
from virtual_gpus.dry_runs.cluster import Cluster
from virtual_gpus.dry_runs.dry_run import NotConverged, dry_script
from virtual_gpus.report import reporting


def main(arguments=None):
    """Run the program that the command line names; returns nothing, or raises what the program does."""
    options = parse(arguments)
    if options.cluster:
        dry(options)
        return
    setup = options.setup
    with handed_down(setup), setup.make() as machine, reporting(machine, setup):
        run(options.program, options.arguments, options.module)


def parse(arguments):
    parser = argparse.ArgumentParser("python -m virtual_gpus", description="Run a program on virtual GPUs.")
    parser.add_argument("--gpus", type=int, help="how many (default: 4; under torchrun as many as local ranks)")
    parser.add_argument("--gpu", help=f"which: {', '.join(GPUS)}")
    links = ", ".join([*LINKS, *MACHINES])
    parser.add_argument("--link", help=f"what joins them, or a machine type: {links} (default: the best they have)")
    parser.add_argument("--network", help=f"what joins machines of a type: {', '.join(NETWORKS)}")
    parser.add_argument("--host", type=float, help="how long the host takes for a call (default: 1, a server of 2020)")
    parser.add_argument("--trace", metavar="FILE", help="write a timeline that https://ui.perfetto.dev opens")
    parser.add_argument("--account", action="store_true", help="at the end, say what the GPUs did, on standard error")
    parser.add_argument("--dry-run", action="store_true", help="shapes only: say what a step takes, and end")
    parser.add_argument("--per-node", type=int, help="in a dry run: how many GPUs a node has (default: 8)")
    parser.add_argument("--rank", type=int, default=0, help="in a dry run: which of the processes this one is")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", help="a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    options = parser.parse_args(arguments)
    options.trace = options.trace and os.path.abspath(options.trace)  # the program may go to another folder
    try:
        options.cluster = cluster_of(options)
        options.setup = Setup(options.gpus, named(options), options.trace, options.account, run_id())
        (options.cluster.node if options.cluster else options.setup.make)()
    except ValueError as error:
        parser.error(str(error))
    if not options.module and not os.path.exists(options.program):
        parser.error(f"there is no file {options.program!r}")
    return options


def named(options, *more):
    """Those options of a machine, and `more`, that the command line names."""
    values = {name: getattr(options, name) for name in ("gpu", "link", "network", "host", *more)}
    return {name: value for name, value in values.items() if value is not None}


def cluster_of(options):
    """The Cluster of a dry run; None if it isn't one. ValueError for options that don't go together."""
    if not options.dry_run:
        if options.per_node is not None or options.rank:
            raise ValueError("--per-node and --rank are for a --dry-run")
        return None
    if options.gpus is None:
        raise ValueError("--dry-run needs --gpus: how many processes the program has, each with a GPU")
    if options.account:
        raise ValueError("--account: a dry run says by itself what a step takes")
    return Cluster(options.gpus, **named(options, "per_node"))


def dry(options):
    """Run the program with shapes only, and say what a step takes."""
    script = functools.partial(run, options.program, options.arguments, options.module)
    try:
        made = dry_script(script, options.cluster, options.rank)
    except NotConverged as error:
        sys.exit(f"dry run: {error}")
    if options.trace:
        made.timeline.to_chrome_trace(options.trace)
    print("(What the program has printed of its own speed is that of this computer, without GPUs.)")
    print("\n".join(made.words(options.cluster)), flush=True)


def run_id():
    """What tells this run of the program from others: the same for all ranks that torchrun starts."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return uuid.uuid4().hex
    known = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    one_computer = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return " ".join(known + [str(os.getppid())] * one_computer)


def run(program, arguments, is_module):
    """What `python program arguments` does, or `python -m program arguments`."""
    sys.argv = [program, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
