"""The book's search: forty questions and messages lead to their sections, from a folder on disk."""

import json
import re
from pathlib import Path

import pytest

SOUGHT = json.loads(Path(__file__).with_name("searched.json").read_text(encoding="utf-8"))
REPORTED = json.loads(Path(__file__).with_name("reported_messages.json").read_text(encoding="utf-8"))
INDEX_LIMIT = 750_000  # bytes; a third of it where a server compresses


@pytest.fixture
def search(book, page):
    """What the hits for a query lead to: page#section."""
    page.goto((book / "search.html").as_uri())

    def hits(query):
        page.fill("#search-words", query)
        links = page.locator("#search-hits a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
        return [re.sub(r"\.html\?find=[^#]*", "", link) for link in links]

    return hits


def test_questions_and_messages_find_their_section(search):
    """One of the right sections among the first three, for 36 of the forty; they were written before the search was."""
    missed = {query: search(query)[:3] for query, right in SOUGHT.items() if not {*right} & {*search(query)[:3]}}
    assert len(SOUGHT) == 40
    assert len(missed) <= 4, missed


def test_messages_that_people_have_reported_find_the_page_of_messages(search, page):
    """As they were pasted, with tracebacks, paths, and whatever stands in quotes."""
    for report in REPORTED:
        if report["title"] is not None:
            search(report["message"])
            found = [re.sub("[‘’]", "'", text) for text in page.locator("#search-hits a").all_inner_texts()[:3]]
            assert report["title"].replace("`", "") in found, report["message"]


def test_a_hit_opens_at_its_section_with_the_words_marked(book, page):
    """As a reader does it: Ctrl+K, words, Enter, and twice Enter for the first hit. The excerpt shows the words."""
    page.goto((book / "index.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.type("pinned memory")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=pinned*")
    hit = page.locator("#search-hits li").first
    assert "pinned" in hit.locator("p").inner_text().lower()
    title = hit.locator("a").inner_text()
    page.keyboard.press("Enter")  # from the words to the first hit
    page.keyboard.press("Enter")
    page.wait_for_url(lambda url: "?find=" in url)
    marked = "[...CSS.highlights.get('found') ?? []].map(String)"
    assert {"pinned", "memory"} <= {word.lower() for word in page.evaluate(marked)}
    place = page.evaluate("(document.querySelector(':target') ?? {}).getBoundingClientRect().top")
    assert 0 <= place < 200, "the section is at the top of the window"
    assert title in page.locator(":target").evaluate("target => (target.closest('section, p')).textContent")
    page.keyboard.press("Escape")
    assert page.evaluate(marked) == []


def test_words_in_quotes_stand_together(search):
    assert len(search("add up what comes back")) == 20
    assert "chapters/05-dataparallel#who-adds-the-gradients" in search('"add up what comes back"')
    assert len(search('"add up what comes back"')) < 10


def test_nothing_found_is_said(search, page):
    assert search("qqqqqqqq") == []
    assert page.get_by_role("status").inner_text() == "No section has such words."


def test_index_is_light_and_loaded_by_the_search_alone(book):
    assert (book / "sections.js").stat().st_size <= INDEX_LIMIT
    others = [path for path in book.rglob("*.html") if path.name != "search.html"]
    assert [path for path in others if "sections.js" in path.read_text(encoding="utf-8")] == []
