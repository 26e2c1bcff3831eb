"""Writing down what an experiment found, and how it came about."""
import datetime
import hashlib
import json
import os
from pathlib import Path

import torch
import torchvision


def provenance(module, sources):
    """How to find the same again: `sources` are the files that decide the result."""
    versions = {package.__name__: package.__version__.split("+")[0] for package in (torch, torchvision)}
    return {"command": f"python -m {module}", "date": datetime.date.today().isoformat(), "versions": versions,
            "files": [Path(path).name for path in sources], "sha256": digest(sources)}


def digest(paths):
    """SHA-256 of the contents of files, one after the other."""
    found = hashlib.sha256()
    for path in paths:
        found.update(Path(path).read_bytes())
    return found.hexdigest()


def write(path, result):
    """Write `result` as JSON; the file is replaced as a whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    os.replace(new, path)
