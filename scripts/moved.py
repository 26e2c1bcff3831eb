"""A Sphinx extension: a small page at each address that a page of the book once had, which leads to the new one."""

from html import escape
from pathlib import Path

MOVED = {  # page: where it is now
    "chapters/05-the-parallel-primitives": "chapters/05-dataparallel",
    "chapters/06-dataparallel-in-one-line": "chapters/05-dataparallel",
    "chapters/07-where-the-time-goes": "chapters/06-where-the-time-goes",
    "chapters/08-batch-size-and-learning-rate": "chapters/07-batch-size-and-learning-rate",
    "chapters/09-how-large-a-batch-pays": "chapters/08-how-large-a-batch-pays",
    "chapters/10-distributeddataparallel": "chapters/09-distributeddataparallel",
    "chapters/10-splitting-a-network": "chapters/10-pipelines",
    "chapters/11-splitting-a-network": "chapters/10-pipelines",
    "chapters/11-sharding": "chapters/12-sharding",
    "chapters/12-planning-a-run": "chapters/14-planning-a-run",
    "chapters/13-planning-a-run": "chapters/14-planning-a-run",
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Moved: {title}</title>
<meta name="robots" content="noindex">
<link rel="canonical" href="{canonical}">
<script>location.replace("{address}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={address}">
</head>
<body><p>This page has moved to <a href="{address}">{title}</a>.</p></body>
</html>
"""


def write_pages(app, exception):
    """The old pages, beside those new ones that are there. ValueError where a page of the book would be overwritten."""
    if exception or app.builder.format != "html":
        return
    for old, new in MOVED.items():
        if old in app.env.found_docs:
            raise ValueError(f"{old} is a page of the book, and can't lead to {new}")
        if new not in app.env.found_docs:
            continue
        address = "../" * old.count("/") + f"{new}.html"
        canonical = f"{app.config.html_baseurl}{new}.html" if app.config.html_baseurl else address
        names = {"title": app.env.titles[new].astext(), "address": address, "canonical": canonical}
        page = PAGE.format(**{name: escape(text) for name, text in names.items()})
        (Path(app.outdir) / f"{old}.html").write_text(page, encoding="utf-8")


def setup(app):
    app.connect("build-finished", write_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
