"""The recorded grid of why two are slower than one: how it is made."""

from figure_samples import US, kernel, timeline

from experiments import why_slower
from mgpu_lib.recorded import study

LENGTHS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def test_the_grid_says_what_does_not_fit():
    """As virtual GPUs do, by their ledgers: ResNet-50 at batch 256 fits two of 16 GB, not one."""
    cells = study("why_slower")["cells"]
    assert why_slower.record("V100/ResNet-50", [32, 256])[1] == "" == cells["V100/ResNet-50"][3]
    assert cells["V100/nvlink/ResNet-50/ddp/2"][3] != ""
    assert cells["T4/pcie/ResNet-50/ddp/2"][7] == ""


def test_states_of_a_gpu_add_up_and_rows_show_them():
    """A step of 100 µs: launched at 10, forward to 30, backward to 70 with communication beside it from 50, and alone
    to 80; the update is asked for at 85, waits until 90, and runs to 95."""
    events = (
        kernel("k", 10, 30, phase="forward"),
        kernel("k", 30, 70, phase="backward", launched=12),
        kernel("all-reduce", 50, 80, kind="collective", row="collective", launched=45),
        kernel("k", 90, 95, phase="update", launched=85),
    )
    events = [e._replace(called=0.0) for e in events]
    spans = list(why_slower.states(timeline(*events), 0, 100 * US))
    rounded = [(round(start / US), round(end / US), *rest) for start, end, *rest in spans]
    assert [span for span in rounded if span[0] < span[1]] == [
        (0, 10, "w", False),
        (10, 30, "f", False),
        (30, 50, "b", False),
        (50, 70, "b", True),
        (70, 80, "c", False),
        (80, 85, "w", False),
        (85, 90, "o", False),
        (90, 95, "u", False),
        (95, 100, "w", False),
    ]
    row = why_slower.row(spans, 100 * US)
    runs = [(row[i], LENGTHS.index(row[i + 1]), int(row[i + 2])) for i in range(0, len(row), 3)]
    assert [(name, n) for name, n, _ in runs if name in "fbBc"] == [("f", 10), ("b", 10), ("B", 10), ("c", 5)]
    assert [level for name, _, level in runs if name in "fbBc"] == [9, 9, 9, 9]
    assert sum(n for _, n, _ in runs) == 50
