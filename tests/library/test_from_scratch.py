"""DistributedDataParallel and ZeRO from scratch, experts and the meter of noise, on four ranks."""

import re
from pathlib import Path

import pytest
import ranks
import torch.distributed as dist

from virtual_gpus import virtual_gpus

PROGRAMS = Path(__file__).parent / "programs"
TEXTS = [(PROGRAMS / file).read_text() for file in ("from_scratch.py", "zero.py", "moe.py", "noise.py")]


@pytest.fixture(scope="module")
def passed(request):
    return ranks.passed(request, PROGRAMS / "from_scratch.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", re.findall(r"@check\ndef (\w+)", "".join(TEXTS)))
def test_as_on_one_device(name, passed):
    assert name in passed


def test_one_rank_alone(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    import moe
    import zero

    with virtual_gpus(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        for check in zero.any_shape, zero.kept_bytes, moe.experts_on_any_number_of_ranks:
            check(0, 1)
        dist.destroy_process_group()
