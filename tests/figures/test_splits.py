"""The split explorer: what crosses between GPUs in one training step."""

import itertools

import pytest
from figure_pages import picture
from figure_samples import BATCH_SIZES, splits, traffic_data

from mgpu_lib.widgets import SplitExplorer


def test_data_that_is_not_a_traffic_table_is_refused():
    net, other, *_ = traffic_data()
    cases = {
        "NoneType": None,
        "one network at least": [],
        "its own name": [net, net],
        "limits": [{"name": "LeNet"}],
        r"lists of \[2, 8\]": [net | {"tensor": [0, 1]}, other],
        "data of 'LeNet' has None": [net | {"data": [0, None, 2, 3, 4, 5, 6, 7]}],
        "tensor of 'LeNet' has nan": [net | {"tensor": [0, float("nan"), 2, 3, 4, 5, 6, 7]}],
    }
    for words, bad in cases.items():
        with pytest.raises(ValueError, match=words):
            SplitExplorer(bad)


def bytes_moved(net, num_gpus, batch_size):
    """What the table means: bytes per text, and bytes per step in data parallelism."""
    times = {"pipeline": batch_size, "tensor": batch_size, "data": 1}
    return {way: net[way][num_gpus - 1] and net[way][num_gpus - 1] * n for way, n in times.items()}


def test_least_is_the_smallest_number_and_change_is_where_that_changes(calls):
    cases = list(itertools.product(traffic_data(), range(2, 9), BATCH_SIZES))
    found = calls(SplitExplorer, "(cases) => cases.map((c) => compare(...c))", cases)
    for (net, k, batch_size), there in zip(cases, found, strict=True):
        moved, change, rival = bytes_moved(net, k, batch_size), there["change"], there.get("rival")
        assert there["moved"] == moved
        possible = {way: n for way, n in moved.items() if n is not None}
        assert moved[there["least"]] == min(possible.values())
        assert (there["least"] == "data") == (rival is None or (change is not None and batch_size >= change))
        if rival is not None and change is not None:
            each, once = net[rival][k - 1], net["data"][k - 1]
            assert each * (change - 1) < once <= each * change


def test_sentence(says):
    assert says(splits()) == (
        "LeNet at batch 64 on 2 GPUs: pipeline parallelism moves least, 400 KiB per step (tensor parallelism "
        "2.37 MiB; data parallelism 1008 KiB). From a batch of 162 on, data parallelism moves least."
    )
    assert says(splits(num_gpus=6, batch_size=4096)) == (
        "LeNet at batch 4096 on 6 GPUs: data parallelism moves least, 4.92 MiB per step (pipeline parallelism is not "
        "possible, with 4 layers; tensor parallelism 759 MiB). Below a batch of 27, tensor parallelism moves least."
    )
    assert "That is so at every" in says(splits(network="all activations"))


def test_bars_are_drawn_to_scale(page, write):
    page.goto(write(splits(batch_size=32, num_gpus=4)))
    widths = page.locator(".mgpu-bar").evaluate_all("bars => bars.map((bar) => +bar.getAttribute('width'))")
    moved = list(bytes_moved(traffic_data()[0], 4, 32).values())
    span = picture(page).evaluate("picture => picture.clientWidth") - 1
    assert widths == pytest.approx([span * n / max(moved) for n in moved], abs=0.01)
    strong = page.locator(".mgpu-picture .mgpu-strong").all_text_contents()
    marks = [mark.text_content()[0] for mark in page.locator(".mgpu-marks span").all()]
    steps = [bytes_moved(traffic_data()[0], 4, batch_size) for batch_size in BATCH_SIZES]
    assert marks == [min(step, key=step.get)[0].upper() for step in steps] and len({*marks}) == 2
    assert len(strong) == 2 and "pipeline parallelism" in strong[0] and strong[1].endswith("least")
