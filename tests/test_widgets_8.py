"""The explorers of batch size and learning rate: recorded runs in a page, and the Train button in JupyterLab."""

import copy
import itertools
import json
import math
import re
import statistics
import threading
import time

import figure_pages
import nbformat
import pytest
from figure_pages import (
    CLASHES,
    DARK,
    HOSTILE,
    SMALLEST,
    assert_dark_has_colours_of_its_own,
    assert_pictures_show_without_javascript,
    picture,
    sentence,
)
from live import accept, run_cell
from traitlets import TraitError

import mgpu_lib as mgpu
from experiments import tuning, tuning_runs
from mgpu_lib import devices, trial
from mgpu_lib.tuning import linear_scaling, sqrt_scaling
from mgpu_lib.widgets import LoopExplorer, TuningExplorer, recorded, train
from mgpu_lib.widgets.base import EXPORT, module
from mgpu_lib.widgets.explorer_pictures import LEVELS, color, place

write = figure_pages.write
SCRIPTS = ("time.js", "cells.js", "heatmap.js", "curves.js", "trainbutton.js", "explorer.js")
SIZES = (1, 16, 256, 4096)
IMAGES = 55_000


def made_run(net, batch_size, lr, seed):
    """A run in the form in which the grid records it, from a formula: too slow, good, diverged."""
    per_epoch = math.ceil(IMAGES / batch_size)
    limit = {1: 0.1, 16: 0.7, 256: 1.5, 4096: 2.0}[batch_size] * (1 + 0.4 * seed) * (2 if net == "lenet_bn" else 1)
    run = {"net": net, "batch_size": batch_size, "seed": seed, "lr": lr, "step": [], "train_loss": [],
           "validation_accuracy": [], "test_accuracy": {}, "diverged_at_step": None, "dead_at_step": None}
    for step in tuning_runs.marks(per_epoch, 4, 215):
        if lr > 3 * limit and step > 4:  # not finite at step 5: no measurement any more
            run["diverged_at_step"] = 5
            return run
        learned = 1 - math.exp(-((step * lr / (3 + step * batch_size**-0.5 / 500)) ** 0.7))
        run["step"].append(step)
        run["train_loss"].append(round(2.4 - 2.1 * learned + 0.01 * seed, 5))
        run["validation_accuracy"].append(round((0.1 + 0.8 * learned + 0.004 * seed) * 5000) / 5000)
        if lr > limit and step >= 100:
            run["dead_at_step"] = step
            return run
    return run


def made_grid(nets=("lenet", "lenet_bn"), seeds=(0, 1, 2)):
    runs = [made_run(net, b, lr, seed)
            for net, b, seed in itertools.product(nets, SIZES, seeds) for lr in tuning.learning_rates(b)]
    recipe = {"epochs": 4, "steps": 215, "validation": 5000}
    return {"recipe": recipe, "trained_on": IMAGES, "runs": runs}


@pytest.fixture(scope="module")
def grid():
    return made_grid()


@pytest.fixture(scope="module")
def data(grid):
    return recorded.explorer_data(grid)


@pytest.fixture(scope="module")
def loop(grid):
    return recorded.explorer_data(grid, nets=("lenet",), budgets=("epochs",), strategy="manual")


def in_page(value):
    """As the page gets it."""
    return json.loads(json.dumps(value))


# The recorded grid


def test_finished_parts_and_the_whole_grid_give_the_same_data(grid, data, monkeypatch, tmp_path):
    parts = tmp_path / "tuning.unfinished"
    parts.mkdir()
    for net, b, seed in itertools.product(("lenet", "lenet_bn"), SIZES, (0, 1, 2)):
        runs = [{name: value for name, value in run.items() if name not in ("net", "batch_size", "seed")}
                for run in grid["runs"] if (run["net"], run["batch_size"], run["seed"]) == (net, b, seed)]
        part = parts / f"{net}-{b}-{seed}-{runs[0]['lr']}.json"
        part.write_text(json.dumps({"recipe": grid["recipe"], "runs": runs}))
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    assert recorded.explorer_data(recorded.read_grid()) == data
    joined = [tuning.packed((run["net"], run["batch_size"], run["seed"]), run) for run in grid["runs"]]
    (tmp_path / "tuning.json").write_text(json.dumps({**grid, "runs": joined}))
    assert isinstance(recorded.read_grid()["runs"][0]["step"], str)
    assert recorded.explorer_data(recorded.read_grid()) == data == in_page(data)


def test_what_is_missing_stays_empty_and_the_rest_is_shown(grid):
    some = {**grid, "runs": [run for run in grid["runs"] if run["batch_size"] > 16 and run["seed"] == 0]}
    figure = TuningExplorer(recorded.explorer_data(some))
    assert figure.net()["batch_sizes"] == [256, 4096]
    assert "one seed" in figure.sentence()
    alone = {**grid, "runs": [run for run in some["runs"] if run["net"] == "lenet_bn"]}
    figure = TuningExplorer(recorded.explorer_data(alone))
    assert figure.sentence().startswith("LeNet with batch norm at batch 256")


