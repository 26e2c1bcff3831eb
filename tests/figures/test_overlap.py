"""One step of DistributedDataParallel: the figure. tests/experiments/test_ddp_step.py is about its recorded grid."""

import copy
import itertools
import re

import pytest
from figure_pages import control, drawn_boxes, sentence
from figure_samples import packed_times

from mgpu_lib.widgets import OverlapExplorer

MIB = 2**20
NAMES = ("network", "num_gpus", "link", "between", "host", "bucket_cap_mb")


@pytest.fixture(scope="module")
def data():
    return OverlapExplorer().data


def cells_of(data, state):
    """The step on one GPU, and those on several for all bucket sizes."""
    [host] = [name for name, value in data["hosts"].items() if value == state["host"]]
    joints = [state["link"], *([state["between"]] if state["num_gpus"] > data["node"] else []), state["num_gpus"]]
    one = f"{state['network']}/{host}"
    return data["cells"][one][0], data["cells"]["/".join([one, *map(str, joints)])]


def test_a_grid_that_is_none_is_refused(data):
    uneven, short = copy.deepcopy(data), copy.deepcopy(data)
    uneven["cells"]["ResNet-18/fast/PCIe tree/8"].pop()
    short["bytes"]["ResNet-18"].pop()
    for grid, words in ((uneven, r"7 bucket sizes.*\[6, 7\]"), (short, r"\[6, 7\]"), ([], "list"), ({}, "gpu")):
        with pytest.raises(ValueError, match=words):
            OverlapExplorer(grid)


SENTENCES = {
    ("ResNet-18", 2, "DGX A100", "Ethernet 25", 1.0, 4): (
        "ResNet-18 on 2 A100-80 (NVLink 3, 12 links), 32 images each: 10.5 ms per step, modelled. One GPU takes "
        "8.99 ms, so the efficiency is 86%. 7 all-reduces carry 42.6 MiB; 87% of the communication is hidden. The GPU "
        "sets the pace: kernels run for 84% of the step. A faster link and a faster host together could save 16% at "
        "most."
    ),
    ("ResNet-18", 16, "DGX A100", "Ethernet 25", 1 / 3, 50): (
        "1 all-reduce carries 42.6 MiB; under 1% of the communication is hidden. The link sets the pace: for 72% of "
        "the step a GPU only communicates. With buckets of 4 MiB the step would take 26.0 ms."
    ),
    ("ResNet-18", 8, "PCIe tree", "Ethernet 25", 1.0, 4): (
        "Other buckets hardly help: the all-reduces take 7.68 ms, and the backward pass lasts only 5.43 ms. Send fewer "
        "bytes, send less often, or over a faster link."
    ),
}


def test_sentences(says):
    for state, words in SENTENCES.items():
        assert says(OverlapExplorer(**dict(zip(NAMES, state, strict=True)))).endswith(words)


def test_every_cell_says_its_numbers(calls, data):
    parts = [list(data[f"{part}s"].values()) for part in ("host", "bucket")]
    states = itertools.product(data["networks"], data["counts"], data["links"], data["between"], *parts)
    states = [dict(zip(NAMES, state, strict=True)) for state in states]
    script = "(data, states) => states.map((at) => overlapSentence(data, at))"
    said = calls(OverlapExplorer, script, data, states)
    for state, words in zip(states, said, strict=True):
        one, many = cells_of(data, state)
        place = list(data["buckets"].values()).index(state["bucket_cap_mb"])
        ticks, kernels, exposed, idle, hidden = map(int, many[place].split()[:5])
        sizes = list(map(int, data["bytes"][state["network"]][place].split()))
        best = min(int(cell.split()[0]) for cell in many)
        assert f" on {state['num_gpus']} {data['gpu']} ({data['links'][state['link']]}" in words
        assert (f"nodes on {state['between']})" in words) == (state["num_gpus"] > data["node"])
        efficiency = 100 * int(one.split()[0]) / ticks
        assert float(re.search(r"the efficiency is (\d+)%", words)[1]) == pytest.approx(efficiency, abs=0.501)
        assert f" {len(sizes)} all-reduce" in words
        shown = re.search(r"carr(?:y|ies) ([\d.]+) MiB; (under 1|\d+)%", words)
        assert float(shown[1]) == pytest.approx(sum(sizes) / MIB, rel=0.01)
        assert shown[2] == "under 1" or float(shown[2]) == pytest.approx(hidden / 10, abs=0.5001)
        assert ("With " in words) == (best <= 0.98 * ticks)
        sets = "GPU" if kernels >= 750 else "link" if exposed >= idle else "host"
        assert f"The {sets} sets the pace" in words


