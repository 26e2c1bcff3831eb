"""PyTorch's operations and ways to train on many GPUs: programs that know nothing of the library, by torchrun."""

import re
from pathlib import Path

import pytest
import ranks
from versions import since

PROGRAMS = Path(__file__).parent / "programs"
NEWER = {  # what older versions of PyTorch can't do themselves
    "dtensor_operations": "2.15",  # average and sum of parts do not go together
    "sequence_parallelism": "2.13",  # an optimizer with foreach=True meets shapes that differ, on the CPU as well
    "attention_of_dtensors": "2.13",  # DTensor's propagation doesn't know an output
}


def checks(*files):
    """The names of the checks in these programs."""
    texts = [(PROGRAMS / file).read_text() for file in files]
    names = [name for text in texts for name in re.findall(r"@(?:check|each_group)\ndef (\w+)", text)]
    return [pytest.param(name, marks=since(NEWER.get(name, "2.10"))) for name in names]


@pytest.fixture(scope="module")
def passed(request):
    return ranks.passed(request, PROGRAMS / "parallelism.py")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", checks("asserted.py", "collectives.py"))
def test_operations(name, passed):
    assert name in passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", checks("graphed.py", "grouped.py", "placed.py", "replicated.py", "sharded.py", "staged.py")
)
def test_as_on_one_device(name, passed):
    assert name in passed
