"""The interactive figures about time, in a real browser from file://."""

import itertools
import json
import re

import figure_pages
import pytest
import torch
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
from torch import nn
from traitlets import TraitError

from experiments import why_slower
from mgpu_lib.virtual import virtual_gpus
from mgpu_lib.virtual.clock import Event
from mgpu_lib.virtual.specs import find_gpu, find_link
from mgpu_lib.virtual.timeline import Timeline
from mgpu_lib.widgets import TimelineViewer, WhySlower, why
from mgpu_lib.widgets.base import EXPORT, module
from mgpu_lib.widgets.timeline import MOST, TICK, compact, duration

write = figure_pages.write
US = 1e-6
VIEWER = ("time.js", "events.js", "bars.js", "timeline.js")


def kernel(name, start, end, gpu=0, **values):
    """An event on a GPU's default stream, in µs; its launch takes 5 and ends where it starts, or at `launched`."""
    launched = values.pop("launched", start)
    event = Event(name, "conv", gpu, "default", start * US, end * US, (launched - 5) * US, launched * US, "host", "",
                  0, 0, "memory")
    return event._replace(**values)


def made(*events, gpu="V100"):
    """A timeline of made-up events; tests below take those of real programs."""
    spec = find_gpu(gpu)
    return Timeline(events, spec, find_link(None, spec))


def small():
    """Three kernels and a copy on two GPUs, and some work of the host, in 1005 µs."""
    return made(
        kernel("convolution", 0, 100, phase="forward", nbytes=2**20, flops=3 * 10**9, bound="compute"),
        kernel("addmm", 100, 200, phase="backward", launched=40),
        kernel("add_", 500, 600, bound="fixed", gpu=1),
        kernel("copy cuda:0 to cuda:1", 200, 400, kind="copy", row="copy out", bound="link", nbytes=3 * 2**20),
        Event("collate", "host", None, "host", 700 * US, 1000 * US, 700 * US, 1000 * US, "host", "", 0, 0, "host"),
    )


def step_of(k, rounds=1):
    """The timeline of training steps on `k` virtual GPUs, with what the rates of today make of it."""
    with virtual_gpus(k, backing="meta") as machine:
        nets = [nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10)).to(device)
                for device in machine.devices]
        X = torch.zeros(64, 1, 28, 28, device="meta")
        torch.cuda.synchronize(0)
        start = machine.elapsed()
        for _ in range(rounds):
            with torch.cuda.nvtx.range("forward"):
                losses = [net(X.to(device)).sum() for net, device in zip(nets, machine.devices, strict=True)]
            for loss in losses:
                loss.backward()
            for net in nets[1:]:
                for p, q in zip(nets[0].parameters(), net.parameters(), strict=True):
                    q.grad.copy_(p.grad.to(q.device))
        return machine.timeline.since(start)


@pytest.fixture(scope="module")
def step():
    return step_of(4)


def viewer(**values):
    return TimelineViewer(small(), **values)


def slider(root, name):
    return root.get_by_role("slider", name=re.compile(f"^{name}"))


def select(root, name):
    return root.get_by_role("combobox", name=re.compile(f"^{name}"))


def event_line(page):
    return page.locator(".mgpu-words").text_content()


def read(figure):
    """The figure's data as the page gets it."""
    return json.loads(json.dumps(figure.data))


# Reading and setting from Python


def test_viewer_is_read_and_set_from_python():
    figure = viewer(zoom=2)
    assert repr(figure) == "TimelineViewer(start=0.0, zoom=2, event=-1)"
    assert figure.window() == (0, 25125)
    figure.start = 300 * US
    assert figure.window() == (30000, 55125)
    figure.start = 1e-3  # too late for a window of this length: the last one
    assert figure.window() == (100500 - 25125, 100500)
    figure.event = 2
    assert figure.sentence().startswith("754 µs to 1.01 ms of 1.01 ms, modelled (V100, ")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zoom": -1}, "zoom"),
        ({"zoom": 7}, "zoom=7: choose 6 at most"),
        ({"start": -1e-6}, "start"),
        ({"start": 0.002}, "start=0.002: choose 0.001005 at most"),
        ({"start": float("nan")}, "start=nan: choose 0.001005 at most"),
        ({"event": -2}, "event"),
        ({"event": 10}, "event=10: choose 9 at most"),
    ],
)
def test_viewer_refuses_bad_values_and_says_what_would_do(values, words):
    with pytest.raises(TraitError, match=words):
        viewer(**values)
    figure = viewer(zoom=1)
    with pytest.raises(TraitError):
        figure.set_trait(*next(iter(values.items())))
    assert figure.zoom == 1 and figure.start == 0 and figure.event == -1


def test_viewer_refuses_what_is_no_timeline():
    with pytest.raises(TypeError, match="timeline is a list: pass a Timeline"):
        TimelineViewer(list(small()))
    with pytest.raises(ValueError, match=r"has 0 events.*timeline\.since"):
        TimelineViewer(made())
    with pytest.raises(ValueError, match=f"has {MOST + 1} events: show 1 to {MOST}"):
        TimelineViewer(made(*[kernel("add", 5, 6)] * (MOST + 1)))


# What it says is right


def test_rows_are_those_of_the_timeline(step):
    figure, rows = TimelineViewer(step), step.rows()
    lanes = {name if gpu is None else f"cuda:{gpu} {name}": items for (gpu, name), items in figure.lanes()}
    assert set(lanes) == set(rows)
    for label, items in lanes.items():
        expected = sorted((e.start - step.start, e.end - step.start) for e in rows[label])
        found = [(start * TICK, end * TICK) for start, end, _ in items]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=TICK)