def test_within_one_node_there_is_no_network_to_choose(page, write, says):
    page.goto(write(OverlapExplorer(between="Ethernet 25")))
    between, gpus = control(page, "Between nodes"), control(page, "Number of GPUs")
    offered = "all => all.filter((e) => !e.disabled).map((e) => e.textContent)"
    assert between.locator("option").evaluate_all(offered) == ["InfiniBand HDR", "Ethernet 100", "Ethernet 25"]
    gpus.press("ArrowLeft")
    assert between.locator("option").evaluate_all(offered) == ["only one node"] and between.input_value() == ""
    assert sentence(page.locator("figure.mgpu")) == says(OverlapExplorer(num_gpus=8))
    gpus.press("ArrowRight")
    assert between.input_value() == "Ethernet 25"
    assert gpus.get_attribute("aria-valuetext") == "16 GPUs in 2 nodes"


def test_marks_say_how_long_a_step_takes_and_which_is_shortest(page, write, data):
    page.goto(write(OverlapExplorer(network="ResNet-18", num_gpus=2)))
    control(page, "In a node").select_option("PCIe 4.0 x16")
    times = [int(cell.split()[0]) for cell in data["cells"]["ResNet-18/fitted/PCIe tree/2"]]
    read = "marks => marks.map((e) => [+e.firstChild.textContent, e.className])"
    for (mark, look), ticks in zip(page.locator(".mgpu-marks span").evaluate_all(read), times, strict=True):
        assert mark == pytest.approx(ticks / 1e5, abs=0.0501)
        assert look == ("mgpu-least" if ticks == min(times) else "")
    assert page.locator(".mgpu-marks small").all_text_contents() == list(data["buckets"])


def test_a_step_is_drawn_to_scale(page, write, data):
    """One scale for one GPU and for all bucket sizes on several: that of the longest step."""
    state = dict(zip(NAMES, ("ResNet-18", 2, "PCIe tree", "Ethernet 25", 1.0, 4), strict=True))
    one, cells = cells_of(data, state)
    steps = one.split(), cells[list(data["buckets"].values()).index(4)].split()
    page.goto(write(OverlapExplorer(**state)))
    [(_, left, _, width, _), *_] = drawn_boxes(page, ".mgpu-picture .mgpu-lane")
    scale = width / max(int(cell.split()[0]) for cell in (one, *cells)) * 100  # pixels of a µs

    def check(drawn, look, spans):
        drawn = [box for box in drawn_boxes(page, f".mgpu-picture .{drawn}") if box[0] == f"mgpu-{look}"]
        assert [x for _, x, *_ in drawn] == pytest.approx([left + scale * start for start, *_ in spans], abs=0.01)
        widths = [max(scale * (end - start), 0.3) for start, end, _ in spans]
        assert [width for *_, width, _ in drawn] == pytest.approx(widths, abs=0.01)
        return drawn

    for place, look in enumerate(("forward", "backward", "update"), 5):
        spans = [span for step in steps for span in packed_times(step[place])]
        check("mgpu-run", look, spans)
        full = [20 * covered / (end - start) for start, end, covered in spans]
        assert [height for *_, height in check("mgpu-full-part", look, spans)] == pytest.approx(full)
    alone, broadcasts, sums = map(packed_times, steps[1][8:])
    check("mgpu-exposed", "exposed", alone)
    check("mgpu-broadcast", "communication", broadcasts)
    check("mgpu-reduce", "communication", sums)
    ideal = page.locator(".mgpu-picture .mgpu-ideal").first.get_attribute("x1")
    assert float(ideal) == pytest.approx(left + scale * int(steps[0][0]) / 100, abs=0.01)
