"""Why is two slower than one? The figure; tests/experiments/test_why_slower.py is about its recorded grid."""

import copy
import itertools
import re

import pytest
from figure_pages import control, drawn_boxes, picture

from mgpu_lib.widgets import WhySlower

NAMES = ("gpu", "link", "network", "strategy", "num_gpus", "batch_size")
LENGTHS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def data():
    return WhySlower().data


def test_a_grid_that_is_none_is_refused(data):
    uneven = copy.deepcopy(data)
    uneven["cells"]["T4/LeNet"].pop()
    for bad, words in ((uneven, r"8 batch sizes.*\[7, 8\]"), ([], "list"), ({}, "links")):
        with pytest.raises(ValueError, match=words):
            WhySlower(bad)


SENTENCES = {
    ("T4", "pcie", "LeNet", "data_parallel", 2, 32): (
        "LeNet at batch 32, modelled on 2 T4 (PCIe 3.0 x16): 982 µs per step, one takes 617 µs: slower, 0.63 times as "
        "fast. The bottleneck is launching: a GPU waits 38% of the step for the host, where one process copies the "
        "network and launches the work of all GPUs."
    ),
    ("T4", "pcie", "ResNet-18", "manual", 2, 128): (
        "1.50 times as fast. Compute bound: kernels run for 81% of the step, so 2 GPUs pay."
    ),
    ("T4", "pcie", "ResNet-18", "manual", 2, 32): (
        "The bottleneck is communication: for 37% of the step a GPU only sends, receives, or waits for another."
    ),
    ("A100-80", "nvlink", "LeNet", "manual", 1, 32): (
        "a GPU waits 27% of the step for the host, which launches kernels more slowly than the GPU runs them."
    ),
}


def test_sentences(says):
    for state, words in SENTENCES.items():
        assert says(WhySlower(**dict(zip(NAMES, state, strict=True)))).endswith(words)


def test_every_cell_says_its_numbers(calls, data):
    parts = (data[part] for part in ("networks", "strategies", "counts", "batch_sizes"))
    cases = [*itertools.product(data["links"], ("nvlink", "pcie"), *parts)]
    states = [dict(zip(NAMES, case, strict=True)) for case in cases]
    said = calls(WhySlower, "(data, states) => states.map((at) => whySentence(data, at))", data, states)
    for (gpu, link, network, strategy, k, batch_size), words in zip(cases, said, strict=True):
        link = link if link in data["links"][gpu] else "pcie"
        names = f"{gpu}/{network}", f"{gpu}/{network}" if k == 1 else f"{gpu}/{link}/{network}/{strategy}/{k}"
        one, many = (data["cells"][name][data["batch_sizes"].index(batch_size)].split()[:4] for name in names)
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


def test_marks_say_how_many_times_as_fast_and_what_does_not_fit(page, write, data):
    page.goto(write(WhySlower(gpu="T4", network="ResNet-50", strategy="ddp")))
    read = "marks => marks.map((e) => [e.firstChild.textContent, e.className.includes('mgpu-fails')])"

    def check(wanted):
        assert page.locator(".mgpu-marks span").evaluate_all(read) == [[mark, mark == "×"] for mark in wanted]

    control(page, "Number of GPUs").press("End")
    ones, manys = data["cells"]["T4/ResNet-50"], data["cells"]["T4/pcie/ResNet-50/ddp/8"]
    ticks = [(one and int(one.split()[0]), many and int(many.split()[0])) for one, many in zip(ones, manys)]
    check([f"{one / many:.1f}" if one and many else "●" if many else "×" for one, many in ticks])
    control(page, "Number of GPUs").press("Home")
    check(["●" if one else "×" for one in ones])


def test_steps_are_drawn_to_scale(page, write, data):
    page.goto(write(WhySlower(num_gpus=4, strategy="data_parallel", batch_size=64)))
    cells = (data["cells"][f"A100-80/{name}"][1].split() for name in ("LeNet", "nvlink/LeNet/data_parallel/4"))
    steps = [(int(ticks), row) for ticks, _, _, _, *rows in cells for row in rows]
    drawn = drawn_boxes(page, ".mgpu-run")
    left, longest = min(x for _, x, *_ in drawn), max(ticks for ticks, _ in steps)
    span = picture(page).evaluate("picture => picture.clientWidth") - 1 - left
    looks = {"f": "forward", "b": "backward", "u": "update", "c": "communication", "w": "waits", "o": "away"}
    expected = []
    for whole, row in steps:
        x = left
        for i in range(0, len(row), 3):
            width = span * whole / longest * LENGTHS.index(row[i + 1]) / 50
            expected.append((f"mgpu-{looks[row[i].lower()]}", x, width - 0.6))
            x += width
    assert [look for look, *_ in drawn] == [look for look, *_ in expected]
    assert [x for _, x, *_ in drawn] == pytest.approx([x for _, x, _ in expected], abs=0.01)
    assert [width for *_, width, _ in drawn] == pytest.approx([width for *_, width in expected], abs=0.01)
    pieces = [(row[i], int(row[i + 2])) for _, row in steps for i in range(0, len(row), 3)]
    full = [height for *_, height in drawn_boxes(page, ".mgpu-full-part")]
    assert full == pytest.approx([20 * share / 9 for piece, share in pieces if piece not in "wo"])
    assert page.locator(".mgpu-beside").count() == sum(piece.isupper() for piece, _ in pieces)
    ideal = float(page.locator(".mgpu-picture .mgpu-ideal").get_attribute("x1"))
    assert ideal == pytest.approx(left + span * steps[0][0] / longest / 4, abs=0.01)
