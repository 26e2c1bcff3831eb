"""The built book: whole pages, nothing from outside, formulas offline, light enough, readable on a phone."""

import re
import shutil
from functools import cache
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import build_book
import moved
import published
import pytest
import trim_styles
import yaml
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup

ROOT = build_book.ROOT
PARTS = yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"]
CHAPTERS = [entry["file"] for part in PARTS for entry in part["chapters"]]
PAGES = ["index", *CHAPTERS]
PAGE_LIMIT = 1_500_000  # bytes of a page's HTML and pictures
SHARED_LIMIT = 700_000  # a third of it when a web server compresses it
LOADS = {"link": "href", **dict.fromkeys(["script", "img", "iframe", "source", "video", "audio"], "src")}


def soup(path):
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


shown = cache(soup)  # of the book, which no test changes


@cache
def anchors(path):
    return {tag["id"] for tag in shown(path).find_all(id=True)}


def test_toc_lists_every_chapter():
    written = {f"chapters/{path.stem}" for path in (ROOT / "chapters").glob("*.ipynb")}
    assert written <= set(CHAPTERS), "a chapter that _toc.yml doesn't list is in nobody's book"
    numbered = [name for name in CHAPTERS if re.match(r"chapters/\d", name)]
    assert numbered == sorted(numbered)


def said(page):
    """What a page's <meta> elements say."""
    tags = page.find_all("meta", content=True)
    return {tag.get("name", tag.get("property")): tag["content"] for tag in tags}


def check_form(page):
    assert page.title and page.title.get_text(strip=True)
    assert len(page.select("article h1")) == 1
    assert page.html.get("lang") == "en"
    assert len(said(page)["description"]) > 50
    for image in page.find_all("img"):
        alt = image.get("alt", "").strip()
        assert alt, f"no alt text: {image.get('src', '')[:100]}"
        # without one of its own, an output's picture gets its path for an alt text
        assert Path(urlsplit(image["src"]).path).name not in alt or image["src"].startswith("data:"), (
            f"the alt text is a path: {alt!r}; set it in the cell's metadata: mystnb.image.alt"
        )


def check_nothing_outside(page):
    """Statically: also what a browser would load later, or only on some screens."""
    loads = [tag[where] for kind, where in LOADS.items() for tag in page.find_all(kind, {where: True})]
    loads += [part.split()[0] for tag in page.find_all(srcset=True) for part in tag["srcset"].split(",")]
    for style in page.find_all("style"):
        loads += re.findall(r"(?:url\(|@import\s)[\s'\"]*([^)'\"]+)", style.get_text())
    outside = [address for address in loads if urlsplit(address).scheme not in ("", "data") or address.startswith("//")]
    assert not outside


def check_links(page, path):
    """Sphinx checks its own references; this also sees links written as HTML, in widgets and in outputs."""
    for link in page.find_all("a", href=True):
        parts = urlsplit(link["href"])
        if parts.scheme:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
        assert target.exists(), f"{link['href']} leads nowhere"
        if parts.fragment and target.suffix == ".html":
            assert unquote(parts.fragment) in anchors(target), f"{link['href']}: no such anchor"


@pytest.mark.parametrize("name", [*PAGES, "search", "genindex"])
def test_page_is_whole_and_leads_nowhere_outside(book, name):
    path = book / f"{name}.html"
    page = shown(path)
    check_nothing_outside(page)
    if name in PAGES:
        check_form(page)
        check_links(page, path)
        pictures = {urlsplit(image["src"]) for image in page.find_all("img", src=True)}
        files = [path, *(path.parent / unquote(address.path) for address in pictures if address.scheme != "data")]
        assert sum(file.stat().st_size for file in files) <= PAGE_LIMIT, "all pages share the rest"


def test_old_addresses_lead_to_pages_of_the_book(book):
    """Without a script, too."""
    for old, new in moved.MOVED.items():
        path = book / f"{old}.html"
        [refresh] = soup(path).select("meta[http-equiv=refresh]")
        address = refresh["content"].removeprefix("0; url=")
        assert [link["href"] for link in soup(path).find_all("a")] == [address]
        assert (path.parent / address).resolve() == book / f"{new}.html" and new in PAGES


def test_an_old_address_is_followed_with_its_anchor(book, page):
    """A heading that is still there is found."""
    page.goto((book / "chapters/06-dataparallel-in-one-line.html").as_uri() + "#checkpoints-and-module")
    page.wait_for_url(lambda url: url.endswith("chapters/05-dataparallel.html#checkpoints-and-module"))
    assert "Checkpoints and module." in page.locator(":target").inner_text()


def test_the_map_of_the_first_page_leads_to_chapters(book):
    """Each stop to the one that it names."""
    stops = shown(book / "index.html").select("svg.drawing a")
    assert len(stops) == 18
    for stop in stops:
        label = stop.find_all("text")[1].get_text()
        assert label in shown(book / stop["href"]).h1.get_text()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.sweep(4)
