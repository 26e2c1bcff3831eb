"""What every interactive figure promises: in a real browser from file://, in JupyterLab, and without JavaScript."""

import io
import re

import pytest
import take_pictures
from figure_pages import FORCE, HOSTILE, SMALLEST, picture, sentence, state_of
from figure_samples import SAMPLES
from PIL import Image
from traitlets import TraitError

from mgpu_lib import widgets
from mgpu_lib.widgets import BatchSplitter, base
from mgpu_lib.widgets.base import DECLARATION, EXPORT, PICTURES, module, picture_name

DARK = ["document.documentElement.dataset.theme = 'dark'", "document.body.dataset.jpThemeLight = 'false'"]
COLORS = """() => ["figcaption", ".mgpu-picture *", ".mgpu-controls :is(select, button)"].map((some) =>
    [...document.querySelectorAll(`.mgpu ${some}`)].map((element) => {
        const { color, fill, stroke, backgroundColor } = getComputedStyle(element);
        return [color, fill, stroke, backgroundColor].join();
    }).join(";"))"""
FOCUSABLE = """[...document.querySelectorAll(".mgpu :is(input, select, button, [tabindex='0'])")]
    .filter((e) => e.type !== "radio" || e.checked)"""
# What has the focus, and whether nothing can be done with it.
AT_FOCUS = """[document.activeElement.localName, document.activeElement.ariaDisabled === "true"
    || [...(document.activeElement.options ?? [1, 1])].filter((option) => !option.disabled).length < 2]"""
# Names that don't begin with the words that are seen; controls without a name, or whose keys JupyterLab would take.
RENAMED = """() => [...document.querySelectorAll(".mgpu [aria-label]:not([role=grid], [role=img])")]
    .filter((e) => !e.ariaLabel.startsWith(e.textContent.trim())).map((e) => e.ariaLabel)"""
UNNAMED = """() => [...document.querySelectorAll(".mgpu :is(input, select, button)")]
    .filter((e) => !(e.labels[0] ?? e).textContent.trim() || e.dataset.lmSuppressShortcuts !== "true")
    .map((e) => e.outerHTML)"""
pytestmark = pytest.mark.sweep(2)


@pytest.fixture(params=SAMPLES)
def sample(request):
    return SAMPLES[request.param]


def test_every_figure_has_a_sample():
    assert sorted(SAMPLES) == sorted(widgets.__all__)
    for name, sample in SAMPLES.items():
        assert type(sample.make()).__name__ == name


# The output


