"""A Sphinx extension: what the built book knows of the web.

The environment says where the book's sources and its pages are (`addresses`). Templates and other extensions find them
in `html_context`, as `repository` and `site`. Either is "" where nobody knows it; what would need it is then left out.
"""

import os
import re
from html import escape
from pathlib import Path
from textwrap import shorten
from urllib.parse import urlsplit

from docutils import nodes

NOT_FOUND = """<h1>Page not found</h1>
<p>There is no page at this address: it may have been moved, or the link has a typing error. The contents are on the
left, and the search finds a page by its words.</p>"""
REPOSITORY = re.compile(r"https?://[^/\s]+(/[^/\s?#]+){2,}")


def addresses(environment):
    """{"REPOSITORY": …, "SITE": …}: the addresses of the sources and, with a slash at its end, of the pages.

    REPOSITORY is what `environment` calls so, or where GitHub Actions works; SITE what it calls so (a domain of one's
    own), or GitHub Pages of that repository. Raises ValueError where REPOSITORY is no address."""
    repository = environment.get("REPOSITORY", "")
    if not repository and "GITHUB_REPOSITORY" in environment:
        repository = f"{environment['GITHUB_SERVER_URL']}/{environment['GITHUB_REPOSITORY']}"
    repository = repository.rstrip("/").removesuffix(".git")
    if repository and not REPOSITORY.fullmatch(repository):
        raise ValueError(f"REPOSITORY={repository} is no address such as https://github.com/owner/name")
    site = environment.get("SITE") or github_pages(repository)
    return {"REPOSITORY": repository, "SITE": site.rstrip("/") + "/" if site else ""}


def github_pages(repository):
    """Where GitHub Pages shows the pages of a `repository` on github.com; "" for another."""
    parts = urlsplit(repository)
    if parts.netloc != "github.com":
        return ""
    owner, name = parts.path.split("/")[1:3]
    host = f"{owner.lower()}.github.io"
    return f"https://{host}/" if name.lower() == host else f"https://{host}/{name}/"


def tell(app, config):
    known = addresses(os.environ)
    config.html_context.update({name.lower(): address for name, address in known.items()})
    config.html_theme_options["repository_url"] = known["REPOSITORY"]
    config.html_baseurl = known["SITE"]  # Sphinx writes each page's canonical address with it
    config.notfound_urls_prefix = urlsplit(known["SITE"]).path or "/"  # 404.html is shown at any depth
    config.notfound_context = {"title": "Page not found", "body": NOT_FOUND}


def description(doctree):
    """The first paragraph of a page, or of a long one the beginning."""
    texts = (paragraph.astext() for paragraph in doctree.findall(nodes.paragraph))
    return shorten(next(filter(None, texts), ""), 200, placeholder=" …")


def card(site, page, title, text):
    """What a link to `page` looks like on social media."""
    return {
        "og:type": "website",
        "og:url": f"{site}{page}.html",
        "og:title": title,
        "og:description": text,
        "og:image": f"{site}_static/screenshot.png",
        "twitter:card": "summary_large_image",
    }


def describe(app, page, template, context, doctree):
    if page == app.config.notfound_pagename:
        context["content_root"] = app.config.notfound_urls_prefix  # from there scripts look for other pages
    if doctree is None:
        return
    tags = {"description": description(doctree)}
    if context["site"]:
        tags |= card(context["site"], page, app.env.titles[page].astext(), tags["description"])
    for name, value in tags.items():
        kind = "property" if name.startswith("og:") else "name"
        context["metatags"] += f'<meta {kind}="{name}" content="{escape(value)}" />\n'


def write_sitemap(app, exception):
    site = app.config.html_context["site"]
    if site and not exception:
        pages = "".join(f"<url><loc>{site}{name}.html</loc></url>\n" for name in sorted(app.env.found_docs))
        text = f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{pages}</urlset>\n'
        (Path(app.outdir) / "sitemap.xml").write_text(text, encoding="utf-8")


def setup(app):
    app.connect("config-inited", tell)
    app.connect("html-page-context", describe)
    app.connect("build-finished", write_sitemap)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
