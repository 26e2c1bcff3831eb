"""What experiments recorded, as it stands in the files of this folder: the only module that reads them.

`python -m experiments.NAME` writes NAME.json. Those about the clock are links to what the programs in
virtual-gpus/calibration wrote; d2l_lenet.json, d2l_resnet18.json and d2l_loader.json hold what the history of
published notebooks says, trace_resnet50.json and trace_cut.json two published traces of PyTorch's profiler. What they
say, in the terms of the chapters: `mgpu_lib.evidence`.
"""

import json
import math
from pathlib import Path

RESULTS = Path(__file__).parent


def study(name):
    """The study that `python -m experiments.NAME` recorded. FileNotFoundError without."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is missing: record it with `python -m experiments.{name}`")
    return json.loads(path.read_text(encoding="utf-8"))


def measured(part):
    """What `python -m experiments.on_a_gpu` recorded of this part: (on a real GPU, on a virtual one of its kind)."""
    return study(f"measured_{part}"), study(f"modelled_{part}")


def resnet_grid(norm):
    """The runs of ResNet-8 with batch norm, "batch", group norm, "group", or none, "none", in the form of the grid."""
    stored = study("resnet_grid")
    runs, images = [], stored["recipe"]["images"]
    for name, run in stored["runs"].items():
        kind, batch_size, lr, seed = name.split("/")
        if kind == norm:
            per_epoch = math.ceil(images / int(batch_size))
            about = {"net": "resnet8", "batch_size": int(batch_size), "lr": float(lr), "seed": int(seed)}
            marks = [per_epoch * (epoch + 1) for epoch in range(len(run["validation_accuracy"]))]
            ends = {"dead_at_step": None, "test_accuracy": {"epochs": run["test_accuracy"]}}
            runs.append({**about, **run, "step": marks, **ends})
    return {"recipe": {"epochs": stored["recipe"]["epochs"]}, "trained_on": images, "runs": runs}


def length(images, budgets, batch_size, budget):
    """How many steps a run takes in a budget, "epochs" or "steps"."""
    return budgets["steps"] if budget == "steps" else budgets["epochs"] * math.ceil(images / batch_size)


def numbers(curve):
    """A curve that is written as text, or as a list."""
    return [float(word) for word in curve.split()] if isinstance(curve, str) else curve
