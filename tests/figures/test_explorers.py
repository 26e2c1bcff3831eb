"""The explorers of batch size and learning rate: the map of recorded runs, and the curves of one of them."""

import itertools
import math
import statistics

import figure_pages
import pytest
from figure_pages import cell, control, drawn, sentence
from figure_samples import explorer, loop, shown_by

from mgpu_lib import recorded
from mgpu_lib.tuning import linear_scaling, sqrt_scaling
from mgpu_lib.widgets import LoopExplorer, TuningExplorer, explorer_data

write, says, calls = figure_pages.write, figure_pages.says, figure_pages.calls
SIZES = [1, 4, 16, 64, 256, 1024, 4096]


def mean_percent(cell, digits):
    """A cell's mean accuracy in percent, halves upwards; in whole numbers, as the records are."""
    unit = 10 ** (2 - digits)
    whole = (2 * sum(cell.finals) + unit * len(cell.finals)) // (2 * unit * len(cell.finals))
    return f"{whole / 10**digits:.{digits}f}"


# Reading and setting from Python


def test_values_are_read_and_set_from_python(says):
    figure = explorer(batch_size=16, lr=0.16)
    assert repr(figure) == (
        "TuningExplorer(network='LeNet', batch_norm=False, budget='epochs', num_gpus=1, batch_size=16, lr=0.16)"
    )
    figure.batch_norm, figure.budget, figure.num_gpus, figure.lr = True, "steps", 4, 0.4
    assert says(figure).startswith("LeNet with batch norm at batch 16, learning rate 0.4: ")
    figure.batch_size = 1  # for which 0.4 was recorded, too
    assert figure.lr == 0.4
    figure.batch_size, figure.lr = 4096, 6.3
    figure.batch_size = 1  # 6.3 was not: the nearest
    assert figure.lr == 0.4


def test_what_the_page_sends_is_taken_together(says):
    """As ipywidgets hands it on: several values in one message, or one with which the other no longer goes."""
    figure = explorer(batch_size=4096, lr=6.3)
    figure.set_state({"batch_size": 1, "lr": 0.01})
    assert (figure.batch_size, figure.lr) == (1, 0.01)
    figure.set_state({"lr": 0.4, "batch_norm": True, "budget": "steps", "num_gpus": 8})
    figure.set_state({"batch_size": 4096, "lr": 1})  # JavaScript knows no 1.0
    assert figure.lr == 1.0 and says(figure).startswith("LeNet with batch norm at batch 4096, learning rate 1: ")
    figure.lr = 6.3
    figure.set_state({"batch_size": 16})
    assert (figure.batch_size, figure.lr) == (16, 2.5)


def test_the_start_is_the_best_rate_of_its_batch_size():
    net, norm = (shown_by("TuningExplorer")["nets"][name] for name in ("LeNet", "LeNet with batch norm"))
    assert explorer().batch_size == 256
    for b in SIZES:
        assert explorer(batch_size=b, batch_norm=True).lr == explorer_data.best(norm, "epochs", b)[1]
        assert explorer(batch_size=b).lr == explorer_data.best(net, "epochs", b)[1]
        assert loop(batch_size=b).lr == explorer_data.best(net, "epochs", b)[1]


def test_what_is_missing_stays_empty_and_the_rest_is_shown(says):
    grid = recorded.study("tuning")
    some = [run for run in grid["runs"] if run["batch_size"] in (256, 4096) and run["seed"] == 0]
    figure = TuningExplorer(explorer_data.explorer_data({**grid, "runs": some}))
    assert figure.net()["batch_sizes"] == [256, 4096]
    assert "one seed" in says(figure)
    del figure.data["nets"]["LeNet"]
    assert says(TuningExplorer(figure.data)).startswith("LeNet with batch norm at batch 256")


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


