"""The Train button: runs of the reader's own, in a thread, drawn over the recorded ones."""

import json
import threading
from pathlib import Path

import nbformat
import pytest
import torch
from figure_pages import CLASHES, SMALLEST, cell, control, drawn, sentence
from figure_samples import explorer, loop, shown_by
from live import accept, browsing, run_cell
from ranks import happens

import mgpu_lib as mgpu
from mgpu_lib import data as library_data
from mgpu_lib import devices, training
from mgpu_lib.widgets import TuningExplorer

# Training


@pytest.fixture
def trained():
    """Make an explorer whose training has ended by the time the test is over, and virtual GPUs are off again."""
    figures = []

    def make(kind=explorer, **values):
        figures.append(kind(**values))
        return figures[-1]

    yield make
    for figure in figures:
        figure.cancel(wait=600)
        figure.close()
    while mgpu.current_machine():
        mgpu.current_machine().stop()
    devices._started = None


def end_of(figure):
    assert happens(lambda: figure.run["state"] != "running")
    return figure.run


@pytest.mark.slow
def test_train_runs_on_these_gpus_and_leaves_their_modelled_times_alone(trained):
    """Of whatever kind they are: tensors of other cells lie on them."""
    devices.use_gpus(2, "H100")
    machine = mgpu.current_machine()
    before = machine.elapsed(), len(machine.timeline)
    figure = trained(batch_size=256, lr=0.16, num_gpus=2)
    figure.train()
    assert figure.run["state"] == "running" and figure.job.running()
    run = end_of(figure)
    assert (run["state"], run["words"], run["same"]) == ("done", "", False)
    assert run["data"] == library_data.whole_data().name and run["gpus"] == "2 virtual GPUs"
    assert (run["per_epoch"], run["steps"], run["marks"][-1]) == (6, 24, 24)  # 1,375 images, 4 epochs
    expected = [
        at
        for at in training.validated_steps(library_data.whole_data(), 256, 0.16, 24, [torch.device("cpu")])
        if at.accuracy is not None
    ]
    assert run["marks"] == [at.step for at in expected]
    early = [at for at in expected if at.step <= 8]
    assert run["loss"][: len(early)] == pytest.approx([1000 * at.train_loss for at in early], rel=0.01, abs=1)
    assert len(run["accuracy"]) == len(run["marks"])
    assert mgpu.current_machine() is machine and (machine.elapsed(), len(machine.timeline)) == before
    assert all(stream.done_at <= machine.clock.host().now for gpu in machine.gpus for stream in gpu.streams)


def test_cancel_stops_within_a_step_and_keeps_what_was_measured(trained):
    figure = trained(batch_size=1, lr=0.01)
    figure._handle_custom_msg({"do": "something else"}, [])
    assert figure.run == {}
    figure._handle_custom_msg({"do": "train"}, [])  # as the page's button asks
    assert happens(lambda: len(figure.run["marks"]) >= 2)
    figure._handle_custom_msg({"do": "cancel"}, [])
    figure.cancel(wait=600)
    assert not figure.job.running()
    assert figure.run["state"] == "cancelled" and figure.run["marks"][:2] == [2, 4]
    assert figure.run["marks"][-1] < figure.run["steps"]
    figure.cancel()  # nothing to do


def test_a_new_run_stops_the_one_before_also_that_of_another_figure(trained):
    first, second = trained(batch_size=1, lr=0.01), trained(loop, batch_size=1, lr=0.025)
    first.train()
    assert happens(lambda: first.run["marks"])
    old = first.job
    first.lr = 0.004
    first.train()
    assert happens(lambda: first.run["marks"])
    assert not old.running() and first.run["state"] == "running" and first.run["lr"] == 0.004
    second.train()
    assert happens(lambda: second.run["marks"])
    assert first.run["state"] == "cancelled" and not first.job.running()
    assert second.run["state"] == "running"
    assert sum(thread.name == "mgpu-train" for thread in threading.enumerate()) == 1
    second.close()
    second.job.thread.join(600)
    assert not second.job.running(), "who closes a figure stops its training"


