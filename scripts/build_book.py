"""Build the static book: python scripts/build_book.py
Ask the addresses outside of the book whether they are still there: python scripts/build_book.py links

The book goes to _build/html, with warnings as errors. Nothing is done when nothing it is made of has changed. Otherwise
every page is written anew (some seconds; no notebook is run): a changed title shows in every page's sidebar, and Sphinx
repeats a page's warnings only when it reads the page again, so an incremental build would call a faulty book good.
Where the book is published is told by the environment's REPOSITORY and SITE: see published.py.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from published import addresses
from standalone import library

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    *("_config.yml", "_toc.yml", "*.md", "assets/**/*", "chapters/**/*", "scripts/*", "scripts/templates/**/*"),
    *("mgpu_lib/**/*.py", "virtual-gpus/virtual_gpus/**/*.py"),  # their docstrings
)
BUILDERS = ("jupyter-book", "sphinx", "sphinx-book-theme", "pydata-sphinx-theme", "myst-nb", "docutils")
TIME_LIMIT = 600  # seconds


def digest(source):
    """SHA-256 of all that the book is made of: sources' names and bytes, the builders' versions, and its addresses."""
    settings = {name: version(name) for name in BUILDERS} | addresses(os.environ)
    settings["library"] = library(source, settings["REPOSITORY"])
    hashed = hashlib.sha256(" ".join(f"{name}={value}" for name, value in settings.items()).encode())
    paths = {path for pattern in SOURCES for path in source.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        if not hidden:
            hashed.update(f"\0{path.relative_to(source).as_posix()}\0".encode() + path.read_bytes())
    return hashed.hexdigest()


@contextmanager
def locked(path):
    """One build at a time: `make book` beside a test run, or two test workers."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(source=ROOT, quiet=False):
    """Build the book in `source` unless it is up to date; returns the folder of the pages.

    Raises RuntimeError, with what Sphinx said, when there is a warning; the next call then builds again."""
    output = source / "_build"
    stamp = output / "digest"
    with locked(output / "lock"):
        wanted = digest(source)
        if not stamp.exists() or stamp.read_text() != wanted:
            stamp.unlink(missing_ok=True)
            run_jupyter_book(source, quiet)
            stamp.write_text(wanted)
    return output / "html"


def check_links(source=ROOT):
    """Raises RuntimeError, with what Sphinx said, where an address doesn't answer. `build` looks at links within."""
    with locked(source / "_build" / "lock"):
        run_jupyter_book(
            source, False, "--builder", "linkcheck", fault="addresses don't answer, or the book has warnings"
        )


def run_jupyter_book(source, quiet, *options, fault="the book has warnings, and they are errors"):
    # -W: warnings are errors; -n: so are references to nothing; --keep-going: show all of them, not the first
    command = ["jupyter-book", "build", str(source), "--all", "-W", "-n", "--keep-going", *options]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, **addresses(os.environ), "PATH": path}
    captured = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if quiet else {}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=TIME_LIMIT, **captured)
    if done.returncode:
        raise RuntimeError(f"{fault}; look above\n{done.stdout or ''}")


def main(links=False):
    try:
        pages = check_links() if links else build()
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
    if pages:
        print(f"\nThe book is ready. Open it in a browser:\n\n    {(pages / 'index.html').as_uri()}\n")


if __name__ == "__main__":
    main(links=sys.argv[1:] == ["links"])
