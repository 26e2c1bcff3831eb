"""What chapters say about modelled times beyond what their cells print: with another host, or with another guess.

Each test names the cells with the sentences that depend on it.
"""

import pytest
import torch

import mgpu_lib as mgpu
from mgpu_lib import recorded


def test_data_parallel_against_ddp_with_a_fast_host():
    """Chapter 9, two-steps-explained: the milliseconds of both, beside those in its table, which are for a slow one."""
    images, options = torch.empty(32 * 4, 1, 28, 28), {"precision": "default", "host": 1 / 3}
    steps = [mgpu.predict(mgpu.resnet18(), images, "A100-80", 4, way, **options) for way in ("data_parallel", "ddp")]
    assert [round(1e3 * step.seconds) for step in steps] == [9, 6]


def test_a_host_as_slow_as_the_measured_server_s():
    """Chapter 6, lenet-measured-why and sweep-caption: what host=2.25 changes below."""
    nets = {"LeNet": mgpu.lenet_module(), "ResNet-18": mgpu.resnet18()}

    def seconds(name, k, batch_size, strategy="manual", gpu="A100-80"):
        images = torch.empty(batch_size, 1, 28, 28, device="meta")
        return mgpu.predict(nets[name], images, gpu, k, strategy, precision="default", host=2.25).seconds

    measured = recorded.measured("steps")[0]["rows"]["LeNet/256/fp32"]["median"]
    assert seconds("LeNet", 1, 256, gpu="H200") == pytest.approx(measured, rel=0.01)
    for name, few in (("LeNet", 2048), ("ResNet-18", 256)):
        assert seconds(name, 2, few) > seconds(name, 1, few)
        assert seconds(name, 2, 2 * few) < seconds(name, 1, 2 * few)
        for k in (2, 4, 8):
            assert seconds(name, k, 256, "ddp") < seconds(name, k, 256, "data_parallel") < seconds(name, k, 256)
