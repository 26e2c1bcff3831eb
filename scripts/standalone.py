"""A Sphinx extension: each chapter as one file that runs anywhere, and the buttons that lead to it.

The file, notebooks/NAME.ipynb beside the book's pages, is the chapter without outputs and with one more cell, which
installs the libraries of the book and says which GPUs there are. It needs no other file: its pictures are those of the
site, or lie in its text where no site is known, and its links lead to the site or are plain words.

Colab and Kaggle open notebooks of repositories on GitHub: the branch `notebooks` holds the files for them
(push_notebooks.py).
"""

import base64
import posixpath
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import nbformat

BRANCH = FOLDER = "notebooks"
CODE = r"(?P<fence>^```|^~~~|`+).*?(?P=fence)"  # in it, nothing is a link
WORDS, ADDRESS = r"(?:[^\[\]]|\[[^\[\]]*\])*", r"(?:[^()\s]|\([^()\s]*\))+"
LINK = re.compile(rf"{CODE}|(?P<picture>!?)\[(?P<words>{WORDS})\]\((?P<address>{ADDRESS})\)", re.DOTALL | re.MULTILINE)
INSTALL = """\
# A chapter opened alone: this cell installs the book's library where it is missing, and leaves your PyTorch as it is.
# On Kaggle, switch Internet on first, in the panel on the right.
import importlib.util
from importlib.metadata import version

if importlib.util.find_spec("mgpu_lib") is None:
    book = "{library}"
    pytorch = "torch==" + version("torch") if importlib.util.find_spec("torch") else "torch"
    %pip install --quiet {{pytorch}} "virtual-gpus @ {{book}}#subdirectory=virtual-gpus" "mgpu-lib @ {{book}}"
    importlib.invalidate_caches()
    if importlib.util.find_spec("mgpu_lib") is None:
        raise ModuleNotFoundError(
            f"The book's library could not be installed: see above. It needs the Internet and PyTorch 2.10 or later; "
            f"here is {{pytorch}}. Then run this cell again."
        )
"""
SAY = """\
# A chapter opened alone: it needs the book's library.
import importlib.util

if importlib.util.find_spec("mgpu_lib") is None:
    raise ModuleNotFoundError("Install the book's library, from its repository: pip install ./virtual-gpus .")
"""
GPUS = """
import torch

gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
print("GPUs here:", ", ".join(gpus) or "none. The chapter makes virtual ones of main memory.")
"""


def library(source, repository):
    """Where pip finds the libraries of the book in `source`: its commit in `repository`; "" where that is unknown."""
    if not repository:
        return ""
    git = ["git", "-C", str(source), "rev-parse", "--verify", "-q", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return f"git+{repository}@{commit}" if commit else f"git+{repository}"  # of no checkout: the default branch


def first_cell(libraries):
    source = (INSTALL.format(library=libraries) if libraries else SAY) + GPUS
    return nbformat.v4.new_code_cell(source.rstrip(), id="opened-alone")


def standalone(chapter, folder, place, libraries):
    """The notebook `chapter`, whose file lies in `folder`, as one that needs no other file.

    `place(path, fragment)` is the web's address of a page or picture of the book, or "" where none is known.
    """
    cells = [first_cell(libraries)]
    for cell in chapter.cells:
        cell = nbformat.from_dict(cell)
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(lambda link: replaced(link, folder, place), cell.source)
        else:
            cell.outputs, cell.execution_count = [], None
        cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells, metadata=chapter.metadata)


def replaced(link, folder, place):
    """What stands in a standalone notebook for the match `link`: an address on the web, a picture's data, or words."""
    address = urlsplit(link["address"] or "")
    if not address.path or address.scheme:  # code, the same page, or the web already
        return link[0]
    path = folder / address.path
    there = place(path, address.fragment)
    if link["picture"]:
        data = base64.b64encode(path.read_bytes()).decode()
        return f"![{link['words']}]({there or f'data:image/svg+xml;base64,{data}'})"
    return f"[{link['words']}]({there})" if there else link["words"]


def write_notebooks(app, exception):
    """After the build: the standalone notebook of each chapter."""
    if exception or app.builder.name != "html":
        return
    source, site = Path(app.srcdir), app.config.html_context["site"]
    libraries = library(source, app.config.html_context["repository"])

    def place(path, fragment):
        name = posixpath.normpath(path.relative_to(source).as_posix())
        if not site:
            return ""
        if name.startswith("assets/"):
            return f"{site}_static/{name.removeprefix('assets/')}"
        page = name.rpartition(".")[0]
        anchor = app.env.metadata[page]["myst_slugs"][fragment][1] if fragment else ""
        return f"{site}{page}.html" + (f"#{anchor}" if anchor else "")

    folder = Path(app.outdir, FOLDER)
    folder.mkdir(exist_ok=True)
    for path in sorted(source.glob("chapters/*.ipynb")):
        notebook = standalone(nbformat.read(path, as_version=4), path.parent, place, libraries)
        nbformat.write(notebook, folder / path.name)


def add_buttons(app, pagename, templatename, context, doctree):
    """On a chapter: the theme's button brings the standalone notebook, and others run it where that is possible."""
    if not Path(app.srcdir, f"{pagename}.ipynb").exists():
        return
    name = f"{posixpath.basename(pagename)}.ipynb"
    for group in context["header_buttons"]:
        for button in group.get("buttons", []):
            if button.get("text") == ".ipynb":
                button["url"] = f"{context['pathto'](FOLDER, 1)}/{name}"
                button["tooltip"] = "Download the notebook, which runs anywhere"
    if places := where_to_run(context["repository"], name):
        buttons = [{"type": "link", "text": text, "url": url, "tooltip": what} for text, (url, what) in places.items()]
        menu = {"type": "group", "tooltip": "Run this chapter", "icon": "fas fa-rocket", "label": "launch-buttons"}
        context["header_buttons"].insert(0, menu | {"buttons": buttons})


def where_to_run(repository, name):
    """{name of a service: (address that opens the notebook `name` there, what it is)}, for a repository on GitHub."""
    if urlsplit(repository).netloc != "github.com":
        return {}
    file = f"{urlsplit(repository).path}/blob/{BRANCH}/{name}"
    return {
        "Colab": (f"https://colab.research.google.com/github{file}", "Google Colab"),
        "Kaggle": (f"https://kaggle.com/kernels/welcome?src=https://github.com{file}", "Kaggle, with two GPUs"),
        "Codespace": (f"https://codespaces.new{urlsplit(repository).path}", "All chapters, on GitHub"),
    }


def setup(app):
    app.connect("build-finished", write_notebooks)
    app.connect("html-page-context", add_buttons, priority=502)  # after the theme's own, at 501
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