@pytest.mark.slow
def test_what_is_chosen_after_the_start_changes_nothing(trained, monkeypatch):
    """Also while the run before it is still at a step, or the data are read."""
    gate, whole = threading.Event(), library_data.whole_data
    monkeypatch.setattr(library_data, "whole_data", lambda check: gate.wait(600) and whole())
    figure = trained(batch_size=256, lr=0.16, batch_norm=True)
    figure.train()
    figure.batch_norm, figure.budget, figure.batch_size = False, "steps", 1
    gate.set()
    run = end_of(figure)
    assert (run["state"], run["steps"], run["batch_norm"], run["batch_size"]) == ("done", 24, True, 256)
    assert run["accuracy"][-1] > 8000, "with batch norm; without it is slower"


def test_what_goes_wrong_is_said_in_words(trained, monkeypatch):
    monkeypatch.setattr(library_data, "whole_data", lambda check: Path("/no such folder/data").read_text())
    figure = trained()
    figure.train()
    assert end_of(figure)["words"].startswith("FileNotFoundError: ") and figure.run["state"] == "failed"


def test_a_network_that_would_take_too_long_is_refused():
    data = shown_by("TuningExplorer")
    figure = TuningExplorer({**data, "nets": {"ResNet-18 with batch norm": data["nets"]["LeNet"]}})
    figure.train()
    assert "ResNet-18 with batch norm would take too long" in end_of(figure)["words"]


def test_other_gpus_turned_on_meanwhile_end_it_with_words(trained):
    figure = trained(batch_size=1, lr=0.01)
    figure.train()
    assert happens(lambda: figure.run["marks"])
    with mgpu.virtual_gpus(1):
        assert end_of(figure)["state"] == "failed"
    assert "press Train again" in figure.run["words"]


# In the page


@pytest.fixture
def shown(live):
    """The explorer with a batch size of 256 and a rate of 0.16 in a page in which Python listens."""
    return live(explorer(batch_size=256, lr=0.16), sends=True)


def test_the_buttons_ask_python(page, live, says):
    root = live(explorer(batch_size=4096, lr=6.3), sends=True)
    control(root, "Batch size").press("Home")
    saved = page.evaluate("saved.map((values) => [values.batch_size, values.lr])")
    assert saved == [[1, 0.4]], "both values at once: Python never sees a rate that the batch size doesn't have"
    page.evaluate("model.set('batch_size', 256); model.set('lr', 0.16)")  # as when Python sets them
    assert sentence(root) == says(explorer(lr=0.16))
    root.get_by_role("button", name="Train on this machine").click()
    page.evaluate("model.set('run', {...model.get('run'), state: 'running', steps: 0})")
    root.get_by_role("button", name="Cancel").click()
    assert page.evaluate("sent") == [{"do": "train"}, {"do": "cancel"}]
    page.evaluate("show()()")
    assert page.evaluate("sent.length") == 2, "who closes one of two views does not cancel"
    assert page.evaluate("leave(); Object.values(heard).flat().length") == 0
    assert page.evaluate("sent.slice(2)") == [{"do": "cancel"}], "who closes the figure can't cancel any more"


CHOSEN = {"network": "LeNet", "batch_norm": False, "budget": "epochs", "num_gpus": 2, "batch_size": 256, "lr": 0.16}
MEASURED = {"marks": [2, 430, 860], "accuracy": [1000, 8500, 9010], "loss": [2303, 700, 400]}
DATA = {"data": "Fashion-MNIST, 60,000 training images", "same": True, "per_epoch": 215, "steps": 860}
RUN = CHOSEN | MEASURED | DATA | {"state": "running", "words": "", "diverged": None, "gpus": "2 virtual GPUs"}


def own_words(page):
    return page.locator(".mgpu-train [role=status]").text_content()


def test_a_run_is_drawn_over_the_recorded_ones_of_its_cell(page, shown):
    root = shown
    assert page.locator(".mgpu-train progress").is_hidden() and own_words(page) == ""
    page.evaluate("run => model.set('run', run)", RUN)
    assert len(drawn(root, "mgpu-own")) == 3
    recorded_curve = drawn(root, "mgpu-mean")
    for x, _ in drawn(root, "mgpu-own")[1:]:  # 85.0 and 90.1 %, next to the curve of the seeds at the same epochs
        assert any(abs(x - other) < 0.2 for other, _ in recorded_curve)
    assert own_words(page) == (
        "Training LeNet at batch 256, learning rate 0.16 on 2 virtual GPUs, with Fashion-MNIST, 60,000 training images."
    )
    page.evaluate("heard['msg:custom'][0]({step: 430, left: 61.2})")
    assert page.locator(".mgpu-train progress").evaluate("e => e.value / e.max") == 0.5
    assert page.locator(".mgpu-left").text_content() == "step 430 of 860, 61 seconds left"
    page.evaluate("run => model.set('run', run)", {**RUN, "state": "done"})
    assert page.locator(".mgpu-train progress").is_hidden()
    assert own_words(page).endswith(": accuracy 90.1% after 860 steps; recorded: 83.1% to 85.2%.")
    cell(root, 16, "0.063").click()
    assert page.locator(".mgpu-own").count() == 1, "only in the legend: it was another cell's run"


