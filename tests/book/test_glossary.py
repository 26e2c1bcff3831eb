"""The glossary: sorted, in two languages. Terms lead to the sections that explain them, earlier uses to the terms."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import test_plain_markdown as plain
import yaml
from markdown_it import MarkdownIt
from pages import cells, markdown

NAME = "glossary.md"
[TEXT] = markdown(NAME)
CHAPTERS = [name for name in plain.PAGES if name.startswith("chapters/")]
ENTRY = re.compile(r'^<a id="(?P<key>[^"]+)"></a>\*\*(?P<term>.+?)\*\* · (?P<chinese>.+)\\\n(?P<text>.+)$', re.M)
ENTRIES = {entry["term"]: entry for entry in ENTRY.finditer(TEXT)}
LINK = re.compile(r"\]\(([^)\s]*)#([^)\s]+)\)")


def bare(term):
    """`term` without what stands in parentheses, in lower case."""
    return term.partition(" (")[0].casefold()


def test_terms_are_sorted_below_their_letters_in_two_languages():
    paragraphs = [part.strip() for part in TEXT.split("\n\n")[2:]]
    assert len([part for part in paragraphs if not part.startswith("## ")]) == len(ENTRIES), "a term stands here twice"
    names, letters = [], []
    for part in paragraphs:
        if part.startswith("## "):
            letters.append(part[3:])
            continue
        entry = ENTRY.fullmatch(part)
        assert entry and re.search(r"[\u4e00-\u9fff]", entry["chinese"]), part
        assert len(LINK.sub("]", entry["text"]).split()) >= 10, "an explanation"
        assert letters[-1] == ("0–9" if entry["term"][0].isdigit() else entry["term"][0].upper())
        names.append(bare(entry["term"]).replace("-", " "))
    assert (names, letters) == (sorted(set(names)), sorted(set(letters)))


def test_each_term_leads_to_a_section_that_introduces_it():
    """tests/book/test_plain_markdown.py looks whether such links lead somewhere."""
    places = {term: [page for page, _ in LINK.findall(entry["text"])] for term, entry in ENTRIES.items()}
    assert [term for term, pages in places.items() if not set(pages) & set(CHAPTERS)] == []


# Where a term is explained, and where it stands before that

TOC = yaml.safe_load((plain.ROOT / "_toc.yml").read_text(encoding="utf-8"))
READING = [f"{page['file']}.ipynb" for part in TOC["parts"] for page in part["chapters"]]
READING = [name for name in READING if name in CHAPTERS]
FURTHER = {  # what a term is called besides what its entry says
    "divergence": "diverged",
    "modelled time": "modelled",
    "out of memory": "OutOfMemoryError",
    "reduce": "all-reduce",
    "synchronize": "synchronization",
    "warm-up": "warms up",
    "Young's rule": "Young, 1974",
}
# These may stand without a link before the section that explains them. Readers have trained a network on one device:
KNOWN = {"backward pass", "batch size", "epoch", "learning rate", "seed"}
# And these stand there with another meaning, mostly their ordinary one:
EVERYDAY = {"gather", "moments", "process", "schedule", "signal", "stage", "view"}
OTHERS = re.compile(r"host bridge|NODE|NUMA node|head start|streaming")  # a term is only a part of these


@cache
def spelling(term):
    """What finds a term, in the plural or as a verb, too. Abbreviations and names are held to their capitals."""
    first, _, others = term.rstrip(")").partition(" (")
    found = []
    for name in filter(None, (first, *others.split(", "), FURTHER.get(first))):
        spelled = re.escape(name).replace(r"\ ", r"[\s_-]+").replace(r"\-", r"[\s_-]?")
        found.append(f"(?i:{spelled})" if name.islower() else f"(?i:{spelled[0]}){spelled[1:]}")
    return re.compile(rf"(?<![A-Za-z-])(?:{'|'.join(found)})(?:e?s|e?d|ing)?(?![A-Za-z])")


@cache
def read(name):
    """A page's sections and marked paragraphs, {anchor: all of its text}, and its prose, [(text, what it links to)]."""
    sections, prose, anchor = defaultdict(str), [], ""
    for cell in cells(Path(name).stem):
        if cell.cell_type == "code":
            sections[anchor] += f"{cell.source}\n"
            continue
        heading = False
        for token in MarkdownIt().enable("table").parse(cell.source):
            heading = token.type == "heading_open" or (heading and token.type != "heading_close")
            if heading and token.type == "inline":
                anchor = plain.plain_markdown.heading_anchor("".join(part.content for part in token.children))
            for place in (anchor, *re.findall(r'<a id="([^"]+)"', token.content)):
                sections[place] += f"{token.content}\n"
            title = re.match(r'(<a id="[^"]*"></a>)?\*\*(Figure|Exercise) ', token.content)
            if token.type == "inline" and not heading and not title:
                prose += linked(token.children)
    return sections, prose


def linked(tokens):
    """Pairs of a text, without its code and its pictures, and the address that it links to, or None."""
    found, address = [("", None)], None
    for token in tokens:
        if token.type in ("link_open", "link_close"):
            address = unquote(token.attrs["href"]) if token.type == "link_open" else None
            found.append(("", address))
        elif token.type in ("text", "softbreak"):
            found[-1] = (found[-1][0] + (token.content or " "), address)
    return [(OTHERS.sub("…", text), address) for text, address in found if "references.md" not in (address or "")]


def test_each_section_that_a_term_leads_to_speaks_of_it():
    places = [(term, *place) for term, entry in ENTRIES.items() for place in LINK.findall(entry["text"]) if place[0]]
    assert [place for place in places if not spelling(place[0]).search(read(place[1])[0][place[2]])] == []


def unexplained(term):
    """Where the first page that uses `term` neither explains it nor links to what does, or None."""
    explained = {page for page, _ in LINK.findall(ENTRIES[term]["text"]) if page}
    link = f"../{NAME}#{ENTRIES[term]['key']}"
    for name in READING:
        if name in explained:
            return None
        for text, address in read(name)[1]:
            found = spelling(term).search(text)
            if address == link or (found and f"chapters/{address}".partition("#")[0] in explained):
                return None
            if found:
                return f"{name}: …{text[: found.end()][-80:]}…"
    return None


def test_the_first_page_with_a_term_explains_it_or_links_to_it():
    places = {term: unexplained(term) for term in ENTRIES if bare(term) not in KNOWN | EVERYDAY}
    assert {term: place for term, place in places.items() if place} == {}


def test_a_page_links_to_each_term_or_has_it_in_a_heading():
    links = [LINK.findall(text) for name in plain.PAGES if name != NAME for text in markdown(name)]
    targets = {anchor for found in links for page, anchor in found if page.endswith(NAME)}
    for term, entry in ENTRIES.items():
        headings = [anchor.replace("-", " ") for page, anchor in LINK.findall(entry["text"]) if page]
        assert entry["key"] in targets or any(spelling(term).search(text) for text in headings), term
