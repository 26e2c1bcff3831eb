"""The command `virtual-gpus`, which is also `python -m virtual_gpus`: what it is asked for. Comes without PyTorch."""

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from virtual_gpus.clock.machine_types import MACHINES, NETWORKS
from virtual_gpus.clock.rates import NEWEST, SOFTWARE
from virtual_gpus.clock.specs import GPUS, LINKS, find_gpu, unknown
from virtual_gpus.clock.topology import find_topology

HELP = """\
usage: virtual-gpus COMMAND [options] ...

GPUs for PyTorch made of this computer's memory: values are real, memory is counted, times are modelled.

  virtual-gpus run -n 8 train.py --epochs 3     run a script for torchrun: eight processes, a virtual GPU for each
  virtual-gpus plan -n 64 --gpu H100 train.py   does it fit on 64 H100, and how long is a step? Computes shapes only
  virtual-gpus gpus                             the GPUs, links and networks that there are
  virtual-gpus topo --machine dgx-h100          what joins the GPUs of a machine
  virtual-gpus --version                        versions, for a report of a problem

A program that uses several GPUs in one process, or starts its processes itself, needs no command; and torchrun can
start the ranks, with all of its own options:

  virtual-gpus [options] train.py
  torchrun --nproc-per-node 8 -m virtual_gpus [options] train.py

`python -m virtual_gpus` is the same as `virtual-gpus`. `virtual-gpus run --help` and `virtual-gpus plan --help` list
the options; [tool.virtual-gpus] in pyproject.toml sets them for a project, such as gpu = "H100" or n = 8.
"""
COMMANDS = {"run": "processes", "plan": "plan", "gpus": "tables", "topo": "tables", "": "launch"}
LINK_NAMES = ["nvlink", "pcie", *LINKS, *MACHINES]
# Options that pyproject.toml may set
MACHINE_OPTIONS = "gpu", "link", "network", "host", "software"
PROJECT_OPTIONS = "n", *MACHINE_OPTIONS, "per_node", "assume"
API = {"n_gpus=": "-n ", "per_node=": "--per-node ", "link=": "--link ", "network=": "--network ", "rank=": "--rank "}
# What argparse calls a usage error; Unix says 1 for any failure, 128 + 2 for Ctrl-C.
FAILED, USAGE, TOO_SMALL, NO_STEP, INTERRUPTED = 1, 2, 3, 4, 130


class Parser(argparse.ArgumentParser):
    """What is wrong, and one line of usage."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n{self.format_usage()}")
        raise SystemExit(USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(HELP, end="")
        return 0 if arguments else USAGE
    if arguments[0] == "--version":
        return importlib.import_module("virtual_gpus.cli.tables").version()
    command = arguments.pop(0) if arguments[0] in COMMANDS else ""
    if "--sweep" in arguments and command == "plan":
        arguments = repeat_option("--sweep", arguments)
    parser = PARSERS[command]()
    try:
        parser.set_defaults(**project_defaults(parser))
        options = parser.parse_args(arguments)
        check(options)
        return importlib.import_module(f"virtual_gpus.cli.{COMMANDS[command]}").run(options)
    except UsageError as error:
        # arguments of the library are options of the command
        parser.error(re.sub(rf"\b({'|'.join(API)}) ?", lambda match: API[match[1]], str(error)))


class UsageError(Exception):
    """The command line makes no sense."""


# Values of options


def one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """The type of an option that takes one of `names`, in any case, with spaces or without."""
    known = {normalized(name): name for name in names}

    def find(text):
        if normalized(text) not in known:
            raise argparse.ArgumentTypeError(str(unknown(kind, text, list(known.values()))))
        return known[normalized(text)]

    return find


def normalized(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use a whole number, at least 1")
    return int(text)


def positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: use a number above 0")
    return number


def writable_path(text: str) -> str:
    """The whole path, because the program may go to another folder; what can't be written is said at once."""
    path = os.path.abspath(text)
    if not os.path.isdir(os.path.dirname(path)):
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {os.path.dirname(path)}")
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} can't be written")
    return path


SWEEP_TYPES = {"n": positive_int, "per_node": positive_int, "host": positive_float, "gpu": one_of("GPU", GPUS)}
SWEEP_TYPES |= {"link": one_of("link", LINK_NAMES), "network": one_of("network", NETWORKS)}


