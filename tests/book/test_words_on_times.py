"""What chapters say about modelled times beyond what their cells print: with another host, or with another guess.

Each test names the cells with the sentences that depend on it.
"""

import torch

import mgpu_lib as mgpu


def test_data_parallel_against_ddp_with_a_fast_host():
    """Chapter 9, two-steps-explained: the milliseconds of both, beside those in its table, which are for a slow one."""
    images, options = torch.empty(32 * 4, 1, 28, 28), {"precision": "default", "host": 1 / 3}
    steps = [mgpu.predict(mgpu.resnet18(), images, "A100-80", 4, way, **options) for way in ("data_parallel", "ddp")]
    assert [round(1e3 * step.seconds) for step in steps] == [9, 6]
