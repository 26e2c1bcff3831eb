"""Plans of large training runs, by formulas: what a GPU holds, and how long a step takes, for any way to split a run.

A dry run answers the same questions for any program, in seconds or minutes. The formulas of `plan_formulas` answer them
for one kind of program, a transformer like Llama 3 (see `experiments/planned_runs.py`), in less than a millisecond, so
that all ways to split it can be tried. `experiments/planner_validation.py` holds them against dry runs. Those that are
recorded for chapter 14 are found by `recorded_plan`.
"""

import functools
import itertools

from mgpu_lib import recorded
from mgpu_lib.arguments import check_count
from mgpu_lib.plan_formulas import TrainingRun, fault, planned, sizes_of
from mgpu_lib.plan_rates import NODES, constants

ZERO = {0: "all whole", 1: "optimizer sharded", 2: "gradients, too", 3: "parameters, too"}
CHOICES = {  # what the planner offers
    "layers": (16, 24, 32, 48, 64, 80, 96, 128),
    "width": (2048, 4096, 6144, 8192, 12_288, 16_384),
    "heads": (16, 32, 64, 128),
    "seq_len": (2048, 4096, 8192, 16_384, 32_768),
    "batch_tokens": tuple(2**i for i in range(20, 26)),
    "gpu": tuple(NODES),
    "n_gpus": tuple(2**i for i in range(3, 15)),
    "network": ("InfiniBand HDR", "InfiniBand NDR", "EFA", "RoCE 100", "Ethernet 100"),
    "tensor": (1, 2, 4, 8, 16),
    "pipeline": (1, 2, 4, 8, 16, 32),
    "zero": tuple(ZERO),
    "micro_batch": (1, 2, 4, 8),
    "recompute": (False, True),
}


def run_of(layers, width, heads, batch_tokens, seq_len, **split):
    """The TrainingRun of a model like Llama 3 and a batch of so many tokens; `split`: what else TrainingRun takes."""
    check_count("seq_len", seq_len)
    sizes = sizes_of(layers, width, heads)
    return TrainingRun(sizes, batch=batch_tokens // seq_len, seq_len=seq_len, **split)


def plan(run):
    """The Plan of a TrainingRun. ValueError, naming the numbers, for one that there can't be."""
    check_run(run)
    return planned(run, constants(run.gpu, run.network))


def best_plan(run):
    """The fastest Plan that fits, of all splits of this model, batch and number of GPUs; None if nothing fits."""
    plans = [plan(other) for other in splits(run)]
    return min((made for made in plans if made.fits), key=lambda made: made.step, default=None)


def splits(run):
    """All TrainingRuns of the same model, GPUs and batch that there can be, of those that CHOICES offers."""
    names = "tensor", "pipeline", "zero", "micro_batch", "recompute"
    for values in itertools.product(*(CHOICES[name] for name in names)):
        made = run._replace(**dict(zip(names, values, strict=True)))
        if fault(made) is None:
            yield made


def check_run(run):
    for name in ("n_gpus", "tensor", "pipeline", "micro_batch", "batch", "seq_len"):
        check_count(name, getattr(run, name))
    for name, known in (("gpu", NODES), ("network", CHOICES["network"]), ("zero", ZERO)):
        if getattr(run, name) not in known:
            raise ValueError(f"{name}={getattr(run, name)!r}: use one of {', '.join(map(str, known))}")
    if words := fault(run):
        raise ValueError(words)


FOUND = {"gpu", "seconds", "gib", "memory", "exposed", "flops", "error"}  # what a dry run says, and what follows


def recorded_plan(model, n_gpus, network="InfiniBand NDR", **options):
    """The dry run of exactly this plan that `experiments/large_scaling.py` has recorded: {"seconds" of a step, "gib" on
    the fullest GPU, its "memory" by kind, "exposed", "flops" of a rank}, or "error" for one that doesn't fit. KeyError,
    which names the plan that is nearest, where there is none."""
    wanted = {"model": model, "n_gpus": n_gpus, "network": network, **options}
    plans = [({k: v for k, v in run.items() if k not in FOUND}, run) for run in recorded_runs()]
    nearest, run = min(plans, key=lambda each: len(each[0].items() ^ wanted.items()))
    if nearest != wanted:
        raise KeyError(f"no dry run of {wanted} is recorded; the nearest is {nearest}")
    return run


@functools.cache
def recorded_runs():
    return tuple(recorded.study("large_scaling")["runs"].values())