def test_rows_stand_in_the_order_host_streams_copies_collectives():
    rows = ["stream 2", "copy out", "collective", "default", "copy in"]
    events = [kernel("k", 5 + i, 6 + i, row=row, gpu=gpu) for i, row in enumerate(rows) for gpu in (1, 0)]
    names = [tuple(row) for row in compact(made(*events))["rows"]]
    order = ["default", "stream 2", "copy in", "copy out", "collective"]
    assert names == [(None, "host"), *[(0, row) for row in order], *[(1, row) for row in order]]


def test_utilization_is_the_timelines(step):
    figure = TimelineViewer(step)
    whole = figure.data["whole"]
    assert {gpu: n / whole for gpu, n in figure.utilization().items()} == pytest.approx(step.utilization(), abs=2e-3)
    figure = viewer(zoom=1, start=50 * US)
    assert figure.utilization() == {0: 15500, 1: 4750}  # µs 50 to 552.5; kernels run from 5 to 205, and from 505 on


def test_sentence_of_the_viewer():
    assert viewer().sentence() == (
        "All 1.01 ms, modelled (V100, NVLink 2, 6 links): kernels run 20% of this time on cuda:0 and 10% on cuda:1."
    )
    assert viewer(zoom=3, start=250 * US).sentence() == (
        "250 µs to 376 µs of 1.01 ms, modelled (V100, NVLink 2, 6 links): kernels run 0% of this time on each of 2 "
        "GPUs."
    )
    host = made(small()[-1], gpu="T4")
    assert TimelineViewer(host).sentence() == "All 300 µs, modelled (T4, PCIe 3.0 x16): kernels run on no GPU."


def test_the_page_computes_what_python_computes(page, step):
    page.goto("about:blank")
    page.add_script_tag(content=module(*VIEWER).removesuffix(EXPORT))
    for timeline in (small(), step, step_of(1, rounds=3)):
        figure = TimelineViewer(timeline)
        lanes = page.evaluate("""data => unpack(data).lanes.map(({gpu, name, items}) =>
            [[gpu, name], items.map(({start, end, part}) => [start, end, part])])""", read(figure))
        assert [[list(row), sorted(map(tuple, items))] for row, items in lanes] == [
            [list(row), items] for row, items in figure.lanes()
        ]
        windows = []
        for zoom in range(figure.data["levels"] + 1):
            figure.zoom = zoom
            for eighth in range(8):
                figure.start = figure.data["whole"] * TICK * eighth / 8
                windows.append((figure.window(), figure.sentence()))
        said = page.evaluate("""([data, windows]) => {
            const busy = busyTimes(unpack(data).lanes);
            return windows.map(([from, to]) => timelineSentence(data, busy, from, to));
        }""", [read(figure), [window for window, _ in windows]])
        assert said == [words for _, words in windows]


def test_durations_are_written_alike(page):
    page.goto("about:blank")
    page.add_script_tag(content=module("time.js").removesuffix(EXPORT))
    ticks = [*range(1200), 99_949, 99_950, 99_999, 10**5, 100_500, 999_499, 10**7 - 1, 10**8 - 1, 10**8, 10**12 + 5]
    assert page.evaluate("ticks => ticks.map(duration)", ticks) == [duration(n) for n in ticks]
    written = {0: "0 µs", 1: "0.01 µs", 150: "1.50 µs", 1005: "10.1 µs", 99_949: "999 µs", 10**5: "1.00 ms"}
    written |= {100_500: "1.01 ms", 12_345_678: "123 ms", 10**8: "1.00 s", 6 * 10**9: "60.0 s"}
    assert {n: duration(n) for n in written} == written


def test_events_are_described_in_full(page):
    page.goto("about:blank")
    page.add_script_tag(content=module(*VIEWER).removesuffix(EXPORT))
    words = page.evaluate("data => Object.values(unpack(data).items).map(describe)", read(viewer()))
    assert words == [
        "convolution (conv, forward) on cuda:0, default: starts at 5.00 µs, takes 100 µs, 1.00 MiB, 3.00 GFLOP, bound "
        "by compute. Launched at 5.00 µs by host; it starts at once",
        "addmm (conv, backward) on cuda:0, default: starts at 105 µs, takes 100 µs, bound by memory. "
        "Launched at 45.0 µs by host; it starts 60.0 µs later",
        "copy cuda:0 to cuda:1 (copy) on cuda:0, copy out: starts at 205 µs, takes 200 µs, 3.00 MiB, bound by the "
        "link. Launched at 205 µs by host; it starts at once",
        "add_ (conv) on cuda:1, default: starts at 505 µs, takes 100 µs, bound by the fixed time of a launch. "
        "Launched at 505 µs by host; it starts at once",
        "collate, work of host: starts at 705 µs, takes 300 µs",
        *[f"host hands {name} to cuda:{gpu}: starts at {start}, takes 5.00 µs" for name, gpu, start in (
            ("convolution", 0, "0 µs"), ("addmm", 0, "40.0 µs"), ("copy cuda:0 to cuda:1", 0, "200 µs"),
            ("add_", 1, "500 µs"))],
    ]


# The output


def test_html_is_deterministic_small_and_self_contained(step):
    for make in (viewer, lambda: TimelineViewer(step), lambda: viewer(zoom=1, event=3)):
        html = make().static_html()
        assert html == make().static_html()
        assert len(html.encode()) < 70_000
        assert not re.findall(r"(?:src|href)=[\"'](?!data:)|\bimport\b[ (]|@import|url\((?!#)", html)
    assert viewer(zoom=1).static_html() != viewer(zoom=2).static_html()


