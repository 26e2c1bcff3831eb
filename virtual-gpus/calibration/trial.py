"""A trial of the clock: NVIDIA's figures of ResNet-50, which nothing was ever fitted to, and never may be.

    python -m calibration.trial

writes recorded/trial.json: every row of trial.json with what the clock said when it was first tried, and what
it says now. Where the programs computed in half precision they kept images as channels last; the trial did not, so
what that gives stands beside it.
"""

import json
from pathlib import Path

import torch
import torchvision

from calibration import steps
from calibration.errors import summary
from calibration.record import save

PATH = Path(__file__).parent / "trial.json"
SAMPLE = ("inference/V100/fp32/64/1",)


def cases():
    """{name of a row: (the row,)}."""
    rows = json.loads(PATH.read_text())["rows"]
    return {"/".join(map(str, list(row.values())[:5])): (row,) for row in rows}


def published(row):
    """Seconds of one step."""
    if row["mode"] == "train":
        return row["batch_per_gpu"] * row["gpus"] / row["images_per_second"]
    return row["milliseconds"] / 1e3


def seconds(row, layout=torch.contiguous_format):
    """What the clock says of a row's step."""
    with torch.device("meta"):
        net = torchvision.models.resnet50().to(memory_format=layout)
        X = torch.empty(row["batch_per_gpu"] * row["gpus"], 3, 224, 224).to(memory_format=layout)
    return steps.seconds(net, X, row["gpu"], row["gpus"], row["precision"], training=row["mode"] == "train")


def record(row):
    """A row with what the clock says; "then" and "now" have seconds, and which part of the real is too much."""
    real = published(row)
    said = {"then": row["then"], "now": seconds(row)}
    if row["precision"] == "amp":
        said["now, channels last"] = seconds(row, torch.channels_last)
    errors = {name: {"predicted": round(t, 6), "error": round(t / real - 1, 4)} for name, t in said.items()}
    return {**{key: value for key, value in row.items() if key != "then"}, "published": round(real, 6), **errors}


def result():
    """All that is recorded, but for how it came about."""
    printed = json.loads(PATH.read_text())
    found = [record(*case) for case in cases().values()]
    errors = {name: summary(row[name]["error"] for row in found) for name in ("then", "now")}
    return {**{key: printed[key] for key in ("what", "source_url", "rule")}, "summary": errors, "rows": found}


if __name__ == "__main__":
    save("trial", result())
