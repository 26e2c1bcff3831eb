"""DistributedDataParallel from scratch, on four ranks."""

import re
from pathlib import Path

import pytest
import ranks

PROGRAM = Path(__file__).parent / "programs" / "from_scratch.py"


@pytest.fixture(scope="module")
def passed(request):
    return ranks.passed(request, PROGRAM)


@pytest.mark.slow
@pytest.mark.parametrize("name", re.findall(r"@check\ndef (\w+)", PROGRAM.read_text()))
def test_from_scratch(name, passed):
    assert name in passed
