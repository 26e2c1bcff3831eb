"""The interactive figures, in a real browser from file:// and in a real JupyterLab."""

import itertools
import json
import re

import figure_pages
import nbformat
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
from live import accept, run_cell
from torch import nn
from traitlets import TraitError

from mgpu_lib.virtual import virtual_gpus
from mgpu_lib.widgets import BatchSplitter, MemoryExplorer
from mgpu_lib.widgets.base import EXPORT, module
from mgpu_lib.widgets.memory import OPTIMIZERS, PRECISIONS, memory_table
from mgpu_lib.widgets.splitter import shard_sizes

write = figure_pages.write
BATCH_SIZES = [2**i for i in range(13)]


def network(parameters, activations):
    """Made-up figures in the shape of `memory_table`'s; the tests named test_memory_table_* measure real ones."""
    by_batch = {n: activations * n for n in BATCH_SIZES}
    optimizer = {"sgd": 0, "momentum": parameters, "adam": 2 * parameters}
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": optimizer,
        "activations": {"fp32": by_batch, "amp": {n: 3 * b // 5 + parameters // 2 for n, b in by_batch.items()}},
        "scratch": {p: {o: {n: b // 32 + 1000 for n, b in by_batch.items()} for o in optimizer} for p in PRECISIONS},
    }


def data():
    networks = {"LeNet": network(1_725_440, 89_600), "ResNet-18": network(44_700_160, 3_660_000)}
    return {"networks": networks, "gpus": {"T4": 15 * 2**30, "RTX4090": 24 * 2**30, "tiny": 2**27 + 2**17}}


def explorer(**values):
    return MemoryExplorer(data(), **{"network": "ResNet-18", "optimizer": "adam", "batch_size": 512, **values})


# Reading and setting from Python


def test_values_are_read_and_set_from_python():
    figure = explorer()
    figure.batch_size, figure.precision, figure.gpu = 64, "amp", "RTX4090"
    assert repr(figure) == (
        "MemoryExplorer(batch_size=64, network='ResNet-18', optimizer='adam', precision='amp', gpu='RTX4090')"
    )
    splitter = BatchSplitter()
    assert (splitter.batch_size, splitter.num_gpus, splitter.way) == (10, 4, "split_batch")
    splitter.num_gpus = 3
    assert splitter.shards() == [range(0, 4), range(4, 7), range(7, 10)]


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("batch_size", 500, "256, 512"),
        ("network", "VGG", "'LeNet', 'ResNet-18'"),
        ("gpu", "H100", "'T4', 'RTX4090'"),
        ("optimizer", "lion", "'sgd', 'momentum', 'adam'"),
        ("precision", "int8", "'fp32', 'amp'"),
    ],
)
def test_explorer_refuses_what_was_not_measured_and_says_what_would_do(name, value, names):
    figure = explorer()
    before = getattr(figure, name)
    with pytest.raises(TraitError, match=names):
        setattr(figure, name, value)
    assert getattr(figure, name) == before
    with pytest.raises(TraitError, match=names):
        explorer(**{name: value})


@pytest.mark.parametrize("values", [{"batch_size": 0}, {"batch_size": 65}, {"num_gpus": 9}, {"way": "randomly"}])
def test_splitter_refuses_bad_values(values):
    with pytest.raises(TraitError, match=rf"{next(iter(values))}.*(1|64|8|'split_batch', 'scatter')"):
        BatchSplitter(**values)


def test_data_that_is_not_a_memory_table_is_refused():
    incomplete = data()
    del incomplete["networks"]["LeNet"]["scratch"]
    uneven = data()
    del uneven["networks"]["LeNet"]["activations"]["amp"][4096]
    for bad, words in ((incomplete, "scratch"), (uneven, "same batch sizes"), ({}, "networks"), (None, "NoneType")):
        with pytest.raises(ValueError, match=words):
            MemoryExplorer(bad)
    with pytest.raises(ValueError, match="0 GPUs"):
        MemoryExplorer({**data(), "gpus": {}})


def test_data_read_back_from_json_gives_the_same_figure():
    figure, again = MemoryExplorer(data()), MemoryExplorer(json.loads(json.dumps(data())))
    assert again.data == figure.data
    assert again.static_html() == figure.static_html()


# The output


def test_html_is_deterministic_small_and_self_contained():
    for make in (explorer, BatchSplitter, lambda: BatchSplitter(batch_size=64, num_gpus=8)):
        html = make().static_html()
        assert html == make().static_html()
        assert len(html.encode()) < 60_000
        assert not re.findall(r"(?:src|href)=[\"'](?!data:)|\bimport\b[ (]|@import|url\((?!#)", html)
    assert explorer(batch_size=64).static_html() != explorer(batch_size=128).static_html()


def test_scripts_may_stand_inside_a_script_element():
    for name in ("memory.js", "splitter.js"):
        assert module(name).endswith(EXPORT)
        assert not re.search(r"</script|<!--|^import |^export (?!default)", module(name), re.IGNORECASE | re.MULTILINE)


def test_output_carries_the_live_widget_the_page_and_a_line_of_text():
    figure = BatchSplitter()
    bundle, _ = figure._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == "BatchSplitter(batch_size=10, num_gpus=4, way='split_batch')"
    figure.batch_size = 11
    assert "11 rows" not in bundle["text/html"]
    assert figure.static_html() == BatchSplitter(batch_size=11).static_html()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_names(page, write, name):
    hostile = {"networks": {name: network(1000, 1000)}, "gpus": {name: 2**30}}
    figure = MemoryExplorer(hostile)
    page.goto(write(figure))
    assert page.evaluate("window.hacked") is None
    assert page.locator("select").first.input_value() == name
    assert page.locator("[role=status]").text_content() == figure.sentence()


# What the picture says is right


def test_split_equals_torch_for_every_size(page):
    page.goto("about:blank")
    page.add_script_tag(content=module("splitter.js").removesuffix(EXPORT))
    cases = list(itertools.product(range(1, 65), range(1, 9), ("split_batch", "scatter")))
    scripted = page.evaluate("cases => cases.map(c => shards(...c).map(s => [s.first, s.count]))", cases)
    for (rows, gpus, way), in_page in zip(cases, scripted, strict=True):
        X = torch.arange(rows)
        pieces = X.tensor_split(gpus) if way == "split_batch" else X.chunk(gpus)
        sizes = [len(piece) for piece in pieces] + [0] * (gpus - len(pieces))
        assert [count for _, count in in_page] == sizes == shard_sizes(rows, gpus, way), (rows, gpus, way)
        starts = [first for first, count in in_page if count]
        assert starts == [piece[0].item() for piece in pieces if len(piece)]
    said = page.evaluate("cases => cases.map(c => splitSentence(...c))", cases)
    figure = BatchSplitter()
    for (rows, gpus, way), words in zip(cases, said, strict=True):
        figure.batch_size, figure.num_gpus, figure.way = rows, gpus, way
        assert figure.sentence() == words


def test_splitter_sentence():
    assert BatchSplitter(batch_size=9, way="scatter").sentence() == (
        "Rows 0–2 go to GPU 0, rows 3–5 to GPU 1 and rows 6–8 to GPU 2. GPU 3 gets nothing. "
        "Each of these shards weighs 3/9 in the mean over the batch."
    )
    assert BatchSplitter(batch_size=9).sentence() == (
        "Rows 0–2 go to GPU 0, rows 3–4 to GPU 1, rows 5–6 to GPU 2 and rows 7–8 to GPU 3. "
        "The shards weigh 3/9, 2/9, 2/9 and 2/9 in the mean over the batch."
    )
    assert BatchSplitter(batch_size=1, num_gpus=3).sentence() == "Row 0 goes to GPU 0. GPUs 1 and 2 get nothing."


def test_memory_sentence_is_the_same_in_python_and_in_the_page(page):
    page.goto("about:blank")
    page.add_script_tag(content=module("memory.js").removesuffix(EXPORT))
    names = ("network", "optimizer", "precision", "gpu", "batch_size")
    cases = list(itertools.product(data()["networks"], OPTIMIZERS, PRECISIONS, data()["gpus"], BATCH_SIZES))
    say = """([data, names, cases]) => cases.map((c) => memorySentence(
        {get: (key) => key === "data" ? data : c[names.indexOf(key)]}))"""
    said = page.evaluate(say, [json.loads(json.dumps(data())), names, cases])
    figure = explorer()
    for case, words in zip(cases, said, strict=True):
        figure.set_trait("batch_size", case[-1])
        for name, value in zip(names, case, strict=True):
            setattr(figure, name, value)
        assert figure.sentence() == words
    kinds = ("of the memory of one", "the largest batch that fits is", "no batch size fits", "under 1%")
    assert all(any(kind in words for words in said) for kind in kinds)


def test_memory_sentence():
    figure = explorer(gpu="T4", batch_size=512)
    assert figure.sentence() == (
        "ResNet-18 with Adam at batch 512 in FP32 needs 1.97 GiB, 13% of the memory of one T4; "
        "89% of that is activations."
    )
    figure.gpu, figure.optimizer, figure.batch_size = "tiny", "sgd", 64
    assert figure.sentence() == (
        "ResNet-18 with SGD at batch 64 in FP32 needs 316 MiB. That does not fit: 188 MiB too much for one tiny; "
        "the largest batch that fits is 8."
    )
    assert figure.largest_batch_size() == 8


# The picture in the browser


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_explorer_is_moved_by_keyboard_and_by_pointer(page, write, theme):
    figure = explorer()
    page.goto(write(figure))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root, slider = page.locator("figure.mgpu"), page.get_by_label("Batch size")
    assert sentence(root) == figure.sentence()
    before = picture(page).screenshot()

    slider.focus()
    page.keyboard.press("ArrowLeft")
    figure.batch_size = 256
    assert sentence(root) == figure.sentence() == picture(page).get_attribute("aria-label")
    assert slider.get_attribute("aria-valuetext") == "256, fits"
    moved = picture(page).screenshot()
    assert moved != before

    box = slider.bounding_box()  # from the thumb to the right end
    page.mouse.move(box["x"] + 8 + (box["width"] - 16) * 8 / 12, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2, steps=10)
    page.mouse.up()
    figure.batch_size = 4096
    assert sentence(root) == figure.sentence()
    assert picture(page).screenshot() not in (before, moved)

    page.keyboard.press("Home")
    page.get_by_label("Network").select_option("LeNet")
    page.get_by_label("Optimizer").focus()
    page.keyboard.press("ArrowUp")
    page.get_by_label("Precision").select_option("mixed precision")
    page.get_by_label("GPU").select_option("tiny")
    chosen = explorer(batch_size=1, network="LeNet", optimizer="momentum", precision="amp", gpu="tiny")
    assert sentence(root) == chosen.sentence()


def test_explorer_says_what_does_not_fit(page, write):
    figure = explorer(gpu="tiny", optimizer="sgd", batch_size=64)
    page.goto(write(figure))
    marks = page.locator(".mgpu-marks span")
    assert [mark.text_content()[0] for mark in marks.all()] == ["●"] * 4 + ["×"] * 9
    assert "188 MiB too much" in picture(page).text_content()
    assert page.get_by_label("Batch size").get_attribute("aria-valuetext") == "64, does not fit"
    page.get_by_label("Batch size").press("Home")
    assert "too much" not in picture(page).text_content()
    assert "MiB free" in picture(page).text_content()


def test_explorer_draws_its_bars_to_scale(page, write):
    figure = explorer(gpu="T4", batch_size=4096)
    page.goto(write(figure))
    bars = page.locator(".mgpu-picture .mgpu-part").all()
    starts, widths = ([float(bar.get_attribute(name)) for bar in bars] for name in ("x", "width"))
    whole, magnified = widths[:5], widths[5:]
    for begin, drawn in ((starts[:5], whole), (starts[5:], magnified)):  # each begins where the one before it ends
        assert begin == pytest.approx(list(itertools.accumulate(drawn[:-1], initial=1)))
    total = sum(figure.parts().values())
    span = picture(page).evaluate("picture => picture.clientWidth") - 2
    for drawn, per_byte in ((whole, span / figure.data["gpus"]["T4"]), (magnified, span / total)):
        assert drawn == pytest.approx([n_bytes * per_byte for n_bytes in figure.parts().values()], abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_splitter_is_moved_by_keyboard_and_by_pointer(page, write, theme):
    figure = BatchSplitter()
    page.goto(write(figure))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root = page.locator("figure.mgpu")
    before = picture(page).screenshot()
    page.get_by_label("Batch size").press("ArrowLeft")
    page.get_by_label("nn.parallel.scatter").click()
    figure.batch_size, figure.way = 9, "scatter"
    assert sentence(root) == figure.sentence() == picture(page).get_attribute("aria-label")
    assert [page.locator(f".mgpu-cell.mgpu-gpu{gpu}").count() for gpu in range(4)] == [6, 6, 6, 0]
    assert "nothing" in picture(page).text_content()
    moved = picture(page).screenshot()
    assert moved != before

    box = page.get_by_label("Number of GPUs").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
    page.get_by_label("nn.parallel.scatter").press("ArrowUp")
    figure.num_gpus, figure.way = 8, "split_batch"
    assert sentence(root) == figure.sentence()
    assert [page.locator(f".mgpu-cell.mgpu-gpu{gpu}").count() for gpu in range(8)] == [4] + [2] * 7
    assert picture(page).screenshot() not in (before, moved)


@pytest.mark.parametrize("dark", DARK)
def test_dark_has_colours_of_its_own(page, write, dark):
    """By the book's theme and by JupyterLab's."""
    page.goto(write(explorer(), BatchSplitter()))
    names = ["text.mgpu-quiet", "select", ".mgpu-parameters", ".mgpu-gpu0", "figcaption"]
    assert_dark_has_colours_of_its_own(page, dark, names)


def test_a_dragged_slider_does_not_chatter(page, write):
    page.goto(write(BatchSplitter()))
    page.evaluate("""() => {
        window.said = 0;
        new MutationObserver(() => window.said++).observe(document.querySelector("[role=status]"), {childList: true});
    }""")
    box = page.get_by_label("Batch size").bounding_box()
    page.mouse.move(box["x"] + 8 + (box["width"] - 16) * 9 / 63, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"], box["y"] + box["height"] / 2, steps=40)
    page.mouse.up()
    assert sentence(page.locator("figure.mgpu")) == BatchSplitter(batch_size=64).sentence()
    assert page.evaluate("window.said") <= 3  # of 54 steps


def test_several_figures_and_the_same_one_twice_share_a_page(page, write):
    page.goto(write(BatchSplitter(), explorer(), BatchSplitter(), explorer(batch_size=1)))
    figures = page.locator("figure.mgpu")
    assert figures.count() == page.locator("svg.mgpu-picture").count() == 4
    untouched = [sentence(figures.nth(n)) for n in (1, 2, 3)]
    figures.nth(0).get_by_label("Batch size").press("End")
    figures.nth(0).get_by_label("nn.parallel.scatter").check()
    assert sentence(figures.nth(0)) == BatchSplitter(batch_size=64, way="scatter").sentence()
    assert figures.nth(2).get_by_label("split_batch").is_checked()
    assert [sentence(figures.nth(n)) for n in (1, 2, 3)] == untouched
    # A notebook may add the same output later: what the reader has moved stays as it is.
    page.add_script_tag(content=page.locator("body > script:not([type])").first.text_content())
    assert sentence(figures.nth(0)) == BatchSplitter(batch_size=64, way="scatter").sentence()
    figures.nth(2).get_by_label("Number of GPUs").press("Home")
    assert sentence(figures.nth(2)) == BatchSplitter(num_gpus=1).sentence()


def test_text_stays_readable_on_a_telephone(page, write):
    page.set_viewport_size({"width": 360, "height": 800})
    crowded = BatchSplitter(batch_size=64, num_gpus=8)
    page.goto(write(explorer(), explorer(gpu="tiny"), crowded, BatchSplitter(num_gpus=7)))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(SMALLEST) >= 12
    assert page.evaluate(CLASHES) == []
    for n in range(4):
        box, frame = picture(page, n).bounding_box(), page.locator("form.mgpu-controls").nth(n).bounding_box()
        assert frame["width"] - 1 <= box["width"] <= frame["width"]
        assert box["x"] == frame["x"]
    # The picture is drawn anew, not scaled, when the page gets wider.
    narrow = picture(page).bounding_box()["width"]
    page.set_viewport_size({"width": 700, "height": 800})
    page.wait_for_function("narrow => document.querySelector('.mgpu-picture').clientWidth > narrow + 200", arg=narrow)
    assert picture(page).evaluate("picture => picture.getScreenCTM().a") == 1


def test_a_number_and_its_unit_stay_on_one_line(page, write):
    page.set_viewport_size({"width": 320, "height": 800})
    page.goto(write(explorer(batch_size=4096)))
    lines = page.locator(".mgpu td").evaluate_all("""cells => cells.map((cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return new Set([...range.getClientRects()].map((line) => Math.round(line.top))).size;
    })""")
    assert set(lines) == {1}, [*zip(lines, page.locator(".mgpu td").all_text_contents())]
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_every_control_has_a_label_a_visible_focus_and_its_own_keys(page, write):
    page.goto(write(explorer(), BatchSplitter()))
    controls = page.locator(".mgpu :is(input, select)")
    assert controls.count() == 5 + 4
    for control in controls.all():
        assert control.evaluate("e => e.labels[0].textContent.trim()")
        assert control.get_attribute("data-lm-suppress-shortcuts") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"


def test_without_javascript_the_picture_and_its_caption_show(browser, write):
    figures = {"#009e73": explorer(batch_size=2048), "#0072b2": BatchSplitter()}
    assert_pictures_show_without_javascript(browser, write(*figures.values()), figures)


# Live


def test_module_keeps_anywidgets_protocol(page, write):
    """The ES module as anywidget loads it: values go both ways, and the function it returns lets go of the model."""
    page.goto(write())
    result = page.evaluate("""async (source) => {
        const heard = {}, saved = [], state = {batch_size: 10, num_gpus: 4, way: "split_batch", caption: "c", data: {}};
        const model = {
            get: (key) => state[key],
            set(key, value) { state[key] = value; (heard[`change:${key}`] || []).forEach((f) => f()); },
            on: (name, f) => (heard[name] ??= []).push(f),
            off: (name, f) => { heard[name] = heard[name].filter((other) => other !== f); },
            save_changes: () => saved.push({...state}),
        };
        const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
        const el = document.body.appendChild(document.createElement("div"));
        const leave = widget.render({ model, el });
        const slider = el.querySelector("input");
        slider.value = 19;
        slider.dispatchEvent(new Event("input"));
        model.set("num_gpus", 2);  // as when Python sets it
        await new Promise((done) => setTimeout(done, 300));
        const said = el.querySelector("[role=status]").textContent;
        leave();
        const left = Object.values(heard).flat().length;
        return { saved: saved.map((values) => values.batch_size), said, left };
    }""", module("splitter.js"))
    assert result == {"saved": [20], "said": BatchSplitter(batch_size=20, num_gpus=2).sentence(), "left": 0}


def test_live_in_jupyterlab(browser, lab):
    """The slider moved by keyboard in JupyterLab is the trait that Python reads, and what Python sets is shown."""
    address, token, folder = lab
    sources = (
        "from mgpu_lib.widgets import BatchSplitter\nfigure = BatchSplitter()\nfigure",
        "figure.num_gpus = 3\nprint('Python reads', figure.batch_size)",
    )
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{n}") for n, source in enumerate(sources)]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=spec), folder / "live.ipynb")
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    context.set_default_timeout(120_000)
    context.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
    try:
        page = context.new_page()
        page.add_locator_handler(page.locator(".jp-Dialog"), accept)
        page.goto(f"{address}/lab/tree/live.ipynb?token={token}")
        root = page.locator(".jp-OutputArea figure.mgpu")
        run_cell(page, 0, root)
        slider = root.get_by_label("Batch size")
        slider.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert sentence(root) == BatchSplitter(batch_size=12).sentence()
        run_cell(page, 1, page.get_by_text("Python reads 12"))
        root.get_by_text("3 GPUs", exact=True).wait_for()
        assert sentence(root) == BatchSplitter(batch_size=12, num_gpus=3).sentence()
        assert root.count() == 1, "the live widget should be shown, and the static page not beside it"
    finally:
        context.close()


# The numbers


def make_net():
    return nn.Sequential(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(20 * 13 * 13, 500))


@pytest.fixture(scope="module")
def measured():
    return memory_table({"net": (make_net, (1, 28, 28))}, [1, 2, 4, 64, 128, 256], ["T4", "A100-80"])


def test_memory_table_counts_parameters_gradients_and_optimizer_state(measured):
    assert list(measured["gpus"]) == ["T4", "A100-80"]
    net = measured["networks"]["net"]
    parameters = sum(-(-p.numel() * 4 // 512) * 512 for p in make_net().parameters())  # in blocks of 512 bytes
    assert net["parameters"] == net["gradients"] == net["optimizer"]["momentum"] == parameters
    assert net["optimizer"]["sgd"] == 0
    assert 2 * parameters <= net["optimizer"]["adam"] <= 2 * parameters + 4 * 512  # and maybe its step counters


def test_memory_table_activations_grow_in_proportion_to_the_batch(measured):
    activations = measured["networks"]["net"]["activations"]
    for table in activations.values():
        assert table[256] - table[128] == 2 * (table[128] - table[64]) > 0
    assert 0.4 < activations["amp"][256] / activations["fp32"][256] < 0.8


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 256])
def test_memory_table_adds_up_to_the_peak_of_an_ordinary_training_loop(measured, optimizer, precision, batch_size):
    figure = MemoryExplorer(measured, optimizer=optimizer, precision=precision, batch_size=batch_size)
    kind, options = {"sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {})}[optimizer]
    with virtual_gpus(1, gpu="T4", backing="meta"):
        X = torch.zeros(batch_size, 1, 28, 28, device="cuda:0")
        y = torch.zeros(batch_size, dtype=torch.int64, device="cuda:0")
        net = make_net().to("cuda:0")
        trainer = getattr(torch.optim, kind)(net.parameters(), **options)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.float16, enabled=precision == "amp"):
                loss = nn.functional.cross_entropy(net(X), y)
            trainer.zero_grad(set_to_none=False)
            loss.backward()
            trainer.step()
            del loss
        assert sum(figure.parts().values()) == torch.cuda.max_memory_allocated(0)
