"""The interactive figures about all-reduce and splitting, in a real browser from file://."""

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
from traitlets import TraitError

from mgpu_lib import splitting, traffic
from mgpu_lib.collectives import Send, execute
from mgpu_lib.virtual import virtual_gpus
from mgpu_lib.widgets import AllReduceStepper, SplitExplorer
from mgpu_lib.widgets.base import EXPORT, module
from mgpu_lib.widgets.splits import BATCH_SIZES, WAYS

write = figure_pages.write
KINDS = ("star", "ring", "tree")
ROUNDS = {"star": [2 * (k - 1) for k in range(9)], "ring": [2 * (k - 1) for k in range(9)]}
ROUNDS["tree"] = [0, 0, 2, 4, 4, 6, 6, 6, 6]
STATES = [(kind, k, step) for kind in KINDS for k in range(2, 9) for step in range(ROUNDS[kind][k] + 1)]


def stepper(kind="ring", num_gpus=4, step=0):
    return AllReduceStepper(kind=kind, num_gpus=num_gpus, step=step)


def network(name, layers, per_cut, per_gpu, parameters):
    """Made-up figures in the shape of `traffic_table`'s; a test below takes measured ones."""
    layer_wise = [per_cut * k if k < layers else None for k in range(8)]
    all_reduce = [8 * parameters * k for k in range(8)]
    return {
        "name": name,
        "parameters": parameters,
        "layers": layers,
        "layer_wise": layer_wise,
        "in_layer": [per_gpu * k for k in range(8)],
        "data_parallel": all_reduce,
    }


def data():
    """Four networks. What moves least: it depends on the batch; by layers; data parallel; never by layers."""
    return [
        network("LeNet", 4, 6400, 38880, 129068),
        network("huge", 10, 8, 160, 10**9),
        network("all activations", 8, 10**6, 10**7, 10),
        network("one layer", 1, 0, 4096, 2**20),
    ]


def radio(root, kind):
    return root.get_by_role("radio", name=re.compile(f"^{kind}:"))


def button(root, name):
    return root.get_by_role("button", name=name)


def explorer(**values):
    return SplitExplorer(data(), **{"network": "LeNet", "num_gpus": 2, **values})


# Reading and setting from Python


def test_values_are_read_and_set_from_python():
    figure = stepper("ring", 4, 3)
    assert repr(figure) == "AllReduceStepper(kind='ring', num_gpus=4, step=3)"
    assert figure.links() == {(i, (i + 1) % 4): figure.data["nbytes"] // 4 * 3 for i in range(4)}
    assert [[len(shares) for shares in row] for row in figure.holds()] == [
        [1, 4, 3, 2],
        [2, 1, 4, 3],
        [3, 2, 1, 4],
        [4, 3, 2, 1],
    ]
    splits = explorer()
    assert repr(splits) == "SplitExplorer(network='LeNet', batch_size=64, num_gpus=2)"
    splits.batch_size, splits.num_gpus = 32, 3
    assert splits.bytes_moved() == {"layer_wise": 12800 * 32, "in_layer": 77760 * 32, "data_parallel": 16 * 129068}


def test_the_step_stays_within_the_rounds():
    figure = stepper("ring", 8, 14)
    figure.kind = "tree"
    assert figure.step == 6
    figure.num_gpus = 2
    assert figure.step == 2
    figure.kind = "star"
    assert figure.step == 2


def test_bad_values_are_refused_and_say_what_would_do():
    cases = [({"kind": "mesh"}, "'star', 'ring', 'tree'"), ({"num_gpus": 1}, "num_gpus.*2"), ({"num_gpus": 9}, "8")]
    cases += [({"step": -1}, "step"), ({"step": 7}, "a ring on 4 GPUs has 6 rounds; choose 0 to 6")]
    cases += [({"kind": "tree", "step": 5}, "a tree on 4 GPUs has 4 rounds")]
    for values, words in cases:
        with pytest.raises(TraitError, match=words):
            AllReduceStepper(**values)
    figure = stepper(step=2)
    with pytest.raises(TraitError, match="choose 0 to 6"):
        figure.step = 7
    assert figure.step == 2
    for nbytes in (0, -4, 8190, 4096, "1 MiB", 8192.0):
        with pytest.raises(ValueError, match=re.escape(f"nbytes={nbytes!r}: give a multiple of 4")):
            AllReduceStepper(nbytes)


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("network", "VGG", "'LeNet', 'huge'"),
        ("batch_size", 100, "64, 128"),
        ("num_gpus", 1, "2, 3"),
        ("num_gpus", 9, "7, 8"),
    ],
)
def test_explorer_refuses_what_it_has_no_data_for(name, value, names):
    figure = explorer()
    before = getattr(figure, name)
    with pytest.raises(TraitError, match=names):
        setattr(figure, name, value)
    assert getattr(figure, name) == before
    with pytest.raises(TraitError, match=names):
        explorer(**{name: value})


