"""Figures have one size and the same bytes each time; the live plot redraws in a notebook and prints elsewhere."""

from types import SimpleNamespace

import matplotlib
import pytest
from matplotlib.figure import Figure

from mgpu_lib import plots, recorded

HISTORY = [{"epoch": 1, "test_accuracy": 0.25}, {"epoch": 2, "test_accuracy": 0.75}]


@pytest.fixture(autouse=True)
def clean_matplotlib():
    matplotlib.use("agg")
    with matplotlib.rc_context():
        yield
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.fixture
def kernel(monkeypatch):
    """Pretend to be a notebook; collects what is shown as (action, PNG bytes)."""
    import IPython.display

    shown = []

    def display(image, display_id=None):
        assert display_id
        shown.append(("display", image.data))
        return SimpleNamespace(update=lambda image: shown.append(("update", image.data)))

    monkeypatch.setattr(plots, "notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", display)
    return shown


def test_the_png_has_a_fixed_size_the_same_bytes_and_no_metadata():
    png, other = (plots.accuracy_png({label: HISTORY}) for label in ("one", "a label that is rather longer"))
    for each in png, other:
        assert each[:8] == b"\x89PNG\r\n\x1a\n" and each[16:24] == (960).to_bytes(4, "big") + (540).to_bytes(4, "big")
        assert b"tEXt" not in each and b"iTXt" not in each
    matplotlib.rcParams["lines.linewidth"] = 20  # the reader's own settings don't matter
    assert plots.accuracy_png({"one": HISTORY}) == png


def test_curves_show_every_history_with_its_label():
    plots.use_book_style()
    ax = plots.accuracy_curves({"1 GPU": HISTORY, "2 GPUs": HISTORY[:1]})
    one, two = ax.get_lines()
    assert (list(one.get_xdata()), list(one.get_ydata())) == ([1, 2], [0.25, 0.75])
    assert (list(two.get_xdata()), list(two.get_ydata())) == ([1], [0.25])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["1 GPU", "2 GPUs"]
    assert one.get_color() != two.get_color() and one.get_linestyle() != two.get_linestyle()
    assert ax.get_ylim() == (0, 1)


def test_a_forest_plot_fills_the_dots_whose_interval_leaves_out_nothing():
    rows = {"those": None, "sure": (2, 1, 3), "unsure": (0.5, -1, 2), "gone": "all died"}
    ax = plots.forest(rows, number="{:.0f}")
    dots = [line for line in ax.get_lines() if line.get_marker() == "o"]
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == [(2, 1), (0.5, 2)]
    filled = [dot.get_markerfacecolor() == dot.get_color() for dot in dots]
    assert filled == [True, False]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["those", "sure", "unsure", "gone"]
    assert [text.get_text() for text in ax.texts] == ["2 (1 to 3)", "0 (-1 to 2)", "all died"]
    assert ax.get_ylim()[0] > 3 > 0 > ax.get_ylim()[1], "from top to bottom"
    twice = plots.forest([("twice", (1, 0, 2)), ("twice", (2, 1, 3))], ax=ax.figure.add_subplot())
    assert [label.get_text() for label in twice.get_yticklabels()] == ["twice", "twice"]


def test_live_accuracy_redraws_one_figure_in_a_notebook(kernel):
    live = plots.LiveAccuracy()
    for label, history in {"2 GPUs": HISTORY[:1], "1 GPU": HISTORY}.items():
        live.of(label)(history)
    assert [action for action, png in kernel] == ["display", "update"]
    assert kernel[0][1] != kernel[1][1]
    assert kernel[1][1] == plots.accuracy_png({"2 GPUs": HISTORY[:1], "1 GPU": HISTORY})


def test_live_accuracy_prints_a_line_per_epoch_in_a_terminal(capsys):
    live = plots.LiveAccuracy().of("2 GPUs")
    live(HISTORY[:1])
    live(HISTORY)
    assert capsys.readouterr().out == ("2 GPUs: epoch 1, test accuracy 0.250\n2 GPUs: epoch 2, test accuracy 0.750\n")


def test_trace_steps_draws_what_the_host_does_and_when_the_gpu_is_busy():
    steps = recorded.study("trace_resnet50")["steps"]
    panels = plots.trace_steps(steps, Figure())
    for ax, step in zip(panels, steps, strict=True):
        *host, gpu = ax.collections
        assert len(host) == len(step["host"]) and len(gpu.get_paths()) == len(step["gpu"])
        assert str(step["workers"]) in ax.get_title()
    assert [[text.get_text() for text in ax.texts] for ax in panels] == [["61", "9", "6"], ["12", "8"]]


def test_a_condensed_trace_holds_what_it_says():
    """The two files agree: where the GPU idles, and that both cut the same steps."""
    cut = recorded.study("trace_cut")["traces"]
    for step, events in zip(recorded.study("trace_resnet50")["steps"], (trace["traceEvents"] for trace in cut)):
        joined = sum(end - start for start, end in step["gpu"])
        assert step["busy"] <= joined < 1.02 * step["busy"]
        assert events[0]["name"] == step["step"] and events[0]["dur"] == step["microseconds"]
        assert 40 <= len(events) <= 55
        assert sum(e["dur"] for e in events if e["cat"] == "Kernel") == pytest.approx(joined, rel=0.05)


def test_strips_have_a_dot_for_each_ratio_and_a_bar_at_the_median():
    ax = plots.strips({"a": {"x": [2, 0.5, 0.8], "y": [1.1]}, "b": {"z": [1, 1]}}, Figure().subplots())
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "x", "y", "b", "z"]
    assert [sorted(line.get_xdata()) for line in ax.lines[:3]] == [[0.5, 0.8, 2], [1.1], [1, 1]]
    assert [text.get_text() for text in ax.texts] == ["-20%  of 3", "+10%  of 1", "+0%  of 2"]
    assert len({*ax.lines[2].get_ydata()}) == 2, "equal ratios don't cover each other"


def test_log_panels():
    curve = [1, 2, 4], [3, 4, 5], [2, 3, 5], [6, 6, 6]
    left, right = plots.log_panels({"a": {"x": curve}, "b": {}}, "images", "ms", Figure())
    assert left.get_title() == "a" and left.get_xscale() == left.get_yscale() == "log"
    assert [line.get_label() for line in left.lines] == ["x"] and not right.lines
    (band,) = left.collections
    assert band.get_paths()[0].get_extents().get_points().tolist() == [[1, 2], [4, 6]]


def test_schedule_draws_each_pass_in_the_row_of_its_rank():
    ax = plots.schedule([[("F0", 5, 6), ("B0", 8, 10)], [("F0'", 6, 7), ("W1", 7, 8)]], Figure().subplots(), 1)
    boxes = [(round(box.get_y() + box.get_height() / 2), box.get_x(), box.get_width()) for box in ax.patches]
    assert boxes == [(0, 0, 1), (0, 3, 2), (1, 1, 1), (1, 2, 1)]
    assert [text.get_text() for text in ax.texts] == ["F0", "B0", "F0'", "W1"]
    assert [box.get_alpha() for box in ax.patches] == [1, 1, 0.7, 1]
    assert [box.get_linewidth() for box in ax.patches] == [0.5, 0.5, 0.5, 1.5]
    assert len({box.get_facecolor()[:3] for box in ax.patches}) == 3
