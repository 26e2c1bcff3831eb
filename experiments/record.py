"""Writing down what an experiment found, and how it came about."""

import datetime
import json

import torch
import torchvision

from mgpu_lib.virtual import replacing


def provenance(module):
    """How to find the same again, beside the recipe: with which command, when, and on which libraries it ran."""
    versions = {package.__name__: package.__version__.split("+")[0] for package in (torch, torchvision)}
    return {
        "command": f"python -m {module}",
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }


def write(path, result):
    """Write `result` as JSON; the file is replaced as a whole."""
    with replacing(path) as new:
        new.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
