"""The checks of "Plan a run on a thousand GPUs": typical wrong answers are explained, other right ones taken."""

import math

import pytest
from answers import (  # noqa: F401
    changed,
    checks_of,
    function,
    test_a_wrong_answer_is_explained,
    test_other_right_answers,
)

from mgpu_lib.exercises import planning_a_run

SIGNATURES = {
    "fewest_gpus": "parameters, activations, memory, per_node",
    "training_days": "parameters, tokens, n_gpus, peak, mfu",
    "best_interval": "write, hours, n_gpus",
    "stays_in_node": "dimensions, per_node",
}

FEWEST = """
    import math
    room = memory - activations
    if room <= 0:
        return math.inf
    return math.ceil(16 * parameters / (room * per_node)) * per_node"""
DAYS = "return 6 * parameters * tokens / (n_gpus * peak * mfu) / 86400"
INTERVAL = "return (2 * write * hours * 3600 / n_gpus) ** 0.5"
STAYS = """
    from itertools import combinations
    from math import prod
    best, saved = set(), 0
    for k in range(1, len(dimensions) + 1):
        for names in combinations(dimensions, k):
            ranks = prod(dimensions[name][0] for name in names)
            gain = sum(dimensions[name][1] - dimensions[name][2] for name in names)
            if per_node % ranks == 0 and gain > saved:
                best, saved = set(names), gain
    return best"""

WRONG = [
    ("fewest_gpus", "return -(-16 * parameters // memory)", "whole nodes"),
    ("fewest_gpus", changed(FEWEST, "memory - activations", "memory"), "however many GPUs there are"),
    ("fewest_gpus", changed(FEWEST, "math.ceil", "int"), "round up"),
    ("fewest_gpus", changed(FEWEST, "return math.inf", "return 8"), "don't make them smaller"),
    ("fewest_gpus", changed(FEWEST, "16 *", "18 *"), "Solve 16 * parameters"),
    ("fewest_gpus", "return 'many'", "Return a number"),
    ("training_days", changed(DAYS, " / 86400", ""), "seconds"),
    ("training_days", changed(DAYS, "86400", "3600"), "hours"),
    ("training_days", changed(DAYS, "6 *", "2 *"), "six for each parameter"),
    ("training_days", changed(DAYS, " * mfu", ""), "only a part of it"),
    ("training_days", changed(DAYS, "peak * mfu)", "peak) * mfu"), "Divide by the MFU"),
    ("training_days", changed(DAYS, "n_gpus * ", ""), "share the work"),
    ("training_days", changed(DAYS, "6 *", "7 *"), "Divide all FLOPs"),
    ("training_days", "return '21 days'", "Return a number of days"),
    ("best_interval", changed(INTERVAL, " * 3600", ""), "Hours have to become seconds"),
    ("best_interval", changed(INTERVAL, " / n_gpus", ""), "n times as many failures"),
    ("best_interval", changed(INTERVAL, "/ n_gpus", "* n_gpus"), "divided by n"),
    ("best_interval", changed(INTERVAL, "2 * ", ""), "half an interval"),
    ("best_interval", INTERVAL + " / 3600", "These are hours"),
    ("best_interval", changed(INTERVAL, "** 0.5", "** 0.4"), "It is the root"),
    ("best_interval", "return 'often'", "Return seconds"),
    ("stays_in_node", "return set(dimensions)", "a node has 8 GPUs"),
    ("stays_in_node", "return set()", "time that a node saves"),
    ("stays_in_node", "return {max(dimensions, key=lambda name: dimensions[name][1])}", "instead of"),
    ("stays_in_node", "return {'tensor'} if dimensions['tensor'][0] <= 8 else set()", "time that a node saves"),
    ("stays_in_node", "return {'network'}", "not all names"),
    ("stays_in_node", "return 'tensor'", "Return a set"),
]  # fmt: skip
RIGHT = [
    *((name, function(name, SIGNATURES[name], body)) for name, body in [
        ("fewest_gpus", FEWEST), ("training_days", DAYS), ("best_interval", INTERVAL), ("stays_in_node", STAYS)
    ]),
    (
        "fewest_gpus",
        """
    def fewest_gpus(parameters, activations, memory, per_node):
        if activations >= memory:
            return float("inf")
        n = per_node
        while 16 * parameters > n * (memory - activations):
            n += per_node
        return n""",
    ),
]  # fmt: skip


def test_every_exercise_of_the_chapter_has_wrong_answers():
    assert {name for name, *_ in WRONG} == set(SIGNATURES) == checks_of(planning_a_run)


@pytest.mark.parametrize("dimensions", planning_a_run.MESHES)
def test_one_placement_alone_is_best(dimensions):
    """Else a right answer could be refused."""
    best = planning_a_run.least_exposed(dimensions, 8)
    rest = {name: sizes for name, sizes in dimensions.items() if name not in best}
    assert 8 % planning_a_run.size(best, dimensions) == 0
    assert all(far >= near for _, far, near in dimensions.values())
    assert all(8 % (planning_a_run.size(best, dimensions) * n) for n, *_ in rest.values()), "nothing more fits"


def test_the_run_that_training_days_names_is_the_published_one():
    tokens = 312e12 * 0.4764 / (6 * 65.2e9)
    assert math.isclose(tokens, 380, rel_tol=1e-3)