def test_page_in_a_browser(book, page, name):
    """From a folder on disk, network blocked: no request outside, no error (both checked by `page`), formulas drawn,
    pictures shown, and nothing wider than a phone."""
    page.goto((book / f"{name}.html").as_uri())
    page.wait_for_load_state("load")
    assert page.locator(".katex-error").count() == 0, page.locator(".katex-error").first.text_content()
    assert page.locator(".math").count() == page.locator(".math .katex").count()
    assert page.evaluate(MISSING_FONTS) == [], "assets/katex/katex.css has only the fonts that were used"
    broken = "images => images.filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert page.locator("img").evaluate_all(broken) == []
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "the page scrolls sideways on a phone"
    cut = "bars => bars.filter(b => b.scrollWidth > b.clientWidth).length"
    assert page.locator(".bd-sidebar-secondary").evaluate_all(cut) == 0, "the contents of the page scroll sideways"
    narrow = "figures => figures.filter(f => f.clientWidth && f.clientWidth < 344).map(f => [f.id, f.clientWidth])"
    assert page.locator("[data-mgpu]").evaluate_all(narrow) == [], "tests/figures look at figures 344 pixels wide"


MISSING_FONTS = """() => {
    const known = new Set([...document.fonts].map((f) => `${f.family} ${f.weight} ${f.style}`.replaceAll('"', "")));
    const used = [...document.querySelectorAll(".katex-html *")].filter((e) => e.firstChild?.data?.trim()).map((e) => {
      const style = getComputedStyle(e);
      return `${style.fontFamily.split(",")[0]} ${style.fontWeight} ${style.fontStyle}`;
    });
    return [...new Set(used)].filter((font) => !known.has(font.replaceAll('"', "")));
}"""
NO_ICON = """() => [...document.querySelectorAll("[class*='fa-']")]
    .filter((icon) => getComputedStyle(icon, "::before").content === "none").map((icon) => icon.className)"""


@pytest.mark.parametrize("name", ["index", "chapters/04-data-parallelism-from-scratch"])
def test_what_pages_share_is_light(book, page, name):
    """Style sheets, scripts, fonts: of icons and of KaTeX's fonts only those that the book shows."""
    loaded = set()

    def note(request):
        path = Path(unquote(urlsplit(request.url).path))
        if request.resource_type != "image" and path.suffix != ".html":
            loaded.add(path)

    page.on("request", note)
    page.goto((book / f"{name}.html").as_uri())
    page.remove_listener("request", note)
    assert len(loaded) > 10 and sum(path.stat().st_size for path in loaded) <= SHARED_LIMIT
    assert not [path for path in loaded if "webfonts" in path.parts], "an icon that assets/icons.css hasn't"
    assert page.evaluate(NO_ICON) == []


def test_style_sheets_keep_what_pages_name():
    css = "/*! MIT */.a,.gone.a,p:not(.gone) {x: 1}.gone::before {x: 2}@media print {.gone {x: 3}.b {x: 4}}"
    css += "@media screen {.gone {x: 5}}@font-face {src: none}"
    kept = "/*! MIT */.a,p:not(.gone){x: 1}@media print {.b{x: 4}}@font-face {src: none}"
    assert trim_styles.trimmed(css, {"a", "b"}) == kept


TO_USE = """() => [...document.querySelectorAll(
        "nav, aside, button, input, .copybtn, .headerlink, #pst-back-to-top, .mgpu-event")]
    .filter((e) => e.checkVisibility({ visibilityProperty: true })).map((e) => e.outerHTML.slice(0, 100))"""
