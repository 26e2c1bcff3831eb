"""A page that holds figures, for the tests of this folder: live ones, or as the book has them."""

import live as jupyterlab
import pytest
from figure_pages import LIVE, SAY, in_page, state_of

from mgpu_lib.widgets.base import EXPORT

lab = jupyterlab.lab  # a fixture: a JupyterLab for the tests of one file


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


@pytest.fixture(scope="module")
def says(browser):
    """What figures say in a page of their own: says(figure), or says(figure, states) for a list of changed values."""
    page = browser.new_page()
    page.goto("about:blank")

    def says(figure, states=None):
        changes = [{}] if states is None else in_page(states)
        said = page.evaluate(SAY, [figure._esm, state_of(figure), changes])
        return said[0] if states is None else said

    yield says
    page.close()


@pytest.fixture
def calls(page):
    """The functions of a figure's script: calls(figure class, "name or expression", *arguments)."""
    loaded = []

    def calls(figure, function, *arguments):
        if not loaded:
            page.goto("about:blank")
            page.add_script_tag(content=figure._esm.removesuffix(EXPORT))
            loaded.append(figure)
        assert loaded == [figure], "one script for one page"
        return page.evaluate(f"(given) => ({function})(...given)", in_page(arguments))

    return calls


@pytest.fixture
def live(page, write):
    """Show a figure as anywidget does. The page's variables are `model`, `heard`, `saved`, `sent`, `show`, `leave`."""

    def live(figure, sends=False):
        page.goto(write())
        page.add_style_tag(content=figure._css)
        page.evaluate(LIVE, [figure._esm, state_of(figure), sends])
        page.locator(".mgpu-picture[viewBox]").wait_for(state="attached")
        return page.locator("figure.mgpu")

    return live
