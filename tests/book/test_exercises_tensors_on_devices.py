"""The checks of "Tensors on devices": typical wrong answers are explained, other right ones taken."""

import pytest
from answers import (  # noqa: F401
    function,
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
    variants,
)

from mgpu_lib import exercises

SIGNATURES = {
    "to_device": "nest, device",
}
NEST = """
    if isinstance(nest, torch.Tensor):
        return nest.to(device)
    if isinstance(nest, dict):
        return {key: to_device(value, device) for key, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(to_device(value, device) for value in nest)
    return nest"""
WRONG = [
    ("to_device", "return [x.to(device) for x in nest]", "can't use your answer: AttributeError"),
    ("to_device", "return nest.to(device) if isinstance(nest, torch.Tensor) else nest", "the caller's list"),
    *variants(
        "to_device",
        NEST,
        ("return nest.to(device)", "return nest.to(device).clone()", "needs no copy"),
        ("type(nest)(to_device(value, device) for value in nest)", "[to_device(x, device) for x in nest]", "as list"),
        (
            "(list, tuple)):\n        return type(nest)(",
            "(list, tuple, str)):\n        return list(",
            "your code raises",
        ),
        (
            "(to_device(value, device) for",
            "(value.to(device) if isinstance(value, torch.Tensor) else value for",
            "moved",
        ),
    ),
]
RIGHT = [("to_device", function("to_device", "nest, device", NEST))]


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
