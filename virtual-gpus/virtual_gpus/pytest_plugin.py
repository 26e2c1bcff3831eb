"""A pytest plugin: tests of multi-GPU code run on machines without GPUs.

    @pytest.mark.virtual_gpus(4, gpu="A100-80")
    def test_on_four_gpus(): ...

    # The fixture is the machine; without the mark it has four GPUs of the default kind.
    def test_traffic(virtual_gpus): ...

The mark takes what `Machine` takes. The GPUs are on during the test only, and in processes that it starts, whatever
CUDA_VISIBLE_DEVICES says: that is often set to hide real GPUs from tests.
"""

import pytest

MARK = "virtual_gpus(n, gpu=..., link=..., backing=...): run on n virtual GPUs, as virtual_gpus.virtual_gpus takes them"


def pytest_configure(config):
    config.addinivalue_line("markers", MARK)


def pytest_itemcollected(item):
    if item.get_closest_marker("virtual_gpus") is not None and "virtual_gpus" not in item.fixturenames:
        item.fixturenames.insert(0, "virtual_gpus")  # first: what else the test needs may use them


@pytest.fixture
def virtual_gpus(request, monkeypatch):
    """The machine whose GPUs are on until the test ends: as many and such as its mark `virtual_gpus` says."""
    # Here: pytest loads plugins in every run, whatever is tested, and this imports PyTorch.
    from virtual_gpus import LaunchConfig, child_environment

    mark = request.node.get_closest_marker("virtual_gpus") or pytest.mark.virtual_gpus(4).mark
    try:
        if len(mark.args) != 1:
            raise ValueError("say how many, and the rest by name, as in virtual_gpus(4, gpu='A100-80')")
        config = LaunchConfig(*mark.args, mark.kwargs)
        machine = config.make()
    except (ValueError, TypeError) as error:
        pytest.fail(f"the mark {written(mark)} names no virtual GPUs: {error}", pytrace=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with child_environment(config), machine:
        yield machine


def written(mark):
    arguments = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"virtual_gpus({', '.join(arguments)})"
