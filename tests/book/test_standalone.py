"""Chapters opened alone: notebooks that need no other file, install what is missing, and run; the buttons to them."""

import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import nbformat
import pages
import push_notebooks
import pytest
import standalone
import wheels
from IPython.core.inputtransformer2 import TransformerManager
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/ada/book"


def notebook(book, name):
    return nbformat.read(book / "notebooks" / f"{name}.ipynb", as_version=4)


def pointers(markdown):
    """The addresses of all links and pictures."""
    for block in MarkdownIt("commonmark").enable("table").parse(markdown):
        for token in block.children or ():
            if token.type in ("link_open", "image"):
                yield token.attrGet("href") or token.attrGet("src")


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_chapter_alone_needs_no_other_file(book, name):
    alone = notebook(book, name)
    nbformat.validate(alone)
    assert len(alone.cells) == len(pages.cells(name)) + 1
    for cell in alone.cells:
        if cell.cell_type == "code":
            assert "../" not in cell.source and not cell.outputs
            compile(TransformerManager().transform_cell(cell.source), name, "exec")
        for address in pointers(cell.source) if cell.cell_type == "markdown" else ():
            assert address.startswith("#") or urlsplit(address).scheme in ("data", "http", "https"), address


def test_links_and_pictures_are_the_site_s_where_one_is_known():
    text = (
        "[`a`](02-b.ipynb#A-[b]), [b](../glossary.md), [c](#here), [d](https://e.example/)\n"
        "`[x](y.md)`, [e](../errors.md#key(s)-in-[x])\n\n![two GPUs](../assets/figures/two-places.svg)\n"
        "```python\nx[0](y.md)\n```\n"
    )
    chapter = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])

    def markdown(place):
        return standalone.standalone(chapter, ROOT / "chapters", place, "").cells[1].source

    found = markdown(lambda path, fragment: f"https://s.example/{path.name}+{fragment}")
    assert found == (
        "[`a`](https://s.example/02-b.ipynb+A-[b]), [b](https://s.example/glossary.md+), [c](#here), "
        "[d](https://e.example/)\n`[x](y.md)`, [e](https://s.example/errors.md+key(s)-in-[x])\n\n"
        "![two GPUs](https://s.example/two-places.svg+)\n```python\nx[0](y.md)\n```\n"
    )
    found = markdown(lambda path, fragment: "")
    assert found.startswith("`a`, b, [c](#here), [d](https://e.example/)\n`[x](y.md)`, e\n\n")
    assert "![two GPUs](data:image/svg+xml;base64," in found


def test_the_download_button_brings_the_chapter_alone(book):
    for name in pages.PAGES:
        path = book / "chapters" / f"{name}.html"
        links = {link for link in re.findall('href="([^"]*[.]ipynb)"', path.read_text()) if not urlsplit(link).scheme}
        assert links == {f"../notebooks/{name}.ipynb"} and (path.parent / links.pop()).exists()


def test_a_chapter_is_opened_from_the_branch_of_a_repository_on_github():
    found = standalone.where_to_run(REPOSITORY, "01-a.ipynb")
    assert {name: address for name, (address, _) in found.items()} == {
        "Colab": "https://colab.research.google.com/github/ada/book/blob/notebooks/01-a.ipynb",
        "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/ada/book/blob/notebooks/01-a.ipynb",
        "Codespace": "https://codespaces.new/ada/book",
    }
    assert standalone.where_to_run("", "01-a.ipynb") == standalone.where_to_run("https://gitlab.com/a/b", "a") == {}


def git(*command, folder):
    return wheels.run("git", "-c", "user.name=Ada", "-c", "user.email=ada@example.org", *command, cwd=folder).strip()


def test_the_branch_holds_the_last_notebooks_and_the_checkout_stays(tmp_path):
    """Pushed twice: what is gone from the folder is gone from the branch, which has one commit."""
    checkout, remote, made = tmp_path / "checkout", tmp_path / "remote.git", tmp_path / "made"
    for folder in (checkout, made):
        folder.mkdir()
    git("init", "-q", "--bare", remote, folder=tmp_path)
    git("init", "-q", folder=checkout)
    (checkout / "here.txt").write_text("of the checkout")
    git("add", "here.txt", folder=checkout)
    git("commit", "-qm", "first", folder=checkout)
    for name in ("01-old.ipynb", "01-new.ipynb"):
        for path in made.iterdir():
            path.unlink()
        (made / name).write_text("{}")
        push_notebooks.push(made, str(remote), checkout)
    assert git("ls-tree", "--name-only", "notebooks", folder=remote) == "01-new.ipynb"
    assert git("rev-list", "--count", "notebooks", folder=remote) == "1"
    assert git("status", "--porcelain", folder=checkout) == "" and not (checkout / "01-new.ipynb").exists()


def test_an_installation_that_fails_is_said(monkeypatch):
    """As pip fails without the Internet: IPython's %pip prints what it says and goes on."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mgpu_lib" else found(name))
    shell = SimpleNamespace(run_line_magic=lambda *line: None)
    code = TransformerManager().transform_cell(standalone.first_cell(f"git+{REPOSITORY}").source)
    with pytest.raises(ModuleNotFoundError, match=r"could not be installed.* the Internet and PyTorch 2.10"):
        exec(code, {"get_ipython": lambda: shell})


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with the libraries and the files of one chapter, as this checkout has them now."""
    folder = tmp_path_factory.mktemp("repository")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests")
    for name in ("mgpu_lib", "virtual-gpus", "examples"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    git("init", "-q", folder=folder)
    git("add", ".", folder=folder)
    git("commit", "-qm", "all", folder=folder)
    return folder


@pytest.mark.slow
def test_a_chapter_alone_installs_the_library_and_runs(repository, tmp_path):
    """In an empty folder and an environment without the library. The repository's address leads git to the one here;
    the other libraries are there."""
    python = wheels.environment(tmp_path / "environment", [])
    wheels.run(python, "-m", "ipykernel", "install", "--sys-prefix")
    chapter = nbformat.read(ROOT / "chapters" / "01-meet-your-gpus.ipynb", as_version=4)
    libraries = standalone.library(repository, REPOSITORY)
    alone = standalone.standalone(chapter, ROOT / "chapters", lambda *place: "", libraries)
    folder = tmp_path / "empty"
    folder.mkdir()
    nbformat.write(alone, folder / "alone.ipynb")
    settings = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which pip reads as "no isolation": what builds a wheel is there
    }
    execute = ["-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", "alone.ipynb"]
    wheels.run(python, *execute, cwd=folder, env=wheels.ENVIRONMENT | settings)
    ran = nbformat.read(folder / "alone.ipynb", as_version=4)
    said = "".join(output.get("text", "") for output in ran.cells[0].outputs)
    assert said.rstrip().splitlines()[-1].startswith("GPUs here: ")
    assert [path.name for path in folder.iterdir()] == ["alone.ipynb"], "it leaves nothing in the reader's folder"
