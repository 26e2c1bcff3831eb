"""What a program did on its GPUs, said when it ends: in words, and as one trace of all its processes.

When they end its processes have no way to each other any more: each adds its part to a file that all of them know.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from virtual_gpus.clock.events import Totals
from virtual_gpus.clock.timeline import Timeline
from virtual_gpus.files import locked, private_folder, replacing
from virtual_gpus.machine import Machine
from virtual_gpus.memory.ledger import readable
from virtual_gpus.state import current

if TYPE_CHECKING:
    from virtual_gpus.children import LaunchConfig

HEAD, TAIL = '{"displayTimeUnit": "ms", "otherData": ', "\n]}\n"  # of a trace: an event a line between them
PIDS = 1000  # numbers of processes in a trace, for each that there really was


@contextlib.contextmanager
def reporting(machine: Machine, config: "LaunchConfig", inherited: bool = False) -> Iterator[None]:
    """Around a program: at its end what the LaunchConfig wants to know, also where it fails.

    inherited: this process was started by another one on virtual GPUs; if it has used none it says nothing.
    """
    steps, failed, process = [], True, os.getpid()
    try:
        with register_optimizer_step_post_hook(lambda *args: steps.append(machine.elapsed())):
            yield
        failed = False
    except SystemExit as end:
        failed = bool(end.code)
        raise
    except KeyboardInterrupt:  # of all ranks, as a rule
        failed = False
        raise
    finally:
        name, timeline = process_name(machine, inherited), machine.timeline
        speaks = os.getpid() == process and (timeline.events or not inherited)  # not in a fork
        if config.trace and speaks:
            add_trace(config, name, timeline)
        if config.account and speaks:
            add_account(config, name, machine, steps, failed, inherited)


def gather_timeline(group: "dist.ProcessGroup | None" = None) -> list[Timeline] | None:
    """The timelines of all ranks of a torch.distributed `group`, a list by rank, on its first rank; None on the others.

    Each rank must call it. The gathering itself, which is at the end of them, is not in them.
    """
    rank, timeline = dist.get_rank(group), current().timeline
    timelines: list | None = [None] * dist.get_world_size(group) if rank == 0 else None
    dist.gather_object(timeline, timelines, group=group, group_dst=0)
    return timelines


def process_name(machine: Machine, inherited: bool) -> str:
    """What this process is called: nothing, if it is the only one or starts those that compute."""
    if machine.rank is None and inherited:
        return f"process {os.getpid()}"
    under_torchrun = os.environ["RANK"] if "LOCAL_WORLD_SIZE" in os.environ else None
    rank = under_torchrun if machine.rank is None else machine.rank
    return "" if rank is None else f"rank {rank}"


def number_in(name: str) -> int:
    return int(name.rpartition(" ")[2] or 0)


def attempt_id(config: "LaunchConfig") -> str:
    """What tells this run from others, and from those before torchrun started its processes again."""
    return f"{config.run} {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def add_trace(config: "LaunchConfig", name: str, timeline: Timeline) -> None:
    """Add this process to the file of the run's trace. A file of another run is replaced."""
    path, run = Path(config.trace), attempt_id(config)
    owner, first = (f"{name}, ", PIDS * (number_in(name) + 1)) if name else ("", 0)
    with locked(path):
        owners, lines = read_trace(path)
        if owners["run"] != run or name in owners["processes"]:
            owners, lines = {"run": run, "processes": []}, ""
        if timeline.events:
            owners["processes"].append(name)
        events = timeline.trace_events(0.0, owner, first)
        lines = ",\n".join(filter(None, [lines, *map(json.dumps, events)]))
        with replacing(path) as new:
            new.write_text(f'{HEAD}{json.dumps(owners)}, "traceEvents": [\n{lines}{TAIL}')


def read_trace(path: Path) -> tuple[dict, str]:
    """Whose a trace is, {"run": ..., "processes": names}, and its lines; nobody's if `add_trace` has not written it."""
    text = path.read_text(errors="replace") if path.exists() else ""
    head, _, lines = text.partition("\n")
    try:
        owners = json.loads(head + "]}")["otherData"]
        return {"run": owners["run"], "processes": owners["processes"]}, lines.removesuffix(TAIL)
    except (ValueError, KeyError, TypeError):
        return {"run": None, "processes": []}, ""


