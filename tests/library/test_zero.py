"""ZeRO from scratch, on one to four ranks."""

import re
from pathlib import Path

import pytest
import ranks

PROGRAM = Path(__file__).parent / "programs" / "zero.py"


@pytest.fixture(scope="module")
def passed(request):
    return ranks.passed(request, PROGRAM)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 5))
@pytest.mark.parametrize("name", re.findall(r"@check\ndef (\w+)", PROGRAM.read_text()))
def test_as_on_one_device(name, n, passed):
    assert f"{name} {n}" in passed
