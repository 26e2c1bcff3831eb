"""Says what a step of a program would take and hold on GPUs that nobody has: a dry run of one of its processes.

`--json` prints one object. Times are modelled, in seconds, memory is in bytes, shares are parts of 1.

    schema     1; it changes when a field gets another meaning or goes, not when one is added
    assumed    n, gpu, per_node, nodes (what they are and what joins them, in words), host, software, rank
    values     what unknown numbers were taken for, in words: by --assume, and that numbers are finite; and
               where the program calls torch.compile
    fits       whether a tenth of the GPU's memory stays free, for what is not counted; null if that is unknown
    error      why there is no plan; then what follows is missing
    step       seconds, flops (of a rank), mfu, communication and exposed (the shares of the step in which a rank
               communicates, and in which it does nothing else), reproducible
    capacity   of a GPU
    ranks      of each process that was run: rank, peak (since its start), memory ({kind: bytes} when a step holds most)
               and time ({kind: {seconds, hidden: of those, behind a kernel}}); idle is when the GPU does nothing

With --sweep it is {"schema": 1, "sweep": [such an object for each combination]}.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from virtual_gpus.cli.launch import run_program
from virtual_gpus.cli.main import INTERRUPTED, NO_STEP, TOO_SMALL, UsageError, machine_options
from virtual_gpus.cli.page import write_page
from virtual_gpus.cli.tables import print_table
from virtual_gpus.cli.tracebacks import show, where
from virtual_gpus.clock.events import covered
from virtual_gpus.dry_runs.cluster import Cluster
from virtual_gpus.dry_runs.dry_run import NotConverged, Prediction, dry_script
from virtual_gpus.memory.ledger import readable
from virtual_gpus.state import current

SCHEMA = 1
FREE = 0.1  # of a GPU's memory, at least, for what is not counted
SHOWN = 6  # ranks that a table has columns for
ASSUMED = """the ranks that are not run do the same at the same time; a call takes the host {host:g} times as long as on
  a server of 2020; not counted: fragmentation, the CUDA context, NCCL's buffers, workspaces of cuBLAS and cuDNN"""


class Plan(NamedTuple):
    """What came of a dry run: a Prediction, or the words why there is none, with the exit status."""

    cluster: Cluster
    prediction: Prediction | None
    error: str = ""
    status: int = 0

    @property
    def fits(self) -> bool | None:
        if self.prediction is None:
            return False if self.status == TOO_SMALL else None
        return max(self.prediction.peak_memory) <= (1 - FREE) * self.prediction.timeline.spec.memory


def run(options: argparse.Namespace) -> int:
    """Plan what the options say, and print it; the exit status."""
    swept = dict(options.sweep or [])
    combinations = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    clusters = [cluster_of(argparse.Namespace(**{**vars(options), **values})) for values in combinations]
    plans = []
    try:
        for cluster in clusters:
            plans.append(make_plan(options, cluster, quiet=bool(swept) or options.json))
    except KeyboardInterrupt as error:
        print(f"virtual-gpus plan: interrupted in {where(error)}", file=sys.stderr, flush=True)
        if threading.active_count() > 1:  # a rank is asleep, say: Python might abort if it woke up while all ends
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        return show(error)
    if plans[0].prediction:  # the only one, for files
        write_files(plans[0], options)
    if options.json:
        fields = [json_fields(plan, options) for plan in plans]
        print(json.dumps({"schema": SCHEMA, "sweep": fields} if swept else fields[0], indent=1))
    elif swept:
        print_sweep(combinations, plans)
    else:
        print_plan(plans[0], options)
    if options.fits and not all(plan.fits for plan in plans):
        return TOO_SMALL
    return 0 if swept else plans[0].status


def cluster_of(options: argparse.Namespace) -> Cluster:
    cluster = Cluster(options.n, per_node=options.per_node, **machine_options(options))
    try:
        cluster.node()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return cluster


def make_plan(options: argparse.Namespace, cluster: Cluster, quiet: bool) -> Plan:
    """The Plan for one cluster. quiet: what the program prints goes to standard error."""
    try:
        with progress(), contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
            step = dry_script(lambda: run_program(options), cluster, options.rank, dict(options.assume or []))
    except torch.OutOfMemoryError as error:
        return Plan(cluster, None, f"in {where(error)}: {error}", TOO_SMALL)
    except NotConverged as error:
        return Plan(cluster, None, str(error), NO_STEP)
    except SystemExit as end:
        if end.code:
            raise
        return Plan(cluster, None, "the program called sys.exit() before two of its steps were alike", NO_STEP)
    return Plan(cluster, step)


@contextlib.contextmanager
def progress() -> Iterator[None]:
    """Inside, standard error says how far the program is: each second on a terminal, every half minute elsewhere."""
    terminal, done, began = sys.stderr.isatty(), threading.Event(), time.monotonic()
    steps: list[object] = []

    def report():
        while not done.wait(1 if terminal else 30):
            held = max((ledger.allocated for ledger in current().ledgers), default=0) if current() else 0
            words = f"{time.monotonic() - began:.0f} s, {len(steps)} optimizer steps, {readable(held)} on the GPU"
            print(f"\r\033[K{words}" if terminal else words, end="" if terminal else "\n", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        with register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(None)):
            yield
    finally:
        done.set()
        thread.join()
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# What is said


