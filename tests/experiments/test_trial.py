"""The trial of the clock: all its rows are there, and no fit can read its rows."""

import json
import subprocess
import sys

import pytest

from experiments import trial
from experiments.clock_validation import summary
from experiments.record import ROOT

RESULT = json.loads(trial.OUT.read_text())
FITS = """
import sys

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).rpartition("/")[2] == "trial.json":
        sys.exit("a fit has opened the trial's rows")

sys.addaudithook(refuse)
from experiments import clock_fit, collective_fit, transformer_fit
from experiments import published, published_collectives, published_transformers

assert clock_fit.used(published.rows()) and published_collectives.tables()
rows = transformer_fit.used([row for row in published_transformers.rows() if not row["excluded"]])
transformer_fit.logs_of(next(row for row in rows if row["layers"] == 12))
assert not [name for name in sys.modules if name.endswith(".trial")]
"""


def test_all_rows_are_there():
    assert len(RESULT["rows"]) == len(trial.cases()) == 24
    for name in ("then", "now"):
        assert RESULT["summary"][name] == summary([row[name]["error"] for row in RESULT["rows"]])
    for row in RESULT["rows"]:
        rate = row["published"] * row["images_per_second"] if row["mode"] == "train" else row["published"] * 1e3
        wanted = row["batch_per_gpu"] * row["gpus"] if row["mode"] == "train" else row["milliseconds"]
        assert abs(rate / wanted - 1) < 1e-3


def run(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_no_fit_can_read_its_rows():
    done = run(FITS)
    assert done.returncode == 0, done.stderr
    done = run(f"{FITS}\nimport experiments.trial\nexperiments.trial.cases()\n")
    assert done.returncode == 1 and "opened the trial's rows" in done.stderr  # it would be seen
