"""Plain Markdown: no role and no directive, links that lead somewhere, and what the book makes of it."""

import logging
import re
from functools import cache
from urllib.parse import unquote, urlsplit

import plain_markdown
import pytest
import references
from docutils import nodes
from docutils.core import publish_doctree
from markdown_it import MarkdownIt
from myst_parser.docutils_ import Parser
from pages import BOOK as PAGES
from pages import markdown

ROOT = references.ROOT
pages = pytest.mark.parametrize("name", PAGES)
LABELS = references.labels()


def tokens(text):
    """All of `text`'s Markdown tokens, those inside paragraphs included."""
    for token in MarkdownIt().enable("table").parse(text):
        yield token
        yield from token.children or []


# What only MyST knows


@pages
def test_what_is_hidden_has_blank_lines_around(name):
    """Without them Markdown inside <details> is not read as such; and what is opened in a cell is closed in it."""
    for text in markdown(name):
        assert text.count("<details>") == text.count("</details>")
        for opening in re.findall(r"^.*<details>.*\n(?:.*\n)?", text, re.M):
            assert re.fullmatch(r"<details><summary>\S.*</summary>\n\n", opening), opening
        for closing in re.findall(r".*\n.*\n.*</details>.*", text):
            assert re.fullmatch(r".*\n\n</details>", closing), closing


# Links


@cache
def links(name):
    """(text, address) for each link of a page that leads to a page of the book."""
    found = []
    for text in markdown(name):
        parsed = list(tokens(text))
        for number, token in enumerate(parsed):
            if token.type == "link_open" and not urlsplit(token.attrs["href"]).scheme:
                end = next(n for n in range(number, len(parsed)) if parsed[n].type == "link_close")
                found.append(("".join(inner.content for inner in parsed[number:end]), unquote(token.attrs["href"])))
    return found


@pages
def test_citations_say_what_the_references_call_it(name):
    """All of the label, or its last part where the text has said the rest: "Popel and Bojar ([2018](…))"."""
    for text, address in links(name):
        if "references.md#" in address:
            label = LABELS[address.partition("#")[2]]
            assert text in (label, label.rpartition(", ")[2]), f"{address} is {label!r}, not {text!r}"


# The bibliography


def test_references_are_made_from_the_bibliography():
    assert (ROOT / "references.md").read_text(encoding="utf-8") == references.page(), "python scripts/references.py"


def test_labels_tell_sources_apart():
    assert len(set(LABELS.values())) == len(LABELS)


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ("author = {Goyal, Priya and Doll{\\'a}r, Piotr and He, Kaiming}, year = {2017}", "Goyal et al., 2017"),
        ("author = {Smith, Samuel L. and M{\\k{a}}dry, A.}, year = {2018}", "Smith and Mądry, 2018"),
        ("author = {{NVIDIA}}, shorttitle = {{NVML, GPM\\_t}}", "NVML, GPM_t"),
    ],
)
def test_a_label_is_authors_and_year_or_the_short_title(tmp_path, fields, label):
    bib = tmp_path / "a.bib"
    bib.write_text(f"@misc{{key, title = {{A *Title*}}, {fields}, url = {{https://a.org/x_y}}}}", encoding="utf-8")
    assert references.labels(bib) == {"key": label}
    [entry] = re.findall(r"^- .*$", references.page(bib), re.M)
    assert entry.startswith(f'- <a id="key"></a>**{label}.** '.replace("_", "\\_"))
    assert "A \\*title\\*" in entry and "<https://a.org/x_y>" in entry
    bib.write_text("@misc{web, author = {{NVIDIA}}, title = {Page}}")
    with pytest.raises(ValueError, match="web: wants author and year, or a shorttitle"):
        references.labels(bib)


# Numbers


def number_of(name):
    """What numbers begin with on a page: "4." in chapter 4, "M." and "M2." in the museum, "B." in an appendix."""
    page = name.rpartition("/")[2]
    if not name.startswith("chapters/"):
        return ""
    if page.startswith("appendix-"):
        appendices = sorted(path.name for path in (ROOT / "chapters").glob("appendix-*.ipynb"))
        return f"{'AB'[appendices.index(page)]}."
    if page == "museum-many-processes.ipynb":
        return "M2."
    return f"{int(page[:2]) if page[:2].isdigit() else page[0].upper()}."


@pages
@pytest.mark.parametrize("kind", ["Figure", "Exercise"])
def test_figures_and_exercises_are_numbered_in_order(name, kind):
    beginning = rf'^[> ]*(?:<a id="[^"]+"></a>)?\*\*{kind} (\S+?)\.?(?: \(.+\))?\*\*'
    found = re.findall(beginning, "\n".join(markdown(name)), re.M)
    assert found == [f"{number_of(name)}{n}" for n in range(1, len(found) + 1)]