SCROLLS = """() => [...document.querySelectorAll("article *")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(e).overflowX))
    .map((e) => e.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize(
    "name", ["index", "chapters/04-data-parallelism-from-scratch", "chapters/06-where-the-time-goes"]
)
def test_on_paper_nothing_is_dark_or_to_be_clicked(book, page, name):
    page.spent = True  # its media
    page.emulate_media(media="print", color_scheme="dark")
    page.set_viewport_size({"width": 680, "height": 1000})  # the width of an A4 sheet between its margins
    page.goto((book / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate(TO_USE) == []
    assert page.evaluate(SCROLLS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 680
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


SMALL_BOOK = {
    "_toc.yml": "format: jb-book\nroot: index\nchapters: [{file: end}]\n",
    "index.md": "# A small book\n\nOf a few words.\n",
    "end.md": "# The end\n\nOf a small book.\n",
}


@pytest.fixture(scope="module")
def small_book(tmp_path_factory):
    """A book of two pages with the settings and the assets of the real one."""
    folder = tmp_path_factory.mktemp("small_book")
    shutil.copy(ROOT / "_config.yml", folder)
    shutil.copytree(ROOT / "assets", folder / "assets")
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in SMALL_BOOK.items():
        (folder / name).write_text(text)
    return folder


FAULTS = """
[unknown](references.md#le2019), [wrong](#A-Small-book), [right](#A-small-book)

> **Predct.** Which?

**Figure 1.** Of nothing.

```{api} mgpu_lib.nowhere
use_gpus
```
"""


@pytest.mark.slow
def test_a_faulty_book_stays_faulty_until_it_is_mended(small_book):
    """An unknown page, heading, box and module, a caption of nothing: each is named, and again the second time.

    An incremental build would then pass: Sphinx doesn't repeat the warnings of a page it didn't read.
    """
    index = small_book / "index.md"
    index.write_text(SMALL_BOOK["index.md"] + FAULTS)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            build_book.build(small_book, quiet=True)
        warnings = re.findall(r"(?:WARNING|ERROR): (.*)", str(error.value))
        words = "le2019", "A-Small", "Predct", "Figure 1.", "mgpu_lib.nowhere"
        assert [sum(word in text for text in warnings) for word in words] == len(words) * [1]
        assert len(warnings) == len(words)
    index.write_text(SMALL_BOOK["index.md"])
    built = build_book.build(small_book, quiet=True) / "index.html"
    before = built.stat().st_mtime_ns
    build_book.build(small_book, quiet=True)
    assert built.stat().st_mtime_ns == before, "nothing changed, so nothing is built"


OPEN = """() => document.querySelectorAll("details, .covered").forEach((e) => {
    e.open = true;
    e.classList.remove("covered");
})"""
# Not looked at: definition lists. Sphinx makes one of <dd> without <dt> of a long signature's arguments.
AXE = {"preload": False, "resultTypes": ["violations"], "rules": {"definition-list": {"enabled": False}}}
REPORT = "Report an error on this page"
FORK = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "Ada/book"}
BOOK, OF_A_USER = "https://github.com/Ada/book", "https://github.com/ada/Ada.github.io"


@pytest.mark.parametrize(
    "environment, repository, site",
    [
        ({}, "", ""),
        ({"REPOSITORY": f"{BOOK}.git"}, BOOK, "https://ada.github.io/book/"),
        (FORK, BOOK, "https://ada.github.io/book/"),
        (FORK | {"SITE": "https://gpus.example"}, BOOK, "https://gpus.example/"),
        (FORK | {"REPOSITORY": "https://gitlab.com/a/b/c"}, "https://gitlab.com/a/b/c", ""),
        ({"REPOSITORY": OF_A_USER}, OF_A_USER, "https://ada.github.io/"),
    ],
)
def test_addresses_follow_from_the_repository(environment, repository, site):
    assert published.addresses(environment) == {"REPOSITORY": repository, "SITE": site}


def test_what_is_no_address_of_a_repository_is_refused():
    for wrong in ("ada/book", "git@github.com:ada/book", "https://github.com/ada"):
        with pytest.raises(ValueError, match=f"REPOSITORY={wrong}"):
            published.addresses({"REPOSITORY": wrong})


@pytest.mark.slow
def test_a_published_page_says_where_it_is_and_what_it_is_about(small_book, monkeypatch):
    """One built for nowhere names no address; nothing but the place has changed, and yet it is built anew."""
    for name in ("REPOSITORY", "SITE", "GITHUB_REPOSITORY"):  # of which CI has the last
        monkeypatch.delenv(name, raising=False)
    pages = build_book.build(small_book, quiet=True)
    index = soup(pages / "index.html")
    assert said(index)["description"] == "Of a few words."
    assert "http" not in str(index.head) and not (pages / "sitemap.xml").exists()
    assert not index.find("a", string=REPORT)

    monkeypatch.setenv("REPOSITORY", "https://github.com/ada/book")
    build_book.build(small_book, quiet=True)
    index, address = soup(pages / "index.html"), "https://ada.github.io/book/index.html"
    assert index.find("link", rel="canonical")["href"] == said(index)["og:url"] == address
    assert said(index)["og:title"] == "A small book"
    picture = said(index)["og:image"].removeprefix("https://ada.github.io/book/")
    assert (pages / picture).is_file()
    assert address in [place.get_text() for place in soup(pages / "sitemap.xml").find_all("loc")]
    report = index.find("a", string=REPORT)["href"]
    assert report.startswith("https://github.com/ada/book/issues/new?template=book.yml&")
    assert parse_qs(urlsplit(report).query)["place"] == ["A small book"]
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "book.yml").read_text())
    assert "place" in [field.get("id") for field in form["body"]]

    wrong_address = soup(pages / "404.html")
    wheres = {**LOADS, "a": "href", "form": "action"}
    links = {tag.get(where, "#") for kind, where in wheres.items() for tag in wrong_address.find_all(kind)}
    for link in links:  # they work at any depth
        path = urlsplit(link).path
        assert link[0] == "#" or (path.startswith("/book/") and (pages / path.removeprefix("/book/")).is_file()), link


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", "chapters/07-batch-size-and-learning-rate", "search", "api-virtual-gpus"])
def test_axe_finds_nothing_serious(book, page, name):
    """With all answers and solutions open. A chapter takes it several seconds, so it sees one."""
    page.spent = True  # its media
    for scheme in ("light", "dark"):  # without motion, or axe may measure a color on its way to another
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.goto((book / f"{name}.html").as_uri())
        page.evaluate(OPEN)
        found = Axe().run(page, options=AXE).response["violations"]
        assert [fault["nodes"] for fault in found if fault["impact"] in ("serious", "critical")] == []
