"""What most tests of virtual GPUs need: four of them."""

import importlib.util

import pytest

from virtual_gpus import virtual_gpus

# The programs in calibration/ need more than the simulator does.
if not all(map(importlib.util.find_spec, ("numpy", "scipy", "torchvision"))):
    collect_ignore = ["test_calibration.py", "test_published_tables.py", "test_run_validation.py"]
pytest_plugins = ["sweeps"]  # which cases of a test run


@pytest.fixture
def gpus():
    with virtual_gpus(4) as machine:
        yield machine