def test_the_output_is_the_live_widget_a_line_of_text_and_html_that_needs_nothing_else(sample):
    figure = sample.make()
    bundle, _ = figure._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain", "application/vnd.jupyter.widget-view+json"}
    values = ", ".join(f"{name}={getattr(figure, name)!r}" for name in figure.controls)
    assert bundle["text/plain"] == repr(figure) == f"{type(figure).__name__}({values})"
    html = bundle["text/html"]
    assert html == sample.make().static_html() and len(html.encode()) < sample.largest
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)|\bimport\b[ (]|@import|url\((?!#)", html)
    for name, (value, words) in sample.refused.items():
        with pytest.raises(TraitError, match=words):
            setattr(figure, name, value)
        with pytest.raises(TraitError, match=words):
            sample.make(**{name: value})
    assert figure.static_html() == html, "what there is not changes nothing"
    for name, value in sample.other.items():
        setattr(figure, name, value)
    assert figure.static_html() == sample.make(**sample.other).static_html() != html


@pytest.mark.sweep(4)
def test_hostile_words_stay_words(page, write, says, sample):
    """As a caption, and as names in the data."""
    made = [(name, sample.make(caption=name)) for name in HOSTILE]
    made += [(name, sample.hostile(name)) for name in HOSTILE if sample.hostile]
    page.goto(write(*(figure for _, figure in made)))
    for n, (name, figure) in enumerate(made):
        root = page.locator("figure.mgpu").nth(n)
        assert sentence(root) == says(figure)
        assert name in root.text_content() or name.replace("/", "-") in root.text_content()
    for menu in page.locator("select").all():
        assert menu.evaluate("e => e.selectedIndex >= 0")
    assert page.evaluate("window.hacked") is None


# In the page


@pytest.mark.parametrize("dark", DARK, ids=["the book's theme", "JupyterLab's theme"])
@pytest.mark.sweep(4)
def test_dark_has_colors_of_its_own(page, write, sample, dark):
    page.goto(write(sample.make()))
    picture(page).and_(page.locator("[viewBox]")).wait_for()
    light = page.evaluate(COLORS)
    page.evaluate(dark)
    for some, colors, before in zip(("caption", "picture", "controls"), page.evaluate(COLORS), light, strict=True):
        assert colors != before or not before, some


@pytest.mark.parametrize("width, orders", [(360, [1, 7, 11]), (720, [7])], ids=["telephone", "book"])
def test_whatever_is_chosen_picture_words_and_controls_agree_and_fit(page, write, sample, width, orders):
    """On a telephone and on a page of a book. All controls are set to all values, also to an option that is hidden or
    disabled: a typed letter chooses it, and some browsers show it."""
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(write())
    figure = sample.make()
    page.add_style_tag(content=figure._css)
    steps, differences, clashes = page.evaluate(FORCE, [figure._esm, state_of(figure), orders])
    assert differences == clashes == [] and steps > 5
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALLEST) >= 12


@pytest.mark.sweep(4)
def test_the_picture_is_drawn_anew_and_never_scaled(page, write, sample):
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(write(sample.make()))
    drawn = picture(page)
    drawn.and_(page.locator("[viewBox]")).wait_for()
    narrow, form = drawn.bounding_box(), page.locator("form.mgpu-controls").bounding_box()
    assert narrow["x"] == form["x"] and form["width"] - 1 <= narrow["width"] <= form["width"]
    page.set_viewport_size({"width": 620, "height": 800})
    page.wait_for_function(
        "old => document.querySelector('.mgpu-picture').clientWidth > old + 150", arg=narrow["width"]
    )
    assert drawn.evaluate("picture => picture.getScreenCTM().a") == 1


@pytest.mark.sweep(4)
def test_every_control_has_a_name_and_a_visible_focus_and_is_moved_by_keyboard(live, says, sample):
    """In the order of the page. Python hears of it, and the figure says what it shows."""
    figure = sample.make()
    root = live(figure)
    page, stops = root.page, root.page.evaluate(f"{FOCUSABLE}.length")
    assert page.evaluate(RENAMED) == page.evaluate(UNNAMED) == [] and stops > 2
    for n in range(stops):
        page.keyboard.press("Tab")
        assert page.evaluate(f"{FOCUSABLE}[{n}] === document.activeElement"), n
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
        name, idle = page.evaluate(AT_FOCUS)
        before = page.evaluate("saved.length")
        for key in ["Enter"] if name == "button" else ["ArrowRight", "ArrowLeft"]:
            if page.evaluate("saved.length") == before and not idle:
                page.keyboard.press(key)
        assert page.evaluate("saved.length") > before or idle, n
        now = {name: page.evaluate("name => model.get(name)", name) for name in figure.controls}
        assert sentence(root).endswith(says(figure, [now])[0])
    for name, value in sample.other.items():  # as when Python sets them
        page.evaluate("([name, value]) => model.set(name, value)", [name, value])
    now = {name: page.evaluate("name => model.get(name)", name) for name in figure.controls}
    assert sentence(root).endswith(says(figure, [now])[0])
    page.evaluate("leave()")
    assert page.evaluate("Object.values(heard).flat().length") == 0, "a figure that is closed lets go of the model"


# Without JavaScript


@pytest.fixture(scope="module")
def plain_page(browser):
    """A page in which no script runs, on a telephone."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 900})
    yield context.new_page()
    context.close()


@pytest.mark.sweep(4)
def test_without_javascript_the_picture_and_its_caption_show(
    page, plain_page, write, says, sample, monkeypatch, tmp_path
):
    monkeypatch.setattr(base, "PICTURES", tmp_path)
    figure = sample.make(caption="It's <this>.")
    name, state = type(figure).__name__, state_of(figure)
    taken = take_pictures.take(page, name, state)
    (tmp_path / picture_name(name, state)).write_text(taken, encoding="utf-8")
    plain_page.goto(write(figure))
    assert plain_page.locator("input, select, button").count() == 0
    assert "It's <this>. (The controls need JavaScript" in plain_page.locator("figcaption").text_content()
    image = plain_page.locator("figure.mgpu img")
    assert image.get_attribute("alt") == says(figure)
    shown = Image.open(io.BytesIO(image.screenshot())).convert("RGB")
    assert shown.width > 250 and shown.height > 100
    assert len(shown.getcolors(shown.width * shown.height)) > 50, "it should show something"
    assert not re.search(r"NaN|undefined|class=|style=|var\(", taken)


def test_without_javascript_a_figure_without_a_picture_shows_its_caption(plain_page, write):
    """Other data than the book's have no picture, nor have other values: nothing wrong may be shown."""
    plain_page.goto(write(BatchSplitter(batch_size=8, caption="It's <this>.")))
    words = "It's <this>. (This figure needs JavaScript, and in a notebook your trust.)"
    assert plain_page.locator("figure.mgpu").inner_text() == words
    assert plain_page.locator("figure.mgpu img").count() == 0
    assert "<img" in BatchSplitter(batch_size=9, caption="Other words.").static_html(), "of the book, with another text"


def test_the_pictures_are_those_of_the_chapters_and_of_todays_scripts():
    """Else: `make pictures`, then `make run-notebooks`."""
    shown = {picture_name(name, state): getattr(widgets, name) for name, state in take_pictures.figures_shown()}
    assert shown and sorted(shown) == sorted(path.name for path in PICTURES.iterdir())
    for file, figure in shown.items():
        made_with = f'data-script="{take_pictures.script_digest(figure)}"'
        assert made_with in (PICTURES / file).read_text(encoding="utf-8"), f"{file} is out of date"


def numbers_and_the_rest(text):
    number = r"-?\d+(?:\.\d+)?"
    return [float(word) for word in re.findall(number, text)], re.sub(number, "#", text)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.sweep(4)
def test_a_picture_taken_again_is_the_stored_one(page, name):
    """Up to a pixel: letters may be a little wider elsewhere."""
    [state, *_] = [state for figure, state in take_pictures.figures_shown() if figure == name]
    numbers, rest = numbers_and_the_rest(take_pictures.take(page, name, state))
    stored, wanted = numbers_and_the_rest((PICTURES / picture_name(name, state)).read_text(encoding="utf-8"))
    assert rest == wanted
    assert numbers == pytest.approx(stored, abs=1)


# The scripts


@pytest.mark.parametrize("figure", SAMPLES)
def test_a_figures_script_is_one_module_that_may_stand_in_a_page(figure):
    figure = getattr(widgets, figure)
    assert figure._esm.endswith(EXPORT)
    assert not re.search(r"</script|<!--|^import |^export (?!default)", figure._esm, re.IGNORECASE | re.MULTILINE)
    names = DECLARATION.findall(figure._esm)
    assert len(names) == len(set(names)) > 10


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ('import { b } from "./b.js";\nexport const a = b;', "export const b = 1;\nconst a = 2;", "a is decl"),
        ('import { b } from "./b.js";', 'import { a } from "./a.js";', "a.js → b.js → a.js"),
        ('import * as b from "./b.js";', "", r"a.js: 'import \* as b"),
        ("function a() {}\nexport { a };", "", "a.js: 'export { a };'"),
    ],
)
def test_files_that_cannot_be_joined_are_refused(monkeypatch, tmp_path, a, b, words):
    (tmp_path / "a.js").write_text(f"{a}\n")
    (tmp_path / "b.js").write_text(f"{b}\n")
    monkeypatch.setattr(base, "HERE", tmp_path)
    with pytest.raises(ValueError, match=words):
        module("a.js")


# Words that all figures use


def test_sizes_shares_and_lists_are_written_with_three_digits_and_in_words(calls):
    sizes = {0: "0 B", 512: "0.50 KiB", 126 * 2**10: "126 KiB", 3 * 2**19: "1.50 MiB", 2**30 - 1: "1024 MiB"}
    sizes |= {2**30: "1.00 GiB", 15 * 2**30 + 2**29: "15.5 GiB", 16_117_530_624: "15.0 GiB", 10**12: "931 GiB"}
    assert calls(BatchSplitter, "(all) => all.map(size)", list(sizes)) == list(sizes.values())
    shares = {(0, 5): "0%", (1, 1000): "under 1%", (5, 1000): "1%", (125, 1000): "13%", (1, 1): "100%"}
    assert calls(BatchSplitter, "(all) => all.map((of) => percent(...of))", list(shares)) == list(shares.values())
    lists = {(): "", ("a",): "a", ("a", "b"): "a and b", ("a", "b", "c"): "a, b and c"}
    assert calls(BatchSplitter, "(all) => all.map(list)", list(lists)) == list(lists.values())
