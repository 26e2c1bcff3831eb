"""Runs a program that knows nothing of this library on virtual GPUs, in this process.

The program is the same as on a machine with that many GPUs: its arguments, its exit status and its errors are its own.
Processes that it starts have virtual GPUs like it: see `children`.
"""

import _thread
import argparse
import contextlib
import os
import runpy
import sys
import threading
import uuid
from collections.abc import Iterator

from virtual_gpus.children import LaunchConfig, child_environment
from virtual_gpus.cli.main import FAILED, INTERRUPTED, machine_options
from virtual_gpus.cli.processes import NOT_THE_FIRST
from virtual_gpus.cli.rank import become_rank
from virtual_gpus.cli.tracebacks import show, where
from virtual_gpus.report import machine_in_words, reporting

TORCHRUN_VARIABLES = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
ANOTHER_HAS_GONE = "another rank has gone"  # what a communicator says
HINT = """
{program} expects torchrun, which starts a process for each GPU. On virtual GPUs that is: \
virtual-gpus run -n {gpus} {program}"""


def run(options: argparse.Namespace) -> int:
    """Run the program; its exit status."""
    launched, config = become_rank(), config_of(options)
    with child_environment(config), config.make() as machine:
        alone = "RANK" not in os.environ
        if alone:
            print(f"{machine_in_words(machine)}: values are real, times are modelled", file=sys.stderr, flush=True)
        try:
            with reporting(machine, config), no_interrupt_lost():
                run_program(options)
        except KeyboardInterrupt as error:
            if alone:
                print(f"virtual-gpus: interrupted in {where(error)}", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            if launched and ANOTHER_HAS_GONE in str(error):  # which has said why
                rank, _, _ = str(error).partition(ANOTHER_HAS_GONE)
                print(f"{rank}{ANOTHER_HAS_GONE}, in {where(error)}", file=sys.stderr)
                return NOT_THE_FIRST
            show(error)
            if alone and asks_for_torchrun(error):
                print(HINT.format(program=options.program, gpus=len(machine.installed)), file=sys.stderr)
            return FAILED
        if alone and options.trace:
            print(f"{options.trace} opens at https://ui.perfetto.dev", file=sys.stderr)
    return 0


def config_of(options: argparse.Namespace) -> LaunchConfig:
    return LaunchConfig(options.gpus, machine_options(options), options.trace, options.account, run_id())


def run_id() -> str:
    """What tells this run of the program from others: the same for all ranks that torchrun starts."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return uuid.uuid4().hex
    known = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    one_computer = os.environ.get("GROUP_WORLD_SIZE") == "1"
    return " ".join(known + [str(os.getppid())] * one_computer)


def asks_for_torchrun(error: Exception) -> bool:
    """Whether it is about a variable that torchrun sets, read from os.environ or by torch.distributed."""
    missing = error.args[:1] if isinstance(error, KeyError) else ()
    return any(name in missing or f"environment variable {name} expected" in str(error) for name in TORCHRUN_VARIABLES)


def run_program(options: argparse.Namespace) -> None:
    """What `python program arguments` does, or `python -m program arguments`."""
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.program))
        runpy.run_path(options.program, run_name="__main__")


@contextlib.contextmanager
def no_interrupt_lost() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt also where Python prints and drops it, or C++ makes a RuntimeError of it.

    The first happens in a `__del__`, as each block of memory has one, the second where PyTorch's futures call Python.
    """

    def interrupt_later(lost: "sys.UnraisableHookArgs") -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            return before(lost)
        threading.Timer(0.01, _thread.interrupt_main).start()  # once this is left

    before, sys.unraisablehook = sys.unraisablehook, interrupt_later
    try:
        yield
    except RuntimeError as error:
        if KeyboardInterrupt.__name__ not in str(error):
            raise
        raise KeyboardInterrupt().with_traceback(error.__traceback__) from None
    finally:
        sys.unraisablehook = before
