"""A Sphinx extension: what the built book knows of the web.

The environment says where the book's sources and its pages are (`addresses`). Templates and other extensions find them
in `html_context`, as `repository` and `site`. Either is "" where nobody knows it; what would need it is then left out.
"""

import os
import re
from urllib.parse import urlsplit

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


def setup(app):
    app.connect("config-inited", tell)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
