"""What the smaller studies have in common: every finished run is kept, and a study that was interrupted goes on.

A study is a module of this folder with `cases`, `record`, `recipe` and `summary`; `python -m experiments.NAME` writes
mgpu_lib/recorded/NAME.json. Until all its runs are there they are kept in NAME.unfinished.json beside it. To record all
of them anew, delete the file first.

In SAMPLE a study names some of its quicker cases, which tests/experiments/test_samples.py runs again. Modelled times
come out the same to the last digit. A study that trains has a TOLERANCE, since another processor rounds sums in another
way, which grows from step to step: a part of a number above 1, and of 1 for a smaller one. Its SAMPLE says for each
case which arguments of `record` cut it short; then what is recorded begins as it did.
"""

import contextlib
import ctypes
import json
import multiprocessing

import torch
from tqdm import tqdm

from experiments import tuning
from experiments.record import provenance, write
from mgpu_lib.recorded import RESULTS


def run(name, cases, record, recipe, summary):
    """Record what is missing, one case after the other, and write the file of the study `name`.

    cases      {key: arguments of `record`}; the result of `record` is plain data
    recipe     plain data, all that decides the runs: those that were kept with another one are recorded anew
    summary    called with {key: run} of the runs that are there; gives plain data
    """
    out = RESULTS / f"{name}.json"
    part = out.with_name(f"{name}.unfinished.json")
    before = kept(out, recipe)
    late = kept(part, recipe).get("runs", {})
    runs = {**before.get("runs", {}), **late}
    runs = {key: run for key, run in runs.items() if key in cases}
    missing = [key for key in cases if key not in runs]
    set_up()
    for key in tqdm(missing, unit="run", smoothing=0):
        runs[key] = plain(record(*cases[key]))  # as those are that come from the file
        write(part, {"recipe": recipe, "summary": summary(runs), "runs": runs})
    about = before["provenance"] if before and not (missing or late) else provenance(f"experiments.{name}")
    result = plain(
        {"provenance": about, "recipe": recipe, "summary": summary(runs), "runs": {key: runs[key] for key in cases}}
    )
    if result == before:
        print(f"{out.name} is up to date")
    else:
        write(out, result)
    part.unlink(missing_ok=True)


def modelled(name, names, record, recipe):
    """{each of `names`: record(it)}, made in two processes; None where the file of the study `name` has them all.

    What is done is kept as `run` keeps it, until the caller calls `finish`.
    """
    out, part = RESULTS / f"{name}.json", RESULTS / f"{name}.unfinished.json"
    if kept(out, recipe):
        print(f"{out.name} is up to date")
        return None
    runs = kept(part, recipe).get("runs", {})
    missing = [each for each in names if each not in runs]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = zip(missing, pool.imap(record, missing))
        for each, found in tqdm(results, total=len(missing), unit="configuration"):
            runs[each] = plain(found)
            write(part, {"recipe": recipe, "runs": runs})
    return {each: runs[each] for each in names}


def finish(name, recipe, result):
    """Write the file of a study whose runs `modelled` made."""
    write(RESULTS / f"{name}.json", {"provenance": provenance(f"experiments.{name}"), "recipe": recipe, **result})
    (RESULTS / f"{name}.unfinished.json").unlink(missing_ok=True)


def kept(path, recipe):
    """What a file holds, or {} where there is none that was recorded with this recipe."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    return stored if stored.get("recipe") == plain(recipe) else {}


def plain(data):
    return json.loads(json.dumps(data, allow_nan=False))


def set_up():
    """One thread, because the steps are small, and a compiler that doesn't give up after eight shapes.

    Freed memory stays with the process: else each step of a large batch takes its pages from the system anew, and is
    nearly twice as slow.
    """
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 100
    with contextlib.suppress(AttributeError, OSError, TypeError):  # a C library other than GNU's
        mallopt, trim_threshold, mmap_max = ctypes.CDLL(None).mallopt, -1, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def split():
    """(X, y, X_validation, y_validation): the training images of the grid, and those it validates with."""
    data = tuning.fashion_mnist()
    kept_out = min(tuning.VALIDATION, len(data.X_train) // 3)  # a third where a test has fewer images
    sizes = [len(data.X_train) - kept_out, kept_out]
    (X, X_validation), (y, y_validation) = data.X_train.split(sizes), data.y_train.split(sizes)
    return X, y, X_validation, y_validation


def text(numbers):
    """Numbers with blanks between them: a third of the size that a list has in the file."""
    return " ".join(map(str, numbers))


def numbers(text):
    return [float(number) for number in text.split()]
