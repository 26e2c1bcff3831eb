"""The grid of batch sizes and learning rates, on all of Fashion-MNIST: LeNet without and with batch norm, three seeds.

    python -m experiments.tuning            (one seed of the three: python -m experiments.tuning --seeds 0)

writes mgpu_lib/recorded/tuning.json. It keeps each finished part (the runs of one network, batch size and seed that
are trained at once, or a single one) in a file of its own, so that what was interrupted goes on where it was.

joblib spreads the parts over the cores of one machine. Its Dask back end takes the same grid to a cluster:

    import joblib; from dask.distributed import Client; from experiments import tuning
    client = Client("scheduler:8786")
    with joblib.parallel_config(backend="dask"):
        tuning.main([])

Workers need this checkout, the data (MGPU_DATA) and one thread each (`dask worker --nthreads 1`), since a worker trains
on one core. Results come back one by one to the program that asked, and it alone writes files; joblib can't have that
of Ray, whose back end returns all results at the end.
"""

import argparse
import json
import math
import os
import shutil
import sys
from functools import cache, lru_cache

import joblib
import torch
from tqdm import tqdm

from experiments.record import provenance, write
from experiments.tuning_runs import NETS, train_runs
from mgpu_lib import data
from mgpu_lib.recorded import RESULTS

BATCH_SIZES, SEEDS = (1, 4, 16, 64, 256, 1024, 4096), (0, 1, 2)
VALIDATION = 5_000  # of the 60,000 training images; 55,000 are trained on
EPOCHS = 4  # equal epochs
STEPS = 215  # equal steps: an epoch of 256 images; 16 epochs of 4096
FIRST = {1: -9, 4: -8, 16: -7}  # the smallest learning rate is 10 ** (this / 2.5); -6 for larger batches
WIDTH = {1: 9, 4: 9, 16: 9, 32: 3, 64: 3}  # runs trained at once, else 1: more don't fit the caches (measured)
OUT = RESULTS / "tuning.json"
SHORT = {"epochs": 0, "steps": 8}  # of a run that takes minutes
SAMPLE, TOLERANCE = {"lenet-256-0-0.16": SHORT, "lenet_bn-256-0-0.16": SHORT}, 1e-3


def learning_rates(batch_size):
    """Nine, a factor of 2.5 apart, from too small to too large for this batch size (short trials set the ends)."""
    first = FIRST.get(batch_size, -6)
    return [float(f"{10 ** (i / 2.5):.2g}") for i in range(first, first + 9)]


def stacks(batch_size, lrs):
    """Learning rates in groups of those that are trained at once."""
    width = WIDTH.get(batch_size, 1)
    return [tuple(lrs[i : i + width]) for i in range(0, len(lrs), width)]


def grid(seeds):
    """(net, batch_size, seed, lrs) of every part, one seed after the other."""
    return [
        (net, batch_size, seed, lrs)
        for seed in seeds
        for batch_size in reversed(BATCH_SIZES)
        for net in NETS
        for lrs in stacks(batch_size, learning_rates(batch_size))
    ]


def cases():
    """{name of a part: arguments of `record`}."""
    return {name_of(*part): part for part in grid(SEEDS)}


def name_of(net, batch_size, seed, lrs):
    return f"{net}-{batch_size}-{seed}-{lrs[0]}"


def images(batch_size):
    """How many images one run of this batch size trains on."""
    return max(EPOCHS * (60_000 - VALIDATION), STEPS * batch_size)


@cache
def fashion_mnist():
    if str(data.data_folder()) == "digits":
        raise ValueError("MGPU_DATA=digits: the grid is about Fashion-MNIST; unset it, or name a folder for the data")
    data.fetch_if_damaged(data.data_folder())
    return data.read_fashion_mnist(data.data_folder(), full=True)


def record(net, batch_size, seed, lrs, epochs=EPOCHS, steps=STEPS):
    """One part: (the part, its list of runs)."""
    torch.set_num_threads(1)
    forget_others(net, batch_size)
    torch._dynamo.config.recompile_limit = 100  # one for each number of runs left, not 8: then it no longer compiles
    return (net, batch_size, seed, lrs), train_runs(
        net, batch_size, list(lrs), seed, fashion_mnist(), VALIDATION, epochs, steps
    )


@lru_cache(maxsize=1)
def forget_others(net, batch_size):
    """Called with others than before: what was compiled for those is of no use, and would be looked through."""
    torch.compiler.reset()


def recipe():
    """All that decides the numbers of a part. Parts that were recorded with another one are recorded anew."""
    return {
        "validation": VALIDATION,
        "epochs": EPOCHS,
        "steps": STEPS,
        "learning_rates": {str(b): learning_rates(b) for b in BATCH_SIZES},
    }


def part_file(*part):
    return OUT.with_name("tuning.unfinished") / f"{name_of(*part)}.json"


def finished(part, wanted):
    """The runs of a part, or None where they have not been recorded with the recipe `wanted`."""
    path = part_file(*part)
    stored = json.loads(path.read_text()) if path.exists() else {}
    return stored.get("runs") if stored.get("recipe") == wanted else None


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="only these, for now")
    seeds = parser.parse_args(arguments).seeds
    made = recipe()
    if OUT.exists() and json.loads(OUT.read_text())["recipe"] == made:
        print(f"{OUT.name} is up to date")
        return
    fashion_mnist()  # fetched once, and an error comes before the work
    # Freed memory stays with the process: else each step of a large batch takes its pages from the system anew, and
    # is nearly twice as slow. The GNU C library reads this when a worker starts.
    os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**40))
    missing = [part for part in grid(seeds) if finished(part, made) is None]
    parallel = joblib.Parallel(n_jobs=-1, batch_size=1, return_as="generator_unordered")
    work = {part: len(part[-1]) * images(part[1]) for part in missing}
    with tqdm(total=sum(work.values()), unit="image", unit_scale=True, smoothing=0) as bar:
        for part, runs in parallel(joblib.delayed(record)(*part, EPOCHS, STEPS) for part in missing):
            write(part_file(*part), {"recipe": made, "runs": runs})
            bar.update(work[part])
    compact()


def compact():
    """Join the parts into one file, once all are there."""
    wanted = recipe()
    parts = {part: finished(part, wanted) for part in grid(SEEDS)}
    missing = [part for part, runs in parts.items() if runs is None]
    if missing:
        print(f"{len(missing)} of {len(parts)} parts are still to come", file=sys.stderr)
        return
    runs = [packed(part, run) for part, runs in parts.items() for run in runs]
    write(
        OUT,
        {
            "provenance": provenance("experiments.tuning"),
            "recipe": wanted,
            "data": fashion_mnist().name,
            "nets": list(NETS),
            "trained_on": 60_000 - VALIDATION,
            "seeds": SEEDS,
            "steps_per_epoch": {b: math.ceil((60_000 - VALIDATION) / b) for b in BATCH_SIZES},
            "runs": runs,
        },
    )
    shutil.rmtree(part_file(*grid(SEEDS)[0]).parent)


def packed(part, run):
    """A run with its curves as text, numbers with blanks between them: a third of the size."""
    curves = {name: " ".join(map(str, value)) for name, value in run.items() if isinstance(value, list)}
    return {**dict(zip(("net", "batch_size", "seed"), part)), **run, **curves}


if __name__ == "__main__":
    from experiments import tuning  # under this name workers find `record`: their own __main__ is another

    tuning.main()
