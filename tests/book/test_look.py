"""How pages of the built book look on a telephone and in the dark."""

import io

import pytest
from PIL import Image, ImageStat

# The columns of the first table that are seen whole without scrolling, but for the padding.
SEEN = """() => [...document.querySelectorAll(".mgpu-table th")]
    .filter((cell) => cell.getBoundingClientRect().right - 10 <= innerWidth)
    .map((cell) => cell.textContent)"""
# Of each plot its width, that of the box in which it scrolls, and what that box hides.
PLOTS = """() => [...document.querySelectorAll(".cell_output img")].map((image) => {
    const box = image.closest(".cell_output");
    return [image.clientWidth, box.clientWidth, box.scrollWidth];
})"""


@pytest.fixture
def chapter(book, page):
    """The first chapter, on a telephone."""
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto((book / "chapters" / "01-meet-your-gpus.html").as_uri())
    return page


def test_a_telephone_shows_words_at_their_size_and_what_is_wider_scrolls_in_its_box(chapter):
    assert chapter.evaluate(SEEN)[:3] == ["GPU", "name", "memory used"]
    plots = chapter.evaluate(PLOTS)
    assert plots and all(image > 600 and image <= scrolls > box for image, box, scrolls in plots)


def test_drawings_and_plots_are_dark_in_the_dark(chapter):
    chapter.evaluate("document.documentElement.dataset.theme = 'dark'")
    for image in chapter.locator(".bd-article img:visible").all():
        shown = Image.open(io.BytesIO(image.screenshot())).convert("L")
        assert ImageStat.Stat(shown).median[0] < 60, image.get_attribute("alt")


def test_what_opens_a_hidden_cell_is_called_what_it_says(book, page):
    page.goto((book / "chapters" / "museum.html").as_uri())
    assert page.locator("summary").count() > 5 and page.locator("summary[aria-label]").count() == 0


def test_messages_are_read_to_their_end_on_a_telephone(book, page):
    """Those in a table take several lines, and a traceback that the text shows wraps."""
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto((book / "chapters" / "02-tensors-on-devices.html").as_uri())
    cells = page.locator("td.mgpu-words", has_text="Expected all tensors")
    widths = cells.evaluate_all("(cells) => cells.map((cell) => cell.clientWidth)")
    assert len(widths) > 4 and max(widths) < 360
    page.goto((book / "chapters" / "03-what-fills-the-memory.html").as_uri())
    page.locator("details", has_text="Traceback").evaluate("(details) => { details.open = true; }")
    assert page.locator("details .highlight-pytb pre").evaluate("(pre) => pre.scrollWidth <= pre.clientWidth")
