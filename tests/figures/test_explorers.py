"""The explorers of batch size and learning rate: the map of recorded runs, and the curves of one of them."""

import copy
import itertools
import math
import re
import statistics

import pytest
from figure_pages import cell, control, drawn, points_of, sentence
from figure_samples import explorer, loop, shown_by

from mgpu_lib import recorded
from mgpu_lib.tuning import linear_scaling, sqrt_scaling
from mgpu_lib.widgets import LoopExplorer, TuningExplorer, explorer_data

SIZES = [1, 4, 16, 64, 256, 1024, 4096]


def mean_percent(cell, digits):
    """A cell's mean accuracy in percent, halves upwards; in whole numbers, as the records are."""
    unit = 10 ** (2 - digits)
    whole = (2 * sum(cell.finals) + unit * len(cell.finals)) // (2 * unit * len(cell.finals))
    return f"{whole / 10**digits:.{digits}f}"


# Reading and setting


def test_a_rate_goes_with_its_batch_size_and_what_the_page_sends_is_taken_together(says):
    """As ipywidgets hands it on: several values in one message, or one with which the other no longer goes."""
    figure = explorer(batch_size=1, lr=0.4)
    figure.batch_size, figure.lr = 4096, 6.3
    figure.batch_size = 1  # 6.3 was not recorded for it: the nearest
    assert figure.lr == 0.4
    figure.set_state({"lr": 0.4, "batch_norm": True, "budget": "steps", "num_gpus": 8})
    figure.set_state({"batch_size": 4096, "lr": 1})  # JavaScript knows no 1.0
    assert figure.lr == 1.0 and says(figure).startswith("LeNet with batch norm at batch 4096, learning rate 1: ")
    figure.lr = 6.3
    figure.set_state({"batch_size": 16})
    assert (figure.batch_size, figure.lr) == (16, 2.5)


def test_the_start_is_the_best_rate_of_its_batch_size():
    assert explorer().batch_size == 256
    for b in SIZES:
        for figure in (explorer(batch_size=b), explorer(batch_size=b, batch_norm=True), loop(batch_size=b)):
            assert figure.lr == explorer_data.best(figure.net(), "epochs", b)[1]


def test_what_is_missing_stays_empty_and_the_rest_is_shown(says):
    """Two batch sizes with one seed, and a network that is gone."""
    data = copy.deepcopy(shown_by("TuningExplorer"))
    net = data["nets"]["LeNet"]
    for name in ("batch_sizes", "rates", "marks", "runs", "times"):
        net[name] = [net[name][SIZES.index(b)] for b in (256, 4096)]
    net["runs"] = [[seeds[:1] for seeds in row] for row in net["runs"]]
    assert "one seed" in says(TuningExplorer(data)) and TuningExplorer(data).known("batch_size") == [256, 4096]
    del data["nets"]["LeNet"]
    assert says(TuningExplorer(data)).startswith("LeNet with batch norm at batch 256")


def test_another_network_may_have_fewer_batch_sizes_and_budgets(page, write, says):
    figure = explorer(budget="steps", batch_size=4096)
    assert figure.known("network") == ["LeNet", "ResNet-8"]
    figure.network = "ResNet-8"
    assert (figure.budget, figure.batch_size, figure.lr) == ("epochs", 1024, 0.4)
    page.goto(write(explorer(budget="steps", batch_size=4096)))
    root = page.locator("figure.mgpu")
    control(root, "Network").select_option("ResNet-8")
    assert sentence(root) == says(figure)
    assert control(root, "Compare at").locator("option:disabled").all_text_contents() == ["equal steps"]
    assert control(root, "Batch norm").locator("option:disabled").all_text_contents() == ["without"]
    assert control(root, "Batch norm").input_value() == "true"


# What it says


SENTENCES = {
    ("LeNet at batch 256, learning rate 0.16", "epochs", 4): (
        "accuracy 84.3% after 4 epochs (860 steps), 83.1% to 85.2% over 3 seeds. That is 5.0 points below the best "
        "cell (batch 4, rate 0.025), and 61 times as fast. An epoch takes 103 ms on 4 A100-80s with 64 images each "
        "(modelled)."
    ),
    ("LeNet at batch 64, learning rate 1", "epochs", 1): (
        "diverged within 64 steps (all 3 seeds). At this batch size 0.4 is the largest rate at which none did. An "
        "epoch takes 340 ms on one A100-80 (modelled)."
    ),
    ("LeNet at batch 4096, learning rate 0.4", "steps", 1): (
        "accuracy 80.3% after 215 steps (880,640 images), 79.7% to 80.9% over 3 seeds. As good as the best cell "
        "(batch 1024, rate 0.4) within the spread of the seeds, and 3.3 times as slow. An epoch takes 56.4 ms on one "
        "A100-80 (modelled)."
    ),
}


def test_sentences(says):
    for (start, budget, num_gpus), words in SENTENCES.items():
        batch_size, lr = re.findall(r"[\d.]+", start)
        figure = explorer(batch_size=int(batch_size), lr=float(lr), budget=budget, num_gpus=num_gpus)
        assert says(figure) == f"{start}: {words}"


