"""The form of a chapter, on which readers rely, and how it is stored."""

import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import run_notebooks
from pages import BOOK, PAGES, cells, markdown

ROOT = run_notebooks.ROOT
chapters = pytest.mark.parametrize("page", PAGES)


def code_cells(page):
    return [cell for cell in cells(page) if cell.cell_type == "code"]


def text_of(page):
    return "\n".join(markdown(f"chapters/{page}.ipynb"))


def tags(cell):
    return cell.metadata.get("tags", [])


@chapters
def test_cells_have_ids_that_say_what_they_are(page):
    """A random id would change with each new cell at the same place, and say nothing in an error message."""
    ids = [cell.id for cell in cells(page)]
    assert len(set(ids)) == len(ids)
    words, random = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*"), re.compile(r"[0-9a-f]{8}")
    assert [i for i in ids if not words.fullmatch(i) or random.fullmatch(i)] == []


MUSEUM = {"museum", "museum-many-processes"}
LOOKED_UP = {"appendix-clock"}  # a page to look things up: it opens with its figure


@chapters
def test_a_chapter_opens_with_what_the_reader_will_be_able_to_do(page):
    opening = cells(page)[0].source
    number = f"{int(page[:2])} " if page[:2].isdigit() else ""  # the museum has none
    assert re.match(rf"# {number}\S", opening), "the title begins with the chapter's number"
    assert 3 <= len(re.findall(r"^- \S", opening, re.M)) <= 6 or page in LOOKED_UP
    first = code_cells(page)[0].source
    assert "import mgpu_lib as mgpu" in first


def absent(source):
    """The GPUs of `source` that a reader with two lacks. A program with virtual GPUs of its own has them."""
    named = re.findall(r"cuda:[2-9]\b|devices\[[2-9]\]|try_gpu\w*\([2-9]\)", source)
    return [] if "virtual_gpus(" in source else named


@pytest.mark.parametrize("page", [page for page in PAGES if page[:2] <= "05"])
def test_part_1_names_no_gpu_that_a_reader_with_two_lacks(page):
    assert absent('X.to("cuda:1").to("cuda:2"), devices[3], try_gpu(2)') == ["cuda:2", "devices[3]", "try_gpu(2)"]
    assert [cell["id"] for cell in code_cells(page) if absent(cell.source)] == []


def wrong_numbers(text):
    """Links to chapters that say another number than that of the file they lead to, such as "chapter 2 <03-…>"."""
    links = re.findall(r"chapters? (\d+)[^<>()\[\]`]*?(?:<|\]\()(?:chapters/)?(\d\d)-", text, re.I)
    return [(said, file) for said, file in links if int(said) != int(file)]


@pytest.mark.parametrize("name", BOOK)
def test_a_link_to_a_chapter_says_its_number(name):
    assert wrong_numbers("[chapter 3](02-tensors.ipynb), [chapter 11](11-splitting.ipynb)") == [("3", "02")]
    assert wrong_numbers("\n".join(markdown(name))) == []


@chapters
def test_a_chapter_closes_with_a_summary_and_what_to_read_next(page):
    last = cells(page)[-1]
    assert last.cell_type == "markdown"
    heading, text = re.split(r"^(?=## )", last.source, flags=re.M)[-1].split("\n", 1)
    assert heading == "## Summary"
    summary, *following = re.split(r"^\*\*(?:Next|Read next)[:.]\*\*", text, flags=re.M)
    assert len(re.findall(r"\w[.?!](?:\s|$)", summary)) >= 3, "a summary in full sentences"
    assert "".join(following).strip(), "what to read next"


@chapters
def test_a_chapter_asks_before_it_runs_and_breaks_what_runs(page):
    text = text_of(page)
    assert len(re.findall(r"^> \*\*Predict\.\*\* \S", text, re.M)) >= 3
    assert text.count("**Break it") >= 2 or page in {*MUSEUM, *LOOKED_UP}  # there, everything is broken
    solutions = re.findall(r"^<details><summary>Solution(.*?)^</details>$", text, re.M | re.S)
    assert solutions, "a task for the reader"
    for program in re.findall(r"^```python$(.*?)^```$", "\n".join(solutions), re.M | re.S):
        compile(program, "solution", "exec")


