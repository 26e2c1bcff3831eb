"""Why is two slower than one? The figure; tests/experiments/test_why_slower.py is about its recorded grid."""

import itertools
import json
import re

import figure_pages
import pytest
from figure_pages import picture
from figure_samples import why, why_grid

from mgpu_lib import recorded as results
from mgpu_lib.widgets import WhySlower

write, says, calls = figure_pages.write, figure_pages.says, figure_pages.calls
NAMES = ("gpu", "link", "network", "strategy", "num_gpus", "batch_size")
LENGTHS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def recorded():
    return json.loads((results.RESULTS / "why_slower.json").read_text(encoding="utf-8"))


def all_states(data):
    """The values of all controls that a figure with this grid can have."""
    parts = (data[part] for part in ("networks", "strategies", "counts", "batch_sizes"))
    states = itertools.product(data["links"], ("nvlink", "pcie"), *parts)
    return [dict(zip(NAMES, state, strict=True)) for state in states]


def select(root, name):
    return root.get_by_role("combobox", name=re.compile(f"^{name}"))


def slider(root, name):
    return root.get_by_role("slider", name=re.compile(f"^{name}"))


def test_a_grid_that_is_none_is_refused(monkeypatch, tmp_path):
    incomplete, uneven = why_grid(), why_grid()
    del incomplete["counts"]
    uneven["cells"]["T4/LeNet"].pop()
    for bad, words in ((incomplete, "counts"), (uneven, r"3 batch sizes.*\[2, 3\]"), ([], "list"), ({}, "links")):
        with pytest.raises(ValueError, match=words):
            WhySlower(bad)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape("python -m experiments.why_slower")):
        WhySlower()


def test_sentence(says):
    assert says(why(batch_size=32, strategy="data_parallel")) == (
        "LeNet at batch 32, modelled on 2 V100 (NVLink 2, 6 links): 123 µs per step, one takes 100 µs: slower, "
        "0.81 times as fast. Compute bound: kernels run for 75% of the step, which smaller shards hardly shorten."
    )
    assert says(why(batch_size=32, strategy="ddp", num_gpus=4)) == (
        "LeNet at batch 32, modelled on 4 V100 (NVLink 2, 6 links): 20.0 µs per step, one takes 100 µs: 5.00 times as "
        "fast. Compute bound: kernels run for 75% of the step, so 4 GPUs pay."
    )
    assert says(why(link="pcie")) == (
        "LeNet at batch 64, modelled on 2 V100 (PCIe 3.0 x16): 540 µs per step, one takes 200 µs: slower, 0.37 times "
        "as fast. The bottleneck is launching: a GPU waits 45% of the step for the host, which launches the work of "
        "all GPUs, one after the other."
    )
    assert says(why(strategy="ddp", gpu="T4")).endswith(
        "The bottleneck is communication: for 46% of the step a GPU only sends, receives, or waits for another."
    )
    assert says(why(num_gpus=1)) == (
        "LeNet at batch 64, modelled on one V100: 200 µs per step. The bottleneck is launching: a GPU waits 60% of the "
        "step for the host, which launches kernels more slowly than the GPU runs them."
    )
    assert says(why(num_gpus=4, batch_size=128)) == (
        "LeNet at batch 128, modelled on 4 V100 (NVLink 2, 6 links): 0.10 µs per step, and does not fit into the "
        "memory of one. The bottleneck is communication: for 50% of the step a GPU only sends, receives, or waits for "
        "another."
    )
    assert says(why(batch_size=128)) == (
        "LeNet at batch 128, modelled on 2 V100 (NVLink 2, 6 links), does not fit into the memory."
    )