def test_a_grid_that_is_none_is_refused(grid, monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    for explorer in (TuningExplorer, LoopExplorer):
        with pytest.raises(FileNotFoundError, match=r"python -m experiments\.tuning"):
            explorer()
    with pytest.raises(ValueError, match="KeyError: 'train_loss'"):
        broken = copy.deepcopy(grid)
        del broken["runs"][0]["train_loss"]
        recorded.explorer_data(broken)
    for bad in ({}, None, []):
        with pytest.raises(ValueError, match="isn't what"):
            recorded.explorer_data(bad)
    with pytest.raises(ValueError, match="no grid has a run of resnet18"):
        recorded.explorer_data(grid, nets=("resnet18",))
    parts = {f"lenet-1-{seed}": {"recipe": {"validation": 1, "sha256": seed}, "runs": []} for seed in (0, 1)}
    with pytest.raises(ValueError, match="2 parts have 2 recipes"):
        recorded.join(parts)


def test_cells_hold_what_was_recorded(grid, data):
    """Finals, divergence and best cells, found once more from the records themselves."""
    for key, name in (("lenet", "LeNet"), ("lenet_bn", "LeNet with batch norm")):
        net = data["nets"][name]
        for budget, b in itertools.product(("epochs", "steps"), SIZES):
            means = {}
            end = 215 if budget == "steps" else 4 * math.ceil(IMAGES / b)
            for lr in tuning.learning_rates(b):
                runs = [run for run in grid["runs"] if (run["net"], run["batch_size"], run["lr"]) == (key, b, lr)]
                ends = [run["diverged_at_step"] or run["dead_at_step"] or math.inf for run in runs]
                there = recorded.cell(net, b, lr, budget)
                assert (there.end, there.seeds) == (end, 3)
                assert sorted(there.diverged) == sorted(at for at in ends if at <= end)
                finals = [run["validation_accuracy"][run["step"].index(end)]
                          for run, at in zip(runs, ends, strict=True) if at > end]
                assert there.finals == sorted(round(10_000 * final) for final in finals)
                if finals:
                    assert there.rounded(10) / 10 == pytest.approx(100 * statistics.mean(finals), abs=0.0501)
                if len(finals) == 3:
                    means[lr] = statistics.mean(finals)
            assert means[recorded.best(net, budget, b)[1]] == pytest.approx(max(means.values()))


def test_a_run_that_dies_between_the_budgets_counts_in_the_longer_one(data):
    net = data["nets"]["LeNet"]
    died = [(b, lr) for b, rates in zip(net["batch_sizes"], net["rates"], strict=True) for lr in rates
            if not recorded.cell(net, b, lr, "epochs").diverged and recorded.cell(net, b, lr, "steps").diverged]
    assert died and {b for b, _ in died} == {4096}  # the only one for which 215 steps are more than 4 epochs


def test_times_are_those_of_predict(data, loop):
    for strategy, there in (("ddp", data), ("manual", loop)):
        net = there["nets"]["LeNet"]
        for b, k in ((256, 4), (4096, 2)):
            steps, epochs = net["times"][net["batch_sizes"].index(b)]
            step = recorded.step_seconds("lenet", b, k, strategy)
            rest = recorded.step_seconds("lenet", IMAGES % b, k, strategy)
            column = there["counts"].index(k)
            assert steps[column] == pytest.approx(step / 1e-8, abs=1)
            assert epochs[column] * 1e-8 == pytest.approx(IMAGES // b * step + rest, rel=1e-4)
        one, *more = net["times"][0][0]
        assert all(ticks == one for ticks in more), "of one image, one GPU can work"


def test_the_loop_shows_epochs_of_lenet_only(loop):
    assert list(loop["nets"]) == ["LeNet"]
    net = loop["nets"]["LeNet"]
    assert net["budgets"] == {"epochs": 4}
    assert max(net["marks"][-1]) == 56


def test_the_real_grid_makes_figures():
    """With whatever parts of it are there."""
    try:
        grid = recorded.read_grid()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    net = next(iter(recorded.explorer_data(grid)["nets"].values()))
    assert net["images"] == IMAGES and net["budgets"] == {"epochs": tuning.EPOCHS, "steps": tuning.STEPS}
    for b, rates in zip(net["batch_sizes"], net["rates"], strict=True):
        assert rates == tuning.learning_rates(b)
    figure = TuningExplorer()
    assert "accuracy" in figure.sentence() and len(figure.static_html().encode()) < 200_000


def small_grid():
    """As experiments/resnet_grid.py writes it."""
    runs = {f"{b}/{lr}/{seed}": {"images": 3000, "diverged_at_step": 7 if lr > 1 else None, "seconds": 1.0,
                                 "train_loss": [] if lr > 1 else [1.5, 0.9],
                                 "validation_accuracy": [] if lr > 1 else [0.5 + lr, 0.6 + lr + seed / 100]}
            for b in (16, 64) for lr in (0.1, 0.2, 1.6) for seed in (0, 1)}
    return {"recipe": {"epochs": 2}, "runs": runs}


def test_the_small_grid_of_resnet18_joins_when_it_is_there(page, write, grid, monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    (tmp_path / "tuning.json").write_text(json.dumps(grid))
    assert len(recorded.read_grids()) == 1
    (tmp_path / "resnet_grid.json").write_text(json.dumps(small_grid()))
    figure = TuningExplorer(budget="steps")
    assert figure.known("network") == ["LeNet", "ResNet-18 on 3,000 images"]
    figure.network = "ResNet-18 on 3,000 images"
    assert (figure.budget, figure.batch_size, figure.lr) == ("epochs", 64, 0.2)
    figure.batch_size = 16
    assert figure.sentence().startswith("ResNet-18 on 3,000 images with batch norm at batch 16, learning rate 0.2: "
                                        "accuracy 80.5% after 2 epochs (376 steps), 80.0% to 81.0% over 2 seeds. ")
    page.goto(write(TuningExplorer(budget="steps", batch_size=16)))
    root = page.locator("figure.mgpu")
    control(root, "Network").select_option("ResNet-18 on 3,000 images")
    control(root, "Learning rate").fill("1")
    assert sentence(root) == figure.sentence()
    assert control(root, "Compare at").locator("option:disabled").all_text_contents() == ["equal steps"]
    assert control(root, "Batch norm").locator("option:disabled").all_text_contents() == ["without"]
    assert control(root, "Batch norm").input_value() == "true"
    control(root, "Learning rate").press("End")
    assert "diverged within 7 steps (all 2 seeds)" in sentence(root)


# Reading and setting from Python


def test_values_are_read_and_set_from_python(data):
    figure = TuningExplorer(data, batch_size=16, lr=0.16)
    assert repr(figure) == (
        "TuningExplorer(network='LeNet', batch_norm=False, budget='epochs', num_gpus=1, batch_size=16, lr=0.16)")
    figure.batch_norm, figure.budget, figure.num_gpus, figure.lr = True, "steps", 4, 0.4
    assert figure.sentence().startswith("LeNet with batch norm at batch 16, learning rate 0.4: ")
    figure.batch_size = 1  # for which 0.4 was recorded, too
    assert figure.lr == 0.4
    figure.batch_size, figure.lr = 4096, 6.3
    figure.batch_size = 1  # 6.3 was not: the nearest
    assert figure.lr == 0.4


def test_what_the_page_sends_is_taken_together(data):
    """As ipywidgets hands it on: several values in one message, or one with which the other no longer goes."""
    figure = TuningExplorer(data, batch_size=4096, lr=6.3)
    figure.set_state({"batch_size": 1, "lr": 0.01})
    assert (figure.batch_size, figure.lr) == (1, 0.01)
    figure.set_state({"lr": 0.4, "batch_norm": True, "budget": "steps", "num_gpus": 8})
    figure.set_state({"batch_size": 4096, "lr": 1})  # JavaScript knows no 1.0
    assert figure.lr == 1.0 and figure.sentence().startswith("LeNet with batch norm at batch 4096, learning rate 1: ")
    figure.lr = 6.3
    figure.set_state({"batch_size": 16})
    assert (figure.batch_size, figure.lr) == (16, 2.5)


def test_the_start_is_the_best_rate_of_its_batch_size(data, loop):
    net, norm = data["nets"]["LeNet"], data["nets"]["LeNet with batch norm"]
    assert TuningExplorer(data).batch_size == 256
    for b in SIZES:
        assert TuningExplorer(data, batch_size=b, batch_norm=True).lr == recorded.best(norm, "epochs", b)[1]
        assert TuningExplorer(data, batch_size=b).lr == recorded.best(net, "epochs", b)[1]
        assert LoopExplorer(loop, batch_size=b).lr == recorded.best(net, "epochs", b)[1]


@pytest.mark.parametrize(("name", "value", "names"), [
    ("batch_size", 128, "choose one of 1, 16, 256, 4096"),
    ("lr", 0.2, r"choose one of 0\.004, .*6\.3 at batch size 256"),
    ("network", "VGG", "choose one of 'LeNet'"),
    ("budget", "hours", "choose one of 'epochs', 'steps'"),
    ("num_gpus", 3, "choose one of 1, 2, 4, 8"),
    ("batch_norm", "yes", "batch_norm"),
])
def test_what_was_not_recorded_is_refused(data, name, value, names):
    figure = TuningExplorer(data)
    before = getattr(figure, name)
    with pytest.raises(TraitError, match=names):
        setattr(figure, name, value)
    assert getattr(figure, name) == before
    with pytest.raises(TraitError, match=names):
        TuningExplorer(data, **{name: value})


# What it says


def test_sentences(data, loop):
    time = "An epoch takes 226 ms on one V100 (modelled)."
    for values, words in (
        ({"lr": 0.16, "num_gpus": 4},
         "accuracy 90.4% after 4 epochs (860 steps), 90.0% to 90.8% over 3 seeds. As good as the best cell (batch 1, "
         "rate 0.063) within the spread of the seeds, and 212 times as fast. An epoch takes 186 ms on 4 V100s with 64 "
         "images each (modelled)."),
        ({"lr": 0.004},
         "accuracy 63.1% after 4 epochs (860 steps), 62.7% to 63.5% over 3 seeds. That is 27.3 points below the best "
         f"cell (batch 1, rate 0.063), and 175 times as fast. {time}"),
        ({"lr": 6.3},
         "diverged within 108 steps (all 3 seeds). At this batch size 1 is the largest rate at which none did. "
         f"{time}"),
        ({"lr": 2.5},
         "accuracy 90.8% after 4 epochs (860 steps), one seed. 2 of 3 seeds diverged, within 108 steps. At this batch "
         f"size 1 is the largest rate at which none did. {time}"),
        ({"batch_size": 1, "lr": 0.063, "num_gpus": 4},
         "accuracy 90.4% after 4 epochs (220,000 steps), 90.0% to 90.8% over 3 seeds. No cell of this map is better. "
         "An epoch takes 39.4 s on 4 V100s, 3 of them without an image (modelled)."),
        ({"batch_size": 4096, "lr": 1.0, "budget": "steps"},
         "accuracy 90.4% after 215 steps (880,640 images), 90.0% to 90.8% over 3 seeds. As good as the best cell "
         "(batch 16, rate 0.4) within the spread of the seeds, and 15 times as slow. An epoch takes 141 ms on one V100 "
         "(modelled)."),
    ):
        figure = TuningExplorer(data, **{"batch_size": 256, **values})
        assert figure.sentence() == f"LeNet at batch {figure.batch_size}, learning rate {figure.lr:g}: {words}"
    assert LoopExplorer(loop, batch_size=4096, lr=0.4, num_gpus=8).sentence() == (
        "LeNet at batch 4096, learning rate 0.4: accuracy 89.1% after 4 epochs (56 steps), 88.7% to 89.5% over 3 "
        "seeds. An epoch takes 113 ms on 8 V100s with 512 images each (modelled).")


def every_state(data):
    for name, net in data["nets"].items():
        for budget, k in itertools.product(net["budgets"], data["counts"]):
            for b, rates in zip(net["batch_sizes"], net["rates"], strict=True):
                for lr in rates:
                    yield {"network": "LeNet", "batch_norm": name != "LeNet", "budget": budget, "num_gpus": k,
                           "batch_size": b, "lr": lr}


@pytest.mark.parametrize("which", ["map", "loop", "one seed", "guessing"])
def test_the_page_says_of_every_cell_what_python_says(page, which, data, loop, grid):
    few = {**grid, "runs": [run for run in grid["runs"] if run["seed"] == 0 and run["batch_size"] > 1]}
    dull = {**grid, "runs": [{**run, "validation_accuracy": [0.1] * 99} if run["lr"] == 1 else run
                             for run in grid["runs"]]}
    figure = (TuningExplorer(data) if which == "map" else LoopExplorer(loop) if which == "loop" else
              TuningExplorer(recorded.explorer_data(few if which == "one seed" else dull)))
    page.goto("about:blank")
    page.add_script_tag(content=module(*SCRIPTS).removesuffix(EXPORT))
    states = list(every_state(figure.data))
    said = page.evaluate("([data, states]) => states.map((at) => explorerSentence(data, at))",
                         [in_page(figure.data), states])
    expected = []
    for state in states:
        with figure.hold_trait_notifications():
            for name, value in state.items():
                setattr(figure, name, value)
        expected.append(figure.sentence())
    assert said == expected
    assert any("accuracy 10.0% (no better than guessing) after" in words for words in said) == (which == "guessing")
    if which == "map":
        kinds = ("No cell of this map", "As good as", "points below", "largest rate", "times as slow", "times as fast",
                 "of 3 seeds diverged", "all 3 seeds", "without an image", "images each")
        assert all(any(kind in words for words in said) for kind in kinds)


def test_map_and_picture_have_the_same_scales(page):
    page.goto("about:blank")
    page.add_script_tag(content=module(*SCRIPTS).removesuffix(EXPORT))
    assert page.evaluate("LEVELS") == list(LEVELS)
    rates = tuning.learning_rates(256)
    asked = [0.0001, 0.004, 0.005, 0.16, 1.7, 6.3, 40]
    assert page.evaluate("([asked, rates]) => asked.map((lr) => place(lr, rates))", [asked, rates]) == pytest.approx(
        [place(lr, rates) for lr in asked])


# The output


def test_html_is_deterministic_small_and_self_contained(data, loop):
    for make in (lambda: TuningExplorer(data), lambda: LoopExplorer(loop), lambda: TuningExplorer(data, lr=0.4)):
        html = make().static_html()
        assert html == make().static_html()
        assert len(html.encode()) < 130_000
        assert not re.findall(r"(?:src|href)=[\"'](?!data:)|\bimport\b[ (]|@import|url\((?!#)", html)
    assert TuningExplorer(data, lr=0.4).static_html() != TuningExplorer(data, lr=1.0).static_html()


def test_scripts_may_stand_inside_a_script_element():
    assert module(*SCRIPTS).endswith(EXPORT)
    assert not re.search(r"</script|<!--|^import |^export (?!default)", module(*SCRIPTS), re.IGNORECASE | re.MULTILINE)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_of_networks_stay_names(page, write, data, name):
    hostile = {**data, "nets": {name: data["nets"]["LeNet"], **data["nets"]}}
    figure = TuningExplorer(hostile, network=name)
    page.goto(write(figure))
    assert page.evaluate("window.hacked") is None
    assert page.get_by_role("combobox", name="Network").input_value() == name
    assert page.locator("[role=status]").text_content() == figure.sentence()


# The picture in the browser


def control(root, name):
    return root.get_by_label(re.compile(f"^{name}"))  # a menu's label goes on with its options


def cell(root, batch_size, lr):
    return root.get_by_role("gridcell", name=re.compile(rf"^batch size {batch_size}, learning rate {re.escape(lr)}:"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_explorer_is_moved_by_keyboard(page, write, theme, data):
    page.goto(write(TuningExplorer(data, lr=0.16)))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root, seen = page.locator("figure.mgpu"), []

    def expect(**values):
        figure = TuningExplorer(data, **{"batch_size": 256, **values})
        assert sentence(root) == figure.sentence() == picture(page).get_attribute("aria-label")
        assert control(root, "Batch size").get_attribute("aria-valuetext") == str(figure.batch_size)
        assert control(root, "Learning rate").get_attribute("aria-valuetext") == f"{figure.lr:g}"
        chosen = root.locator("[aria-selected=true]")
        assert chosen.get_attribute("aria-label").startswith(
            f"batch size {figure.batch_size}, learning rate {figure.lr:g}: ")
        shot = picture(page).screenshot(), root.get_by_role("grid").screenshot()
        assert shot not in seen
        seen.append(shot)

    expect(lr=0.16)
    control(root, "Learning rate").press("ArrowRight")
    expect(lr=0.4)
    control(root, "Batch size").press("ArrowLeft")
    expect(lr=0.4, batch_size=16)
    control(root, "Batch size").press("Home")
    expect(lr=0.4, batch_size=1)
    control(root, "Batch size").press("End")
    control(root, "Learning rate").press("End")
    expect(lr=6.3, batch_size=4096)
    control(root, "Batch size").press("Home")  # where 6.3 was not recorded
    control(root, "Batch norm").press("ArrowDown")
    control(root, "Compare at").press("ArrowDown")
    control(root, "Number of GPUs").press("ArrowDown")
    expect(lr=0.4, batch_size=1, batch_norm=True, budget="steps", num_gpus=2)

    page.keyboard.press("Tab")  # into the map, to the chosen cell
    assert page.evaluate("document.activeElement.ariaSelected") == "true"
    for key, lr, batch_size in (("ArrowRight", 0.4, 16), ("ArrowUp", 1.0, 16), ("ArrowRight", 1.0, 256),
                                ("ArrowDown", 0.4, 256), ("End", 0.4, 4096), ("Home", 0.4, 1)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.ariaSelected") == "true"
        if key != "Home":
            expect(lr=lr, batch_size=batch_size, batch_norm=True, budget="steps", num_gpus=2)
    for _ in range(20):
        page.keyboard.press("ArrowDown")
    assert sentence(root).startswith("LeNet with batch norm at batch 1, learning rate 0.00025: ")
    assert root.locator("[role=gridcell][tabindex='0']").count() == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_explorer_is_moved_by_pointer(page, write, theme, data):
    page.goto(write(TuningExplorer(data, lr=0.16)))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root = page.locator("figure.mgpu")
    cell(root, 16, "0.063").click()
    assert sentence(root) == TuningExplorer(data, batch_size=16, lr=0.063).sentence()
    cell(root, 4096, "6.3").click()  # the last of a row, under the end of a line
    assert sentence(root) == TuningExplorer(data, batch_size=4096, lr=6.3).sentence()
    box = control(root, "Batch size").bounding_box()
    page.mouse.click(box["x"] + 8, box["y"] + box["height"] / 2)
    control(root, "Batch norm").select_option("with")
    control(root, "Compare at").select_option("equal steps")
    control(root, "Number of GPUs").select_option("8 GPUs")
    figure = TuningExplorer(data, batch_size=1, lr=0.4, batch_norm=True, budget="steps", num_gpus=8)
    assert sentence(root) == figure.sentence()
    empty = root.get_by_role("gridcell", name="not recorded").first
    empty.click(force=True)
    assert sentence(root) == figure.sentence()


def test_the_map_shows_accuracies_divergence_and_the_best_of_each_batch_size(page, write, data):
    figure = TuningExplorer(data)
    page.goto(write(figure))
    root, net = page.locator("figure.mgpu"), figure.net()
    for b, rates in zip(net["batch_sizes"], net["rates"], strict=True):
        for lr in rates:
            there, element = recorded.cell(net, b, lr, "epochs"), cell(root, b, f"{lr:g}")
            words = f"{there.rounded(100)}" if there.finals else ""
            assert element.text_content() == words + "×" * bool(there.diverged)
            best = recorded.best(net, "epochs", b)[1] == lr
            assert element.get_attribute("aria-label").endswith(", best of this batch size") == best
            assert ("mgpu-best" in element.get_attribute("class")) == best
            assert ("diverged" in element.get_attribute("aria-label")) == bool(there.diverged)
    assert root.get_by_role("columnheader").all_text_contents() == ["batch", "1", "16", "256", "4096"]
    rows = root.get_by_role("rowheader").all_text_contents()
    assert rows == [f"{lr:g}" for lr in sorted({lr for row in net["rates"] for lr in row}, reverse=True)]
    assert root.locator(".mgpu-map-title b").text_content() == "accuracy after 4 epochs, in %"
    control(root, "Compare at").select_option("equal steps")
    assert root.locator(".mgpu-map-title b").text_content() == "accuracy after 215 steps, in %"
    assert root.locator(".mgpu-times").text_content() == "s/epoch39.42.460.230.14"


@pytest.mark.parametrize("b, lr", [(256, 0.16), (1, 0.01), (4096, 6.3)])
def test_the_rules_are_drawn_through_the_chosen_cell(page, write, data, b, lr):
    figure = TuningExplorer(data, batch_size=b, lr=lr)
    page.goto(write(figure))
    root, rates = page.locator("figure.mgpu"), sorted({lr for row in figure.net()["rates"] for lr in row})
    for look, scaled in (("linear", linear_scaling), ("root", sqrt_scaling)):
        points = root.locator(f".mgpu-rules .mgpu-{look}").get_attribute("points")
        points = [tuple(map(float, point.split(","))) for point in points.split()]
        expected = [(i + 0.5, len(rates) - 0.5 - place(scaled(lr, b, size), rates)) for i, size in enumerate(SIZES)]
        for found, wanted in zip(points, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-6)
    # The picture's units are cells: the line goes through the middle of the chosen one.
    chosen, rules = root.locator("[aria-selected=true]").bounding_box(), root.locator(".mgpu-rules").bounding_box()
    x, y = dict(zip(SIZES, points, strict=True))[b]
    middle = rules["x"] + rules["width"] * x / len(SIZES), rules["y"] + rules["height"] * y / len(rates)
    wanted = chosen["x"] + chosen["width"] / 2, chosen["y"] + chosen["height"] / 2
    assert middle == pytest.approx(wanted, abs=1.5)


def drawn(root, look, nth=0):
    points = root.locator(f".mgpu-picture polyline.{look}").nth(nth).get_attribute("points")
    return [tuple(map(float, point.split(","))) for point in points.split()]


@pytest.mark.parametrize("values", [
    {"batch_size": 256, "lr": 0.16}, {"batch_size": 4096, "lr": 1.0, "budget": "steps"},
    {"batch_size": 256, "lr": 2.5}, {"batch_size": 256, "lr": 6.3}])
def test_curves_are_drawn_to_scale(page, write, data, grid, values):
    """Steps, or epochs, against accuracy: the points of every curve, from the records and the ticks of the scale."""
    page.goto(write(TuningExplorer(data, **values)))
    root, end = page.locator("figure.mgpu"), 215 if "budget" in values else 4 * math.ceil(IMAGES / values["batch_size"])
    lines = root.locator(".mgpu-picture line.mgpu-scale").evaluate_all(
        "lines => lines.map((l) => [+l.getAttribute('y1'), +l.getAttribute('x1'), +l.getAttribute('x2')])")
    (y95, left, right), _, _, (y50, *_), _ = lines[:5]
    names = root.locator(".mgpu-picture text.mgpu-quiet").all_text_contents()
    assert names[:5] == ["10%", "50%", "80%", "90%", "95%"]
    y95, y50 = lines[4][0], lines[1][0]

    def at(step, accuracy):
        across = math.log2(step) / math.log2(end) if "budget" in values else step / end
        up = (math.log(1 - accuracy) - math.log(0.5)) / (math.log(0.05) - math.log(0.5))
        return left + (right - left) * across, y50 + (y95 - y50) * up
    runs = [run for run in grid["runs"] if (run["net"], run["batch_size"], run["lr"])
            == ("lenet", values["batch_size"], values["lr"])]
    ended = [run for run in runs if (run["diverged_at_step"] or run["dead_at_step"] or math.inf) <= end]
    sound = [run for run in runs if run not in ended]
    expected = [[at(step, a) for step, a in zip(run["step"], run["validation_accuracy"], strict=True) if step <= end]
                for run in ended]
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


def test_loop_is_moved_by_keyboard_and_has_no_map(page, write, loop):
    page.goto(write(LoopExplorer(loop)))
    root = page.locator("figure.mgpu")
    assert root.get_by_role("grid").count() == root.get_by_label("Batch norm").count() == 0
    assert root.get_by_label("Compare at").count() == 0
    control(root, "Learning rate").press("Home")
    control(root, "Batch size").press("End")
    control(root, "Number of GPUs").press("ArrowDown")
    assert sentence(root) == LoopExplorer(loop, batch_size=4096, lr=0.004, num_gpus=2).sentence()


@pytest.mark.parametrize("dark", DARK)
def test_dark_has_colours_of_its_own(page, write, dark, data):
    page.goto(write(TuningExplorer(data)))
    names = ["[role=gridcell].mgpu-level9", ".mgpu-gone span", ".mgpu-modelled", "figcaption", "select", ".mgpu-band",
             "text.mgpu-quiet"]
    assert_dark_has_colours_of_its_own(page, dark, names)


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
def test_every_number_of_the_map_stands_out(page, write, theme, data):
    page.goto(write(TuningExplorer(data)))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    page.evaluate("theme => theme === 'dark' && (document.body.style.color = '#ced6dd')", theme)
    found = page.evaluate(CONTRAST)
    assert len(found) == 36
    assert min(found)[0] >= 4.5, sorted(found)[:5]


@pytest.mark.parametrize("width", [360, 320, 700, 1280])
def test_no_words_lie_on_each_other_and_every_cell_can_be_touched(page, write, width, data, loop):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(write(TuningExplorer(data), LoopExplorer(loop)))
    for budget, b in itertools.product(("equal epochs", "equal steps"), range(len(SIZES))):
        control(page.locator("figure.mgpu").nth(0), "Compare at").select_option(budget)
        for n in (0, 1):
            control(page.locator("figure.mgpu").nth(n), "Batch size").fill(str(b))
        assert page.evaluate(CLASHES) == [], (budget, b)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALLEST) >= 12
    for box in (e.bounding_box() for e in page.get_by_role("gridcell").all()):
        assert box["width"] >= 24 and box["height"] >= 24
    outside = page.locator(".mgpu-map span").evaluate_all("""spans => spans.filter((span) => {
        const map = span.closest(".mgpu-map").getBoundingClientRect(), box = span.getBoundingClientRect();
        return span.textContent && (box.left < map.left - 1 || box.right > map.right + 1);
    }).map((span) => span.textContent)""")
    assert outside == []


def test_every_control_has_a_name_a_visible_focus_and_its_own_keys(page, write, data):
    page.goto(write(TuningExplorer(data)))
    controls = page.locator(".mgpu :is(input, select, button)")
    assert controls.count() == 2 + 3, "nobody listens to a Train button on a page"
    for element in controls.all():
        assert element.evaluate("e => e.labels[0].textContent.trim()")
        assert element.get_attribute("data-lm-suppress-shortcuts") == "true"
        page.keyboard.press("Tab")
        assert element.evaluate("e => e === document.activeElement")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.role") == "gridcell"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
    assert page.get_by_role("grid").get_attribute("data-lm-suppress-shortcuts") == "true"


@pytest.mark.parametrize("where", ["a page of its own", "chapter 8"])
def test_it_can_be_used_within_a_second(page, write, data, loop, where, request):
    """From the start of the navigation until a click on the map has been answered; the best of three."""
    if where == "chapter 8":
        address = (request.getfixturevalue("book") / "chapters/08-batch-size-and-learning-rate.html").as_uri()
    else:
        address = write(TuningExplorer(data), LoopExplorer(loop))
    seconds = []
    for _ in range(3):
        page.goto(address, wait_until="commit")
        seconds.append(page.evaluate("""() => new Promise((done) => {
            const look = () => {
                const cell = document.querySelector("[aria-label^='batch size 16, learning rate 0.063:']");
                if (!cell) return setTimeout(look, 1);
                cell.click();
                done(cell.ariaSelected === "true" ? performance.now() / 1000 : NaN);
            };
            look();
        })"""))
    assert min(seconds) < 1


def test_two_copies_on_one_page_do_not_disturb_each_other(page, write, data):
    page.goto(write(TuningExplorer(data), TuningExplorer(data, batch_size=16), TuningExplorer(data)))
    roots = page.locator("figure.mgpu")
    before = [sentence(roots.nth(n)) for n in (1, 2)]
    cell(roots.nth(0), 1, "0.01").click()
    control(roots.nth(0), "Number of GPUs").select_option("2 GPUs")
    assert sentence(roots.nth(0)) == TuningExplorer(data, batch_size=1, lr=0.01, num_gpus=2).sentence()
    assert [sentence(roots.nth(n)) for n in (1, 2)] == before


def test_without_javascript_the_map_or_the_curves_and_their_caption_show(browser, write, data, loop):
    best = TuningExplorer(data)
    figures = {color(best.cell()): best, "#0072b2": LoopExplorer(loop, batch_size=16, lr=0.004)}
    assert_pictures_show_without_javascript(browser, write(*figures.values()), figures)


# Training


@pytest.fixture
def trained(monkeypatch, data, loop):
    """Make an explorer whose training has ended by the time the test is over, and virtual GPUs are off again."""
    figures = []

    def make(kind=TuningExplorer, **values):
        figures.append(kind(data if kind is TuningExplorer else loop, **values))
        return figures[-1]

    yield make
    for figure in figures:
        figure.cancel(wait=60)
        figure.close()
    while mgpu.current_machine():
        mgpu.current_machine().stop()
    devices._started = None


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_of(figure):
    wait_until(lambda: figure.run["state"] != "running")
    return figure.run


def test_train_runs_the_trial_on_these_gpus(trained, capsys):
    figure = trained(batch_size=256, lr=0.16, num_gpus=2)
    figure.train()
    assert figure.run["state"] == "running" and figure.job.running()
    run = end_of(figure)
    assert (run["state"], run["words"], run["same"]) == ("done", "", False)
    assert run["data"] == trial.whole_data().name and run["gpus"] == "2 virtual GPUs"
    assert (run["per_epoch"], run["steps"], run["marks"][-1]) == (6, 24, 24)  # 1,375 images, 4 epochs
    expected = [at for at in trial.trial(trial.whole_data(), 256, 0.16, 24, [trial.torch.device("cpu")])
                if at.accuracy is not None]
    assert run["marks"] == [at.step for at in expected]
    early = [at for at in expected if at.step <= 8]
    assert run["loss"][:len(early)] == pytest.approx([1000 * at.train_loss for at in early], rel=0.01, abs=1)
    assert len(run["accuracy"]) == len(run["marks"])


def test_train_with_batch_norm_and_equal_steps(trained):
    figure = trained(batch_size=16, lr=0.16, num_gpus=2, batch_norm=True, budget="steps")
    figure.train()
    run = end_of(figure)
    assert (run["state"], run["steps"], run["batch_norm"]) == ("done", 215, True)
    assert run["accuracy"][-1] > 8000


def test_train_says_that_it_diverged(trained):
    figure = trained(LoopExplorer, batch_size=256, lr=6.3)
    figure.train()
    run = end_of(figure)
    assert run["state"] == "done" and run["diverged"] <= 24


def test_cancel_stops_within_a_step_and_keeps_what_was_measured(trained):
    figure = trained(batch_size=1, lr=0.01)
    figure.train()
    wait_until(lambda: len(figure.run["marks"]) >= 2)
    figure.cancel(wait=20)
    assert not figure.job.running()
    assert figure.run["state"] == "cancelled" and figure.run["marks"][:2] == [2, 4]
    assert figure.run["marks"][-1] < figure.run["steps"]
    figure.cancel()  # nothing to do


def test_a_new_run_stops_the_one_before_also_that_of_another_figure(trained):
    first, second = trained(batch_size=1, lr=0.01), trained(LoopExplorer, batch_size=1, lr=0.025)
    first.train()
    wait_until(lambda: first.run["marks"])
    old = first.job
    first.lr = 0.004
    first.train()
    wait_until(lambda: first.run["marks"])
    assert not old.running() and first.run["state"] == "running" and first.run["lr"] == 0.004
    second.train()
    wait_until(lambda: second.run["marks"])
    assert first.run["state"] == "cancelled" and not first.job.running()
    assert second.run["state"] == "running"
    assert sum(thread.name == "mgpu-train" for thread in threading.enumerate()) == 1


def test_what_is_chosen_after_the_start_changes_nothing(trained, monkeypatch):
    """Also while the run before it is still at a step, or the data are read."""
    gate, whole = threading.Event(), trial.whole_data
    monkeypatch.setattr(trial, "whole_data", lambda check: gate.wait(20) and whole())
    figure = trained(batch_size=256, lr=0.16, batch_norm=True)
    figure.train()
    figure.batch_norm, figure.budget, figure.batch_size = False, "steps", 1
    gate.set()
    run = end_of(figure)
    assert (run["state"], run["steps"], run["batch_norm"], run["batch_size"]) == ("done", 24, True, 256)
    assert run["accuracy"][-1] > 8000, "with batch norm; without it is slower"


def test_closing_the_widget_stops_its_training(trained):
    figure = trained(batch_size=1, lr=0.01)
    figure.train()
    wait_until(lambda: figure.run["marks"])
    figure.close()
    figure.job.thread.join(20)
    assert not figure.job.running()


def test_what_goes_wrong_is_said_in_words(trained, monkeypatch):
    def broken(check):
        raise OSError("the disk is full")
    monkeypatch.setattr(trial, "whole_data", broken)
    figure = trained()
    figure.train()
    assert end_of(figure)["words"] == "OSError: the disk is full"
    assert figure.run["state"] == "failed"


def test_a_network_that_would_take_too_long_is_refused(trained, data):
    figure = TuningExplorer({**data, "nets": {"ResNet-18 with batch norm": data["nets"]["LeNet"]}})
    figure.train()
    assert "ResNet-18 with batch norm would take too long" in end_of(figure)["words"]


def test_training_leaves_other_modelled_times_alone(trained):
    machine = devices.use_gpus(2) and mgpu.current_machine()
    figure = trained(batch_size=256, lr=0.16, num_gpus=2)
    before = machine.elapsed(), len(machine.timeline)
    figure.train()
    assert end_of(figure)["state"] == "done"
    assert (machine.elapsed(), len(machine.timeline)) == before
    assert all(stream.free <= machine.clock.host().now for gpu in machine.gpus for stream in gpu.streams)


def test_training_leaves_virtual_gpus_on(trained):
    """Of whatever kind: tensors of other cells lie on them."""
    devices.use_gpus(1, "H100")
    machine = mgpu.current_machine()
    figure = trained(batch_size=256, lr=0.16, num_gpus=2)
    figure.train()
    assert end_of(figure)["state"] == "done"
    assert mgpu.current_machine() is machine and len(machine.devices) == 2


def test_other_gpus_turned_on_meanwhile_end_it_with_words(trained):
    figure = trained(batch_size=1, lr=0.01)
    figure.train()
    wait_until(lambda: figure.run["marks"])
    with mgpu.virtual_gpus(1):
        assert end_of(figure)["state"] == "failed"
    assert "press Train again" in figure.run["words"]


def test_messages_of_the_two_buttons(trained):
    figure = trained(batch_size=1, lr=0.01)
    figure._handle_custom_msg({"do": "something else"}, [])
    assert figure.run == {}
    figure._handle_custom_msg({"do": "train"}, [])
    wait_until(lambda: figure.run["marks"])
    figure._handle_custom_msg({"do": "cancel"}, [])
    assert end_of(figure)["state"] == "cancelled"


def test_progress_is_told_as_it_goes(trained, monkeypatch):
    told = []
    monkeypatch.setattr(train, "PAUSE_S", 0.0)
    monkeypatch.setattr(TuningExplorer, "send", lambda self, content: told.append(content))
    figure = trained(batch_size=256, lr=0.16)
    figure.train()
    end_of(figure)
    assert [at["step"] for at in told] == list(range(1, 25))
    assert told[-1]["left"] == 0 and all(at["left"] > 0 for at in told[:-1])


# The module as anywidget loads it, with a model that notes what it is asked
LIVE = """async ([source, data, values]) => {
    const heard = {}, saved = [], sent = [], state = {...values, caption: "c", data, run: {}};
    window.model = {
        get: (key) => state[key],
        set(key, value) { state[key] = value; (heard[`change:${key}`] || []).forEach((f) => f()); },
        on: (name, f) => (heard[name] ??= []).push(f),
        off: (name, f) => { heard[name] = heard[name].filter((other) => other !== f); },
        save_changes: () => saved.push({...state}),
        send: (content) => sent.push(content),
    };
    Object.assign(window, { heard, saved, sent });
    const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    window.show = () => widget.render({ model, el: document.body.appendChild(document.createElement("div")) });
    window.leave = show();
}"""


@pytest.fixture
def live(page, write, data):
    def open_live(**values):
        figure = TuningExplorer(data, **values)
        page.goto(write())
        values = {name: getattr(figure, name) for name in figure.controls}
        page.evaluate(LIVE, [module(*SCRIPTS), in_page(figure.data), values])
        return figure
    return open_live


def test_module_keeps_anywidgets_protocol(page, live):
    live(batch_size=4096, lr=6.3)
    control(page, "Batch size").press("Home")
    saved = page.evaluate("saved.map((values) => [values.batch_size, values.lr])")
    assert saved == [[1, 0.4]], "both values at once: Python never sees a rate that the batch size doesn't have"
    page.evaluate("model.set('batch_size', 256); model.set('lr', 0.16)")  # as when Python sets them
    root = page.locator("figure.mgpu")
    settled = "words => document.querySelector('.mgpu-sentence').textContent === words"
    page.wait_for_function(settled, arg=TuningExplorer(recorded.explorer_data(made_grid()), lr=0.16).sentence())
    root.get_by_role("button", name="Train on this machine").click()
    page.evaluate("model.set('run', {...model.get('run'), state: 'running', steps: 0})")
    root.get_by_role("button", name="Cancel").click()
    assert page.evaluate("sent") == [{"do": "train"}, {"do": "cancel"}]
    page.evaluate("show()()")
    assert page.evaluate("sent.length") == 2, "who closes one of two views does not cancel"
    assert page.evaluate("leave(); Object.values(heard).flat().length") == 0
    assert page.evaluate("sent.slice(2)") == [{"do": "cancel"}], "who closes the figure can't cancel any more"


RUN = {"network": "LeNet", "batch_norm": False, "budget": "epochs", "num_gpus": 2, "batch_size": 256, "lr": 0.16,
       "state": "running", "words": "", "diverged": None, "data": "Fashion-MNIST, 60,000 training images", "same": True,
       "per_epoch": 215, "steps": 860, "gpus": "2 virtual GPUs", "marks": [2, 430, 860], "accuracy": [1000, 8500, 9010],
       "loss": [2303, 700, 400]}


def own_words(page):
    return page.locator(".mgpu-train [role=status]").text_content()


def test_a_sentence_that_stays_is_not_said_again(page, live):
    live(batch_size=256, lr=0.16)
    page.evaluate("""() => {
        window.said = 0;
        const count = new MutationObserver((changes) => { said += changes.length; });
        count.observe(document.querySelector(".mgpu-sentence"), {childList: true, characterData: true, subtree: true});
    }""")
    page.evaluate("run => model.set('run', run)", RUN)
    page.wait_for_timeout(400)  # longer than a slider rests before its sentence is said
    assert page.evaluate("said") == 0
    page.evaluate("model.set('lr', 0.4)")
    page.wait_for_function("said > 0")


def test_a_run_is_drawn_over_the_recorded_ones_of_its_cell(page, live):
    live(batch_size=256, lr=0.16)
    root = page.locator("figure.mgpu")
    assert page.locator(".mgpu-train progress").is_hidden() and own_words(page) == ""
    page.evaluate("run => model.set('run', run)", RUN)
    assert len(drawn(root, "mgpu-own")) == 3
    recorded_curve = drawn(root, "mgpu-mean")
    for x, _ in drawn(root, "mgpu-own")[1:]:  # 85.0 and 90.1 %, next to the curve of the seeds at the same epochs
        assert any(abs(x - other) < 0.2 for other, _ in recorded_curve)
    assert own_words(page) == ("Training LeNet at batch 256, learning rate 0.16 on 2 virtual GPUs, with Fashion-MNIST, "
                               "60,000 training images.")
    page.evaluate("heard['msg:custom'][0]({step: 430, left: 61.2})")
    assert page.locator(".mgpu-train progress").evaluate("e => e.value / e.max") == 0.5
    assert page.locator(".mgpu-left").text_content() == "step 430 of 860, 61 seconds left"
    page.evaluate("run => model.set('run', run)", {**RUN, "state": "done"})
    assert page.locator(".mgpu-train progress").is_hidden()
    assert own_words(page).endswith(": accuracy 90.1% after 860 steps; recorded: 90.0% to 90.8%.")
    cell(root, 16, "0.063").click()
    assert page.locator(".mgpu-own").count() == 1, "only in the legend: it was another cell's run"


def test_a_run_with_other_images_says_so(page, live):
    live(batch_size=256, lr=0.16)
    root = page.locator("figure.mgpu")
    other = {**RUN, "state": "done", "data": "scikit-learn's handwritten digits, 1,500 training images", "same": False,
             "per_epoch": 6, "steps": 24, "marks": [2, 12, 24]}
    page.evaluate("run => model.set('run', run)", other)
    assert own_words(page).endswith(": accuracy 90.1% after 24 steps. These are other images than the recorded ones: "
                                    "compare the shapes, not the numbers.")
    assert page.locator(".mgpu-picture polyline.mgpu-other-data").count() == 2
    left, right = drawn(root, "mgpu-mean")[0][0], drawn(root, "mgpu-mean")[-1][0]
    first, middle, last = (x for x, _ in drawn(root, "mgpu-own"))
    assert last == pytest.approx(right, abs=0.2), "four epochs of theirs are four epochs of ours"
    assert left < middle < right and first < middle


@pytest.mark.parametrize("changes, words", [
    ({"state": "running", "steps": 0}, "Loading the data."),
    ({"state": "failed", "words": "OSError: the disk is full"}, "Training stopped: OSError: the disk is full"),
    ({"state": "cancelled", "steps": 0}, "Cancelled."),
    ({"state": "cancelled"}, "60,000 training images: accuracy 90.1% after 860 steps."),
    ({"state": "done", "diverged": 32}, "Diverged within 32 steps: LeNet at batch 256"),
    ({"state": "done", "batch_norm": True}, "Each GPU normalizes with its own images"),
    ({"state": "done", "lr": 6.3}, "; the recorded runs diverged."),
])
def test_a_run_in_words(page, live, changes, words):
    live(batch_size=256, lr=0.16)
    page.evaluate("run => model.set('run', run)", {**RUN, **changes})
    assert words in own_words(page)


def test_the_live_figure_fits_a_telephone(page, live):
    page.set_viewport_size({"width": 360, "height": 800})
    live(batch_size=256, lr=0.16)
    page.evaluate("run => model.set('run', run)", RUN)
    page.evaluate("heard['msg:custom'][0]({step: 430, left: 61.2})")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(CLASHES) == [] and page.evaluate(SMALLEST) >= 12


def test_train_and_cancel_in_jupyterlab(browser, lab, data):
    """A notebook driven as a reader does: Python sets, the map is clicked, Train runs, Cancel stops."""
    address, token, folder = lab
    (folder / "explorer.json").write_text(json.dumps(data))
    sources = (
        "import json\nfrom mgpu_lib.widgets import TuningExplorer\n"
        "figure = TuningExplorer(json.load(open('explorer.json')), num_gpus=2)\nfigure",
        "figure.batch_size, figure.lr = 4096, 0.4\nprint('Python set', figure.batch_size, figure.lr)",
        "print('Python reads', figure.batch_size, figure.lr, figure.run['state'], figure.run['marks'][-1])",
        "print('Python reads again', figure.run['state'], figure.run['marks'][-1] < 5500, figure.job.running())",
        "job = figure.job\nprint('it runs:', job.running())",
        "job.thread.join(20)\nprint('it goes on:', job.running())",
    )
    cells = [nbformat.v4.new_code_cell(source, id=f"explorer-{n}") for n, source in enumerate(sources)]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=spec), folder / "explorer.ipynb")
    context = browser.new_context(viewport={"width": 1280, "height": 2400})
    context.set_default_timeout(120_000)
    context.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
    try:
        page = context.new_page()
        page.add_locator_handler(page.locator(".jp-Dialog"), accept)
        page.goto(f"{address}/lab/tree/explorer.ipynb?token={token}")
        root = page.locator(".jp-OutputArea figure.mgpu")
        run_cell(page, 0, root)
        run_cell(page, 1, page.get_by_text("Python set 4096 0.4"))
        root.locator("[aria-selected=true][aria-label^='batch size 4096, learning rate 0.4:']").wait_for()
        cell(root, 256, "0.16").click()
        page.keyboard.press("ArrowDown")
        words = root.locator(".mgpu-sentence")
        words.get_by_text("learning rate 0.063").wait_for()
        train_button, cancel = (root.get_by_role("button", name=name) for name in ("Train on this machine", "Cancel"))
        train_button.click()
        said = root.locator(".mgpu-train [role=status]")
        said.get_by_text("Training LeNet at batch 256, learning rate 0.063 on 2 virtual GPUs").wait_for()
        said.get_by_text("Trained: LeNet at batch 256, learning rate 0.063 on 2 virtual GPUs").wait_for()
        assert "These are other images than the recorded ones" in said.text_content()
        assert root.locator(".mgpu-picture circle.mgpu-own-mark").count() == 2 * len(trial.marks(6, 24))
        run_cell(page, 2, page.get_by_text("Python reads 256 0.063 done 24"))

        control(root, "Batch size").press("Home")
        train_button.click()
        root.locator(".mgpu-left").get_by_text("of 5,500").wait_for()
        assert cancel.get_attribute("aria-disabled") == "false"
        cancel.click()
        said.get_by_text("Cancelled: LeNet at batch 1").wait_for()
        assert cancel.get_attribute("aria-disabled") == "true"
        run_cell(page, 3, page.get_by_text("Python reads again cancelled True False"))
        assert root.count() == 1, "the live widget should be shown, and the static page not beside it"

        train_button.click()
        root.locator(".mgpu-left").get_by_text("of 5,500").wait_for()
        run_cell(page, 4, page.get_by_text("it runs: True"))
        run_cell(page, 0, root.locator("[aria-selected=true][aria-label^='batch size 256']"))  # a new figure
        run_cell(page, 5, page.get_by_text("it goes on: False"))
    finally:
        context.close()
