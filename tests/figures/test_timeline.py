"""The timeline viewer: what happened when, to zoom into and to walk through."""

import re

import pytest
import torch
from figure_pages import picture, sentence
from figure_samples import US, kernel, small_timeline, timeline, viewer
from torch import nn
from traitlets import TraitError

from mgpu_lib.prediction import predict
from mgpu_lib.widgets import TimelineViewer
from mgpu_lib.widgets.timeline import MOST, TICK, compact

WHOLE = 100_500  # ticks of the small timeline


@pytest.fixture(scope="module")
def step():
    """The timeline of a training step on four GPUs, with what the rates of today make of it."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10))
    return predict(net, torch.empty(64, 1, 28, 28, device="meta"), n_gpus=4).timeline


def slider(root, name):
    return root.get_by_role("slider", name=re.compile(f"^{name}"))


def event_line(page):
    return page.locator(".mgpu-words").text_content()


def window(zoom=0, start=0.0, **_):
    """What the small timeline's figure has on display, in ticks."""
    span = -(-WHOLE // 2**zoom)
    begin = min(int(start / TICK + 0.5), WHOLE - span)
    return begin, begin + span


# Reading and setting from Python


@pytest.mark.parametrize(("name", "value"), [("zoom", -1), ("start", -1e-6), ("start", float("nan")), ("event", -2)])
def test_what_is_before_the_beginning_is_refused(name, value):
    with pytest.raises(TraitError, match=name):
        viewer(**{name: value})


def test_what_is_no_timeline_is_refused():
    with pytest.raises(TypeError, match="timeline is a list: pass a Timeline"):
        TimelineViewer(list(small_timeline()))
    with pytest.raises(ValueError, match=r"has 0 events.*timeline\.since"):
        TimelineViewer(timeline())
    with pytest.raises(ValueError, match=f"has {MOST + 1} events: show 1 to {MOST}"):
        TimelineViewer(timeline(*[kernel("add", 5, 6)] * (MOST + 1)))
    lacking = timeline(kernel("add", 5, 6))
    lacking.dropped = 12
    with pytest.raises(ValueError, match="first 12 events"):
        TimelineViewer(lacking)


# What it says is right


LANES = """(data) => unpack(data).lanes.map(({gpu, name, items}) =>
    [gpu, name, items.map(({start, end, part}) => [start, end, part])])"""


def test_rows_are_those_of_the_timeline(calls, step):
    """And the calls with which the host starts what GPUs do."""
    rows, lanes = step.rows(), calls(TimelineViewer, LANES, compact(step))
    lanes = {name if gpu is None else f"cuda:{gpu} {name}": items for gpu, name, items in lanes}
    assert set(lanes) == set(rows)
    for label, items in lanes.items():
        expected = sorted((e.start - step.start, e.end - step.start) for e in rows[label])
        for (start, end, _), other in zip(items, expected, strict=True):
            assert (start * TICK, end * TICK) == pytest.approx(other, abs=TICK)
    parts = {part for items in lanes.values() for *_, part in items}
    assert parts == {"forward", "backward", "other", "communication", "host"}


def test_rows_stand_in_the_order_host_streams_copies_collectives():
    rows = ["stream 2", "copy out", "collective", "default", "copy in"]
    events = [kernel("k", 5 + i, 6 + i, row=row, gpu=gpu) for i, row in enumerate(rows) for gpu in (1, 0)]
    names = [tuple(row) for row in compact(timeline(*events))["rows"]]
    order = ["default", "stream 2", "copy in", "copy out", "collective"]
    assert names == [(None, "host"), *[(0, row) for row in order], *[(1, row) for row in order]]


def test_utilization_is_the_timelines(calls, step):
    shares = """(data, from, to) => Object.entries(busyTimes(unpack(data).lanes))
        .map(([gpu, spans]) => [+gpu, within(spans, from, to)])"""
    data = compact(step)
    found = {gpu: ticks / data["whole"] for gpu, ticks in calls(TimelineViewer, shares, data, 0, data["whole"])}
    assert found == pytest.approx(step.utilization(), abs=2e-3)
    inside = timeline(kernel("long", 5, 105), kernel("short", 15, 25, row="stream 2"), kernel("late", 205, 210))
    assert dict(calls(TimelineViewer, shares, compact(inside), 0, 21_000)) == {0: 10_500}
    # µs 50 to 552.5; kernels run from 5 to 205, and from 505 on
    begin, end = window(zoom=1, start=50 * US)
    assert dict(calls(TimelineViewer, shares, compact(small_timeline()), begin, end)) == {0: 15500, 1: 4750}


def test_sentence(says):
    assert says(viewer()) == (
        "All 1.01 ms, modelled (V100, NVLink 2, 6 links): kernels run 20% of this time on cuda:0 and 10% on cuda:1."
    )
    assert "): kernels run 0% of this time on each of 2 GPUs." in says(viewer(zoom=3, start=250 * US))
    late = says(viewer(zoom=2, start=1e-3))  # too late for a window of this length: the last one
    assert late.startswith("754 µs to 1.01 ms of 1.01 ms, modelled (V100, ")
    host = TimelineViewer(timeline(small_timeline()[-1], gpu="T4"))
    assert says(host) == "All 300 µs, modelled (T4, PCIe 3.0 x16): kernels run on no GPU."


def test_durations_have_three_digits(calls):
    words = {0: "0 µs", 1: "0.01 µs", 150: "1.50 µs", 1005: "10.1 µs", 99_949: "999 µs"}
    words |= {100_500: "1.01 ms", 12_345_678: "123 ms", 10**8: "1.00 s", 6 * 10**9: "60.0 s"}
    assert calls(TimelineViewer, "(all) => all.map(duration)", list(words)) == list(words.values())


def test_events_are_described_in_full(calls):
    words = calls(TimelineViewer, "(data) => Object.values(unpack(data).items).map(describe)", viewer().data)
    assert [*words[:2], *words[4:6]] == [
        "convolution (conv, forward) on cuda:0, default: starts at 5.00 µs, takes 100 µs, 1.00 MiB, 3.00 GFLOP, bound "
        "by compute. Launched at 5.00 µs by host; it starts at once",
        "addmm (conv, backward) on cuda:0, default: starts at 105 µs, takes 100 µs, bound by memory. "
        "Launched at 45.0 µs by host; it starts 60.0 µs later",
        "collate, work of host: starts at 705 µs, takes 300 µs",
        "host hands convolution to cuda:0: starts at 0 µs, takes 5.00 µs",
    ]
    assert "3.00 MiB, bound by the link." in words[2] and "bound by the fixed time of a launch." in words[3]


# The picture in the browser


@pytest.mark.slow
def test_events_are_walked_through_by_keyboard(page, write, says):
    page.goto(write(viewer()))
    events = slider(page, "Event")
    assert events.get_attribute("aria-valuetext") == "none chosen"
    assert event_line(page).startswith("Point at a bar")

    def expect(key, start):
        events.press(key)
        assert event_line(page).startswith(start)
        assert events.get_attribute("aria-valuetext") == event_line(page).removesuffix(".")
        assert page.locator(".mgpu-chosen").count() == 1

    moves = {"ArrowRight": ("convolution (", "addmm (", "addmm ("), "ArrowDown": ("copy cuda:0 to cuda:1 (copy)",)}
    moves |= {"ArrowUp": ("addmm (", "host hands addmm to cuda:0"), "End": ("collate",), "Home": ("host hands conv",)}
    for key, starts in moves.items():  # the second addmm is the last of its row
        for start in starts:
            expect(key, start)
    for _ in range(3):
        events.press("+")
    assert sentence(page.locator("figure.mgpu")) == says(viewer(zoom=3, start=2.19 * US))  # about the call
    expect("End", "collate")  # outside the window: the window follows, the bar in its middle
    assert slider(page, "Window").get_attribute("aria-valuetext") == "792 µs to 918 µs"
    events.press("Escape")
    assert events.get_attribute("aria-valuetext") == "none chosen"
    assert page.locator(".mgpu-chosen").count() == 0


def test_a_launch_and_its_kernel_are_joined(page, write):
    page.goto(write(viewer(event=1)))
    line = page.locator(".mgpu-thread")
    left, right = (float(line.get_attribute(name)) for name in ("x1", "x2"))
    scale = picture(page).evaluate("p => +p.querySelector('.mgpu-lane').getAttribute('width')") / WHOLE
    assert right - left == pytest.approx(6000 * scale, abs=0.01)  # launched at 45 µs, runs from 105 on
    assert float(line.get_attribute("y2")) > float(line.get_attribute("y1"))


@pytest.mark.slow
def test_it_is_moved_by_pointer(page, write, says):
    page.goto(write(viewer()))
    root = page.locator("figure.mgpu")
    lane = page.locator(".mgpu-picture .mgpu-lane").nth(1).bounding_box()  # cuda:0, default

    def at(us):
        page.mouse.move(lane["x"] + lane["width"] * us / 1005, lane["y"] + 9)

    at(150)
    assert event_line(page).startswith("addmm")
    assert page.locator(".mgpu-chosen").count() == 1
    at(55)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(0, 0)
    assert event_line(page).startswith("convolution (")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("convolution (")
    page.keyboard.press("Escape")

    at(251.25)
    page.mouse.wheel(0, -120)  # without Ctrl the page would scroll
    assert sentence(root) == says(viewer())
    page.keyboard.down("Control")
    page.mouse.wheel(0, -120)
    assert sentence(root) == says(viewer(zoom=1, start=125.63 * US))  # the moment under the pointer stays there
    page.mouse.wheel(0, 120)
    page.keyboard.up("Control")
    assert sentence(root) == says(viewer())

    for _ in range(2):
        page.get_by_role("button", name="Zoom in").click()
    assert sentence(root) == says(viewer(zoom=2, start=376.88 * US))
    page.mouse.move(lane["x"] + 10, lane["y"] + 9)
    page.mouse.down()
    page.mouse.move(lane["x"] + 10 + lane["width"] / 2, lane["y"] + 30, steps=5)
    page.mouse.up()
    begin = float(re.match(r"[\d.]+", slider(page, "Window").get_attribute("aria-valuetext")).group())
    assert begin == pytest.approx(376.9 - 125.6, abs=1)
    page.get_by_role("button", name="Show all").click()
    assert sentence(root) == says(viewer())
    disabled = [button.get_attribute("aria-disabled") for button in page.get_by_role("button").all()]
    assert disabled == ["true", "false", "true"]


def bars(page):
    """{(class, row's y, from, to)} of all bars, in pixels."""
    read = "paths => paths.map((path) => [path.classList[0], path.getAttribute('d')])"
    paths = page.locator(".mgpu-bars").evaluate_all(read)
    return [
        (part.removeprefix("mgpu-"), float(y), float(x), float(x) + float(wide))
        for part, path in paths
        for x, y, wide in re.findall(r"M([\d.]+),([\d.]+)h([\d.]+)", path)
    ]


@pytest.mark.parametrize("values", [{}, {"zoom": 1, "start": 50 * US}])
@pytest.mark.sweep(2)
def test_bars_are_drawn_to_scale_each_part_at_its_own_height(page, write, calls, values):
    rows = calls(TimelineViewer, LANES, viewer().data)
    page.goto(write(viewer(**values)))
    lanes = page.locator(".mgpu-picture .mgpu-lane").evaluate_all("""lanes => lanes.map((lane) =>
        ['x', 'y', 'width'].map((name) => +lane.getAttribute(name)))""")
    (begin, end), expected = window(**values), []
    for (_, _, items), (x, y, width) in zip(rows, lanes, strict=True):
        for start, stop, part in items:
            if stop > begin and start < end:
                left, right = (x + width * (min(max(t, begin), end) - begin) / (end - begin) for t in (start, stop))
                expected.append((part, y + {"forward": 0, "backward": 6}.get(part, 3), left, right))
    drawn = sorted(bars(page))
    assert [bar[:2] for bar in drawn] == [bar[:2] for bar in sorted(expected)]
    for found, right in zip(drawn, sorted(expected), strict=True):
        assert found[2:] == pytest.approx(right[2:], abs=0.9)  # a wide one ends 0.8 early
    assert {part for part, *_ in drawn} >= {"backward", "communication", "host", "other"}


@pytest.mark.slow
def test_thousands_of_events_are_a_few_elements(page, write, says):
    """6,000 events, and the host's calls for them: one path for each row and part, and only what is in the window."""
    phases = ("forward", "backward")
    events = [kernel(f"k{i % 7}", 5 * i + 5, 5 * i + 9, gpu=i % 8, phase=phases[i % 2]) for i in range(6000)]
    figure = TimelineViewer(timeline(*events))
    assert len(figure.static_html().encode()) < 250_000
    page.goto(write(figure))
    assert sentence(page.locator("figure.mgpu")) == says(figure)
    assert "(modelled, V100, NVLink 2, 6 links)" in picture(page).text_content()
    assert len(bars(page)) == 12_000
    assert page.evaluate("document.querySelectorAll('.mgpu *').length") < 200
    slider(page, "Zoom").fill("5")
    assert 12_000 / 32 - 1 <= len(bars(page)) <= 12_000 / 32 + 17


def test_the_page_sends_zoom_and_window_together(live, says):
    """Hovering stays in the page; what is chosen goes to Python."""
    root = live(viewer())
    slider(root, "Zoom").press("+")
    slider(root, "Window").press("ArrowLeft")
    slider(root, "Event").press("ArrowRight")
    saved = root.page.evaluate("saved.map(({ start, zoom, event }) => [start, zoom, event])")
    assert saved == [[0.00025125, 1, -1], [0.00018844, 1, -1], [0, 1, 1]]  # addmm begins before that