@pages
def test_a_link_to_a_figure_says_its_number(name):
    for text, address in links(name):
        path, _, anchor = address.partition("#")
        if anchor.startswith("fig-"):
            there = "\n".join(markdown(f"chapters/{path}" if path else name))
            assert f'<a id="{anchor}"></a>**{text}.**' in there, f"[{text}]({address})"


# What the book makes of it


def made(text):
    """The document that the book makes of `text`, with a cell that draws in place of each thematic break."""
    document = publish_doctree(text, parser=Parser())
    for line in list(document.findall(nodes.transition)):
        outputs = [nodes.container(classes=["output"]), nodes.image(uri="drawn.png")]
        line.replace_self(nodes.container("", nodes.container("", *outputs), classes=["cell"]))
    slugs = {}
    plain_markdown.dress(document, slugs)
    return document, slugs


def one(document, kind):
    [found] = document.findall(kind)
    return found


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        (
            "> **Predict.** Which one\n> is *it*?\n>\n> ```text\n> x\n> ```",
            "tip",
            ["Predict", "Which one\nis it?", "x\n"],
        ),
        ("> **Verdict on claim 1**\n>\n> **No.** It isn't.", "important", ["Verdict on claim 1", "No. It isn't."]),
        ('> <a id="ex-a"></a>**Exercise 4.2 (Rings)**\n>\n> Do.', "exercise", ["Exercise 4.2 (Rings)", "Do."]),
        ('> <a id="ex-a"></a>**Exercise 4.2 (A)** ★★\n>\n> Do.', "exercise", ["Exercise 4.2 (A) ★★", "Do."]),
    ],
)
def test_a_quote_that_begins_with_a_bold_word_is_a_box_and_others_stay(text, kind, parts):
    document, slugs = made(f"{text}\n\nAnd:\n\n> A word **in bold**.")
    box = one(document, nodes.admonition)
    assert (box["classes"], [child.astext() for child in box]) == ([kind], parts)
    assert one(document, nodes.block_quote).astext() == "A word in bold."
    assert box["ids"] == [place[1] for place in slugs.values()] == ["ex-a"] * (kind == "exercise")


@pytest.mark.parametrize("picture", ["![what it shows](x.svg)", "***"])
def test_a_picture_and_its_caption_are_a_figure(picture):
    end = "![other](y.svg)\n\n**Figures** are good."
    document, _ = made(f'Before.\n\n{picture}\n\n<a id="fig-x"></a>**Figure 4.1.** See `this`.\n\n{end}')
    figure = one(document, nodes.figure)
    assert isinstance(figure[0], nodes.image)
    assert figure["ids"] == ["fig-x", "Figure-4.1"]
    assert one(figure, nodes.caption).astext() == "Figure 4.1. See this."
    assert one(figure, nodes.inline).astext() == "Figure 4.1. ", "the number, in a style of its own"
    assert [p.astext() for p in document.findall(nodes.paragraph)] == ["Before.", "other", "Figures are good."]


def test_a_drawing_with_links_becomes_a_part_of_the_page(tmp_path):
    """In a picture a browser follows no links. What it shows is said as before."""
    (tmp_path / "map.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg"><a href="1.html"><text>1</text></a></svg>'
    )
    (tmp_path / "plain.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><text>1</text></svg>')
    document, _ = made('![the "path"](map.svg)\n\n![no links](plain.svg)\n\n![a photo](photo.png)')
    for image in list(document.findall(nodes.image)):
        plain_markdown.draw_into_page(image, tmp_path)
    assert [image["uri"] for image in document.findall(nodes.image)] == ["plain.svg", "photo.png"]
    drawing = one(document, nodes.raw).astext()
    assert 'aria-label="the &quot;path&quot;"' in drawing and '<a href="1.html">' in drawing


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("> **Predct.** Which?", "unknown kind, 'Predct.': one of Predict"),
        ("Text.\n\n**Figure 1.1.** See.", "no picture before the caption of Figure 1.1."),
        ('<a id="x"></a>A\n\n<a id="x"></a>B', "two anchors of one name: x"),
        ('<a id="x">A</a>', "an anchor holds nothing"),
    ],
)
def test_what_is_almost_right_is_a_warning(caplog, text, complaint):
    logging.getLogger("sphinx").propagate = True
    with caplog.at_level(logging.WARNING):
        made(text)
    assert complaint in caplog.text


def test_a_cell_without_outputs_is_no_picture():
    cell, caption = nodes.container("", nodes.container(), classes=["cell"]), nodes.paragraph()
    nodes.section("", cell, caption)
    assert plain_markdown.picture_before(caption) is None
