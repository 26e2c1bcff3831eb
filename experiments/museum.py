"""What each bug of the museum costs: its exhibits as the page shows them, and mended, trained for longer.

    python -m experiments.museum

writes mgpu_lib/recorded/museum.json. The page trains for two epochs with one seed, too little to tell. Here its own
cells run, with 15 epochs and three seeds; the mended program is the same cell with the fix that stands below it.
"""

import contextlib
import io
import json
import re

from experiments import study
from experiments.record import ROOT

EPOCHS, SEEDS = 15, range(3)
SAMPLE, TOLERANCE = ("dropout/shown/0", "dropout/mended/0"), 0.05
SHORT = "epochs=2, seed=0"  # what this study replaces in the page
SETUP = "setup", "right-step", "next-token", "modules", "split-in-layer"


def cells():
    """The sources of the page's cells, by their ids, and the ids of the exhibits."""
    page = json.loads((ROOT / "chapters" / "museum.ipynb").read_text(encoding="utf-8"))
    sources = {cell["id"]: "".join(cell["source"]) for cell in page["cells"]}
    return sources, [cell["id"] for cell in page["cells"] if "exhibit" in cell["metadata"].get("tags", [])]


def fix_of(text):
    """The diff in the markdown below an exhibit."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S)
    return diff


def mended(source, diff):
    """`source` after a fix: a diff of whole lines, which fits in one place only."""
    lines = [(line[0], line[1:]) for line in diff.splitlines()]
    old = "".join(text + "\n" for mark, text in lines if mark in " -")
    new = "".join(text + "\n" for mark, text in lines if mark in " +")
    if source.count(old) != 1:
        raise ValueError(f"the fix doesn't fit, or in several places:\n{old}")
    return source.replace(old, new)


def cases():
    """{key: (exhibit, "shown" or "mended", seed)}: key exhibit/version/seed, one seed after the other."""
    return {
        f"{exhibit}/{version}/{seed}": (exhibit, version, seed)
        for seed in SEEDS
        for exhibit in cells()[1]
        for version in ("shown", "mended")
    }


def record(exhibit, version, seed):
    """What the page says of the program after training: its title there, `accuracy` on the test images, `meter`."""
    sources, names = cells()[0], {}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in SETUP:
            exec(longer(sources[cell], seed) if cell == "setup" else sources[cell], names)
        program = sources[exhibit] + "\n"
        exec(program if version == "shown" else mended(program, fix_of(sources[f"{exhibit}-why"])), names)
    [(title, (accuracy, meter, _))] = names["museum"].catalog.items()
    return {"title": title, "accuracy": round(accuracy, 5), "meter": meter}


def longer(source, seed):
    """The page's setup, for this study."""
    if source.count(SHORT) != 1:
        raise ValueError(f"the page's setup has no {SHORT!r}")
    return source.replace(SHORT, f"epochs={EPOCHS}, seed={seed}")


def recipe():
    return {"epochs": EPOCHS}


def summary(runs):
    """{title: {"shown" and "mended": the accuracies, {seed: accuracy}}}, in the order of the page."""
    found = {}
    for key, run in runs.items():
        _, version, seed = key.split("/")
        found.setdefault(run["title"], {"shown": {}, "mended": {}})[version][seed] = run["accuracy"]
    return found


if __name__ == "__main__":
    study.run("museum", cases(), record, recipe(), summary)