@pytest.mark.parametrize(
    "values, words",
    [
        (
            {"lr": 0.16, "num_gpus": 4},
            "accuracy 84.3% after 4 epochs (860 steps), 83.1% to 85.2% over 3 seeds. That is 5.0 points below the best "
            "cell (batch 4, rate 0.025), and 64 times as fast. An epoch takes 195 ms on 4 V100s with 64 images each "
            "(modelled).",
        ),
        (
            {"batch_size": 64, "lr": 1.0},
            "diverged within 64 steps (all 3 seeds). At this batch size 0.4 is the largest rate at which none did. An "
            "epoch takes 665 ms on one V100 (modelled).",
        ),
        (
            {"batch_size": 4, "lr": 0.025, "num_gpus": 8},
            "accuracy 89.3% after 4 epochs (55,000 steps), 89.1% to 89.7% over 3 seeds. No cell of this map is better. "
            "An epoch takes 12.5 s on 8 V100s, 4 of them without an image (modelled).",
        ),
        (
            {"batch_size": 4096, "lr": 0.4, "budget": "steps"},
            "accuracy 80.3% after 215 steps (880,640 images), 79.7% to 80.9% over 3 seeds. As good as the best cell "
            "(batch 1024, rate 0.4) within the spread of the seeds, and 3.6 times as slow. An epoch takes 142 ms on "
            "one V100 (modelled).",
        ),
    ],
)
def test_sentences(says, values, words):
    figure = explorer(**{"batch_size": 256, **values})
    name = figure.network + " with batch norm" * figure.batch_norm
    assert says(figure) == f"{name} at batch {figure.batch_size}, learning rate {figure.lr:g}: {words}"


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
    assert root.locator(".mgpu-times").text_content() == "s/epoch39.59.872.470.670.230.160.14"


def test_a_place_among_the_rates_goes_by_their_ratio(calls):
    rates = [0.1, 0.2, 0.8]
    asked = {0.1: 0, 0.2: 1, 0.4: 1.5, 0.8: 2, 0.05: -1, 1.6: 2.5}
    found = calls(TuningExplorer, "(asked, rates) => asked.map((lr) => place(lr, rates))", list(asked), rates)
    assert found == pytest.approx(list(asked.values()))
    assert calls(TuningExplorer, "place", 0.5, [0.5]) == 0


RULES = {"linear": linear_scaling, "root": sqrt_scaling}