@pytest.mark.parametrize("names", [VIEWER, ("time.js", "why.js")])
def test_scripts_may_stand_inside_a_script_element(names):
    assert module(*names).endswith(EXPORT)
    assert not re.search(r"</script|<!--|^import |^export (?!default)", module(*names), re.IGNORECASE | re.MULTILINE)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_names(page, write, name):
    """Names of kernels, NVTX ranges and threads."""
    figure = TimelineViewer(made(kernel(name, 5, 100, phase=name, thread=name)), event=0)
    page.goto(write(figure))
    assert page.evaluate("window.hacked") is None
    assert page.locator("[role=status]").text_content() == figure.sentence()
    assert event_line(page).startswith(f"{name} (conv, {name}) on cuda:0")


# The picture in the browser


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_viewer_is_moved_by_keyboard(page, write, theme):
    page.goto(write(viewer()))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root, zoom, start = page.locator("figure.mgpu"), slider(page, "Zoom"), slider(page, "Window")
    assert sentence(root) == viewer().sentence()
    seen = [picture(page).screenshot()]

    def expect(**values):
        figure = viewer(**values)
        assert sentence(root) == figure.sentence() == picture(page).get_attribute("aria-label")
        begin, end = figure.window()
        assert zoom.get_attribute("aria-valuetext") == f"{2**figure.zoom}×, {duration(end - begin)}"
        assert start.get_attribute("aria-valuetext") == f"{duration(begin)} to {duration(end)}"
        shot = picture(page).screenshot()
        assert shot not in seen
        seen.append(shot)

    zoom.press("ArrowRight")
    expect(zoom=1, start=251.25 * US)  # the middle stays where it is
    zoom.press("+")
    expect(zoom=2, start=376.88 * US)
    start.press("ArrowRight")  # by an eighth of the window
    expect(zoom=2, start=408.29 * US)
    start.press("PageDown")
    expect(zoom=2, start=157.04 * US)
    start.press("Home")
    expect(zoom=2)
    start.press("End")
    expect(zoom=2, start=1e-3)
    zoom.press("-")
    zoom.press("Home")
    assert sentence(root) == viewer().sentence()
    zoom.press("End")
    assert zoom.get_attribute("aria-valuetext") == "64×, 15.7 µs"


def test_events_are_walked_through_by_keyboard(page, write):
    page.goto(write(viewer()))
    events = slider(page, "Event")
    assert events.get_attribute("aria-valuetext") == "none chosen"
    assert event_line(page).startswith("Point at a bar")

    def expect(key, start):
        events.press(key)
        assert event_line(page).startswith(start)
        assert events.get_attribute("aria-valuetext") == event_line(page).removesuffix(".")
        assert page.locator(".mgpu-chosen").count() == 1

    expect("ArrowRight", "convolution (conv, forward) on cuda:0, default")
    expect("ArrowRight", "addmm (")
    expect("ArrowRight", "addmm (")  # the last of its row
    expect("ArrowDown", "copy cuda:0 to cuda:1 (copy) on cuda:0, copy out")
    expect("ArrowDown", "add_ (conv) on cuda:1")
    expect("ArrowDown", "add_ (conv) on cuda:1")
    expect("ArrowUp", "copy cuda:0")
    expect("ArrowUp", "addmm (")
    expect("ArrowUp", "host hands addmm to cuda:0")
    expect("ArrowLeft", "host hands convolution to cuda:0")
    expect("End", "collate, work of host")
    expect("Home", "host hands convolution")
    for _ in range(3):
        events.press("+")
    assert sentence(page.locator("figure.mgpu")) == viewer(zoom=3, start=2.19 * US).sentence()  # about the call
    expect("End", "collate")  # outside the window: the window follows, the bar in its middle
    begin, end = viewer(zoom=3, start=792.19 * US).window()
    assert slider(page, "Window").get_attribute("aria-valuetext") == f"{duration(begin)} to {duration(end)}"
    events.press("Escape")
    assert events.get_attribute("aria-valuetext") == "none chosen"
    assert page.locator(".mgpu-chosen").count() == 0


