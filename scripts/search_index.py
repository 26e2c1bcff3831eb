"""A Sphinx extension: the book's own search, which finds sections and works from a folder on disk.

It takes the place of Sphinx's, which finds pages. A page search.html and sections.js, the text of all sections, are
written; assets/search.js makes an index of them in the browser, with MiniSearch. Whatever has an anchor and a title is
found on its own:

- a section, without those in it;
- a function or class of the reference;
- an exercise;
- an entry of the glossary or the references: a paragraph that begins with an anchor and bold words.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

PAGE = """
<section id="search"><h1>Search</h1>
<noscript><p>The search needs JavaScript.</p></noscript>
<div class="pst-js-only">
<label for="search-words">A question, words, or a pasted message. <q>Words in quotes</q> must stand together.</label>
<form class="bd-search" action="search.html" role="search">
<input type="search" class="form-control" id="search-words" name="q" autocomplete="off" spellcheck="false">
</form>
</div>
<p id="search-count" role="status"></p>
<ol id="search-hits"></ol>
</section>
<script defer src="_static/minisearch/minisearch.min.js"></script>
<script defer src="sections.js"></script>
<script defer src="_static/search.js"></script>
"""
NOT_TEXT = nodes.raw, nodes.math, nodes.math_block, nodes.comment, nodes.image


def unit(node):
    """(anchor, title) of `node` if it is found on its own, or None."""
    if isinstance(node, nodes.section) or (isinstance(node, nodes.admonition) and node["ids"]):
        return node["ids"][0], node.next_node(nodes.title).astext()
    if isinstance(node, addnodes.desc) and node[0]["ids"]:
        return node[0]["ids"][0], node[0]["ids"][0]
    if isinstance(node, nodes.paragraph) and isinstance(node.next_node(), nodes.target) and len(node) > 1:
        return (node[0]["ids"][0], node[1].astext().removesuffix(".")) if isinstance(node[1], nodes.strong) else None
    return None


def text(element):
    """What an element that holds text says in words."""
    copy = element.deepcopy()
    for part in list(copy.findall(lambda node: isinstance(node, NOT_TEXT))):
        part.replace_self(nodes.Text(" "))
    return " ".join(copy.astext().split())


def texts(node):
    """The text of `node`, piece by piece, without its title, code, and what is found on its own."""
    for child in node.children:
        code = isinstance(child, nodes.literal_block) and child.get("language") != "text"  # of errors.md: a message
        if code or unit(child) or isinstance(child, (nodes.title, addnodes.desc_signature, *NOT_TEXT)):
            continue
        yield from [text(child)] if isinstance(child, nodes.TextElement) else texts(child)


def units(document):
    """[anchor, title, text] of all that is found in a page."""
    for node in document.findall(unit):
        body = [text(node)] if isinstance(node, nodes.paragraph) else texts(node)
        yield [*unit(node), " ".join(filter(None, body))]


def collect(app, document, docname):
    found = list(units(document))
    app.env.search_pages[docname] = {"page": f"{docname}.html", "title": found[0][1], "sections": found}


def prepare(app):
    app.builder.search = False
    app.env.search_pages = {}


def write(app):
    """A script, since a page from a folder on disk may load one, and no data."""
    pages = [app.env.search_pages[name] for name in sorted(app.env.search_pages)]
    script = "window.bookPages = " + json.dumps(pages, ensure_ascii=False, separators=(",", ":")) + ";\n"
    (Path(app.outdir) / "sections.js").write_text(script, encoding="utf-8")
    yield "search", {"title": "Search", "body": PAGE}, "page.html"


def remove_sphinx_search(app, exception):
    """Its scripts are copied all the same, one of them broken without an index."""
    for name in "searchtools.js", "language_data.js":
        (Path(app.outdir) / "_static" / name).unlink(missing_ok=True)


def setup(app):
    app.connect("builder-inited", prepare)
    app.connect("doctree-resolved", collect, priority=900)
    app.connect("html-collect-pages", write)
    app.connect("build-finished", remove_sphinx_search)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": False}