def parse_sweep(text: str) -> tuple[str, list]:
    """("gpu", ["H100", "A100-80"]) for "gpu=H100,A100-80"."""
    name, _, values = text.partition("=")
    name = {"per-node": "per_node", "machine": "link", "gpus": "n"}.get(name, name)
    if name not in SWEEP_TYPES or not values:
        raise argparse.ArgumentTypeError(f"{text}: use NAME=VALUE,..., with n, gpu, per-node, link, network or host")
    return name, [SWEEP_TYPES[name](value) for value in values.split(",")]


def parse_assumption(text: str) -> tuple[str, bool | float]:
    """("train.py:12", True) for "train.py:12=true"."""
    place, _, value = text.rpartition("=")
    path, _, line = place.rpartition(":")
    try:
        number = json.loads(value.lower())
    except ValueError:
        number = None
    if not (path and line.isdecimal() and isinstance(number, (int, float))):
        raise argparse.ArgumentTypeError(f"{text}: use FILE:LINE=VALUE, with true, false or a number")
    return place, number


def repeat_option(option: str, arguments: list[str]) -> list[str]:
    """`option` before each of the words NAME=VALUE that follow it, as argparse takes them."""
    start = arguments.index(option) + 1
    end = next((i for i in range(start, len(arguments)) if "=" not in arguments[i]), len(arguments))
    pairs = [part for word in arguments[start + 1 : end] for part in (option, word)]
    return [*arguments[: start + 1], *pairs, *arguments[max(end, start + 1) :]]


# The options of each command


def add_machine(parser: argparse.ArgumentParser) -> None:
    """What every program can be told: its GPUs, and where to write what they did."""
    add = parser.add_argument
    add("--gpu", type=one_of("GPU", GPUS), help=f"which: {', '.join(GPUS)} (default: %(default)s)")
    about = f"what joins them, or their machine type: {', '.join(LINK_NAMES)} (default: the best that they have)"
    add("--link", "--machine", type=one_of("link", LINK_NAMES), metavar="NAME", help=about)
    about = f"what joins machines of a type: {', '.join(NETWORKS)}"
    add("--network", type=one_of("network", NETWORKS), metavar="NAME", help=about)
    about = "how long a call takes the host: 1 as on a server of 2020 (default), 0.33 on one three times as fast"
    add("--host", type=positive_float, metavar="FACTOR", help=about)
    about = "the year of the software whose attention kernels run (default: %(default)s)"
    add("--software", choices=SOFTWARE, default=NEWEST, help=about)
    add("--trace", type=writable_path, metavar="FILE", help="write a timeline that https://ui.perfetto.dev opens")


def machine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those that are given, as Machine takes them."""
    return {name: getattr(options, name) for name in MACHINE_OPTIONS if getattr(options, name) is not None}


def add_program(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", nargs="?", help="a script, or with -m the name of a module")
    add("arguments", nargs=argparse.REMAINDER, help="the program's own")


def add_running(parser: argparse.ArgumentParser) -> None:
    """What a program that runs with values can be told, in this process or in several."""
    add_machine(parser)
    about = "at the end, say on standard error what the GPUs did"
    parser.add_argument("--account", action="store_true", help=about)
    add_program(parser)
    parser.set_defaults(gpu="A100-80")


def here() -> Parser:
    usage = "virtual-gpus [options] train.py [its arguments]; virtual-gpus --help shows the commands"
    parser = Parser("virtual-gpus", usage=usage, description="Run a program that starts its own processes, or none.")
    about = "how many (default: 4, or torchrun's local ranks)"
    parser.add_argument("--gpus", type=positive_int, metavar="N", help=about)
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    add_running(parser)
    return parser


def run() -> Parser:
    usage = "virtual-gpus run -n N [options] train.py [its arguments]"
    about = "Run a script for torchrun in N processes of this computer, each with a virtual GPU."
    parser = Parser("virtual-gpus run", usage=usage, description=about)
    parser.add_argument("-n", "--gpus", dest="n", type=positive_int, metavar="N", help="how many processes, and GPUs")
    add_running(parser)
    return parser


def plan() -> Parser:
    usage = "virtual-gpus plan -n N [options] train.py [its arguments]"
    about = """Dry-run one of a script's N processes, with shapes and no values, until two steps of its optimizer are
    alike: memory and modelled time of a step."""
    codes = f"""exit status: 0 a plan was made; {FAILED} the program failed; {USAGE} the options make no sense;
    {TOO_SMALL} a GPU's memory is too small, or with --fits nearly so; {NO_STEP} there is no step that stands for all"""
    parser = Parser("virtual-gpus plan", usage=usage, description=about, epilog=codes)
    add = parser.add_argument
    add("-n", "--gpus", dest="n", type=positive_int, metavar="N", help="how many processes the program has, and GPUs")
    add("--per-node", type=positive_int, metavar="N", help="how many GPUs a node has (default: %(default)s)")
    add_machine(parser)
    add("--rank", type=int, default=0, metavar="R", help="which of the processes is run (default: %(default)s)")
    about = f"exit with {TOO_SMALL} unless a tenth of the memory stays free, for what is not counted"
    add("--fits", action="store_true", help=about)
    add("--json", action="store_true", help="print JSON; what the program prints goes to standard error")
    about = "write a page with the timeline, memory over the step and the largest operations"
    add("--html", type=writable_path, metavar="FILE", help=about)
    about = "what to take an unknown number for where line 12 decides by it: --assume train.py:12=true"
    add("--assume", type=parse_assumption, action="append", metavar="FILE:LINE=VALUE", help=about)
    about = "plan each combination, as --sweep gpu=H100,A100-80 n=8,16,64, and print a table"
    add("--sweep", type=parse_sweep, action="append", metavar="NAME=VALUE,...", help=about)
    add_program(parser)
    parser.set_defaults(gpu="H100", per_node=8)
    return parser


