"""The recorded grid of why two are slower than one: how it is made."""

from figure_samples import US, kernel, timeline

from experiments import why_slower
from mgpu_lib.recorded import study


def test_the_grid_says_what_does_not_fit():
    """As virtual GPUs do, by their ledgers: ResNet-50 at batch 256 fits two of 16 GB, not one."""
    cells = study("why_slower")["cells"]
    assert why_slower.record("V100/ResNet-50", [32, 256])[1] == "" == cells["V100/ResNet-50"][3]
    assert cells["V100/nvlink/ResNet-50/ddp/2"][3] != ""
    assert cells["T4/pcie/ResNet-50/ddp/2"][7] == ""


def test_states_of_a_gpu_add_up():
    """A step of 100 µs: launched at 10, forward to 30, backward to 70 with communication beside it from 50, and alone
    to 80; the update is asked for at 85, waits until 90, and runs to 95."""
    events = (
        kernel("k", 10, 30, phase="forward"),
        kernel("k", 30, 70, phase="backward", launched=12),
        kernel("all-reduce", 50, 80, kind="collective", row="collective", launched=45),
        kernel("k", 90, 95, phase="update", launched=85),
    )
    events = [e._replace(called=0.0) for e in events]
    spans = why_slower.states(timeline(*events), 0, 100 * US)
    found = [(round(end / US), name, beside) for start, end, name, beside in spans if end - start > US / 2]
    alone = [(10, "w"), (30, "f"), (50, "b"), (70, "b"), (80, "c"), (85, "w"), (90, "o"), (95, "u"), (100, "w")]
    assert found == [(end, name, end == 70) for end, name in alone]