def every_state(data):
    for name, net in data["nets"].items():
        for budget, k in itertools.product(net["budgets"], data["counts"]):
            for b, rates in zip(net["batch_sizes"], net["rates"], strict=True):
                network, _, _ = name.partition(" with batch norm")
                state = {"network": network, "batch_norm": name != network, "budget": budget, "num_gpus": k}
                yield from ((name, {**state, "batch_size": b, "lr": lr}) for lr in rates)


@pytest.mark.parametrize("kind", [TuningExplorer, LoopExplorer])
def test_every_cell_says_its_numbers(calls, kind):
    data = {**shown_by(kind.__name__), "map": kind is TuningExplorer}
    names, states = zip(*every_state(data))
    said = calls(kind, "(data, states) => states.map((at) => explorerSentence(data, at))", data, states)
    for name, state, words in zip(names, states, said, strict=True):
        net, b, lr = data["nets"][name], state["batch_size"], state["lr"]
        there = explorer_data.cell(net, b, lr, state["budget"])
        assert words.startswith(f"{name} at batch {b}, learning rate {lr:g}: ")
        assert ("diverged within" in words) == (not there.finals)
        assert f"{there.end:,} steps" in words or not there.finals
        if there.finals:
            assert f"accuracy {mean_percent(there, 1)}% " in words
            assert ("(no better than guessing)" in words) == (there.finals[-1] < 1200)
            assert (f"over {len(there.finals)} seeds" in words) == (len(there.finals) > 1)
        if there.diverged and there.finals:
            some = f"{len(there.diverged)} of {there.seeds} seeds diverged, within {max(there.diverged):,} step"
            assert some in words
        best = explorer_data.best(net, state["budget"])
        assert ("No cell of this map is better." in words) == (data["map"] and best == (b, lr))
        assert words.endswith(" (modelled).")
    kinds = ["(no better than guessing) after", "of 3 seeds diverged", "all 3 seeds", "without an image", "images each"]
    if data["map"]:
        kinds += ["No cell of this map", "As good as", "points below", "largest rate", "times as slow", "times as fast"]
    assert [kind for kind in kinds if not any(kind in words for words in said)] == []


# The picture in the browser