def test_data_that_is_not_a_traffic_table_is_refused():
    def spoiled(**parts):
        return [{**data()[0], **parts}, data()[1]]

    cases = [
        (None, "NoneType"),
        ([], "one network at least"),
        ([data()[0], data()[0]], "its own name"),
        ([{"name": "LeNet"}], "layers"),
        (spoiled(in_layer=[0, 1]), r"lists of \[2, 8\]"),
        (spoiled(in_layer=5), "TypeError"),
        (spoiled(data_parallel=[0, None, 2, 3, 4, 5, 6, 7]), "data_parallel of 'LeNet' has None"),
        (spoiled(layer_wise=[0, -1, 2, 3, 4, 5, 6, 7]), "layer_wise of 'LeNet' has -1"),
        (spoiled(in_layer=[0, "1", 2, 3, 4, 5, 6, 7]), "in_layer of 'LeNet' has '1'"),
        (spoiled(in_layer=[0, float("nan"), 2, 3, 4, 5, 6, 7]), "in_layer of 'LeNet' has nan"),
    ]
    for bad, words in cases:
        with pytest.raises(ValueError, match=words):
            SplitExplorer(bad)


def test_data_read_back_from_json_gives_the_same_figure():
    again = SplitExplorer(json.loads(json.dumps(data())))
    assert again.static_html() == SplitExplorer(data()).static_html()


# The output


def test_html_is_deterministic_small_and_self_contained():
    makes = [lambda state=state: stepper(*state) for state in STATES if state[1] in (2, 8)]
    for make in [*makes, explorer]:
        html = make().static_html()
        assert html == make().static_html()
        assert len(html.encode()) < 60_000, make()
        assert not re.findall(r"(?:src|href)=[\"'](?!data:)|\bimport\b[ (]|@import|url\((?!#)", html)
    assert stepper(step=1).static_html() != stepper(step=2).static_html()


@pytest.mark.parametrize("name", ["stepper.js", "splits.js"])
def test_scripts_may_stand_inside_a_script_element(name):
    assert module(name).endswith(EXPORT)
    assert not re.search(r"</script|<!--|^import |^export (?!default)", module(name), re.IGNORECASE | re.MULTILINE)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_names(page, write, name):
    figure = SplitExplorer([{**data()[0], "name": name}])
    page.goto(write(figure))
    assert page.evaluate("window.hacked") is None
    assert page.locator("select").first.input_value() == name
    assert page.locator("[role=status]").text_content() == figure.sentence()


# What the stepper says is right


@pytest.mark.parametrize("kind", KINDS)
def test_links_carry_what_a_machine_counts_when_the_rounds_are_run(kind):
    for k, step in ((k, step) for which, k, step in STATES if which == kind):
        figure = AllReduceStepper(4 * 2053, kind=kind, num_gpus=k, step=step)  # in chunks of unequal size
        with virtual_gpus(k) as machine:
            tensors = [torch.full((2053,), 10.0**i, device=device) for i, device in enumerate(machine.devices)]
            before = machine.traffic.copy()
            execute(figure.schedule()[:step], tensors)
            counted = machine.traffic - before
            first = [[chunk[0].item() for chunk in tensor.cpu().tensor_split(k)] for tensor in tensors]
        assert counted == {(f"cuda:{i}", f"cuda:{j}"): n for (i, j), n in figure.links().items() if n}
        holds = [row if kind == "ring" else row * k for row in figure.holds()]
        assert first == [[sum(10**i for i in shares) for shares in row] for row in holds]