def test_a_launch_and_its_kernel_are_joined(page, write):
    page.goto(write(viewer(event=1)))
    line = page.locator(".mgpu-thread")
    left, right = (float(line.get_attribute(name)) for name in ("x1", "x2"))
    scale = picture(page).evaluate("p => +p.querySelector('.mgpu-lane').getAttribute('width')") / 100500
    assert right - left == pytest.approx(6000 * scale, abs=0.01)  # launched at 45 µs, runs from 105 on
    assert float(line.get_attribute("y2")) > float(line.get_attribute("y1"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_viewer_is_moved_by_pointer(page, write, theme):
    page.goto(write(viewer()))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root = page.locator("figure.mgpu")
    lane = page.locator(".mgpu-picture .mgpu-lane").nth(1).bounding_box()  # cuda:0, default

    def at(us):
        page.mouse.move(lane["x"] + lane["width"] * us / 1005, lane["y"] + 9)

    at(150)
    assert event_line(page).startswith("addmm")
    assert page.locator(".mgpu-chosen").count() == 1
    at(400)
    assert event_line(page).startswith("Point at a bar")
    at(55)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(0, 0)
    assert event_line(page).startswith("convolution (")
    assert page.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith("convolution (")
    page.keyboard.press("ArrowRight")
    assert event_line(page).startswith("addmm")
    page.keyboard.press("Escape")

    at(251.25)
    page.mouse.wheel(0, -120)  # without Ctrl the page would scroll
    assert sentence(root) == viewer().sentence()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -120)
    assert sentence(root) == viewer(zoom=1, start=125.63 * US).sentence()  # the moment under the pointer stays there
    page.mouse.wheel(0, 120)
    page.keyboard.up("Control")
    assert sentence(root) == viewer().sentence()

    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Zoom in").click()
    assert sentence(root) == viewer(zoom=2, start=376.88 * US).sentence()
    page.mouse.move(lane["x"] + 10, lane["y"] + 9)
    page.mouse.down()
    page.mouse.move(lane["x"] + 10 + lane["width"] / 2, lane["y"] + 30, steps=5)
    page.mouse.up()
    begin = float(re.match(r"[\d.]+", slider(page, "Window").get_attribute("aria-valuetext")).group())
    assert begin == pytest.approx(376.9 - 125.6, abs=1)
    page.get_by_role("button", name="Show all").click()
    assert sentence(root) == viewer().sentence()
    disabled = [button.get_attribute("aria-disabled") for button in page.get_by_role("button").all()]
    assert disabled == ["true", "false", "true"]
    box = slider(page, "Zoom").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    assert slider(page, "Zoom").get_attribute("aria-valuetext").startswith("64×")
    assert page.get_by_role("button", name="Zoom in").get_attribute("aria-disabled") == "true"


def bars(page):
    """{(class, row's y, from, to)} of all bars, in pixels."""
    read = "paths => paths.map((path) => [path.classList[0], path.getAttribute('d')])"
    paths = page.locator(".mgpu-bars").evaluate_all(read)
    return [(part.removeprefix("mgpu-"), float(y), float(x), float(x) + float(wide))
            for part, path in paths for x, y, wide in re.findall(r"M([\d.]+),([\d.]+)h([\d.]+)", path)]


@pytest.mark.parametrize("values", [{}, {"zoom": 1, "start": 50 * US}])
def test_bars_are_drawn_to_scale_each_part_at_its_own_height(page, write, values):
    figure = viewer(**values)
    page.goto(write(figure))
    lanes = page.locator(".mgpu-picture .mgpu-lane").evaluate_all("""lanes => lanes.map((lane) =>
        ['x', 'y', 'width'].map((name) => +lane.getAttribute(name)))""")
    (begin, end), expected = figure.window(), []
    for (_, items), (x, y, width) in zip(figure.lanes(), lanes, strict=True):
        for start, stop, part in items:
            if stop > begin and start < end:
                left, right = (x + width * (min(max(t, begin), end) - begin) / (end - begin) for t in (start, stop))
                expected.append((part, y + {"forward": 0, "backward": 6}.get(part, 3), left, right))
    drawn = sorted(bars(page))
    assert [bar[:2] for bar in drawn] == [bar[:2] for bar in sorted(expected)]
    for found, right in zip(drawn, sorted(expected), strict=True):
        assert found[2:] == pytest.approx(right[2:], abs=0.9)  # a wide one ends 0.8 early
    assert {part for part, *_ in drawn} >= {"backward", "communication", "host", "other"}


def test_thousands_of_events_are_drawn_at_once(page, write):
    """A figure of 6,000 events is there, and zooms, without a wait that a reader would notice."""
    phases = ("forward", "backward")
    events = [kernel(f"k{i % 7}", 5 * i + 5, 5 * i + 9, gpu=i % 8, phase=phases[i % 2]) for i in range(6000)]
    figure = TimelineViewer(made(*events))
    assert len(figure.static_html().encode()) < 250_000
    page.goto(write(figure))
    assert sentence(page.locator("figure.mgpu")) == figure.sentence()
    assert len(bars(page)) == 12_000  # and the host's calls
    took = page.evaluate("""async () => {
        const zoom = document.querySelector("input"), times = [];
        for (const level of [1, 0, 2, 0, 3, 0, 1]) {
            const before = performance.now();
            zoom.value = level;
            zoom.dispatchEvent(new Event("input"));
            document.querySelector("svg.mgpu-picture").getBoundingClientRect();
            times.push(performance.now() - before);
        }
        return times.sort((a, b) => a - b)[3];
    }""")
    assert took < 400, "the median of seven, in milliseconds; about 15 on two slow cores"


@pytest.mark.parametrize("dark", DARK)
def test_dark_has_colours_of_its_own(page, write, dark):
    page.goto(write(viewer()))
    names = [".mgpu-forward", ".mgpu-backward", ".mgpu-communication", "path.mgpu-host", "button"]
    assert_dark_has_colours_of_its_own(page, dark, names)


@pytest.mark.parametrize("width", [360, 720])
def test_no_words_lie_on_each_other_or_leave_the_picture(page, write, width, step):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(write(viewer(event=2), TimelineViewer(step, event=9)))
    for n in range(2):
        zoom = slider(page, "Zoom").nth(n)
        start = slider(page, "Window").nth(n)
        for level in range(int(zoom.get_attribute("max")) + 1):
            zoom.fill(str(level))
            for key in ("Home", "PageUp", "ArrowRight", "End"):
                start.press(key)
                assert page.evaluate(CLASHES) == [], (level, key)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALLEST) >= 12


def test_every_control_has_a_name_a_visible_focus_and_its_own_keys(page, write):
    page.goto(write(viewer()))
    controls = page.locator(".mgpu :is(input, select, button)")
    assert controls.count() == 3 + 3
    for control in controls.all():
        assert control.evaluate("e => (e.labels[0] ?? e).textContent.trim()")
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
        page.keyboard.press("Tab")
        assert control.evaluate("e => e === document.activeElement")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"


def test_the_gpu_and_that_times_are_modelled_stand_in_the_figure(page, write, step):
    page.goto(write(TimelineViewer(step)))
    assert f"(modelled, {step.spec.key}, {step.link.name})" in picture(page).text_content()