def add_account(
    config: "LaunchConfig", name: str, machine: Machine, steps: list[float], failed: bool, inherited: bool
) -> None:
    """Say what the GPUs did, when the last of this computer's ranks ends.

    One that fails says at once what there is to say, because the others may be ended with it. Processes that are no
    ranks leave it to the one that started them. Where they can't come together each says its own.
    """
    mine = {name: account(machine, steps, name)} if name or machine.timeline.events else {}
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", machine.ranks)) if name else 0
    helps = inherited and machine.rank is None
    try:
        accounts = gather_accounts(config, mine, 0 if failed else math.inf if helps else ranks)
    except OSError as error:
        print(f"--account: {error}", file=sys.stderr)
        accounts = mine
    if accounts:
        print(in_words(machine, accounts), file=sys.stderr, flush=True)


def gather_accounts(config: "LaunchConfig", mine: dict[str, list[str]], needed: float) -> dict[str, list[str]]:
    """The accounts that this computer's processes have left, and `mine`, if there are as many as `needed`; otherwise
    none, and mine is left, too."""
    key, run = f"{config.run} {os.environ.get('GROUP_RANK', 0)}".encode(), attempt_id(config)
    path = private_folder("virtual-gpus") / f"{hashlib.sha256(key).hexdigest()[:16]}.json"
    with locked(path):
        accounts = read_accounts(path, run)
        if accounts.keys() & mine.keys():  # left by an earlier run, which was ended
            accounts = {}
        accounts |= mine
        if len(accounts) >= needed:
            path.unlink(missing_ok=True)
            return accounts
        with replacing(path) as new:
            new.write_text(json.dumps({"run": run, "accounts": accounts}))
        return {}


def read_accounts(path: Path, run: str) -> dict[str, list[str]]:
    """The accounts {name: lines} that processes of this `run` have left at `path`; none if there is anything else."""
    try:
        file = json.loads(path.read_text(errors="replace"))
        return {name: list(map(str, lines)) for name, lines in file["accounts"].items() if file["run"] == run}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def in_words(machine: Machine, accounts: dict[str, list[str]]) -> str:
    """The accounts {name: lines} of the processes, one after the other."""
    n = max(len(accounts), int(os.environ.get("LOCAL_WORLD_SIZE", machine.ranks)))
    missing = f" (only {', '.join(accounts)} had an account to give)" * (len(accounts) < n)
    processes = "" if "" in accounts else f"{n} process{'es' * (n > 1)}{missing}, "
    first = f"{processes}{machine_in_words(machine)} (all times are modelled)"
    return "\n".join([first, *(line for name in sorted(accounts, key=number_in) for line in accounts[name])])


def machine_in_words(machine: Machine) -> str:
    return f"{len(machine.installed)} virtual {machine.spec.key}, {machine.topology.name}"


def account(machine: Machine, steps: list[float], name: str = "") -> list[str]:
    """What the process `name` did on the GPUs of `machine`, as lines; `steps` are when an optimizer had stepped."""
    lines, timeline = [], machine.timeline
    # No time goes by on GPUs between the steps of a network on the CPU.
    between = [after - before for before, after in itertools.pairwise(steps) if after > before]
    if between:
        lines.append(f"{1e3 * statistics.median(between):.3f} ms from one optimizer step to the next (median)")
        lines = [f"{name}: {lines[0]}"] if name else lines
    for gpu, totals in enumerate(machine.totals):
        if totals == Totals():
            continue
        share = totals.communication / timeline.end
        hidden = f", {totals.hidden / totals.communication:.0%} of it behind kernels" if share else ""
        peak, owner = readable(machine.ledgers[gpu].peak), f"{name}, " if name else ""
        lines.append(f"{owner}cuda:{gpu}: at most {peak}, {share:.0%} of the time in copies and collectives{hidden}")
    return [lines[0] + timeline.caveat, *lines[1:]] if lines else lines