def test_the_page_computes_what_python_computes_for_every_kind_number_and_step(page):
    page.goto("about:blank")
    page.add_script_tag(content=module("stepper.js").removesuffix(EXPORT))
    for figure in (AllReduceStepper(), AllReduceStepper(4 * 2053)):
        follow = """([data, states]) => states.map((state) => {
            const at = follow(data, ...state);
            return {...at, links: [...at.links.values()], names: [...at.links.keys()], said: stepSentence(at)};
        })"""
        followed = page.evaluate(follow, [json.loads(json.dumps(figure.data)), STATES])
        for (kind, k, step), at in zip(STATES, followed, strict=True):
            figure.step, figure.kind, figure.num_gpus = 0, kind, k
            figure.step = step
            assert (at["now"], at["rounds"]) == (step, ROUNDS[kind][k])
            assert at["names"] == [f"{i} → {j}" for i, j in figure.links()]
            assert at["links"] == [
                {"sofar": sofar, "whole": whole}
                for sofar, whole in zip(figure.links().values(), figure.all_links().values(), strict=True)
            ]
            assert at["holds"] == [[sum(2**gpu for gpu in shares) for shares in row] for row in figure.holds()]
            assert at["said"] == figure.sentence()


def test_the_last_round_leaves_every_gpu_with_the_sum():
    for kind, k in itertools.product(KINDS, range(2, 9)):
        figure = stepper(kind, k, ROUNDS[kind][k])
        assert all(shares == set(range(k)) for row in figure.holds() for shares in row)
        assert figure.links() == figure.all_links()
        assert sum(figure.links().values()) == 2 * (k - 1) * figure.data["nbytes"]


def test_stepper_sentence():
    assert stepper().sentence() == (
        "Ring on 4 GPUs, before the first of 6 rounds: each GPU holds its own gradient of 504 KiB."
    )
    assert stepper(step=3).sentence() == (
        "Ring on 4 GPUs, round 3 of 6: each GPU sends one chunk (126 KiB) to the next, which adds it to its own; "
        "1.48 MiB have moved, at most 378 KiB over one link; 4 of 16 chunks are complete."
    )
    assert stepper("star", 3, 3).sentence() == (
        "Star on 3 GPUs, round 3 of 4: GPU 0 sends to GPU 1, which keeps it; 1.48 MiB have moved, at most 504 KiB over "
        "one link; 2 of 3 GPUs are complete."
    )
    assert stepper("tree", 4, 1).sentence() == (
        "Tree on 4 GPUs, round 1 of 4: GPU 1 sends to GPU 0 and GPU 3 to GPU 2, which add it to their own; "
        "1008 KiB have moved, at most 504 KiB over one link; 0 of 4 GPUs are complete."
    )
    times = {"star": 14, "ring": 1.75, "tree": 6}
    for kind, wholes in times.items():
        ending = f"every GPU holds the sum, in the time that {wholes} whole gradients take over one link."
        assert stepper(kind, 8, ROUNDS[kind][8]).sentence().endswith(ending)


# What the explorer says is right


def test_least_is_the_smallest_number_and_change_is_where_that_changes():
    figure = explorer()
    for net, k in itertools.product(data(), range(2, 9)):
        figure.network, figure.num_gpus = net["name"], k
        rival, change = figure.change()
        for batch_size in BATCH_SIZES:
            figure.batch_size = batch_size
            moved = {way: n for way, n in figure.bytes_moved().items() if n is not None}
            assert moved[figure.least()] == min(moved.values())
            assert (figure.least() == "data_parallel") == (change is not None and batch_size >= change)
        if rival is not None and change is not None:
            each, once = net[rival][k - 1], net["data_parallel"][k - 1]
            assert each * (change - 1) < once <= each * change