@pytest.mark.parametrize("which", ["made-up", "recorded"])
def test_every_cell_says_its_numbers(calls, which, recorded):
    data = recorded if which == "recorded" else why_grid()
    states = all_states(data)
    said = calls(WhySlower, "(data, states) => states.map((at) => whySentence(data, at))", data, states)
    for state, words in zip(states, said, strict=True):
        gpu, link, network, strategy, k, batch_size = state.values()
        link = link if link in data["links"][gpu] else "pcie"

        def shares(*parts, batch_size=batch_size):
            return data["cells"]["/".join(map(str, parts))][data["batch_sizes"].index(batch_size)].split()[:4]

        one = shares(gpu, network)
        many = one if k == 1 else shares(gpu, link, network, strategy, k)
        assert words.startswith(f"{network} at batch {batch_size}, modelled on {'one' if k == 1 else k} {gpu}")
        assert (data["links"][gpu][link] in words) == (k > 1)
        assert words.endswith("does not fit into the memory.") == (not many)
        assert (", and does not fit into the memory of one." in words) == bool(k > 1 and many and not one)
        if many:
            ticks, kernels, communication, host = map(int, many)
            kind = "Compute bound" if kernels >= 750 else "launching" if host >= communication else "communication"
            assert kind in words
        if many and one and k > 1:
            times = float(re.search(r"([\d.]+) times as fast", words)[1])
            assert times == pytest.approx(int(one[0]) / ticks, abs=0.00501)
            assert (": slower, " in words) == (times < 1)
    kinds = ("is launching", "is communication", "GPUs pay", "does not fit into the memory.", "times as fast", "of one")
    assert all(any(kind in words for words in said) for kind in kinds)


def test_marks_say_how_many_times_as_fast_and_what_does_not_fit(page, write):
    page.goto(write(why(strategy="ddp")))
    marks = page.locator(".mgpu-marks span")

    def read_marks():
        return [mark.evaluate("e => e.firstChild.textContent") for mark in marks.all()]

    assert read_marks() == ["5.0", "10.0", "×"]
    assert marks.nth(2).get_attribute("class") == "mgpu-fails"
    slider(page, "Number of GPUs").press("End")
    assert read_marks() == ["5.0", "10.0", "●"]
    slider(page, "Number of GPUs").press("Home")
    assert read_marks() == ["●", "●", "×"]


def test_steps_are_drawn_to_scale(page, write):
    page.goto(write(why(num_gpus=4, strategy="data_parallel")))
    ticks, _, _, _, *rows = why_grid()["cells"]["V100/nvlink/LeNet/data_parallel/4"][1].split()
    ticks = int(ticks)
    drawn = page.locator(".mgpu-run").evaluate_all("""runs => runs.map((run) =>
        [run.classList[0], ...["x", "y", "width"].map((name) => +run.getAttribute(name))])""")
    left = min(x for _, x, _, _ in drawn)
    span = picture(page).evaluate("picture => picture.clientWidth") - 1 - left
    steps = [(20_000, "wa9fk4bk5"), *((ticks, row) for row in rows)]
    looks = {"f": "forward", "b": "backward", "u": "update", "c": "communication", "w": "waits", "o": "away"}
    expected = []
    for whole, row in steps:
        x = left
        for i in range(0, len(row), 3):
            width = span * whole / 20_000 * LENGTHS.index(row[i + 1]) / 50
            expected.append((f"mgpu-{looks[row[i].lower()]}", x, width - 0.6))
            x += width
    assert [run[0] for run in drawn] == [run[0] for run in expected]
    for (_, x, _, width), (_, right_x, right_width) in zip(drawn, expected, strict=True):
        assert (x, width) == (pytest.approx(right_x, abs=0.01), pytest.approx(right_width, abs=0.01))
    assert len({y for _, _, y, _ in drawn}) == 5
    full = page.locator(".mgpu-full-part").evaluate_all("parts => parts.map((part) => +part.getAttribute('height'))")
    assert full[:2] == pytest.approx([20 * 4 / 9, 20 * 5 / 9])
    assert page.locator(".mgpu-beside").count() == 4
    ideal = float(page.locator(".mgpu-picture .mgpu-ideal").get_attribute("x1"))
    assert ideal == pytest.approx(left + span / 4, abs=0.01)
