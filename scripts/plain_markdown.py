"""A Sphinx extension: what the chapters' plain Markdown becomes in the built book.

The chapters hold only the Markdown that every reader of notebooks shows. Here it gets the form of a book:

- a block quote that begins with a bold word becomes a box:         > **Predict.** Which of the two is faster?
- a picture and a caption in the next paragraph become a figure:    ![what it shows](picture.svg)
  (a code cell that draws does for the picture, too)                **Figure 4.1.** What to see.
- a drawing with links in it (SVG) becomes a part of the page, where they lead somewhere;
- an anchor becomes a target, also for links from other pages:      <a id="fig-ring"></a>
- a link to an entry of the references says, pointed at, what it is.

What is almost one of these, and isn't, is a warning, and so an error of the build.
"""

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

BOXES = {"Predict": "tip", "Note": "note", "Warning": "warning", "Verdict": "important", "Exercise": "exercise"}
CAPTION = re.compile(r"Figure [A-Z]?\d*[A-Z]?(\.?\d+)?\.")
STARS = re.compile("★+")
ANCHOR = re.compile(r'<a id="([^"]+)">')

logger = logging.getLogger(__name__)


def heading_anchor(title):
    """A heading's anchor as JupyterLab makes it, so that one link leads there in both."""
    return title.replace(" ", "-")


def drop_empty_texts(document):
    """MyST leaves one before each piece of markup that begins a paragraph."""
    for text in list(document.findall(nodes.Text)):
        if text.astext() == "" and isinstance(text.parent, nodes.paragraph):
            text.parent.remove(text)


def starts_with(paragraph):
    """The bold words that `paragraph` starts with (anchors may come before), or None."""
    if not isinstance(paragraph, nodes.paragraph):
        return None
    words = next((node for node in paragraph if not isinstance(node, nodes.target)), None)
    return words if isinstance(words, nodes.strong) else None


def take_targets(paragraph, owner):
    """Make the anchors at the start of `paragraph` those of `owner`: a link then leads to the whole of it."""
    while paragraph.children and isinstance(paragraph[0], nodes.target):
        owner["ids"] += paragraph.pop(0)["ids"]


def cut_start(paragraph, words):
    """Take `words`, with which `paragraph` starts, and the space behind them out of it."""
    paragraph.remove(words)
    if paragraph.children and isinstance(paragraph[0], nodes.Text):
        paragraph.replace(paragraph[0], nodes.Text(paragraph[0].lstrip()))


def place_targets(document, slugs):
    """<a id="name"></a> becomes a target. `slugs` is where MyST looks up links; it doesn't read HTML."""
    for opening in list(document.findall(nodes.raw)):
        name = ANCHOR.fullmatch(opening.astext().strip())
        if name is None:
            continue
        place = opening.parent
        closing = place[place.index(opening) + 1]
        if closing.astext() != "</a>":
            logger.warning('an anchor holds nothing: <a id="%s"></a>', name[1], location=opening)
            continue
        if name[1] in slugs:
            logger.warning("two anchors of one name: %s", name[1], location=opening)
        place.remove(closing)
        opening.replace_self(nodes.target("", "", ids=[name[1]]))
        slugs[name[1]] = (opening.line, name[1], place.astext())


def make_box(quote):
    """`quote`, a block quote, as a box if it begins with one of the words for it."""
    words = starts_with(quote[0])
    if words is None:
        return
    kind = words.astext().split()[0].rstrip(".")
    if kind not in BOXES:
        logger.warning("a box of unknown kind, %r: one of %s", words.astext(), ", ".join(BOXES), location=words)
        return
    box = nodes.admonition(classes=[BOXES[kind]])
    take_targets(quote[0], box)
    cut_start(quote[0], words)
    title = words.astext().removesuffix(".")
    if STARS.fullmatch(quote[0].astext()):  # how hard an exercise is
        title += f" {quote[0].astext()}"
        quote[0].clear()
    box += nodes.title(title, title)
    box += [child for child in quote.children if child.children or not isinstance(child, nodes.paragraph)]
    quote.replace_self(box)


def picture_before(caption):
    """The node of the picture that belongs to the paragraph `caption`: an image, or the last output of a cell."""
    position = caption.parent.index(caption)
    before = caption.parent[position - 1] if position else None
    if isinstance(before, nodes.paragraph) and len(before) == 1 and isinstance(before[0], nodes.image):
        return before[0]
    if isinstance(before, nodes.container) and "cell" in before["classes"]:
        outputs = before[-1]
        return outputs[-1] if outputs.children else None
    return None


def make_figure(caption):
    """The paragraph `caption` and the picture before it as a figure, if it is the caption of one."""
    words = starts_with(caption)
    if words is None or not CAPTION.fullmatch(words.astext()):
        return
    picture = picture_before(caption)
    if picture is None:
        logger.warning("no picture before the caption of %s", words.astext(), location=words)
        return
    figure = nodes.figure("", align="default")
    take_targets(caption, figure)
    figure["ids"].append(words.astext().removesuffix(".").replace(" ", "-"))
    cut_start(caption, words)
    number = nodes.inline("", words.astext() + " ", classes=["caption-number"])
    holder = picture.parent if isinstance(picture.parent, nodes.paragraph) else picture
    holder.replace_self(figure)
    figure += [picture, nodes.caption("", "", number, *caption.children)]
    caption.parent.remove(caption)


def draw_into_page(image, folder):
    """An SVG with links, in place of its `image`, in which a browser follows none. Other images stay as they are."""
    path = folder / image["uri"]
    drawing = path.read_text(encoding="utf-8") if path.suffix == ".svg" and path.is_file() else ""
    if "<a href=" in drawing:
        named = f'<svg class="drawing" role="group" aria-label="{escape(image["alt"])}" '
        image.replace_self(nodes.raw("", drawing.replace("<svg ", named, 1), format="html"))


def dress(document, slugs):
    """Make boxes, figures and targets of the plain Markdown in `document`; the targets go into `slugs`, too."""
    drop_empty_texts(document)
    place_targets(document, slugs)
    for quote in list(document.findall(nodes.block_quote)):
        make_box(quote)
    for paragraph in list(document.findall(nodes.paragraph)):
        make_figure(paragraph)


class PlainMarkdown(SphinxTransform):
    """Before MyST resolves a page's links to itself (at 879)."""

    default_priority = 870

    def apply(self, **kwargs):
        slugs = self.env.metadata[self.env.docname].setdefault("myst_slugs", {})
        self.document.myst_slugs = slugs  # one for links within the page and from others
        dress(self.document, slugs)
        for image in list(self.document.findall(nodes.image)):
            draw_into_page(image, Path(self.env.doc2path(self.env.docname)).parent)


def say_what_is_cited(app, document, docname):
    """Give each link to an entry of the references the entry as its title."""
    entries = app.env.metadata.get("references", {}).get("myst_slugs", {})
    for link in document.findall(nodes.reference):
        page, _, key = link.get("refuri", "").partition("#")
        if key in entries and page.endswith("references.html"):
            link["reftitle"] = entries[key][2]
            link["classes"].append("citation")


def setup(app):
    app.add_transform(PlainMarkdown)
    app.connect("doctree-resolved", say_what_is_cited)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