def test_explorer_says_what_a_machine_counts():
    """From a network to the figure's numbers, for the smallest of the chapter's networks."""
    net = traffic.networks()["LeNet"]
    figure = SplitExplorer(traffic.traffic_table({"LeNet": net}), batch_size=16)
    ways = {"layer_wise": splitting.layer_wise, "in_layer": splitting.in_layer, "data_parallel": traffic.data_parallel}
    for figure.num_gpus in (2, 4):
        counted = {name: traffic.measure(way, net, 16, figure.num_gpus) for name, way in ways.items()}
        assert figure.bytes_moved() == counted


def test_explorer_sentence_is_the_same_in_python_and_in_the_page(page):
    page.goto("about:blank")
    page.add_script_tag(content=module("splits.js").removesuffix(EXPORT))
    figure = explorer()
    cases = list(itertools.product([net["name"] for net in data()], BATCH_SIZES, range(2, 9)))
    say = "([networks, cases]) => cases.map((c) => splitsSentence(networks, ...c))"
    said = page.evaluate(say, [json.loads(json.dumps(figure.data))["networks"], cases])
    for (figure.network, figure.batch_size, figure.num_gpus), words in zip(cases, said, strict=True):
        assert figure.sentence() == words
    kinds = ("is not possible, with 4 layers", "That is so at every", "Below a batch of", "From a batch of")
    assert all(any(kind in words for words in said) for kind in kinds)


def test_explorer_sentence():
    assert explorer().sentence() == (
        "LeNet at batch 64 on 2 GPUs: splitting by layers moves least, 400 KiB per step (splitting inside layers "
        "2.37 MiB; data parallelism 1008 KiB). From a batch of 162 on, data parallelism moves least."
    )
    assert explorer(num_gpus=6, batch_size=4096).sentence() == (
        "LeNet at batch 4096 on 6 GPUs: data parallelism moves least, 4.92 MiB per step (splitting by layers is not "
        "possible, with 4 layers; splitting inside layers 759 MiB). Below a batch of 27, splitting inside layers moves "
        "least."
    )


# The pictures in the browser


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_stepper_is_moved_by_keyboard_and_by_pointer(page, write, theme):
    page.goto(write(stepper()))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root, back, forth = page.locator("figure.mgpu"), button(page, "Back"), button(page, "Next")
    assert sentence(root) == stepper().sentence()
    seen = [picture(page).screenshot()]

    def expect(*state):
        assert sentence(root) == stepper(*state).sentence() == picture(page).get_attribute("aria-label")
        disabled = [button.get_attribute("aria-disabled") for button in (back, forth)]
        assert disabled == [str(end == state[2]).lower() for end in (0, ROUNDS[state[0]][state[1]])]
        shot = picture(page).screenshot()
        assert shot not in seen
        seen.append(shot)

    forth.click()
    expect("ring", 4, 1)
    page.keyboard.press("Enter")  # the button has the focus
    page.keyboard.press("Space")
    expect("ring", 4, 3)
    back.focus()
    page.keyboard.press("Enter")
    expect("ring", 4, 2)
    slider = page.get_by_label("Step")
    slider.press("End")
    expect("ring", 4, 6)
    assert slider.get_attribute("aria-valuetext") == "after round 6 of 6"
    forth.click(force=True)  # past the end: Playwright waits for a button that is enabled
    assert slider.get_attribute("aria-valuetext") == "after round 6 of 6"
    radio(page, "tree").click()
    expect("tree", 4, 4)
    box = page.get_by_label("Number of GPUs").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    expect("tree", 8, 4)
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    expect("tree", 8, 6)
    radio(page, "tree").press("ArrowUp")
    expect("ring", 8, 6)
    slider.press("Home")
    back.click(force=True)
    radio(page, "ring").press("ArrowUp")
    expect("star", 8, 0)