def test_the_map_is_walked_by_keyboard_and_clicked(page, write, says):
    page.goto(write(explorer(batch_size=1, lr=0.4)))
    root = page.locator("figure.mgpu")
    root.locator("[role=gridcell][tabindex='0']").focus()
    moves = (("ArrowRight", 0.4, 4), ("ArrowUp", 1.0, 4), ("ArrowRight", 1.0, 16), ("ArrowDown", 0.4, 16))
    for key, lr, batch_size in (*moves, ("End", 0.4, 4096), ("Home", 0.4, 1)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.ariaSelected") == "true"
        assert sentence(root) == says(explorer(batch_size=batch_size, lr=lr))
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    assert sentence(root).startswith("LeNet at batch 1, learning rate 0.00025: ")
    assert root.locator("[role=gridcell][tabindex='0']").count() == 1
    cell(root, 4096, "6.3").click()  # the last of a row, under the end of a line
    root.get_by_role("gridcell", name="not recorded").first.click(force=True)
    assert sentence(root) == says(explorer(batch_size=4096, lr=6.3))


def test_the_map_shows_accuracies_divergence_and_the_best_of_each_batch_size(page, write):
    figure = explorer()
    page.goto(write(figure))
    root, net = page.locator("figure.mgpu"), figure.net()
    cells = root.locator("[role=gridcell][aria-selected]").evaluate_all(
        "cells => cells.map((e) => [e.ariaLabel, e.textContent, e.className])"
    )
    for b, rates in zip(net["batch_sizes"], net["rates"], strict=True):
        for lr in rates:
            there, place = explorer_data.cell(net, b, lr, "epochs"), f": batch size {b}, learning rate {lr:g}:"
            [(label, text, look)] = [found for found in cells if place in found[0]]
            assert text == (mean_percent(there, 0) if there.finals else "") + "×" * bool(there.diverged)
            best = explorer_data.best(net, "epochs", b)[1] == lr
            assert label.endswith(", best of this batch size") == ("mgpu-best" in look) == best
            assert ("diverged" in label) == bool(there.diverged)
    assert root.get_by_role("columnheader").all_text_contents() == ["batch", *map(str, SIZES)]
    rows = root.get_by_role("rowheader").all_text_contents()
    assert rows == [f"{lr:g}" for lr in sorted({lr for row in net["rates"] for lr in row}, reverse=True)]
    assert root.locator(".mgpu-map-title b").text_content() == "accuracy after 4 epochs, in %"
    control(root, "Compare at").select_option("equal steps")
    assert root.locator(".mgpu-map-title b").text_content() == "accuracy after 215 steps, in %"
    assert root.locator(".mgpu-times").text_content() == "s/epoch20.15.031.280.340.110.070.06"


PLACES = "(asked, rates) => asked.map((lr) => place(lr, rates))"


def test_a_place_among_the_rates_goes_by_their_ratio(calls):
    asked = {0.1: 0, 0.2: 1, 0.4: 1.5, 0.8: 2, 0.05: -1, 1.6: 2.5}
    assert calls(TuningExplorer, PLACES, list(asked), [0.1, 0.2, 0.8]) == pytest.approx(list(asked.values()))
    assert calls(TuningExplorer, "place", 0.5, [0.5]) == 0


RULES = {"linear": linear_scaling, "root": sqrt_scaling}


@pytest.mark.parametrize("b, lr", [(256, 0.16), (1, 0.01), (4096, 6.3)])
@pytest.mark.sweep(3)
def test_the_rules_are_drawn_through_the_chosen_cell(page, write, calls, b, lr):
    figure = explorer(batch_size=b, lr=lr)
    rates = sorted({lr for row in figure.net()["rates"] for lr in row})
    places = {
        look: calls(TuningExplorer, PLACES, [scaled(lr, b, size) for size in SIZES], rates)
        for look, scaled in RULES.items()
    }
    page.goto(write(figure))
    root = page.locator("figure.mgpu")
    for look, row in places.items():
        points = points_of(root.locator(f".mgpu-rules .mgpu-{look}"))
        expected = [(i + 0.5, len(rates) - 0.5 - place) for i, place in enumerate(row)]
        assert sum(points, ()) == pytest.approx(sum(expected, ()), abs=1e-6)
    # The picture's units are cells: the line goes through the middle of the chosen one.
    chosen, rules = root.locator("[aria-selected=true]").bounding_box(), root.locator(".mgpu-rules").bounding_box()
    x, y = dict(zip(SIZES, points, strict=True))[b]
    middle = rules["x"] + rules["width"] * x / len(SIZES), rules["y"] + rules["height"] * y / len(rates)
    wanted = chosen["x"] + chosen["width"] / 2, chosen["y"] + chosen["height"] / 2
    assert middle == pytest.approx(wanted, abs=1.5)


@pytest.mark.parametrize(
    ("batch_size", "lr", "budget", "lost"), [(256, 0.16, "epochs", 0), (4096, 0.4, "steps", 0), (256, 6.3, "epochs", 3)]
)
@pytest.mark.slow
def test_curves_are_drawn_to_scale(page, write, batch_size, lr, budget, lost):
    """Steps, or epochs, against accuracy: the points of a curve, from the records and the ticks of the scale."""
    page.goto(write(explorer(batch_size=batch_size, lr=lr, budget=budget)))
    root, end = page.locator("figure.mgpu"), 215 if budget == "steps" else 4 * math.ceil(55_000 / batch_size)
    read = "lines => lines.map((l) => ['y1', 'x1', 'x2'].map((name) => +l.getAttribute(name)))"
    _, (y50, left, right), _, _, (y95, *_), *_ = root.locator(".mgpu-picture line.mgpu-scale").evaluate_all(read)
    names = root.locator(".mgpu-picture text.mgpu-quiet").all_text_contents()
    assert names[:5] == ["10%", "50%", "80%", "90%", "95%"]

    def at(step, accuracy):
        across = math.log2(step) / math.log2(end) if budget == "steps" else step / end
        up = (math.log(1 - accuracy) - math.log(0.5)) / (math.log(0.05) - math.log(0.5))
        return left + (right - left) * across, y50 + (y95 - y50) * up

    grid = recorded.study("tuning")["runs"]
    runs = [run for run in grid if (run["net"], run["batch_size"], run["lr"]) == ("lenet", batch_size, lr)]
    steps, *curves = [recorded.numbers(text) for text in [runs[0]["step"], *(r["validation_accuracy"] for r in runs)]]
    assert root.locator(".mgpu-picture polyline.mgpu-lost").count() == 2 * lost
    assert root.locator(".mgpu-picture path.mgpu-cross").count() == 2 * lost
    shown = curves[0] if lost else [statistics.mean(seeds) for seeds in zip(*curves)]
    expected = [at(step, accuracy) for step, accuracy in zip(steps, shown) if step <= end]
    found = drawn(root, "mgpu-lost" if lost else "mgpu-mean")
    assert sum(found, ()) == pytest.approx(sum(expected, ()), abs=0.6)  # accuracies are cut to whole 0.01 %


def test_every_cell_can_be_touched_and_has_its_words_inside(page, write):
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(write(explorer(), loop()))
    sizes = page.get_by_role("gridcell").evaluate_all("cells => cells.map((e) => [e.clientWidth, e.clientHeight])")
    assert min(map(min, sizes)) >= 24
    outside = page.locator(".mgpu-map span").evaluate_all("""spans => spans.filter((span) => {
        const map = span.closest(".mgpu-map").getBoundingClientRect(), box = span.getBoundingClientRect();
        return span.textContent && (box.left < map.left - 1 || box.right > map.right + 1);
    }).map((span) => span.textContent)""")
    assert outside == []
