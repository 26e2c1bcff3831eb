"""The planner's formulas against dry runs: the record is whole, and within the bounds that it promises."""

import json

import pytest

from experiments import planner_validation
from mgpu_lib import planning, recorded

STUDY = recorded.study("planner_validation")
RUNS = STUDY["runs"]


def test_the_record_is_whole():
    assert STUDY["recipe"] == planner_validation.recipe() and list(RUNS) == list(planner_validation.cases())
    found = json.loads(json.dumps(planner_validation.summary(RUNS)))
    for what in ("time", "memory"):
        assert found[what] == pytest.approx(STUDY["summary"][what], rel=1e-6)


def test_bounds():
    for what in ("time", "memory"):
        assert STUDY["summary"][what]["rows"] == 60 and STUDY["summary"][what]["median"] <= 0.1
    assert STUDY["summary"]["memory"]["worst"] <= 0.25 and STUDY["summary"]["time"]["worst"] <= 0.15


def test_settings_come_from_the_planner_s_controls():
    settings = planner_validation.settings()
    assert len(settings) == 60
    for name, values in planning.CHOICES.items():
        drawn = {setting[name] for setting in settings}
        assert drawn <= set(values) and len(drawn) >= min(3, len(values))
    assert {planning.run_of(**setting).data for setting in settings} > {1, 2, 64}
