"""The checks of "Tensors on devices": typical wrong answers are explained, other right ones taken."""

import pytest
from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)

from mgpu_lib import exercises

SIGNATURES = {
    "to_device": "nest, device",
}
WRONG = [
    ("to_device", "return [x.to(device) for x in nest]", "can't use your answer: AttributeError"),
    ("to_device", "return nest.to(device).clone() if isinstance(nest, torch.Tensor) else nest", "needs no copy"),
    ("to_device", "return nest.to(device) if isinstance(nest, torch.Tensor) else nest", "the caller's list"),
    (
        "to_device",
        """
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        if isinstance(nest, (list, tuple)):
            return [to_device(part, device) for part in nest]
        return nest""",
        "a tuple came back as list",
    ),
    (
        "to_device",
        """
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        return [to_device(part, device) for part in nest] if hasattr(nest, '__iter__') else nest""",
        "your code raises",
    ),
    (
        "to_device",
        """
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        if isinstance(nest, (list, tuple)):
            return type(nest)(x.to(device) if isinstance(x, torch.Tensor) else x for x in nest)
        if isinstance(nest, dict):
            return {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in nest.items()}
        return nest""",
        "was not moved",
    ),
]
RIGHT = [
    (
        "to_device",
        """
    def to_device(nest, device):
        if isinstance(nest, torch.Tensor):
            return nest.to(device)
        if isinstance(nest, dict):
            return {key: to_device(value, device) for key, value in nest.items()}
        if isinstance(nest, (list, tuple)):
            return type(nest)(to_device(value, device) for value in nest)
        return nest""",
    ),
]


@pytest.mark.parametrize(
    "names, phrase",
    [
        ({"X[:2]", "X.detach()", "X.to(devices[0])"}, "right: all six"),
        (["X[:2]", "X.detach()", "X.to(devices[0])"], "right: all six"),
        (set(), "yours to fill in"),
        ({"X.to(devices[0])"}, "look again at X.detach()"),
        ({"X[:2]", "X.detach()", "X.to(devices[0])", "X.cpu()"}, "they were copied"),
        ({"X"}, "isn't among the six names"),
    ],
)
def test_aliases(names, phrase, capsys):
    exercises.check_aliases(names)
    assert phrase in capsys.readouterr().out
