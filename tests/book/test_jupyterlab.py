"""What `make lab` opens: each page shows text and no markup, each picture is there, each link leads somewhere."""

import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import live
import pytest
from pages import BOOK as PAGES
from pages import markdown

pytestmark = pytest.mark.slow

ROOT = live.REPO
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none"}',  # cells outside the window are drawn too
    "@jupyterlab/docmanager-extension/plugin": '{"autosave": false}',  # these are the repository's own files
}
OPEN = """([path, factory]) => {
    const kernelPreference = { shouldStart: false, canStart: false };
    const open = async () => {
        const widget = await jupyterapp.commands.execute("docmanager:open", { path, factory, kernelPreference });
        await widget.context.ready;
        widget.id = "page-under-test";
        window.closePage = () => widget.dispose();
    };
    window.opened = null;
    // The window keeps the promise: one that only the test waits for may be collected as garbage.
    window.opening = open().then(() => { window.opened = "ok"; }, (error) => { window.opened = String(error); });
}"""
DRAWN = """(cells) => {
    const parts = [...document.querySelectorAll("#page-under-test .jp-RenderedMarkdown:not(.jp-OutputArea-output)")];
    const links = parts.flatMap((part) => [...part.querySelectorAll("a[href]")]);
    const images = parts.flatMap((part) => [...part.querySelectorAll("img")]);
    return parts.length === cells && parts.every((part) => part.textContent)
        && links.every((a) => /^(#|http|$)/.test(a.getAttribute("href"))) && images.every((image) => image.complete);
}"""
SHOWN = """() => {
    const parts = [...document.querySelectorAll("#page-under-test .jp-RenderedMarkdown:not(.jp-OutputArea-output)")];
    const all = (selector) => parts.flatMap((part) => [...part.querySelectorAll(selector)]);
    const words = (part) => {
        const copy = part.cloneNode(true);
        copy.querySelectorAll("code, mjx-container").forEach((element) => element.remove());
        return copy.textContent.replaceAll(/\\$[^$]+\\$/g, "");  // formulas may not be drawn yet
    };
    return {
        text: parts.map(words).join("\\n"),
        links: all("a[href]:not(.jp-InternalAnchorLink)").map((a) => [a.textContent, a.getAttribute("href")]),
        names: all("[data-jupyter-id]").map((element) => element.dataset.jupyterId),
        missing: all("img").filter((image) => !image.naturalWidth || !image.alt).map((image) => image.outerHTML),
        boxes: all("blockquote").length,
    };
}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The JupyterLab that `make lab` starts, in the environment that runs the tests: its address and token."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in SETTINGS.items():
        path = folder / "JUPYTERLAB_SETTINGS_DIR" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / "ready-run").touch()
    make = ["make", "lab", f"BIN={Path(sys.executable).parent}", f"READY={folder / 'ready'}"]
    with live.serving(lambda options: [*make, f"LAB_ARGS={' '.join(options)}"], folder) as server:
        yield server


@pytest.fixture(scope="module")
def lab_page(made, browser):
    """It in a browser, without the network."""
    address, token = made
    with live.browsing(browser, address, height=1000) as page:
        page.goto(f"{address}/lab?token={token}")
        page.wait_for_function("window.jupyterapp")
        page.evaluate("() => { window.restored = jupyterapp.restored.then(() => { window.ready = true; }); }")
        page.wait_for_function("window.ready")
        yield page


def open_page(lab_page, name):
    lab_page.evaluate(OPEN, [name, "Notebook" if name.endswith(".ipynb") else "Markdown Preview"])
    assert lab_page.wait_for_function("window.opened").json_value() == "ok", name


@pytest.fixture(scope="module")
def shown(lab_page):
    """What JupyterLab shows of each page, all in one session."""
    found = {}
    for name in PAGES:
        open_page(lab_page, name)
        lab_page.wait_for_function(DRAWN, arg=len(markdown(name)))
        found[name] = lab_page.evaluate(SHOWN)
        lab_page.evaluate("closePage()")
    return found


def test_it_begins_in_the_folder_of_chapters(lab_page):
    lab_page.locator(".jp-DirListing-item[title*='01-meet-your-gpus.ipynb']").wait_for()


def test_no_markup_is_seen(shown):
    """Neither MyST's, nor Markdown that JupyterLab doesn't take for such."""
    markup = re.compile(r".{0,30}(?::::|```|\{[a-z:-]+\}|^\(\S+\)=|:class:|\*\*|\]\(|</?[a-z]+>|^>).{0,30}", re.M)
    assert {name: found for name in PAGES if (found := markup.findall(shown[name]["text"]))} == {}
    assert sum(page["boxes"] for page in shown.values()) > 100, "the boxes are there"


def test_every_link_leads_somewhere(shown, made):
    """To a page of the book, and to what has this name there, letter by letter: so JupyterLab looks for it."""
    nowhere = []
    for name, page in shown.items():
        for text, href in page["links"]:
            path, name_there = urlsplit(href).path, urlsplit(href).fragment
            if href.startswith("http") and not href.startswith(made[0]):
                continue  # a web page
            target = unquote(path.removeprefix("/files/")) if path else name
            if target.startswith("api-") and not name_there and (ROOT / target).exists():
                continue  # a page that Sphinx makes of docstrings: JupyterLab shows the names alone
            if not href or target not in shown or (name_there and name_there not in shown[target]["names"]):
                nowhere.append(f"{name}: [{text}]({href})")
    assert nowhere == []


def test_every_picture_is_there(shown):
    assert {name: page["missing"] for name, page in shown.items() if page["missing"]} == {}


def test_a_citation_opens_the_references_at_its_entry(shown, lab_page):
    """As a reader does it: a click in a chapter."""
    name = next(name for name in PAGES if name.startswith("chapters") and "references.md" in str(shown[name]["links"]))
    open_page(lab_page, name)
    citation = lab_page.locator("#page-under-test a[href*='references.md']").last
    key = urlsplit(citation.get_attribute("href")).fragment
    citation.click()
    lab_page.wait_for_function(
        """(key) => {
            const entry = document.querySelector(`.jp-MarkdownViewer [data-jupyter-id="${key}"]`);
            const top = entry?.getBoundingClientRect().top;
            return top >= 0 && top < innerHeight;
        }""",
        arg=key,
    )
