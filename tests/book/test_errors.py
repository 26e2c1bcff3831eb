"""errors.md: a program prints the message that it stands under; the search box finds what people have reported."""

import json
import re
from pathlib import Path

import pytest
from ranks import python, torchrun

PAGE = (Path(__file__).parents[2] / "errors.md").read_text(encoding="utf-8")
FIRST = "# two ranks; the lines at the top of this page come first\n"
START = re.search(r"```python\n(# two ranks\n.*?)```", PAGE, re.S)[1]


def entries():
    """(title, message, program or None) of each message on the page."""
    for entry in re.split(r"\n### |\n## .*\n", PAGE)[1:]:
        if "```text" in entry:
            program = re.search(r"```python\n(.*?)```", entry, re.S)
            message = re.search(r"```text\n(.*?)```", entry, re.S)[1]
            assert program or "](https://" in entry, "what no program here raises names its source"
            yield entry.partition("\n")[0], message, program and program[1]


def printed(program, folder):
    """What a program of the page prints, in words alone: no `[rank0]:`, no spaces at ends of lines."""
    if program.startswith(FIRST):
        program = START + program
    path = folder / "program.py"
    path.write_text(program)
    if program.startswith("# two ranks, torchrun"):
        done = torchrun(2, path, folder=folder, check=False)
    else:
        options = ("run", "-n", 2) if program.startswith("# two ranks") else ("--gpus", 4)
        done = python("-m", "virtual_gpus", *options, path, folder=folder, check=False)
    return re.sub(r"^\[rank\d\]: ?|[^\S\n]+$", "", done.stdout + done.stderr, flags=re.M)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("message", "program"),
    [pytest.param(message, program, id=re.sub(r"\W+", "_", title)) for title, message, program in entries() if program],
)
def test_a_program_prints_the_message_that_it_stands_under(message, program, tmp_path):
    found = printed(program, tmp_path)
    place = 0
    for part in message.strip().split("…"):
        place = found.find(part.strip(), place)
        assert place >= 0, f"{part!r} is not in:\n{found}"


@pytest.mark.parametrize(("title", "message"), [(title, message) for title, message, _ in entries()])
def test_a_title_is_in_its_message(title, message):
    """So a search for the first words of a message finds it. `and` stands where a type does."""
    for part in re.split(" and weight type | at least two devices", title):
        assert part.replace("`", "") in re.sub(r"[`\s]+", " ", message).replace("`", "")


REPORTED = json.loads(Path(__file__).with_name("reported_messages.json").read_text(encoding="utf-8"))


def test_a_pasted_message_is_found_whatever_its_numbers_and_names(book, page):
    page.goto((book / "errors.html").as_uri())
    for report in REPORTED:
        page.fill("#pasted", report["message"])
        found = [re.sub("[‘’]", "'", text) for text in page.locator(".find-error li").all_inner_texts()]
        if report["title"] is None:
            assert found == ["No message on this page is like it."], report["message"]
        else:
            assert report["title"].replace("`", "") in found, report["message"]
    page.fill("#pasted", REPORTED[0]["message"])
    page.locator(".find-error a").first.click()
    assert page.evaluate("document.querySelector(':target h3').textContent.length") > 0
