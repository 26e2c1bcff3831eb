"""One step of DistributedDataParallel: the figure. tests/experiments/test_ddp_step.py is about its recorded grid."""

import itertools
import json
import re

import figure_pages
import pytest
from figure_pages import picture, sentence
from figure_samples import overlap, overlap_grid

from mgpu_lib import recorded as results
from mgpu_lib.widgets import OverlapExplorer

write, says, calls = figure_pages.write, figure_pages.says, figure_pages.calls
MIB = 2**20


@pytest.fixture(scope="module")
def recorded():
    return json.loads((results.RESULTS / "ddp_step.json").read_text(encoding="utf-8"))


def all_states(data):
    """The values of all controls that a figure with this grid can have."""
    parts = (data["networks"], data["counts"], data["links"], data["between"], data["hosts"], data["buckets"])
    for network, k, link, between, host, bucket in itertools.product(*parts):
        state = {"network": network, "num_gpus": k, "link": link, "between": between}
        yield {**state, "host": data["hosts"][host], "bucket_cap_mb": data["buckets"][bucket]}


def cells_of(data, state):
    """The step on one GPU, and those on several for all bucket sizes."""
    [host] = [name for name, value in data["hosts"].items() if value == state["host"]]
    joints = [state["link"], *([state["between"]] if state["num_gpus"] > data["node"] else []), state["num_gpus"]]
    one = f"{state['network']}/{host}"
    return data["cells"][one][0], data["cells"]["/".join([one, *map(str, joints)])]


def select(root, name):
    return root.get_by_role("combobox", name=re.compile(f"^{name}"))


def slider(root, name):
    return root.get_by_role("slider", name=re.compile(f"^{name}"))


def test_a_grid_that_is_none_is_refused(monkeypatch, tmp_path):
    incomplete, uneven, short = overlap_grid(), overlap_grid(), overlap_grid()
    del incomplete["hosts"]
    uneven["cells"]["net/fast/PCIe tree/8"].pop()
    short["bytes"]["net"].pop()
    bad = (
        (incomplete, "hosts"),
        (uneven, r"3 bucket sizes.*\[2, 3\]"),
        (short, r"\[2, 3\]"),
        ([], "list"),
        ({}, "gpu"),
    )
    for grid, words in bad:
        with pytest.raises(ValueError, match=words):
            OverlapExplorer(grid)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape("python -m experiments.ddp_step")):
        OverlapExplorer()


def test_sentence(says):
    assert says(overlap(num_gpus=8)) == (
        "ResNet-18 on 8 A100-80 (NVLink 3, 12 links), 32 images each: 10.9 ms per step, modelled. One GPU takes "
        "9.56 ms, so the efficiency is 88%. 2 all-reduces carry 7.63 MiB; 90% of the communication is hidden. The GPU "
        "sets the pace: kernels run for 80% of the step. A faster link and a faster host together could save 20% at "
        "most."
    )
    assert says(overlap(bucket_cap_mb=1000, link="PCIe tree", between="Ethernet 25")) == (
        "ResNet-18 on 16 A100-80 (PCIe 4.0 x16; 2 nodes on Ethernet 25), 32 images each: 28.7 ms per step, modelled. "
        "One GPU takes 9.56 ms, so the efficiency is 33%. 1 all-reduce carries 7.63 MiB; 33% of the communication is "
        "hidden. The link sets the pace: for 50% of the step a GPU only communicates. Other buckets hardly help: the "
        "all-reduces take 19.2 ms, and the backward pass lasts only 6.00 ms. Send fewer bytes, send less often, or "
        "over a faster link."
    )
    assert says(overlap(num_gpus=2, host=1 / 3)).endswith(
        "The host sets the pace: for 30% of the step a GPU waits for kernels to be launched. A faster host would help, "
        "or more images on each GPU."
    )
    assert says(overlap(num_gpus=2, bucket_cap_mb=1e-6)).endswith("With buckets of 4 MiB the step would take 10.3 ms.")
    assert says(overlap(num_gpus=2, bucket_cap_mb=1000, link="PCIe tree")).endswith(
        "With buckets of 4 MiB the step would take 14.3 ms."
    )


