"""The transformer that learned "Alice's Adventures in Wonderland": its record is today's, and what the chapter says."""

import json

import pytest

from experiments import alice
from mgpu_lib import recorded

STUDY = recorded.study("alice")
RUNS = STUDY["runs"]


def test_the_record_is_whole():
    assert STUDY["recipe"] == alice.recipe() and RUNS.keys() == alice.cases().keys()
    assert STUDY["summary"] == json.loads(json.dumps(alice.summary(RUNS)))
    assert all(len(run["losses"]) == alice.STEPS for run in RUNS.values())


@pytest.mark.parametrize("n_gpus", alice.GPUS)
@pytest.mark.slow
def test_the_first_steps_come_out_again(n_gpus):
    found = alice.record(n_gpus, 6)
    assert found["losses"] == pytest.approx(RUNS[str(n_gpus)]["losses"][:6], rel=1e-3)
    assert found["text"].startswith(alice.BEGIN) and len(found["text"]) == len(alice.BEGIN) + 200


def test_what_the_chapter_says_of_it():
    """learned-why: one GPU and eight learn the same, and more than the letters' frequencies."""
    one, eight = (RUNS[str(n)] for n in alice.GPUS)
    assert STUDY["summary"]["gaps"]["10"] < 1e-5
    assert abs(STUDY["summary"]["ends"]["1"] - STUDY["summary"]["ends"]["8"]) < 0.02
    assert abs(one["test_loss"] - eight["test_loss"]) < 0.05 and one["test_loss"] < 1.9
