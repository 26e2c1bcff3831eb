"""One step of DistributedDataParallel: the figure. tests/experiments/test_ddp_step.py is about its recorded grid."""

import copy
import itertools
import re

import pytest
from figure_pages import control, drawn_boxes, picture, sentence

from experiments import ddp_step
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


@pytest.mark.parametrize(
    "state, words",
    [
        (
            ("ResNet-18", 2, "DGX A100", "Ethernet 25", 1.0, 4),
            "ResNet-18 on 2 A100-80 (NVLink 3, 12 links), 32 images each: 10.5 ms per step, modelled. One GPU takes "
            "8.99 ms, so the efficiency is 86%. 7 all-reduces carry 42.6 MiB; 87% of the communication is hidden. The "
            "GPU sets the pace: kernels run for 84% of the step. A faster link and a faster host together could save "
            "16% at most.",
        ),
        (
            ("ResNet-18", 16, "DGX A100", "Ethernet 25", 1 / 3, 50),
            "1 all-reduce carries 42.6 MiB; under 1% of the communication is hidden. The link sets the pace: for 72% "
            "of the step a GPU only communicates. With buckets of 4 MiB the step would take 26.0 ms.",
        ),
        (
            ("ResNet-18", 8, "PCIe tree", "Ethernet 25", 1.0, 4),
            "Other buckets hardly help: the all-reduces take 7.68 ms, and the backward pass lasts only 5.43 ms. Send "
            "fewer bytes, send less often, or over a faster link.",
        ),
    ],
)
def test_sentence(says, state, words):
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


def packed_step(micros, sent=()):
    """A step of so many µs as it is recorded: its backward pass ends at 9000, its last 500 are the update."""
    last = micros - 500
    parts = [[(0, 3000, 1500)], [(3000, 9000, 6000)], [(last, micros, 500)]]
    parts += [[(9000, last, last - 9000)], [(0, 50), (50, 60)], sent] if sent else [[], [], []]
    words = [ddp_step.packed([tuple(1e-6 * time for time in span) for span in part], 0) for part in parts]
    return " ".join([str(100 * micros), "450", "500", "50", "333", *words])


def test_the_step_is_drawn_to_scale(page, write, data):
    """For all bucket sizes the same scale: here the first has the longest step, 15,200 µs; the others take 14,300."""
    grid, sent = copy.deepcopy(data), [(5000, 8000), (8000, 13_800)]
    grid["cells"]["ResNet-18/fitted"] = [packed_step(9560)]
    grid["cells"]["ResNet-18/fitted/PCIe tree/2"] = [packed_step(15_200, sent), *[packed_step(14_300, sent)] * 6]
    page.goto(write(OverlapExplorer(grid, network="ResNet-18", num_gpus=2, link="PCIe tree", bucket_cap_mb=4)))
    kernels = drawn_boxes(page, ".mgpu-run")
    left = min(x for _, x, *_ in kernels)
    scale = (picture(page).evaluate("picture => picture.clientWidth") - 1 - left) / 15_200

    def check(drawn, expected):
        assert [box[0] for box in drawn] == [look for look, *_ in expected]
        assert [x for _, x, *_ in drawn] == pytest.approx([left + scale * start for _, start, _ in expected], abs=0.01)
        widths = [scale * (end - start) for _, start, end in expected]
        assert [width for *_, width, _ in drawn] == pytest.approx(widths, abs=0.01)

    look = [f"mgpu-{phase}" for phase in ("forward", "backward", "update")]
    ends = 9560, 14_300
    check(kernels, [(*box,) for end in ends for box in zip(look, (0, 3000, end - 500), (3000, 9000, end))])
    full = drawn_boxes(page, ".mgpu-full-part")
    assert [height for *_, height in full] == pytest.approx([10, 20, 20] * 2)
    check(drawn_boxes(page, ".mgpu-picture .mgpu-reduce"), [("mgpu-communication", *span) for span in sent])
    check(drawn_boxes(page, ".mgpu-picture .mgpu-exposed"), [("mgpu-exposed", 9000, 13_800)])
    assert page.locator(".mgpu-picture .mgpu-broadcast").count() == 2
    ideal = page.locator(".mgpu-picture .mgpu-ideal").first.get_attribute("x1")
    assert float(ideal) == pytest.approx(left + scale * 9560, abs=0.01)
