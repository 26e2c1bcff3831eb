"""The museum's bugs: the fix that a page shows passes all checks. What finds each bug is in the pages' outputs, which
nbval compares."""

import re

import pages
import pytest

import mgpu_lib as mgpu
from experiments import museum as experiment
from mgpu_lib.ranks import Ranks

MANY = "museum-many-processes"  # the second half


def cells_of(page):
    """{id: cell}"""
    return {cell.id: cell for cell in pages.cells(page)}


def sources(page):
    """{id: source}, and {exhibit: the checks that found it, as its page says}."""
    cells = cells_of(page)
    exhibits = [name for name, cell in cells.items() if "exhibit" in cell.metadata.get("tags", [])]
    found = {name: set(re.findall(r"assert_(\w+)", str(cells[f"{name}-caught"]))) for name in exhibits}
    return {name: re.sub(r"^%%ranks.*\n", "", cell.source) for name, cell in cells.items()}, found


TEXTS, BUGS = sources("museum")
MANY_TEXTS, MANY_BUGS = sources(MANY)


def mended(texts, name):
    return experiment.mended(texts[name], experiment.fix_of(texts[f"{name}-why"]))


@pytest.fixture(scope="module")
def museum():
    """The page's own functions, with two steps in place of two epochs: the checks look at no more."""
    names = {}
    for cell in experiment.SETUP:
        exec(TEXTS[cell], names)

    museum = names["museum"]
    whole, shuffled = museum.run_epochs, museum.shuffled

    def two_steps(step, replicas, devices=None, lr=0.1, order=None):
        whole(step, replicas, devices, lr, lambda epoch: (order or shuffled)(epoch)[:2])

    museum.epochs, museum.run_epochs, museum.shuffled = 1, two_steps, lambda *given: shuffled(*given)[:2]
    yield names
    if machine := mgpu.current_machine():  # the page's; other tests expect none
        machine.stop()


def findings(museum, program):
    museum["museum"].catalog.clear()
    exec(program, dict(museum))  # exhibits must not see what another one defined
    [(_, _, found)] = museum["museum"].catalog.values()
    return set(found)


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sweep(3)
def test_the_fix_passes_all_checks(museum, name):
    assert BUGS[name] and findings(museum, mended(TEXTS, name)) == set()


def called(name):
    """What the catalog calls an exhibit."""
    return re.fullmatch(r'museum\.caught\("(.+)"\)', TEXTS[f"{name}-caught"]).group(1)


def test_the_page_opens_with_accuracies_of_the_catalog():
    """Of the programs that the paragraph below describes."""
    catalog = cells_of("museum")["catalog"].outputs[0]
    accuracies = dict(re.findall(r"^\| (.+?) \| ([\d.]+)", catalog.data["text/markdown"], re.M))
    names = "born-different", None, "rebinding", "aliased", "mean-of-means"
    shown = [accuracies[called(name) if name else "The right program"] for name in names]
    assert f"| {' | '.join(shown)} |\n" in TEXTS["title"] and shown == sorted(shown)


# The second half: many processes


def reported(name):
    """What rank 0 says that a program reaches: "accuracy 0.869", "test loss 3.38"."""
    return REPORT.search(str(cells_of(MANY)[name].outputs)).group()


REPORT = re.compile(r"(?:accuracy|test loss) [\d.]+")


def test_the_second_half_lists_its_bugs():
    """In their order: each bug with a link to its exhibit, what that reports, and which check finds it. An exhibit's
    heading doesn't give the bug away; links by the bug's name lead there, too."""
    rows = []
    for name, found in MANY_BUGS.items():
        heading = re.search(r"^### (.+)", MANY_TEXTS[f"{name}-intro"], re.M).group(1)
        checks = ", ".join(f"`{check}`" for check in sorted(found))
        rows.append((heading.replace(" ", "-"), reported(name), checks))
    linked = [re.fullmatch(r"\[(.+)\]\(#(.+)\)", bug).groups() for bug, *_ in catalog()]
    found = [(place, said, checks) for (_, place), (_, said, _, checks) in zip(linked, catalog(), strict=True)]
    assert found == rows
    for (bug, heading), name in zip(linked, MANY_BUGS, strict=True):
        anchor = bug.replace(" ", "-")
        assert anchor == heading or f'<a id="{anchor}"></a>' in MANY_TEXTS[f"{name}-intro"]


def test_the_second_half_folds_its_answers():
    """As the first does: what is wrong, and the fix."""
    for page, texts, bugs in (("museum", TEXTS, BUGS), (MANY, MANY_TEXTS, MANY_BUGS)):
        for name in bugs:
            folded = re.search(r"<details><summary>What is wrong.*</details>", texts[f"{name}-why"], re.S)
            assert folded and "```diff" in folded.group(), (page, name)


def test_numbers_of_the_second_half_don_t_tell():
    """A higher accuracy is better, and a lower loss."""
    pairs = [(float(said.split()[-1]), float(right), "loss" in said) for _, said, right, _ in catalog()]
    as_good = sum(wrong <= right if loss else wrong >= right for wrong, right, loss in pairs)
    assert (as_good, len(pairs)) == (8, 14) and "In eight of the fourteen rows" in MANY_TEXTS["catalog"]


def catalog():
    """The cells of its rows: bug, what rank 0 reports, what it reports when mended, the checks."""
    lines = [line for line in MANY_TEXTS["catalog"].splitlines() if line.startswith("| [")]
    return [line.strip("| ").split(" | ") for line in lines]


def test_the_second_half_opens_with_accuracies_of_its_programs():
    names = "hall-unfrozen", "hall-no-sync", "hall-right", "hall-set-epoch", "hall-mean-over-ranks"
    shown = [reported(name).removeprefix("accuracy ") for name in names]
    assert f"| {' | '.join(shown)} |\n" in MANY_TEXTS["title"] and shown == sorted(shown)


def test_every_number_of_the_second_half_is_plausible():
    numbers = {name: reported(name).split() for name in ("hall-right", "sharded-right", *MANY_BUGS)}
    right = {kind: float(number) for kind, *_, number in (numbers["hall-right"], numbers["sharded-right"])}
    for kind, *_, number in numbers.values():
        assert abs(float(number) - right[kind]) < (0.1 if kind == "accuracy" else 0.5)


@pytest.fixture
def ranks(tmp_path):
    ranks = Ranks(4)
    ranks.run(f"import os\nos.environ['SHARED'] = {str(tmp_path)!r}")
    yield ranks
    ranks.stop()


@pytest.mark.slow
def test_on_ranks_the_check_passes_each_fix(ranks, capsys):
    """What mended programs report is in the catalog. That the checks find the bugs is on the page, which nbval runs."""
    reports, cells = [], cells_of(MANY)
    names = list(cells)
    for name in names[: names.index([*MANY_BUGS][-1]) + 1]:
        if name in MANY_BUGS:
            caught = f"{name}-caught"
            assert cells[caught].outputs and "no objection" not in str(cells[caught].outputs)
            ranks.run(mended(MANY_TEXTS, name))
            reports.append(REPORT.search(capsys.readouterr().out).group().split()[-1])
            ranks.run(MANY_TEXTS[caught])
            assert {*capsys.readouterr().out.splitlines()} == {"[rank0]: no objection"}
        elif cells[name].source.startswith("%%ranks") and not name.endswith("-caught"):
            ranks.run(MANY_TEXTS[name])
            capsys.readouterr()
    assert [right for _, _, right, _ in catalog()] == reports
