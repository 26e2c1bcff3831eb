"""The glossary: sorted, in two languages, each term used in a chapter and linked to the section that introduces it."""

import re
from functools import cache

import pytest
import test_plain_markdown as plain

NAME = "glossary.md"
[TEXT] = plain.markdown(NAME)
CHAPTERS = [name for name in plain.PAGES if name.startswith("chapters/")]
ENTRY = re.compile(r'^<a id="(?P<key>[^"]+)"></a>\*\*(?P<term>.+?)\*\* · (?P<chinese>.+)\\\n(?P<text>.+)$', re.M)
ENTRIES = {entry["term"]: entry for entry in ENTRY.finditer(TEXT)}
LINK = re.compile(r"\]\(([^)\s]*)#([^)\s]+)\)")
terms = pytest.mark.parametrize("term", ENTRIES)


def bare(term):
    """`term` without what stands in parentheses, in lower case."""
    return term.partition(" (")[0].casefold()


def test_everything_below_a_letter_is_an_entry():
    paragraphs = [part for part in TEXT.split("\n\n")[2:] if not part.startswith("## ")]
    assert [part for part in paragraphs if not ENTRY.fullmatch(part.strip())] == []
    assert len(paragraphs) == len(ENTRIES), "a term stands here twice"


def test_terms_are_sorted_and_different():
    names = [bare(term).replace("-", " ") for term in ENTRIES]
    assert names == sorted(set(names))


def test_each_term_stands_below_its_letter():
    parts = re.split(r"^## (.+)$", TEXT, flags=re.M)[1:]
    letters = parts[::2]
    assert letters == sorted(set(letters))
    for letter, part in zip(letters, parts[1::2]):
        firsts = {"0–9" if entry["term"][0].isdigit() else entry["term"][0].upper() for entry in ENTRY.finditer(part)}
        assert firsts == {letter}


@terms
def test_each_term_has_a_chinese_equivalent_and_an_explanation(term):
    assert re.search(r"[\u4e00-\u9fff]", ENTRIES[term]["chinese"])
    assert len(LINK.sub("]", ENTRIES[term]["text"]).split()) >= 10


@terms
def test_each_term_leads_to_the_section_that_introduces_it(term):
    places = LINK.findall(ENTRIES[term]["text"])
    assert any(page in CHAPTERS for page, _ in places), "no link to a section of a chapter"
    for page, anchor in places:
        assert page in ("", *CHAPTERS), f"{page}: no such chapter"
        assert anchor in plain.anchors(page or NAME), f"{page} has no such heading or anchor: {anchor}"


@cache
def used():
    """The text of all chapters, in lower case."""
    return "\n".join(text for name in CHAPTERS for text in plain.markdown(name)).casefold()


@terms
def test_each_term_occurs_in_a_chapter(term):
    spelled = re.escape(bare(term)).replace(r"\ ", r"[\s_-]+").replace(r"\-", r"[\s_-]?")
    assert re.search(rf"(?<![a-z]){spelled}(?![a-z](?<!s))", used()), "no chapter uses this word"