def json_fields(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The fields of --json."""
    cluster, step = plan.cluster, plan.prediction
    assumed = {name: getattr(cluster, name) for name in ("gpu", "per_node", "host", "software")}
    fields = {
        "schema": SCHEMA,
        "program": [options.program, *options.arguments],
        "assumed": {"n": cluster.n_gpus, **assumed, "nodes": cluster.node().topology.name, "rank": options.rank},
        "fits": plan.fits,
    }
    if step is None:
        return fields | {"error": plan.error}
    shares = {name: getattr(step, name) for name in ("flops", "mfu", "communication", "exposed")}
    ranks = zip(step.ranks, step.peak_memory, step.memory, strict=True)
    return fields | {
        "step": {"seconds": step.seconds, **shares, "reproducible": step.timeline.reproducible},
        "values": list(step.assumed),
        "capacity": step.timeline.spec.memory,
        "ranks": [{"rank": r, "peak": peak, "memory": held, "time": times_of(step, r)} for r, peak, held in ranks],
    }


def times_of(step: Prediction, rank: int) -> dict[str, dict[str, float]]:
    """{kind: seconds in which the GPU of `rank` did such a thing, and how many of those behind a kernel}.

    Of a step with more events than are kept, kernels and communication as a whole.
    """
    totals = step.totals[step.ranks.index(rank)]
    if step.timeline.dropped:
        times = {"kernels": (totals.busy, 0.0), "communication": (totals.communication, totals.hidden)}
    else:
        groups: dict[str, list] = {"forward": [], "backward": [], "other kernels": []}
        for event in step.timeline.on(rank):
            other = "other kernels" if event.part == "other" else event.part
            kind = other if event.part != "communication" else "copies" if event.kind == "copy" else event.name
            groups.setdefault(kind, []).append((event.start, event.end))
        kernels = [span for kind in ("forward", "backward", "other kernels") for span in groups[kind]]
        times = {kind: (covered(spans), 0.0) for kind, spans in groups.items()}
        for kind in list(groups)[3:]:
            hidden = covered(groups[kind]) + covered(kernels) - covered(groups[kind] + kernels)
            times[kind] = covered(groups[kind]), hidden
    times["idle"] = max(0.0, step.seconds - totals.busy - totals.communication + totals.hidden), 0.0
    return {kind: {"seconds": seconds, "hidden": hidden} for kind, (seconds, hidden) in times.items()}


def print_plan(plan: Plan, options: argparse.Namespace) -> None:
    if plan.prediction is None:
        print(f"{name_of(plan.cluster)}: no plan\n{plan.error}", file=sys.stderr)
        return
    print("(What the program has printed of its own speed is that of this computer, without GPUs.)")
    print(*summary(plan), f"assumed: {assumptions(plan)}", sep="\n")
    ranks = json_fields(plan, options)["ranks"]
    if len(ranks) > SHOWN:
        ranks = [max(ranks, key=lambda rank: rank["peak"])]
    heads = [f"rank {rank['rank']}" for rank in ranks]
    for title, name, words in (
        ("memory when a step holds most", "memory", readable),
        ("milliseconds of a step", "time", ms),
    ):
        columns = [rank[name] for rank in ranks]
        kinds = dict.fromkeys(kind for column in columns for kind in column)
        rows = [[kind, *(words(column[kind]) if kind in column else "-" for column in columns)] for kind in kinds]
        print_table([[title, *heads], *rows])


def ms(time: dict[str, float]) -> str:
    """Milliseconds, and how much of that is hidden behind kernels."""
    hidden = f" ({time['hidden'] / time['seconds']:.0%} hidden)" if time["hidden"] else ""
    return f"{1e3 * time['seconds']:.3f}{hidden}"


def name_of(cluster: Cluster) -> str:
    return f"{cluster.n_gpus} {cluster.gpu}, {cluster.node().topology.name}"


def summary(plan: Plan) -> list[str]:
    """What there is a plan of, how long a step is, and how full each rank's GPU gets, as lines."""
    step = plan.prediction
    lines = [
        f"{name_of(plan.cluster)}: a dry run, all times are modelled{step.timeline.caveat}",
        f"{1e3 * step.seconds:.3f} ms from one optimizer step to the next, {step.mfu:.0%} MFU, {step.exposed:.0%} in "
        "communication alone",
    ]
    for rank, peak in zip(step.ranks, step.peak_memory, strict=True):
        lines.append(f"rank {rank}: at most {readable(peak)} of {readable(step.timeline.spec.memory)}")
    if not plan.fits:
        lines.append("That is tight: less than a tenth stays free for what is not counted.")
    return lines


def assumptions(plan: Plan) -> str:
    """What a plan rests on, in words."""
    return ";\n  ".join([ASSUMED.format(host=plan.cluster.host), *plan.prediction.assumed])


def write_files(plan: Plan, options: argparse.Namespace) -> None:
    """The files of --trace and --html."""
    if options.trace:
        plan.prediction.timeline.to_chrome_trace(options.trace)
        print(f"{options.trace} opens at https://ui.perfetto.dev", file=sys.stderr)
    if options.html:
        assumed = " ".join(assumptions(plan).split())
        write_page(options.html, json_fields(plan, options), plan.prediction, summary(plan), assumed)
        print(f"{options.html} opens in a browser", file=sys.stderr)


def print_sweep(combinations: list[dict[str, Any]], plans: list[Plan]) -> None:
    rows = [[*combinations[0], "ms a step", "MFU", "in communication alone", "memory", "of", ""]]
    for values, plan in zip(combinations, plans, strict=True):
        step, verdict = plan.prediction, {True: "fits", False: "does not fit", None: "no step"}[plan.fits]
        numbers = ["-"] * 5
        if step is not None:
            numbers = [f"{1e3 * step.seconds:.3f}", f"{step.mfu:.0%}", f"{step.exposed:.0%}"]
            numbers += [readable(max(step.peak_memory)), readable(step.timeline.spec.memory)]
        rows.append([*map(str, values.values()), *numbers, verdict])
    print_table(rows)
    for plan in plans:
        if plan.error:
            print(f"{name_of(plan.cluster)}: {plan.error}", file=sys.stderr)
