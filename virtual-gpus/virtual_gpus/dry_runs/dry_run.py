"""`dry_run` of a function, and `dry_script` of a script."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from virtual_gpus.clock.rates import NEWEST
from virtual_gpus.dry_runs.cluster import Cluster
from virtual_gpus.dry_runs.prediction import Prediction, prediction_of
from virtual_gpus.dry_runs.progress import Progress
from virtual_gpus.dry_runs.rank_contexts import destroy_groups, ranks_in_this_process
from virtual_gpus.dry_runs.rendezvous import MissingRanks, Rendezvous
from virtual_gpus.dry_runs.step_memory import observe_optimizers
from virtual_gpus.dry_runs.steps import NotConverged
from virtual_gpus.machine import Machine
from virtual_gpus.state import current
from virtual_gpus.unknown import Assumptions, unknown_to_python


def dry_run(
    program: Callable[[], Callable[[], Any]],
    n_gpus: int = 64,
    gpu: str = "H100",
    per_node: int | None = 8,
    link: str | None = None,
    network: str | None = None,
    host: float = 1.0,
    rank: int = 0,
    assume: Mapping[str, bool | float] | None = None,
    software: str = NEWEST,
) -> Prediction:
    """A step of `program` in `n_gpus` processes with a GPU each, without any of them: a Prediction.

    program        what each process runs: it sets up network, sharding and optimizer, all anew, and returns a function
                   without arguments that takes a step. RANK, LOCAL_RANK and WORLD_SIZE are as torchrun sets them. There
                   is a process group for "nccl"; it may also make its own. Where it prints a number it prints "?"
    gpu, host, software  as `virtual_gpus` takes them
    per_node       how many GPUs a node has; None: as many as its machine type, or all of them
    link, network  a machine type and a network, as `virtual_gpus` takes them; None: the first type in
                   `machine_types.MACHINES` that has such GPUs, and the network that it comes with
    rank           which of the processes this one is. Those that it sends messages to, or gets them from, as the stages
                   of a pipeline do, are run as well. Each has its own environment, random numbers, and copies of the
                   modules that the program imports and that aren't installed; what was imported before is shared
    assume         {"train.py:12": value} where the program decides by a number that is unknown: what to take it for at
                   that line. Without, such a place is a RuntimeError that names it

    Steps are taken until two are alike, and the last one counts. Nothing is allocated but what the program puts on the
    CPU. Raises ValueError for a machine that there can't be and for steps that never are alike, TypeError if there is
    no step, torch.OutOfMemoryError, which says where, if a GPU is too small, and what the program raises.
    """
    if not callable(program):
        raise TypeError(f"program is a {type(program).__name__}: pass a function that returns a function, the step")
    cluster = Cluster(n_gpus, gpu, per_node, link, network, host, software)
    return run_ranks(functools.partial(predict_program, program), cluster, rank, Assumptions(assume))


def dry_script(
    run: Callable[[], Any], cluster: Cluster, rank: int = 0, assume: Mapping[str, bool | float] | None = None
) -> Prediction:
    """The same for a script, which run() runs. A step ends with that of the script's first optimizer; when they have
    converged in all ranks that are run, the script is ended. NotConverged if it ends before."""
    return run_ranks(functools.partial(predict_script, run), cluster, rank, Assumptions(assume))


def run_ranks(task: Callable[[Progress], Any], cluster: Cluster, rank: int, assumptions: Assumptions) -> Prediction:
    """The Prediction of `predict` for `rank` and those that it exchanges messages with."""
    cluster.node()
    if not isinstance(rank, int) or not 0 <= rank < cluster.n_gpus:
        raise ValueError(f"rank={rank!r}: with n_gpus={cluster.n_gpus} it is one of 0 to {cluster.n_gpus - 1}")
    ranks = [rank]
    while True:
        try:
            ranks_here = ranks_in_this_process(ranks, cluster.n_gpus, cluster.node, assumptions)
            with observe_optimizers(), unknown_to_python(), ranks_here as (rendezvous, machines):
                return predict(task, rendezvous, machines)._replace(assumed=assumptions.made)
        except MissingRanks as missing:  # again, from the start, with all of them
            ranks = sorted({*ranks, *missing.ranks})


def predict(task: Callable[[Progress], Any], rendezvous: Rendezvous, machines: dict[int, Machine]) -> Prediction:
    """The Prediction after task(progress) in each rank. What that returns is held until it is made, because of what
    steps hold; None: no two were alike."""
    progress = {rank: Progress(rank, machine) for rank, machine in machines.items()}
    held = rendezvous.scheduler.run(lambda rank: task(progress[rank]))
    if any(result is None for result in held.values()):
        raise not_converged(min(len(each.boundaries) for each in progress.values()))
    return prediction_of(machines, progress[rendezvous.ranks[0]].boundaries)


def predict_program(program: Callable, progress: Progress) -> Callable:
    with progress.explained():
        dist.init_process_group("nccl")
        progress.machine.rendezvous.default_groups[progress.rank] = dist.GroupMember.WORLD
        step = program()
    if not callable(step):
        raise TypeError(f"program() returned a {type(step).__name__}: return a function that takes a step")
    while not progress.end_step():
        with progress.explained():
            step()
    destroy_groups()
    return step


class Converged(BaseException):
    """Ends a script. No script that catches Exception holds it up."""


def predict_script(run: Callable, progress: Progress) -> bool | None:
    progress.machine.reads_environment = True
    optimizers = []  # that have taken a step

    def stepped(optimizer, args, kwargs):
        if current() is progress.machine:
            optimizers.append(optimizer)
            if optimizer is optimizers[0] and progress.end_step():
                raise Converged

    try:
        with register_optimizer_step_post_hook(stepped), progress.explained():
            run()
        return None
    except Converged:
        return True
    finally:
        destroy_groups()


def not_converged(steps: int) -> NotConverged:
    """What to say of a script that ended after so many steps."""
    if steps:
        return NotConverged(
            f"the program ended after {steps} steps of its optimizer, and no two were alike: let it take a few more, "
            "of batches of one size"
        )
    return NotConverged(
        "the program ended without a step of an optimizer of torch.optim, and a dry run goes from one to the next. If "
        "it has none, as where nothing is trained, pass a function that takes a step to virtual_gpus.dry_run"
    )