def test_a_run_with_other_images_says_so(page, shown):
    root = shown
    digits = {"data": "handwritten digits", "same": False, "per_epoch": 6, "steps": 24, "marks": [2, 12, 24]}
    page.evaluate("run => model.set('run', run)", RUN | digits | {"state": "done"})
    assert "90.1% after 24 steps. These are other images than the recorded ones: compare the shapes" in own_words(page)
    assert page.locator(".mgpu-picture polyline.mgpu-other-data").count() == 2
    left, right = drawn(root, "mgpu-mean")[0][0], drawn(root, "mgpu-mean")[-1][0]
    first, middle, last = (x for x, _ in drawn(root, "mgpu-own"))
    assert last == pytest.approx(right, abs=0.2), "four epochs of theirs are four epochs of ours"
    assert left < middle < right and first < middle


def test_a_run_in_words(page, shown):
    for changes, words in (
        ({"state": "running", "steps": 0}, "Loading the data."),
        ({"state": "failed", "words": "OSError: no"}, "Training stopped: OSError: no"),
        ({"state": "cancelled", "steps": 0}, "Cancelled."),
        ({"state": "done", "diverged": 32}, "Diverged within 32 steps: LeNet at batch 256"),
        ({"state": "done", "batch_norm": True}, "Each GPU normalizes with its own images"),
        ({"state": "done", "lr": 6.3}, "; the recorded runs diverged."),
    ):
        page.evaluate("run => model.set('run', run)", {**RUN, **changes})
        assert words in own_words(page)


def test_the_live_figure_fits_a_telephone(page, shown):
    page.set_viewport_size({"width": 360, "height": 800})
    page.wait_for_function("document.querySelector('.mgpu-picture').clientWidth < 360")
    page.evaluate("run => model.set('run', run)", RUN)
    page.evaluate("heard['msg:custom'][0]({step: 430, left: 61.2})")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(CLASHES) == [] and page.evaluate(SMALLEST) >= 12


@pytest.mark.slow
def test_train_and_cancel_in_jupyterlab(browser, lab):
    """A notebook driven as a reader does: Python sets, the map is clicked, Train runs, Cancel stops."""
    address, token, folder = lab
    (folder / "explorer.json").write_text(json.dumps(shown_by("TuningExplorer")))
    sources = (
        "import json\nfrom mgpu_lib.widgets import TuningExplorer\n"
        "figure = TuningExplorer(json.load(open('explorer.json')), num_gpus=2)\nfigure",
        "figure.batch_size, figure.lr = 4096, 0.4\nprint('Python set', figure.batch_size, figure.lr)",
        "print('Python reads', figure.batch_size, figure.lr, figure.run['state'], figure.run['marks'][-1])",
        "print('Python reads again', figure.run['state'], figure.run['marks'][-1] < 5500, figure.job.running())",
    )
    cells = [nbformat.v4.new_code_cell(source, id=f"explorer-{n}") for n, source in enumerate(sources)]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=spec), folder / "explorer.ipynb")
    with browsing(browser, address, height=2400) as page:
        page.add_locator_handler(page.locator(".jp-Dialog"), accept)
        page.goto(f"{address}/lab/tree/explorer.ipynb?token={token}")
        root = page.locator(".jp-OutputArea figure.mgpu")
        run_cell(page, 0, root)
        run_cell(page, 1, page.get_by_text("Python set 4096 0.4"))
        root.locator("[aria-selected=true][aria-label*=': batch size 4096, learning rate 0.4:']").wait_for()
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
        assert root.locator(".mgpu-picture circle.mgpu-own-mark").count() == 2 * len(training.validation_steps(6, 24))
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
