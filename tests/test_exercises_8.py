"""The checks of chapter 8: typical wrong answers are explained. tests/test_exercises.py tries the solutions shown."""

import shutil

import pytest
from made_up import write_results
from test_exercises import said

from mgpu_lib import evidence
from mgpu_lib.exercises import tuning
from mgpu_lib.widgets import recorded

SIGNATURES = {"best_lr": "batch_size, known", "critical_batch": "steps", "diagnose": "curve",
              "two_batch_noise": "small, large, b, B"}
LINE = """
    x, y = [1 / B for B in steps], [*steps.values()]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
    start = my - slope * mx
    """
LETTERS = '{"A": "jumps", "B": "dead at once", "C": "too small", "D": "learned, then died", "E": "good"}'
MEANS = """
    small, large = sum(small) / len(small), sum(large) / len(large)
    noise = (small - large) / (1 / b - 1 / B)
    """

WRONG = [
    ("best_lr", "return known[1] * batch_size", "A rule that starts far away"),
    ("best_lr", "return known[1]", "Go up: what do the neighbors"),
    ("best_lr", "return 100.0", "isn't near"),
    ("best_lr", "return 0", "no learning rate"),
    ("best_lr", "return known", "no learning rate"),
    ("best_lr", "return known[batch_size]", "your code raises KeyError"),
    ("critical_batch", LINE + "return slope", "the fewest images. Divide by S_min"),
    ("critical_batch", LINE + "return start", "E_min / S_min is asked for"),
    ("critical_batch", LINE + "return start / slope", "turn it round"),
    ("critical_batch", LINE + "return slope / start", "do they decide alone?"),
    ("critical_batch", """
    B, S = list(steps), list(steps.values())
    return B[0] * (S[0] / S[-1] - 1)""", "less than the steps of the largest batch"),
    ("critical_batch", "return str(steps)", "is no number"),
    ("diagnose", f'return {LETTERS.replace("dead at once", "good")}[curve]', "curve B isn't 'good': it never leaves"),
    ("diagnose", f'return {LETTERS.replace("too small", "good")}[curve]', "curve C isn't 'good': it rises slowly"),
    ("diagnose", f'return {LETTERS.replace("jumps", "too small")}[curve]', "falls back again and again"),
    ("diagnose", f'return {LETTERS.replace("learned, then died", "dead at once")}[curve]', "above guessing before"),
    ("diagnose", f'return {LETTERS.replace("good", "jumps")}[curve]', "curve E isn't 'jumps': it rises fast"),
    ("diagnose", 'return "too large"', "is none of too small, good"),
    ("two_batch_noise", MEANS + "return (large - noise / B) / noise", "that is signal over noise"),
    ("two_batch_noise", MEANS + "return noise / large", "the large batch has noise too"),
    ("two_batch_noise", MEANS + "return noise", "that is tr Σ"),
    ("two_batch_noise", MEANS + "return (small - large) / (large - noise / B)", "small - large is tr Σ"),
    ("two_batch_noise", """
    ratios = []
    for s, l in zip(small, large):
        noise = (s - l) / (1 / b - 1 / B)
        ratios.append(noise / (l - noise / B))
    return sum(ratios) / len(ratios)""", "Take the means of the lengths first"),
]
RIGHT = [
    ("best_lr", """
    import math
    near = min(known, key=lambda B: abs(math.log(B / batch_size)))
    return known[near] * (batch_size / near) ** 0.5"""),
    ("critical_batch", "import mgpu_lib.evidence\n    return mgpu_lib.evidence.critical_batch(steps)[0]"),
    ("diagnose", f"return {LETTERS}[curve]"),
    ("two_batch_noise", """
    from mgpu_lib.tuning import noise_from_norms, noise_scale
    return noise_scale(noise_from_norms(s, l, b, B) for s, l in zip(small, large))"""),
]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """Made-up results, so that these tests stay as they are when runs are recorded anew; but the runs to a target."""
    write_results(tmp_path)
    shutil.copy(recorded.RESULTS / "critical.json", tmp_path)
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)


def program(name, body):
    return f"def {name}({SIGNATURES[name]}):\n    {body.strip()}"


@pytest.mark.parametrize("name, body, phrase", WRONG)
def test_a_wrong_answer_is_explained(name, body, phrase, capsys):
    line = said(capsys, name, program(name, body))
    assert line.startswith("not yet: ") and phrase in line, line


@pytest.mark.parametrize("name, body", RIGHT)
def test_other_right_answers(name, body, capsys):
    assert said(capsys, name, program(name, body)).startswith("right: ")


def test_every_exercise_of_the_chapter_has_wrong_answers():
    assert {name for name, *_ in WRONG} == {name for name, *_ in RIGHT} == set(SIGNATURES)
    assert {f"check_{name}" for name in SIGNATURES} == {name for name in vars(tuning) if name.startswith("check_")}


def five():
    return {tuning.LETTERS[letter]: run for letter, run in tuning.curves().items()}


def assert_each_shows_its_word(found):
    assert found.keys() == tuning.EXPLAINED.keys() and len({id(run) for run in found.values()}) == 5
    slow, good = found["too small"], found["good"]
    assert slow.ended is good.ended is None and slow.accuracy[-1] < good.accuracy[-1] - 0.05
    assert tuning.jumping(slow) <= tuning.jumping(good) and slow.accuracy[-1] > max(slow.accuracy[:-3]), "still rising"
    jumps = found["jumps"]
    assert jumps.ended is None and max(jumps.accuracy) > 0.6 and tuning.jumping(jumps) > 2 * tuning.jumping(good)
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
