"""ZeRO from scratch, on one rank and on three."""

import re
from pathlib import Path

import pytest
import ranks

PROGRAM = Path(__file__).parent / "programs" / "zero.py"


@pytest.fixture(scope="module")
def passed(request):
    return ranks.passed(request, PROGRAM)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", re.findall(r"@check\ndef (\w+)", PROGRAM.read_text()))
def test_as_on_one_device(name, n, passed):
    assert f"{name} {n}" in passed
