"""What most tests of virtual GPUs need: four of them."""

import pytest

from mgpu_lib.virtual import virtual_gpus


@pytest.fixture
def gpus():
    with virtual_gpus(4) as machine:
        yield machine