@pytest.mark.parametrize("which", ["made-up", "recorded"])
def test_every_cell_says_its_numbers(calls, which, request):
    data = request.getfixturevalue("recorded") if which == "recorded" else overlap_grid()
    states = list(all_states(data))
    script = "(data, states) => states.map((at) => overlapSentence(data, at))"
    said = calls(OverlapExplorer, script, data, states)
    for state, words in zip(states, said, strict=True):
        one, many = cells_of(data, state)
        place = list(data["buckets"].values()).index(state["bucket_cap_mb"])
        ticks, kernels, exposed, idle, hidden = map(int, many[place].split()[:5])
        sizes = list(map(int, data["bytes"][state["network"]][place].split()))
        best = min(int(cell.split()[0]) for cell in many)
        assert words.startswith(
            f"{state['network']} on {state['num_gpus']} {data['gpu']} ({data['links'][state['link']]}"
        )
        assert (f"nodes on {state['between']})" in words) == (state["num_gpus"] > data["node"])
        assert float(re.search(r"the efficiency is (\d+)%", words)[1]) == pytest.approx(
            100 * int(one.split()[0]) / ticks, abs=0.501
        )
        assert f" {len(sizes)} all-reduce" in words
        shown = re.search(r"carr(?:y|ies) ([\d.]+) MiB; (under 1|\d+)%", words)
        assert float(shown[1]) == pytest.approx(sum(sizes) / MIB, rel=0.01)
        assert shown[2] == "under 1" or float(shown[2]) == pytest.approx(hidden / 10, abs=0.5001)
        assert ("With " in words) == (best <= 0.98 * ticks)
        sets = "GPU" if kernels >= 750 else "link" if exposed >= idle else "host"
        assert f"The {sets} sets the pace" in words
    kinds = ["GPU sets", "link sets", "With ", "Other buckets hardly help"]
    kinds += ["host sets"] if which == "made-up" else []  # with many images on each GPU it never does
    assert all(any(kind in words for words in said) for kind in kinds)


def test_within_one_node_there_is_no_network_to_choose(page, write, says):
    page.goto(write(overlap(between="Ethernet 25")))
    between, gpus = select(page, "Between nodes"), slider(page, "Number of GPUs")
    offered = "all => all.filter((e) => !e.disabled).map((e) => e.textContent)"
    assert between.locator("option").evaluate_all(offered) == ["InfiniBand HDR", "Ethernet 25"]
    gpus.press("ArrowLeft")
    assert between.locator("option").evaluate_all(offered) == ["only one node"] and between.input_value() == ""
    assert sentence(page.locator("figure.mgpu")) == says(overlap(num_gpus=8))
    gpus.press("ArrowRight")
    assert between.input_value() == "Ethernet 25"
    assert gpus.get_attribute("aria-valuetext") == "16 GPUs in 2 nodes"


def test_marks_say_how_long_a_step_takes_and_which_is_shortest(page, write):
    page.goto(write(overlap(num_gpus=2)))
    marks = page.locator(".mgpu-marks span")

    def read_marks():
        return [mark.evaluate("e => [e.firstChild.textContent, e.className]") for mark in marks.all()]

    assert read_marks() == [["11.2", ""], ["10.3", "mgpu-least"], ["10.8", ""]]
    assert marks.locator("small").all_text_contents() == ["each", "4 MiB", "all"]
    select(page, "In a node").select_option("PCIe 4.0 x16")
    assert read_marks() == [["15.2", ""], ["14.3", "mgpu-least"], ["14.8", ""]]


BOXES = """(boxes) => boxes.map((box) =>
    [box.classList[0], ...["x", "y", "width", "height"].map((name) => +box.getAttribute(name))])"""


def test_the_step_is_drawn_to_scale(page, write):
    """For all bucket sizes the same scale: here the first has the longest step, 15,200 µs; the second takes 14,300."""
    page.goto(write(overlap(num_gpus=2, link="PCIe tree")))
    kernels = page.locator(".mgpu-run").evaluate_all(BOXES)
    left = min(x for _, x, *_ in kernels)
    scale = (picture(page).evaluate("picture => picture.clientWidth") - 1 - left) / 15_200

    def check(drawn, expected):
        assert [box[0] for box in drawn] == [look for look, *_ in expected]
        for (_, x, _, width, _), (_, start, end) in zip(drawn, expected, strict=True):
            assert (x, width) == (
                pytest.approx(left + scale * start, abs=0.01),
                pytest.approx(scale * (end - start), abs=0.01),
            )

    look = [f"mgpu-{phase}" for phase in ("forward", "backward", "update")]
    ends = 9560, 14_300
    check(kernels, [(*box,) for end in ends for box in zip(look, (0, 3000, end - 500), (3000, 9000, end))])
    full = page.locator(".mgpu-full-part").evaluate_all(BOXES)
    assert [height for *_, height in full] == pytest.approx([10, 20, 20] * 2)
    sent = [("mgpu-communication", 5000, 8000), ("mgpu-communication", 8000, 13_800)]
    check(page.locator(".mgpu-picture .mgpu-reduce").evaluate_all(BOXES), sent)
    check(page.locator(".mgpu-picture .mgpu-exposed").evaluate_all(BOXES), [("mgpu-exposed", 9000, 13_800)])
    assert page.locator(".mgpu-picture .mgpu-broadcast").count() == 2
    ideal = page.locator(".mgpu-picture .mgpu-ideal").first.get_attribute("x1")
    assert float(ideal) == pytest.approx(left + scale * 9560, abs=0.01)
