"""What most tests of virtual GPUs need: four of them."""

import pytest

from virtual_gpus import virtual_gpus

pytest_plugins = ["sweeps"]  # which cases of a test run


@pytest.fixture
def gpus():
    with virtual_gpus(4) as machine:
        yield machine