CAPTION = r'(<a id="[^"]+"></a>)?\*\*Figure \S+\.\*\* \S'


@chapters
def test_what_a_cell_draws_has_a_caption(page):
    """At the beginning of the next cell. test_book.py looks whether pictures have an alternative text."""
    for cell, following in pairwise(cells(page)):
        if any(kind.startswith("image/") for output in cell.get("outputs", []) for kind in output.get("data", {})):
            assert re.match(CAPTION, following.source), f"cell {following.id}: **Figure 1.1.** and what to see in it"
    assert "<img" not in text_of(page), "![what it shows](file)"


@chapters
def test_code_cells_are_short(page):
    """At most 15 lines, blank ones not counted. What the library ships is shown whole."""
    lines = {
        cell.id: len(re.findall(r"^.*\S", cell.source, re.M))
        for cell in code_cells(page)
        if "library" not in tags(cell)
    }
    assert {cell: count for cell, count in lines.items() if count > 15} == {}


@chapters
def test_code_fits_into_its_box(page):
    """A cell shows 84 characters of a line, the boxes of exercises and solutions fewer. A traceback's lines wrap."""
    text = text_of(page)
    shown = re.findall(r"^[> ]*```(?!pytb)[a-z]+\n(.*?)^[> ]*```$", text, re.M | re.S)
    of_cells = [cell.source for cell in code_cells(page)]
    for programs, room in ((of_cells, 84), (shown, 79)):
        lines = [line.removeprefix("> ") for program in programs for line in program.split("\n")]
        assert lines and [line for line in lines if len(line) > room] == []


# How it is stored


@chapters
def test_it_is_what_run_notebooks_writes(page):
    """Same bytes as after a run of `make run-notebooks`, as far as that shows without running it."""
    path = ROOT / "chapters" / f"{page}.ipynb"
    notebook = run_notebooks.read(path)
    run_notebooks.clean(notebook)
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n", (
        f"make run-notebooks CHAPTER=chapters/{path.name}"
    )
    assert list(run_notebooks.complaints(notebook)) == []


@chapters
def test_it_was_run_from_top_to_bottom(page):
    code = code_cells(page)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        if "raises-exception" not in tags(cell):
            assert not [output for output in cell.outputs if output.output_type == "error"], cell.source


@chapters
def test_cells_that_nbval_does_not_compare_are_few_and_check_something_themselves(page):
    """They are tagged: a comment would be printed in the book. With nbval-skip they check where outputs are stored, in
    scripts/run_notebooks.py."""
    code = code_cells(page)
    assert not [cell.source for cell in code if re.search(r"#\s*(NBVAL|PYTEST)_", cell.source)]
    ignored = [cell for cell in code if {"nbval-ignore-output", "nbval-skip"} & set(tags(cell))]
    assert len(ignored) <= len(code) / 3
    assert [cell.id for cell in ignored if not re.search(r"^\s*assert ", cell.source, re.M)] == []


ROW = re.compile(r"^\| \[\w+\]\((chapters/.*?)\) \|.*\| (\d+) \| (\d+) \|$", re.M)
MINUTES = ROW.findall((ROOT / "instructors.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name, reading, exercises", MINUTES, ids=[Path(name).stem for name, *_ in MINUTES])
def test_minutes_for_instructors_follow_from_a_chapters_length(name, reading, exercises):
    """As the page says: 180 words a minute without what is folded, 2 minutes a prediction, 15 an exercise."""
    text = "\n".join(markdown(name))
    words = len(re.sub(r"<details>.*?</details>", "", text, flags=re.S).split())
    assert abs(words / 180 + 2 * text.count("**Predict") - int(reading)) <= 10
    assert 15 * len(re.findall(r"\*\*Exercise \w", text)) == int(exercises)
