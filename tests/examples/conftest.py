"""Data for the runs of examples/train_ddp.py: files like Fashion-MNIST's, written on the spot."""

import pytest
import running


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The folder of 240 images to train and 61 to test."""
    return running.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", autouse=True)
def found(data):
    """Every run that these tests start finds them by MGPU_DATA; other tests of the session have their own data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_DATA", data)
        yield