@pytest.mark.parametrize("state", [("ring", 5, 4), ("ring", 2, 1), ("star", 4, 2), ("tree", 6, 1), ("tree", 3, 4)])
def test_stepper_draws_what_each_gpu_holds_the_sends_and_the_links(page, write, state):
    figure = stepper(*state)
    page.goto(write(figure))
    for gpu in range(figure.num_gpus):
        drawn = page.locator(f".mgpu-share.mgpu-gpu{gpu}").count()
        assert drawn == sum(gpu in shares for row in figure.holds() for shares in row)
    complete = sum(len(shares) == figure.num_gpus for row in figure.holds() for shares in row)
    assert page.locator(".mgpu-full").count() == complete
    sends = figure.schedule()[figure.step - 1]
    around = sum(send.chunk is not None and send.target < send.source for send in sends)  # drawn in two pieces
    assert page.locator(".mgpu-head").count() == len(sends) + around
    width = "bars => bars.map((bar) => +bar.getAttribute('width'))"
    carried = page.locator(".mgpu-carried").evaluate_all(width)
    whole = page.locator(".mgpu-room").evaluate_all(width)
    scale = max(whole) / max(figure.all_links().values())
    assert carried == pytest.approx([n * scale for n in figure.links().values()], abs=0.01)
    assert whole == pytest.approx([n * scale for n in figure.all_links().values()], abs=0.01)
    assert all(f"{i} → {j}" in picture(page).text_content() for i, j in figure.links())


def test_arrows_lead_from_the_source_to_the_target(page, write):
    """The rows that the arrows of a star's round join, by where they lie in the picture."""
    page.goto(write(stepper("star", 4, 2)))
    boxes = page.locator(".mgpu-chunk").evaluate_all("boxes => boxes.map((box) => +box.getAttribute('y') + 11)")
    start, *_, end = re.findall(r"[\d.]+,[\d.]+", page.locator(".mgpu-send").get_attribute("d"))
    assert [boxes.index(float(point.split(",")[1])) for point in (start, end)] == [2, 0]
    assert stepper("star", 4, 2).schedule()[1] == [Send(2, 0, None, True)]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_explorer_is_moved_by_keyboard_and_by_pointer(page, write, theme):
    figure = explorer()
    page.goto(write(figure))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root, slider = page.locator("figure.mgpu"), page.get_by_role("slider", name="Batch size")
    assert sentence(root) == figure.sentence()
    before = picture(page).screenshot()
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    figure.batch_size = 256
    assert sentence(root) == figure.sentence() == picture(page).get_attribute("aria-label")
    assert slider.get_attribute("aria-valuetext") == "256, data parallelism moves least"
    marks = [mark.text_content()[0] for mark in page.locator(".mgpu-marks span").all()]
    assert marks == ["L"] * 8 + ["D"] * 5
    moved = picture(page).screenshot()
    assert moved != before
    box = page.get_by_label("Number of GPUs").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    page.get_by_label("Network").select_option("one layer")
    figure.num_gpus, figure.network = 8, "one layer"
    assert sentence(root) == figure.sentence()
    assert "not possible" in picture(page).text_content()
    page.get_by_label("Network").focus()
    page.keyboard.press("ArrowUp")
    slider.press("Home")
    figure.network, figure.batch_size = "all activations", 1
    assert sentence(root) == figure.sentence()
    assert [mark.text_content()[0] for mark in page.locator(".mgpu-marks span").all()] == ["D"] * 13
    assert picture(page).screenshot() not in (before, moved)


def test_explorer_draws_its_bars_to_scale(page, write):
    figure = explorer(batch_size=32, num_gpus=4)
    page.goto(write(figure))
    widths = page.locator(".mgpu-bar").evaluate_all("bars => bars.map((bar) => +bar.getAttribute('width'))")
    moved = list(figure.bytes_moved().values())
    span = picture(page).evaluate("picture => picture.clientWidth") - 1
    assert widths == pytest.approx([span * n / max(moved) for n in moved], abs=0.01)
    strong = page.locator(".mgpu-picture .mgpu-strong").all_text_contents()
    assert len(strong) == 2 and WAYS[figure.least()][0] in strong[0] and strong[1].endswith("least")