def test_two_copies_on_one_page_do_not_disturb_each_other(page, write):
    page.goto(write(viewer(), viewer(zoom=1), viewer()))
    figures = page.locator("figure.mgpu")
    slider(figures.nth(0), "Zoom").press("End")
    slider(figures.nth(2), "Event").press("ArrowRight")
    assert [sentence(figures.nth(n)) for n in (1, 2)] == [viewer(zoom=1).sentence(), viewer().sentence()]
    assert page.locator(".mgpu-chosen").count() == 1


def test_without_javascript_the_picture_and_its_caption_show(browser, write, step):
    figures = {"#d55e00": viewer(zoom=2, start=50 * US), "#7f7f7f": TimelineViewer(step)}
    assert_pictures_show_without_javascript(browser, write(*figures.values()), figures)


# Live


def test_module_keeps_anywidgets_protocol(page, write):
    """Values go both ways; hovering stays in the page; what is returned lets go of the model."""
    page.goto(write())
    result = page.evaluate("""async ([source, data]) => {
        const heard = {}, saved = [], state = {start: 0, zoom: 0, event: -1, caption: "c", data};
        const model = {
            get: (key) => state[key],
            set(key, value) { state[key] = value; (heard[`change:${key}`] || []).forEach((f) => f()); },
            on: (name, f) => (heard[name] ??= []).push(f),
            off: (name, f) => { heard[name] = heard[name].filter((other) => other !== f); },
            save_changes: () => saved.push([state.start, state.zoom, state.event]),
        };
        const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
        const el = document.body.appendChild(document.createElement("div"));
        const leave = widget.render({ model, el });
        await new Promise((done) => setTimeout(done, 100));  // until its width is known
        const press = (n, key) => el.querySelectorAll("input")[n].dispatchEvent(new KeyboardEvent("keydown", {key}));
        press(0, "+");
        press(1, "ArrowLeft");
        press(2, "ArrowRight");
        model.set("zoom", 3);  // as when Python sets it
        model.set("start", 0.0005);
        await new Promise((done) => setTimeout(done, 300));
        const said = el.querySelector("[role=status]").textContent;
        leave();
        return { saved, said, left: Object.values(heard).flat().length };
    }""", [module(*VIEWER), read(viewer())])
    assert result["saved"] == [[0.00025125, 1, -1], [0.00018844, 1, -1], [0, 1, 1]]  # addmm begins before that
    assert result["said"] == viewer(zoom=3, start=500 * US).sentence()
    assert result["left"] == 0


# Why is two slower than one?


def grid(networks=("LeNet", "net")):
    """Made-up cells of every kind, in the shape of the recorded grid; tests below take that."""
    cells = {}
    for gpu, links in (("T4", ["pcie"]), ("V100", ["nvlink", "pcie"])):
        for i, name in enumerate(networks):
            cells[f"{gpu}/{name}"] = ["10007 999 0 1 fi9bw9", "20000 400 0 600 wa9fk4bk5", ""]
            for link, strategy, k in itertools.product(links, ("manual", "data_parallel", "ddp"), (2, 4)):
                n = len(link) + k + i
                ticks = {"manual": 9000 * n, "data_parallel": 12345, "ddp": 1990 + n}[strategy]
                rows = [f"w{j + 5}9fa{j}bc{9 - k}B85c{9 - j}3o49u21" for j in range(k)]
                cells[f"{gpu}/{link}/{name}/{strategy}/{k}"] = [
                    f"{ticks} 750 220 30 {rows[0]}",
                    f"{ticks + 1} 100 {460 if strategy == 'ddp' else 440} 450 {' '.join(rows)}",
                    "" if k == 2 else f"{n} 500 500 0 cE9ua0",
                ]
    links = {"T4": {"pcie": "PCIe 3.0 x16"}, "V100": {"nvlink": "NVLink 2, 6 links", "pcie": "PCIe 3.0 x16"}}
    return {"links": links, "networks": list(networks), "batch_sizes": [32, 64, 128], "counts": [1, 2, 4],
            "strategies": ["manual", "data_parallel", "ddp"], "bins": 50, "cells": cells}


NAMES = ("gpu", "link", "network", "strategy", "num_gpus", "batch_size")


def slower(**values):
    return WhySlower(grid(), **{"batch_size": 64, **values})


def all_states(data):
    """The values of all controls that a figure with this grid can have."""
    parts = (data[part] for part in ("networks", "strategies", "counts", "batch_sizes"))
    return list(itertools.product(data["links"], ("nvlink", "pcie"), *parts))


@pytest.fixture(scope="module")
def recorded():
    return json.loads(why_slower.OUT.read_text(encoding="utf-8"))


def test_why_is_read_and_set_from_python():
    figure = slower(num_gpus=4)
    assert repr(figure) == (
        "WhySlower(gpu='V100', link='nvlink', network='LeNet', strategy='manual', num_gpus=4, batch_size=64)"
    )
    ticks, shares, rows = figure.cell()
    assert (ticks, shares, len(rows)) == (90_001, [100, 440, 450], 4)
    assert figure.cell(1) == (20_000, [400, 0, 600], ["wa9fk4bk5"])
    assert figure.speedup() == 22
    figure.gpu = "T4"  # it has no NVLink
    assert figure.link_name() == "PCIe 3.0 x16"
    assert figure.cell()[0] == 72_001
    figure.batch_size = 128
    assert figure.cell(1) is None and figure.speedup() is None
    figure.num_gpus = 2
    assert figure.cell() is None


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("gpu", "H100", "'T4', 'V100'"),
        ("link", "token ring", "'nvlink', 'pcie'"),
        ("network", "VGG", "'LeNet', 'net'"),
        ("strategy", "horovod", "'manual', 'data_parallel', 'ddp'"),
        ("num_gpus", 3, "1, 2, 4"),
        ("batch_size", 100, "32, 64, 128"),
    ],
)
def test_why_refuses_what_was_not_recorded(name, value, names):
    figure = slower()
    before = getattr(figure, name)
    with pytest.raises(TraitError, match=names):
        setattr(figure, name, value)
    assert getattr(figure, name) == before
    with pytest.raises(TraitError, match=names):
        slower(**{name: value})


