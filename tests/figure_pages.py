"""What the tests of the interactive figures share: pages that hold figures, and what is read from them."""

import io

import pytest
from PIL import Image

HOSTILE = ["</script><script>window.hacked=1</script>", "<!--<script>", "\"'&amp; {0} \\ \u2028"]
DARK = ["document.documentElement.dataset.theme = 'dark'", "document.body.dataset.jpThemeLight = 'false'"]

# The words that lie on others, and what leaves its picture, on the whole page.
CLASHES = """() => [...document.querySelectorAll(".mgpu-picture")].flatMap((picture) => {
    const frame = picture.getBoundingClientRect();
    const words = [...picture.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
    const drawn = [...picture.querySelectorAll("*")].filter((e) => e.getBBox && !e.closest("defs"));
    const out = drawn.map((e) => [e.textContent || e.tagName, e.getBoundingClientRect()]).filter(([, b]) =>
        b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1);
    const on = words.filter(([, a], i) => words.some(([, b], j) => i < j
        && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 5 && b.top < a.bottom - 5));
    return [...out, ...on].map(([word]) => word);
})"""
# The smallest letters of all figures, in pixels of the screen.
SMALLEST = """() => Math.min(...[...document.querySelectorAll(".mgpu *")]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
    .map((e) => parseFloat(getComputedStyle(e).fontSize) * (e.getScreenCTM ? e.getScreenCTM().a : 1)))"""
COLOURS = """(names) => names.map((name) => {
    const { color, fill, backgroundColor } = getComputedStyle(document.querySelector(`.mgpu ${name}`));
    return [color, fill, backgroundColor].join();
})"""


@pytest.fixture
def write(tmp_path):
    """Write figures into a page on disk and return its file:// address."""

    def write(*figures):
        body = "\n".join(figure._repr_mimebundle_()[0]["text/html"] for figure in figures)
        path = tmp_path / "page.html"
        # Themes give figures paddings and borders of their own.
        style = "html{font-family:sans-serif} html[data-theme=dark]{background:#14181e;color:#ced6dd}"
        style += "figure{padding:8px 20px!important;border:3px solid!important}"
        head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><style>{style}</style>"
        path.write_text(f"<!doctype html><html lang=en><head>{head}<title>t</title></head><body>{body}</body></html>")
        return path.as_uri()

    return write


def sentence(figure):
    """What the live region says once the control has come to rest; the picture says it at once."""
    settled = "e => e.querySelector('[role=status]').textContent === e.querySelector('svg[role=img]').ariaLabel"
    figure.page.wait_for_function(settled, arg=figure.element_handle())
    return figure.locator("[role=status]").text_content()


def picture(page, nth=0):
    return page.locator("svg.mgpu-picture").nth(nth)


def assert_dark_has_colours_of_its_own(page, dark, names):
    """`dark` is a script that changes the theme, `names` are selectors inside figures."""
    for name in names:
        page.locator(name).first.wait_for(state="attached")  # the figures draw themselves after the page is there
    light = page.evaluate(COLOURS, names)
    page.evaluate(dark)
    assert all(new != old for new, old in zip(page.evaluate(COLOURS, names), light, strict=True))


def assert_pictures_show_without_javascript(browser, address, figures):
    """`figures` has a colour for each figure, which its picture should show, but not on all of its area."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 360, "height": 900})
    try:
        page = context.new_page()
        page.goto(address)
        assert page.locator("input, select, button").count() == 0
        for n, (color, figure) in enumerate(figures.items()):
            image = page.locator("figure.mgpu img").nth(n)
            assert image.get_attribute("alt") == figure.sentence()
            assert figure.caption in page.locator("figure.mgpu figcaption").nth(n).text_content()
            shown = Image.open(io.BytesIO(image.screenshot())).convert("RGB")
            drawn = dict((pixel, count) for count, pixel in shown.getcolors(shown.width * shown.height))
            share = drawn[tuple(bytes.fromhex(color[1:]))] / (shown.width * shown.height)
            assert 0.01 < share < 0.5, "the bar should be there, and not be all there is"
    finally:
        context.close()
