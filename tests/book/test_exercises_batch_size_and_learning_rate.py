"""The checks of "Batch size and learning rate": typical wrong answers are explained, other right ones taken."""

import pytest
from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)
from made_up import write_results

from mgpu_lib import evidence, recorded
from mgpu_lib.exercises import batch_size_and_learning_rate

SIGNATURES = {
    "best_lr": "batch_size, known",
    "diagnose": "curve",
}
LETTERS = '{"A": "jumps", "B": "dead at once", "C": "too small", "D": "learned, then died", "E": "good"}'

WRONG = [
    ("best_lr", "return known[1] * batch_size", "A rule that starts far away"),
    ("best_lr", "return known[1]", "Go up: what do the neighbors"),
    ("best_lr", "return 100.0", "isn't near"),
    ("best_lr", "return 0", "no learning rate"),
    ("best_lr", "return known", "no learning rate"),
    ("best_lr", "return known[batch_size]", "your code raises KeyError"),
    ("diagnose", f"return {LETTERS.replace('dead at once', 'good')}[curve]", "curve B isn't 'good': it never leaves"),
    ("diagnose", f"return {LETTERS.replace('too small', 'good')}[curve]", "curve C isn't 'good': it rises slowly"),
    ("diagnose", f"return {LETTERS.replace('jumps', 'too small')}[curve]", "falls back again and again"),
    ("diagnose", f"return {LETTERS.replace('learned, then died', 'dead at once')}[curve]", "above guessing before"),
    ("diagnose", f"return {LETTERS.replace('good', 'jumps')}[curve]", "curve E isn't 'jumps': it rises fast"),
    ("diagnose", 'return "too large"', "is none of too small, good"),
]
RIGHT = [
    (
        "best_lr",
        """
    import math
    near = min(known, key=lambda B: abs(math.log(B / batch_size)))
    return known[near] * (batch_size / near) ** 0.5""",
    ),
    ("diagnose", f"return {LETTERS}[curve]"),
]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """Made-up results, so that these tests stay as they are when runs are recorded anew."""
    write_results(tmp_path)
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)


def five():
    return {
        batch_size_and_learning_rate.LETTERS[letter]: run
        for letter, run in batch_size_and_learning_rate.curves().items()
    }


def assert_each_shows_its_word(found):
    assert (
        found.keys() == batch_size_and_learning_rate.EXPLAINED.keys() and len({id(run) for run in found.values()}) == 5
    )
    slow, good = found["too small"], found["good"]
    assert slow.ended is good.ended is None and slow.accuracy[-1] < good.accuracy[-1] - 0.05
    assert batch_size_and_learning_rate.jumping(slow) <= batch_size_and_learning_rate.jumping(good) and slow.accuracy[
        -1
    ] > max(slow.accuracy[:-3]), "still rising"
    jumps = found["jumps"]
    assert (
        jumps.ended is None
        and max(jumps.accuracy) > 0.6
        and batch_size_and_learning_rate.jumping(jumps) > 2 * batch_size_and_learning_rate.jumping(good)
    )
    assert found["dead at once"].ended and max(found["dead at once"].accuracy) < 2 * evidence.GUESSING
    late = found["learned, then died"]
    assert late.ended and max(late.accuracy) > 0.3 and late.accuracy[-1] < 2 * evidence.GUESSING


def test_the_five_curves_show_what_they_are_called():
    assert_each_shows_its_word(five())


def test_a_run_whose_loss_was_no_longer_finite_is_not_one_that_died(monkeypatch):
    batches, died = evidence.grid("lenet"), five()["learned, then died"]
    batches[16][max(batches[16])].append(died._replace(accuracy=[*died.accuracy[:-1], 0.95]))
    monkeypatch.setattr(evidence, "grid", lambda net: batches)
    assert five()["learned, then died"] == died


def test_so_do_the_recorded_ones(monkeypatch):
    monkeypatch.undo()
    assert_each_shows_its_word(five())
