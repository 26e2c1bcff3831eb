"""Data for the runs of examples/train_ddp.py: files like Fashion-MNIST's, written on the spot."""

import pytest
import running


@pytest.fixture(scope="session", autouse=True)
def data(tmp_path_factory):
    """240 images to train, 61 to test. Every run that tests start finds them by MGPU_DATA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_DATA", running.write_data(tmp_path_factory.mktemp("data")))
        yield
