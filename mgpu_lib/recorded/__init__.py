"""What experiments recorded, as it stands in the files of this folder: the only module that reads them.

`python -m experiments.NAME` writes NAME.json, and NAME.unfinished.json until all its runs are there. The grid keeps its
finished parts in the folder tuning.unfinished. Finished is enough for everything here: what is missing stays empty.
"""

import contextlib
import json
import math
from pathlib import Path

RESULTS = Path(__file__).parent


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def study(name):
    """The study that `python -m experiments.NAME` recorded, or what is finished of it. FileNotFoundError without."""
    for path in (RESULTS / f"{name}.json", RESULTS / f"{name}.unfinished.json"):
        if path.exists():
            return read_json(path)
    raise FileNotFoundError(f"{name}.json is missing: record it with `python -m experiments.{name}`")


def measured(part):
    """What `python -m experiments.on_a_gpu` recorded of this part on a real GPU, or None."""
    path = RESULTS / f"measured_{part}.json"
    return read_json(path) if path.exists() else None


def read_grid():
    """The grid of batch sizes and learning rates, or its finished parts. FileNotFoundError without any."""
    parts = sorted((RESULTS / "tuning.unfinished").glob("*-*-*-*.json"))
    if (RESULTS / "tuning.json").exists() or not parts:
        return study("tuning")
    return join({path.stem: read_json(path) for path in parts})


def read_grids():
    """All that is recorded: the grid, and that of ResNet-8 where it is there, or what is finished of them."""
    grids = [read_grid()]
    with contextlib.suppress(FileNotFoundError):
        grids.append(resnet_runs(study("resnet_grid")))
    return grids


def resnet_runs(stored):
    """The runs of ResNet-8 with batch norm, as experiments/resnet_grid.py writes them, in the form of the grid."""
    runs, images = [], stored["recipe"]["images"]
    for name, run in stored["runs"].items():
        norm, batch_size, lr, seed = name.split("/")
        if norm == "batch":
            per_epoch = math.ceil(images / int(batch_size))
            marks = [per_epoch * (epoch + 1) for epoch in range(len(run["validation_accuracy"]))]
            about = {"net": "resnet8", "batch_size": int(batch_size), "lr": float(lr), "seed": int(seed), "step": marks}
            runs.append({**run, **about})
    return {"recipe": {"epochs": stored["recipe"]["epochs"]}, "trained_on": images, "runs": runs}


def join(parts):
    """Finished parts {"NET-BATCH-SEED-RATE": what its file holds} in the form of the whole grid. ValueError if they
    differ.

    Parts of different recipes are no grid.
    """
    recipes = {json.dumps(part["recipe"], sort_keys=True) for part in parts.values()}
    if len(recipes) != 1:
        raise ValueError(
            f"{len(parts)} parts have {len(recipes)} recipes: run `python -m experiments.tuning`, which "
            "records anew what is out of date"
        )
    recipe, runs = json.loads(recipes.pop()), []
    for name, part in parts.items():
        net, batch_size, seed, _ = name.split("-")
        runs += [{"net": net, "batch_size": int(batch_size), "seed": int(seed), **run} for run in part["runs"]]
    return {"recipe": recipe, "trained_on": 60_000 - recipe["validation"], "runs": runs}


def length(images, budgets, batch_size, budget):
    """How many steps a run takes in a budget, "epochs" or "steps"."""
    return budgets["steps"] if budget == "steps" else budgets["epochs"] * math.ceil(images / batch_size)


def numbers(curve):
    """A curve of the whole grid, written as text, or of a part, which is a list."""
    return [float(word) for word in curve.split()] if isinstance(curve, str) else curve