@pytest.mark.parametrize("dark", DARK)
def test_dark_has_colours_of_its_own(page, write, dark):
    page.goto(write(stepper(step=2), explorer()))
    names = [".mgpu-share.mgpu-gpu0", "button", "text.mgpu-quiet", ".mgpu-carried"]
    assert_dark_has_colours_of_its_own(page, dark, names)


@pytest.mark.parametrize("width", [360, 720])
def test_no_words_lie_on_each_other_or_leave_the_picture(page, write, width):
    """In all states of 2, 3, 7 and 8 GPUs, on a telephone and on a page of a book."""
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(write(stepper("star", 2), explorer(num_gpus=8)))
    root = page.locator("figure.mgpu").first
    for kind in KINDS:
        radio(root, kind).click()
        for k in (2, 3, 7, 8):
            root.get_by_label("Number of GPUs").fill(str(k - 2))
            for step in range(ROUNDS[kind][k] + 1):
                root.get_by_role("slider", name="Step").fill(str(step))
                assert page.evaluate(CLASHES) == [], (kind, k, step)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALLEST) >= 12


def test_every_control_has_a_name_a_visible_focus_and_its_own_keys(page, write):
    page.goto(write(stepper(), explorer()))
    controls = page.locator(".mgpu :is(input, select, button)")
    assert controls.count() == 3 + 2 + 2 + 3
    for control in controls.all():
        assert control.evaluate("e => (e.labels[0] ?? e).textContent.trim()")
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
    for _ in range(4):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"


def test_two_copies_on_one_page_do_not_disturb_each_other(page, write):
    page.goto(write(stepper(), stepper("tree"), stepper(), explorer(), explorer()))
    figures = page.locator("figure.mgpu")
    radio(figures.nth(0), "star").click()
    button(figures.nth(0), "Next").click()
    figures.nth(3).get_by_label("Batch size").press("End")
    expected = [stepper("star", 4, 1), stepper("tree"), stepper(), explorer(batch_size=4096), explorer()]
    assert [sentence(figures.nth(n)) for n in range(5)] == [figure.sentence() for figure in expected]


def test_without_javascript_the_picture_and_its_caption_show(browser, write):
    figures = {"#0072b2": stepper("ring", 4, 3), "#cc79a7": stepper("tree", 8, 6), "#e69f00": explorer(num_gpus=6)}
    assert_pictures_show_without_javascript(browser, write(*figures.values()), figures)


# Live


def test_module_keeps_anywidgets_protocol(page, write):
    """Values go both ways; a kind with fewer rounds takes the step with it; what is returned lets go of the model."""
    page.goto(write())
    result = page.evaluate("""async ([source, data]) => {
        const heard = {}, saved = [], state = {kind: "ring", num_gpus: 8, step: 13, caption: "c", data};
        const model = {
            get: (key) => state[key],
            set(key, value) { state[key] = value; (heard[`change:${key}`] || []).forEach((f) => f()); },
            on: (name, f) => (heard[name] ??= []).push(f),
            off: (name, f) => { heard[name] = heard[name].filter((other) => other !== f); },
            save_changes: () => saved.push([state.kind, state.num_gpus, state.step]),
        };
        const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
        const el = document.body.appendChild(document.createElement("div"));
        const leave = widget.render({ model, el });
        await new Promise((done) => setTimeout(done, 100));  // until its width is known
        const [back, next] = el.querySelectorAll("button");
        next.click();
        el.querySelector("input[value=tree]").click();
        back.click();
        model.set("num_gpus", 2);  // as when Python sets it: Python's next message is the step that goes with it
        const between = el.querySelector("svg[role=img]").ariaLabel;
        model.set("step", 2);
        await new Promise((done) => setTimeout(done, 300));
        const said = el.querySelector("[role=status]").textContent;
        leave();
        return { saved, between, said, left: Object.values(heard).flat().length };
    }""", [module("stepper.js"), json.loads(json.dumps(stepper().data))])
    assert result["saved"] == [["ring", 8, 14], ["tree", 8, 6], ["tree", 8, 5]]
    assert result["between"] == result["said"] == stepper("tree", 2, 2).sentence()
    assert result["left"] == 0
