"""Ways to train on many GPUs, on virtual ones: programs that know nothing of the library, run by torchrun."""

import re
from pathlib import Path

import pytest
import ranks

PROGRAMS = Path(__file__).parent / "programs"
CHECKS = "gloo.py", "grouped.py", "placed.py", "replicated.py", "sharded.py", "staged.py"


def names():
    return [name for file in CHECKS for name in re.findall(r"@check\ndef (\w+)", (PROGRAMS / file).read_text())]


@pytest.fixture(scope="module")
def passed(request):
    return ranks.passed(request, PROGRAMS / "parallelism.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_as_on_one_device(name, passed):
    assert name in passed