def gpus() -> Parser:
    return Parser("virtual-gpus gpus", description="The GPUs, links, machine types and networks that there are.")


def topo() -> Parser:
    parser = Parser("virtual-gpus topo", description="What joins the GPUs of a machine, as nvidia-smi topo -m says it.")
    machine = one_of("machine type", MACHINES)
    parser.add_argument("--machine", type=machine, required=True, metavar="NAME", help=", ".join(MACHINES))
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {"": here, "run": run, "plan": plan, "gpus": gpus, "topo": topo}


# What goes together


def check(options: argparse.Namespace) -> None:
    """UsageError for options that don't go together, as far as that can be said without PyTorch."""
    if getattr(options, "dry_run", False):
        raise UsageError("--dry-run is a command now: virtual-gpus plan -n 64 --gpu H100 --per-node 8 train.py")
    if not hasattr(options, "program"):
        return
    if options.program is None:
        raise UsageError("which program? Name a script, or a module after -m")
    if not options.module and not os.path.exists(options.program):
        what = "file" if "n" in options else "file or command"
        raise UsageError(f"there is no {what} {options.program!r}")
    numbers = dict(getattr(options, "sweep", None) or []).get("n", [getattr(options, "n", 1)])
    if None in numbers:
        raise UsageError("-n: how many processes does the program have, each with a GPU?")
    if "rank" in options and not 0 <= options.rank < min(numbers):
        raise UsageError(f"--rank {options.rank}: with -n {min(numbers)} it is one of 0 to {min(numbers) - 1}")
    if "sweep" in options and options.sweep and (options.trace or options.html):
        raise UsageError("--trace and --html are of one plan: leave --sweep out")
    if "per_node" not in options:  # the nodes of a plan are for Cluster to say
        number = options.n if "n" in options else options.gpus
        try:
            find_topology(options.link, find_gpu(options.gpu), options.network).check(number or 1)
        except ValueError as error:
            raise UsageError(str(error)) from None


def project_defaults(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The defaults in [tool.virtual-gpus] of the next pyproject.toml, here or above, for options that `parser` has."""
    folders = Path.cwd(), *Path.cwd().parents
    path = next((folder / "pyproject.toml" for folder in folders if (folder / "pyproject.toml").is_file()), None)
    if path is None or "virtual-gpus]" not in path.read_text(encoding="utf-8", errors="replace"):
        return {}
    try:
        import tomllib  # type: ignore[import-not-found]
    except ImportError:  # Python 3.10
        raise UsageError(f"{path}: reading [tool.virtual-gpus] takes Python 3.11") from None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("virtual-gpus", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    values = {name.replace("-", "_"): value for name, value in table.items()}
    for name, value in values.items():
        if name not in PROJECT_OPTIONS:
            known = ", ".join(PROJECT_OPTIONS).replace("_", "-")
            raise UsageError(f"{path}: [tool.virtual-gpus] has {name!r}. Known: {known}")
        try:
            values[name] = list(map(parse_assumption, value)) if name == "assume" else str(value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{path}: assume: {error}") from None
    return {name: value for name, value in values.items() if any(a.dest == name for a in parser._actions)}