def test_a_grid_that_is_none_is_refused(monkeypatch, tmp_path):
    incomplete, uneven = grid(), grid()
    del incomplete["counts"]
    uneven["cells"]["T4/LeNet"].pop()
    for bad, words in ((incomplete, "counts"), (uneven, r"3 batch sizes.*\[2, 3\]"), ([], "list"), ({}, "links")):
        with pytest.raises(ValueError, match=words):
            WhySlower(bad)
    monkeypatch.setattr(why, "GRID", tmp_path / "why_slower.json")
    with pytest.raises(FileNotFoundError, match=re.escape("python -m experiments.why_slower")):
        WhySlower()


def test_sentence_of_why():
    assert slower(batch_size=32, strategy="data_parallel").sentence() == (
        "LeNet at batch 32, modelled on 2 V100 (NVLink 2, 6 links): 123 µs per step, one takes 100 µs: slower, "
        "0.81 times as fast. Compute bound: kernels run for 75% of the step, which smaller shards hardly shorten."
    )
    assert slower(batch_size=32, strategy="ddp", num_gpus=4).sentence() == (
        "LeNet at batch 32, modelled on 4 V100 (NVLink 2, 6 links): 20.0 µs per step, one takes 100 µs: 5.00 times as "
        "fast. Compute bound: kernels run for 75% of the step, so 4 GPUs pay."
    )
    assert slower(link="pcie").sentence() == (
        "LeNet at batch 64, modelled on 2 V100 (PCIe 3.0 x16): 540 µs per step, one takes 200 µs: slower, 0.37 times "
        "as fast. The bottleneck is launching: a GPU waits 45% of the step for the host, which launches the work of "
        "all GPUs, one after the other."
    )
    assert slower(strategy="ddp", gpu="T4").sentence().endswith(
        "The bottleneck is communication: for 46% of the step a GPU only sends, receives, or waits for another."
    )
    assert slower(num_gpus=1).sentence() == (
        "LeNet at batch 64, modelled on one V100: 200 µs per step. The bottleneck is launching: a GPU waits 60% of the "
        "step for the host, which launches kernels more slowly than the GPU runs them."
    )
    assert slower(num_gpus=4, batch_size=128).sentence() == (
        "LeNet at batch 128, modelled on 4 V100 (NVLink 2, 6 links): 0.10 µs per step, and does not fit into the "
        "memory of one. The bottleneck is communication: for 50% of the step a GPU only sends, receives, or waits for "
        "another."
    )
    assert slower(batch_size=128).sentence() == (
        "LeNet at batch 128, modelled on 2 V100 (NVLink 2, 6 links), does not fit into the memory."
    )


@pytest.mark.parametrize("which", ["made-up", "recorded"])
def test_the_page_says_of_every_cell_what_python_says(page, which, recorded):
    page.goto("about:blank")
    page.add_script_tag(content=module("time.js", "why.js").removesuffix(EXPORT))
    figure = WhySlower(recorded if which == "recorded" else grid())
    states = all_states(figure.data)
    said = page.evaluate("""([data, names, states]) => states.map((state) =>
        whySentence(data, Object.fromEntries(names.map((name, i) => [name, state[i]]))))""",
        [read(figure), NAMES, states])
    for state, words in zip(states, said, strict=True):
        for name, value in zip(NAMES, state, strict=True):
            setattr(figure, name, value)
        assert figure.sentence() == words
    kinds = ("is launching", "is communication", "GPUs pay", "does not fit into the memory.", "times as fast", "of one")
    assert all(any(kind in words for words in said) for kind in kinds)


def test_every_row_fills_the_step(recorded):
    figure = WhySlower(recorded)
    for name, cells in recorded["cells"].items():
        k = int(name.split("/")[4]) if name.count("/") > 1 else 1
        for cell in filter(None, cells):
            ticks, kernels, communication, host, *rows = cell.split()
            assert int(ticks) > 0
            assert abs(int(kernels) + int(communication) + int(host) - 1000) <= 2
            assert len(rows) in (1, k)
            for row in rows:
                assert re.fullmatch(r"([fbucwoFBU][0-9a-zA-E][0-9])+", row), row
                assert sum(why.LENGTHS.index(n) for n in row[1::3]) == figure.data["bins"]


@pytest.mark.parametrize("name", ["V100/LeNet", "V100/nvlink/LeNet/manual/4", "T4/pcie/LeNet/data_parallel/2",
                                  "A100-80/pcie/ResNet-18/ddp/8", "H100/nvlink/ResNet-18/manual/2"])
def test_recorded_cells_are_what_predict_says_today(name, recorded):
    """Else: `python -m experiments.why_slower`."""
    batch_sizes = [32, 512]
    cells = [recorded["cells"][name][recorded["batch_sizes"].index(n)] for n in batch_sizes]
    assert why_slower.record(name, batch_sizes) == cells


def test_the_grid_says_what_does_not_fit(recorded):
    """As virtual GPUs do, by their ledgers: ResNet-50 at batch 256 fits two of 16 GB, not one."""
    assert why_slower.record("V100/ResNet-50", [32, 256])[1] == "" == recorded["cells"]["V100/ResNet-50"][3]
    assert recorded["cells"]["V100/nvlink/ResNet-50/ddp/2"][3] != ""
    assert recorded["cells"]["T4/pcie/ResNet-50/ddp/2"][7] == ""


