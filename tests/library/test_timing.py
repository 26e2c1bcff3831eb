"""Timing, by the virtual clock or the computer's."""

import pytest
import torch

from mgpu_lib import Timer
from mgpu_lib.timing import ms, two_digits
from virtual_gpus import virtual_gpus


@pytest.fixture
def gpus():
    with virtual_gpus(4) as machine:
        yield machine


def test_timer_reads_the_virtual_clock(gpus):
    X = torch.ones(256, 256, device="cuda:1")
    timer = Timer(gpus.devices)
    with timer:
        X @ X
    assert timer.seconds == pytest.approx(gpus.gpus[1].streams[0].done_at - gpus.timeline[-1].called)
    timing = timer.measure(lambda: X @ X, repeats=4, warmup=1)
    assert len(timing.seconds) == 4 and timing.median == pytest.approx(timer.seconds)
    assert timing.spread == (pytest.approx(timing.median), pytest.approx(timing.median))
    assert repr(timing).endswith("ms (modelled, A100-80)")
    assert Timer(["cuda:1"]).measure(lambda: X @ X, repeats=1).spread[0] == pytest.approx(timing.median)


def test_timer_reads_the_computers_clock_elsewhere():
    calls = []
    timing = Timer([torch.device("cpu")]).measure(lambda: calls.append(1), repeats=5, warmup=2)
    assert len(calls) == 7 and all(s > 0 for s in timing.seconds)
    low, high = timing.spread
    assert low <= timing.median <= high and "5 runs" in repr(timing)


def test_timer_belongs_to_its_machine(gpus):
    timer = Timer(gpus.devices)
    with virtual_gpus(1, gpu="T4"), pytest.raises(RuntimeError, match="make another Timer"):
        timer.now()
    gpus.stop()
    with pytest.raises(RuntimeError, match="no virtual machine answers"):
        timer.now()
    with pytest.raises(ValueError, match="name the devices"):
        Timer([])
    with pytest.raises(ValueError, match="repeats=0"):
        Timer(["cpu"]).measure(print, repeats=0)


def test_two_digits_of_a_number():
    numbers = 0.0832, 0.96, 0.996, 5.54, 9.96, 10.4, 99.6, 12_345
    assert [two_digits(n) for n in numbers] == ["0.083", "0.96", "1.0", "5.5", "10", "10", "100", "12,000"]
    assert ms(0.000521) == "0.52 ms"
