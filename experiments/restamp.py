"""Carry recorded runs over to code that was changed and should do the same: only if it does, to the last bit.

    python -m experiments.restamp NAME OLD_COMMIT

runs the cases that the study NAME has in its SAMPLE, at least one for each network, with the code of OLD_COMMIT and
with today's, on this machine. If all values are equal, the fingerprint of today's code replaces the old one in the
study's file, and its provenance names both commits; the runs stay as they are. Otherwise it says what differs, and
writes nothing. Today's code must be committed, and that of OLD_COMMIT must have the fingerprint in the file. It takes
from some seconds to some minutes; MGPU_DATA says where Fashion-MNIST lies.

Values are compared before the study rounds them for its file. Seconds of training aren't: no two runs take the same.
"""

import argparse
import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.fingerprint import PACKAGES, ROOT
from experiments.record import write

RESULTS = "mgpu_lib/recorded"
LIMIT = 3600  # seconds for the runs with one of the two
MEASURED = ("seconds",)  # keys of what a run measures on the computer
# Runs beside either code. It asks little of the old one, which may be laid out otherwise.
PROGRAM = """
import builtins, importlib, json, pathlib, sys
folder, name, keys, out = json.loads(sys.argv[1])
sys.path.insert(0, folder)
module = importlib.import_module(f"experiments.{name}")
if not pathlib.Path(module.__file__).is_relative_to(folder):
    sys.exit(f"{module.__file__} was imported, which is not in {folder}")
found = {"recipe": module.recipe(), "sample": getattr(module, "SAMPLE", None)}
if keys != []:
    cases, exact = module.cases(), builtins.round
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if hasattr(module, "study"):
        module.study.set_up()
    builtins.round = lambda number, digits=None: exact(number) if digits is None else number
    found["runs"] = {key: module.record(*cases[key]) for key in keys or cases}
pathlib.Path(out).write_text(json.dumps(found))
"""


def restamp(name, old, root=ROOT, limit=LIMIT):
    """What the module's docstring says, in the repository `root`; returns a line for the reader.

    Raises ValueError, saying why, where it writes nothing.
    """
    path = Path(root, RESULTS, f"{name}.json")
    stored = json.loads(path.read_text(encoding="utf-8"))
    old, new = (git(root, "rev-parse", "--verify", f"{commit}^{{commit}}") for commit in (old, "HEAD"))
    code = [f"{package}/*.{kind}" for package in PACKAGES for kind in ("py", "json")]
    if changes := git(root, "status", "--porcelain", "--untracked-files=all", "--", *code, f":!{RESULTS}/*.json"):
        raise ValueError(f"commit the code first, so that there is a commit to name:\n{changes}")
    today = run(root, name, [], limit)
    if today["recipe"] == stored["recipe"]:
        return f"{path.name} has the fingerprint of today's code"
    same_settings(path, stored["recipe"], today["recipe"])
    with worktree(old, root) as folder:
        if run(folder, name, [], limit)["recipe"] != stored["recipe"]:
            raise ValueError(f"the code of {old} has not the fingerprint in {path.name}: it didn't make these runs")
        before = run(folder, name, today["sample"], limit)["runs"]
    gaps = list(differences(before, run(root, name, today["sample"], limit)["runs"]))
    if gaps:
        raise ValueError(f"{name} has other values with {new} than with {old}:\n" + "\n".join(gaps[:20]))
    carried = {"from": old, "to": new, "date": datetime.date.today().isoformat(), "cases": today["sample"] or "all"}
    stored["provenance"].setdefault("restamped", []).append(carried)
    stored["recipe"]["sha256"] = today["recipe"]["sha256"]
    write(path, stored)
    return f"{path.name}: {len(before)} cases are equal to the last bit, so it has the fingerprint of {new} now"


def same_settings(path, stored, today):
    """ValueError where more has changed than the code, which other values than a case's show."""
    others = [key for key in {**stored, **today} if key != "sha256" and stored.get(key) != today.get(key)]
    if others:
        raise ValueError(f"{path.name} was recorded with other settings ({', '.join(others)}): record it anew")


def run(folder, name, keys, limit):
    """Recipe and sample of a study by the code in `folder`, and the runs of the cases `keys`; None: of all cases."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "found.json")
        arguments = json.dumps([str(folder), name, keys, str(out)])
        try:
            subprocess.run(
                [sys.executable, "-c", PROGRAM, arguments], check=True, timeout=limit, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{name} took more than {limit} s with the code in {folder}") from None
        except subprocess.CalledProcessError as error:
            raise ValueError(f"{name} failed with the code in {folder} (exit status {error.returncode})") from None
        return json.loads(out.read_text())


@contextlib.contextmanager
def worktree(commit, root):
    """A folder with the files of a commit, for as long as it is needed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve() / "code"
        git(root, "worktree", "add", "--detach", folder, commit)
        try:
            yield folder
        finally:
            git(root, "worktree", "remove", "--force", folder)


def git(root, *arguments):
    """What git prints. ValueError with its words where it fails."""
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ValueError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def differences(one, other, place=""):
    """A line for each place in which two results differ; what was measured on the computer may."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in sorted(one.keys() - set(MEASURED)):
            yield from differences(one[key], other[key], f"{place}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other)):
            yield from differences(*pair, f"{place}/{i}")
    elif one != other or type(one) is not type(other):
        yield f"{place[1:]}: {str(one)[:100]} before, {str(other)[:100]} now"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="of the study: that of its module")
    parser.add_argument("old_commit", help="whose code made the runs, or did the same as what made them")
    arguments = parser.parse_args()
    try:
        print(restamp(arguments.name, arguments.old_commit))
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