def test_a_run_goes_on_where_it_was_and_is_not_repeated(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(why_slower, "OUT", tmp_path / "out.json")
    monkeypatch.setattr(why_slower, "PART", tmp_path / "part.json")
    monkeypatch.setattr(why_slower, "configurations", lambda: ["T4/LeNet", "V100/LeNet"])
    sha256 = why_slower.provenance("experiments.why_slower", why_slower.SOURCES)["sha256"]
    for written, kept in ((sha256, True), ("of other code", False)):
        why_slower.PART.write_text(json.dumps({"sha256": written, "cells": {"V100/LeNet": ["as it was"]}}))
        why_slower.main()
        result = json.loads(why_slower.OUT.read_text(encoding="utf-8"))
        assert list(result["cells"]) == ["T4/LeNet", "V100/LeNet"]
        assert result["cells"]["T4/LeNet"] == why_slower.record("T4/LeNet")
        assert (result["cells"]["V100/LeNet"] == ["as it was"]) == kept
        assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
        before = why_slower.OUT.read_bytes()
        why_slower.main()
        assert "up to date" in capsys.readouterr().out
        assert why_slower.OUT.read_bytes() == before
        why_slower.OUT.unlink()


def test_states_of_a_gpu_add_up_and_rows_show_them():
    """A step of 100 µs: launched at 10, forward to 30, backward to 70 with communication beside it from 50, and alone
    to 80; the update is asked for at 85, waits until 90, and runs to 95."""
    events = (
        kernel("k", 10, 30, phase="forward"),
        kernel("k", 30, 70, phase="backward", launched=12),
        kernel("all-reduce", 50, 80, kind="collective", row="collective", launched=45),
        kernel("k", 90, 95, phase="update", launched=85),
    )
    events = [e._replace(called=0.0) for e in events]
    spans = list(why_slower.states(made(*events), 0, 100 * US))
    rounded = [(round(start / US), round(end / US), *rest) for start, end, *rest in spans]
    assert [span for span in rounded if span[0] < span[1]] == [
        (0, 10, "w", False), (10, 30, "f", False), (30, 50, "b", False), (50, 70, "b", True), (70, 80, "c", False),
        (80, 85, "w", False), (85, 90, "o", False), (90, 95, "u", False), (95, 100, "w", False),
    ]
    row = why_slower.row(spans, 100 * US)
    runs = [(row[i], why.LENGTHS.index(row[i + 1]), int(row[i + 2])) for i in range(0, len(row), 3)]
    assert [(name, n) for name, n, _ in runs if name in "fbBc"] == [("f", 10), ("b", 10), ("B", 10), ("c", 5)]
    assert [level for name, _, level in runs if name in "fbBc"] == [9, 9, 9, 9]
    assert sum(n for _, n, _ in runs) == 50


def test_short_waits_become_a_smaller_part():
    assert why_slower.joined([["f", 3, 3.0], ["w", 2, 2.0], ["f", 1, 0.5], ["b", 4, 4.0]]) == [
        ["f", 6, 3.5], ["b", 4, 4.0]
    ]
    apart = [["f", 3, 3.0], ["w", 4, 4.0], ["f", 1, 0.5], ["o", 1, 1.0], ["b", 4, 4.0]]
    assert why_slower.joined(apart) == apart


def test_html_of_why_is_deterministic_and_self_contained(recorded):
    for make in (slower, lambda: WhySlower(recorded)):
        html = make().static_html()
        assert html == make().static_html()
        assert len(html.encode()) < 300_000
        assert not re.findall(r"(?:src|href)=[\"'](?!data:)|\bimport\b[ (]|@import|url\((?!#)", html)
    assert WhySlower().static_html() == WhySlower(recorded).static_html()
    assert why_slower.OUT.stat().st_size <= 300_000


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_of_networks_stay_names(page, write, name):
    name = name.replace("/", "-")  # it parts the names of cells
    figure = WhySlower(grid((name, "net")), network=name, batch_size=64)
    page.goto(write(figure))
    assert page.evaluate("window.hacked") is None
    assert select(page, "Network").input_value() == name
    assert page.locator("[role=status]").text_content() == figure.sentence()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_why_is_moved_by_keyboard_and_by_pointer(page, write, theme):
    page.goto(write(slower()))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root, seen = page.locator("figure.mgpu"), []

    def expect(value, **values):
        figure = slower(**values)
        assert sentence(root) == figure.sentence() == picture(page).get_attribute("aria-label")
        assert slider(page, "Batch size").get_attribute("aria-valuetext") == value
        shot = picture(page).screenshot()
        assert shot not in seen
        seen.append(shot)

    at = {"num_gpus": 2}
    expect("64, 0.28 times as fast", **at)
    slider(page, "Number of GPUs").press("ArrowRight")
    expect("64, 0.22 times as fast", **(at := {"num_gpus": 4}))
    select(page, "Strategy").select_option("DDP")
    expect("64, 10.00 times as fast", **(at := {**at, "strategy": "ddp"}))
    select(page, "Link").focus()
    page.keyboard.press("ArrowDown")
    expect("64, 10.01 times as fast", **(at := {**at, "link": "pcie"}))
    slider(page, "Batch size").press("ArrowLeft")
    expect("32, 5.01 times as fast", **(at := {**at, "batch_size": 32}))
    select(page, "Network").select_option("net")
    select(page, "Strategy").select_option("by hand")
    expect("32, 0.12 times as fast", **(at := {**at, "network": "net", "strategy": "manual"}))
    box = slider(page, "Batch size").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    expect("128", **(at := {**at, "batch_size": 128}))
    box = slider(page, "Number of GPUs").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect("128, does not fit", **(at := {**at, "num_gpus": 2}))
    slider(page, "Number of GPUs").press("Home")
    slider(page, "Batch size").press("Home")
    expect("32", **{**at, "num_gpus": 1, "batch_size": 32})


def test_a_gpu_without_nvlink_uses_pcie(page, write):
    page.goto(write(slower()))
    select(page, "GPU").select_option("T4")
    link = select(page, "Link")
    assert link.input_value() == "pcie"
    assert link.locator("option").evaluate_all("options => options.map((o) => o.disabled)") == [True, False]
    assert sentence(page.locator("figure.mgpu")) == slower(gpu="T4").sentence()
    select(page, "GPU").select_option("V100")
    assert link.input_value() == "nvlink"
    assert sentence(page.locator("figure.mgpu")) == slower().sentence()


def test_marks_say_how_many_times_as_fast_and_what_does_not_fit(page, write):
    page.goto(write(slower(strategy="ddp")))
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
    figure = slower(num_gpus=4, strategy="data_parallel")
    page.goto(write(figure))
    ticks, _, rows = figure.cell()
    drawn = page.locator(".mgpu-run").evaluate_all("""runs => runs.map((run) =>
        [run.classList[0], ...["x", "y", "width"].map((name) => +run.getAttribute(name))])""")
    left = min(x for _, x, _, _ in drawn)
    span = picture(page).evaluate("picture => picture.clientWidth") - 1 - left
    steps = [(20_000, figure.cell(1)[2][0]), *((ticks, row) for row in rows)]
    looks = {"f": "forward", "b": "backward", "u": "update", "c": "communication", "w": "waits", "o": "away"}
    expected = []
    for whole, row in steps:
        x = left
        for i in range(0, len(row), 3):
            width = span * whole / 20_000 * why.LENGTHS.index(row[i + 1]) / 50
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


@pytest.mark.parametrize("dark", DARK)
def test_dark_of_why_has_colours_of_its_own(page, write, dark):
    page.goto(write(slower(num_gpus=4)))
    names = [".mgpu-forward", ".mgpu-backward", ".mgpu-communication", ".mgpu-waits", "select", "text.mgpu-quiet"]
    assert_dark_has_colours_of_its_own(page, dark, names)


@pytest.mark.parametrize("width", [360, 720])
def test_no_words_of_why_lie_on_each_other_or_leave_the_picture(page, write, width, recorded):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(write(WhySlower(recorded)))
    for gpu, network, strategy in itertools.product(("T4", "H100"), recorded["networks"], recorded["strategies"]):
        select(page, "GPU").select_option(gpu)
        select(page, "Network").select_option(network)
        select(page, "Strategy").select_option(strategy)
        for k, batch in itertools.product(range(4), (0, 4, 7)):
            slider(page, "Number of GPUs").fill(str(k))
            slider(page, "Batch size").fill(str(batch))
            assert page.evaluate(CLASHES) == [], (gpu, network, strategy, k, batch)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALLEST) >= 12