@pytest.mark.parametrize("b, lr", [(256, 0.16), (1, 0.01), (4096, 6.3)])
@pytest.mark.sweep(3)
def test_the_rules_are_drawn_through_the_chosen_cell(page, write, calls, b, lr):
    figure = explorer(batch_size=b, lr=lr)
    rates = sorted({lr for row in figure.net()["rates"] for lr in row})
    wanted = {look: [scaled(lr, b, size) for size in SIZES] for look, scaled in RULES.items()}
    places = {
        look: calls(TuningExplorer, "(asked, rates) => asked.map((lr) => place(lr, rates))", row, rates)
        for look, row in wanted.items()
    }
    page.goto(write(figure))
    root = page.locator("figure.mgpu")
    for look in RULES:
        points = root.locator(f".mgpu-rules .mgpu-{look}").get_attribute("points")
        points = [tuple(map(float, point.split(","))) for point in points.split()]
        expected = [(i + 0.5, len(rates) - 0.5 - place) for i, place in enumerate(places[look])]
        for found, wanted in zip(points, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-6)
    # The picture's units are cells: the line goes through the middle of the chosen one.
    chosen, rules = root.locator("[aria-selected=true]").bounding_box(), root.locator(".mgpu-rules").bounding_box()
    x, y = dict(zip(SIZES, points, strict=True))[b]
    middle = rules["x"] + rules["width"] * x / len(SIZES), rules["y"] + rules["height"] * y / len(rates)
    wanted = chosen["x"] + chosen["width"] / 2, chosen["y"] + chosen["height"] / 2
    assert middle == pytest.approx(wanted, abs=1.5)


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": 256, "lr": 0.16},
        {"batch_size": 4096, "lr": 1.0, "budget": "steps"},
        {"batch_size": 256, "lr": 1.0},
        {"batch_size": 256, "lr": 6.3},
    ],
)
@pytest.mark.slow
def test_curves_are_drawn_to_scale(page, write, values):
    """Steps, or epochs, against accuracy: the points of every curve, from the records and the ticks of the scale."""
    page.goto(write(explorer(**values)))
    root, end = page.locator("figure.mgpu"), 215 if "budget" in values else 4 * math.ceil(55_000 / values["batch_size"])
    lines = root.locator(".mgpu-picture line.mgpu-scale").evaluate_all(
        "lines => lines.map((l) => [+l.getAttribute('y1'), +l.getAttribute('x1'), +l.getAttribute('x2')])"
    )
    (y95, left, right), _, _, (y50, *_), _ = lines[:5]
    names = root.locator(".mgpu-picture text.mgpu-quiet").all_text_contents()
    assert names[:5] == ["10%", "50%", "80%", "90%", "95%"]
    y95, y50 = lines[4][0], lines[1][0]

    def at(step, accuracy):
        across = math.log2(step) / math.log2(end) if "budget" in values else step / end
        up = (math.log(1 - accuracy) - math.log(0.5)) / (math.log(0.05) - math.log(0.5))
        return left + (right - left) * across, y50 + (y95 - y50) * up

    runs = [
        run | {name: recorded.numbers(run[name]) for name in ("step", "validation_accuracy")}
        for run in recorded.study("tuning")["runs"]
        if (run["net"], run["batch_size"], run["lr"]) == ("lenet", values["batch_size"], values["lr"])
    ]
    ended = [run for run in runs if (run["diverged_at_step"] or run["dead_at_step"] or math.inf) <= end]
    sound = [run for run in runs if run not in ended]
    expected = [
        [at(step, a) for step, a in zip(run["step"], run["validation_accuracy"], strict=True) if step <= end]
        for run in ended
    ]
    assert root.locator(".mgpu-picture polyline.mgpu-lost").count() == 2 * len(ended)
    assert root.locator(".mgpu-picture path.mgpu-cross").count() == 2 * len(ended)
    if sound:
        n = sum(step <= end for step in sound[0]["step"])
        mean = [statistics.mean(run["validation_accuracy"][i] for run in sound) for i in range(n)]
        expected.insert(0, [at(step, a) for step, a in zip(sound[0]["step"], mean)])
    looks = ["mgpu-mean"] * bool(sound) + ["mgpu-lost"] * len(ended)
    for i, (look, points) in enumerate(zip(looks, expected, strict=True)):
        for found, wanted in zip(drawn(root, look, i - bool(sound) if look == "mgpu-lost" else 0), points, strict=True):
            assert found == pytest.approx(wanted, abs=0.6)  # accuracies are cut to whole 0.01 %


# A colour is drawn before it is read: the browser then says it in red, green and blue.
CONTRAST = """() => {
    const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const light = (color) => {
        pen.fillStyle = color;
        pen.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    return [...document.querySelectorAll(".mgpu-map [role=gridcell] span")].filter((e) => e.textContent).map((e) => {
        const {color, backgroundColor} = getComputedStyle(e);
        const [a, b] = [light(color), light(backgroundColor)];
        return [Math.max(a, b) / Math.min(a, b), e.textContent];
    });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.sweep(2)
def test_every_number_of_the_map_stands_out(page, write, theme):
    page.goto(write(explorer()))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    page.evaluate("theme => theme === 'dark' && (document.body.style.color = '#ced6dd')", theme)
    found = page.evaluate(CONTRAST)
    assert len(found) == 9 * len(SIZES)
    assert min(found)[0] >= 4.5, sorted(found)[:5]


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
