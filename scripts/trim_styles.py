"""A Sphinx extension: of the theme's style sheets, leave out the rules for classes that no page and no script names.

They are a quarter of what a page loads: the rules of some two thousand icons and of all of Bootstrap's components.
"""

import re
from pathlib import Path

import tinycss2

SHEETS = ("styles/*.css", "basic.css", "mystnb.*.css")
COMPOSED = {"bs-tooltip-auto"}  # by Bootstrap's script, which doesn't name it
CLASS = re.compile(r"\.(-?[A-Za-z_][\w-]*)")
EITHER = re.compile(r":(?:not|is|where|has)\([^)]*\)")  # matches without some of the classes in it


def trimmed(css, names):
    """`css` without selectors that need a class not among `names`, and without rules that lose all of theirs."""
    return "".join(kept(rule, names) for rule in tinycss2.parse_stylesheet(css, skip_whitespace=True))


def kept(rule, names):
    if rule.type == "comment":
        return rule.serialize() if rule.value.startswith("!") else ""  # a licence
    if rule.type == "qualified-rule":
        selectors = tinycss2.serialize(rule.prelude).strip()
        parts = re.split(r",(?![^(]*\))", selectors)
        used = [part for part in parts if names.issuperset(CLASS.findall(EITHER.sub("", part)))]
        return f"{','.join(used)}{{{tinycss2.serialize(rule.content)}}}" if used else ""
    if rule.type == "at-rule" and rule.lower_at_keyword in ("media", "supports") and rule.content is not None:
        inner = trimmed(tinycss2.serialize(rule.content), names)
        return f"@{rule.at_keyword}{tinycss2.serialize(rule.prelude)}{{{inner}}}" if inner else ""
    return rule.serialize()


def trim(app, error):
    if error or app.builder.format != "html":
        return
    pages = Path(app.outdir)
    texts = [path.read_text(encoding="utf-8") for kind in ("*.html", "*.js") for path in pages.rglob(kind)]
    names = COMPOSED.union(*(re.findall(r"[\w-]+", text) for text in texts))
    for sheet in (path for pattern in SHEETS for path in (pages / "_static").glob(pattern)):
        sheet.write_text(trimmed(sheet.read_text(encoding="utf-8"), names), encoding="utf-8")


def setup(app):
    app.connect("build-finished", trim)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