def test_every_control_of_why_has_a_name_a_visible_focus_and_its_own_keys(page, write):
    page.goto(write(slower()))
    controls = page.locator(".mgpu :is(input, select, button)")
    assert controls.count() == 4 + 2
    for control in controls.all():
        assert control.evaluate("e => e.labels[0].textContent.trim()")
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
        page.keyboard.press("Tab")
        assert control.evaluate("e => e === document.activeElement")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"


def test_both_figures_share_a_page(page, write):
    page.goto(write(slower(), viewer(), slower(num_gpus=1)))
    figures = page.locator("figure.mgpu")
    slider(figures.nth(0), "Number of GPUs").press("End")
    slider(figures.nth(1), "Zoom").press("ArrowRight")
    said = [sentence(figures.nth(n)) for n in range(3)]
    assert said == [f.sentence() for f in (slower(num_gpus=4), viewer(zoom=1, start=251.25 * US), slower(num_gpus=1))]


def test_without_javascript_a_step_and_its_caption_show(browser, write, recorded):
    figures = {"#0072b2": slower(num_gpus=1), "#d55e00": WhySlower(recorded, network="ResNet-18")}
    assert_pictures_show_without_javascript(browser, write(*figures.values()), figures)


def test_module_of_why_keeps_anywidgets_protocol(page, write):
    page.goto(write())
    result = page.evaluate("""async ([source, data]) => {
        const heard = {}, saved = [];
        const state = {gpu: "V100", link: "nvlink", network: "LeNet", strategy: "manual", num_gpus: 2, batch_size: 64};
        Object.assign(state, {caption: "c", data});
        const model = {
            get: (key) => state[key],
            set(key, value) { state[key] = value; (heard[`change:${key}`] || []).forEach((f) => f()); },
            on: (name, f) => (heard[name] ??= []).push(f),
            off: (name, f) => { heard[name] = heard[name].filter((other) => other !== f); },
            save_changes: () => saved.push([state.gpu, state.num_gpus, state.batch_size]),
        };
        const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
        const el = document.body.appendChild(document.createElement("div"));
        const leave = widget.render({ model, el });
        const [counts, batch] = el.querySelectorAll("input");
        counts.value = 2;
        counts.dispatchEvent(new Event("input"));
        batch.value = 0;
        batch.dispatchEvent(new Event("input"));
        model.set("gpu", "T4");  // as when Python sets it
        await new Promise((done) => setTimeout(done, 300));
        const said = el.querySelector("[role=status]").textContent;
        leave();
        return { saved, said, left: Object.values(heard).flat().length };
    }""", [module("time.js", "why.js"), read(slower())])
    assert result["saved"] == [["V100", 4, 64], ["V100", 4, 32]]
    assert result["said"] == slower(gpu="T4", num_gpus=4, batch_size=32).sentence()
    assert result["left"] == 0
