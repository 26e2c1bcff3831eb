"""The checks of "How large a batch pays": typical wrong answers are explained, other right ones taken."""

import shutil

import pytest
from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)
from made_up import write_results

from mgpu_lib import recorded

SIGNATURES = {
    "critical_batch": "steps",
    "two_batch_noise": "small, large, b, B",
}
LINE = """
    x, y = [1 / B for B in steps], [*steps.values()]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
    start = my - slope * mx
    """
MEANS = """
    small, large = sum(small) / len(small), sum(large) / len(large)
    noise = (small - large) / (1 / b - 1 / B)
    """

WRONG = [
    ("critical_batch", LINE + "return slope", "the fewest images. Divide by S_min"),
    ("critical_batch", LINE + "return start", "E_min / S_min is asked for"),
    ("critical_batch", LINE + "return start / slope", "turn it round"),
    ("critical_batch", LINE + "return slope / start", "do they decide alone?"),
    (
        "critical_batch",
        """
    B, S = list(steps), list(steps.values())
    return B[0] * (S[0] / S[-1] - 1)""",
        "less than the steps of the largest batch",
    ),
    ("critical_batch", "return str(steps)", "is no number"),
    ("two_batch_noise", MEANS + "return (large - noise / B) / noise", "that is signal over noise"),
    ("two_batch_noise", MEANS + "return noise / large", "the large batch has noise too"),
    ("two_batch_noise", MEANS + "return noise", "that is tr Σ"),
    ("two_batch_noise", MEANS + "return (small - large) / (large - noise / B)", "small - large is tr Σ"),
    (
        "two_batch_noise",
        """
    ratios = []
    for s, l in zip(small, large):
        noise = (s - l) / (1 / b - 1 / B)
        ratios.append(noise / (l - noise / B))
    return sum(ratios) / len(ratios)""",
        "Take the means of the lengths first",
    ),
]
RIGHT = [
    ("critical_batch", "import mgpu_lib.evidence\n    return mgpu_lib.evidence.critical_batch(steps)[0]"),
    (
        "two_batch_noise",
        """
    from mgpu_lib.tuning import noise_from_norms, noise_scale
    return noise_scale(noise_from_norms(s, l, b, B) for s, l in zip(small, large))""",
    ),
]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """Made-up results, so that these tests stay as they are when runs are recorded anew; but the runs to a target."""
    write_results(tmp_path)
    shutil.copy(recorded.RESULTS / "critical.json", tmp_path)
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
