"""The museum's bugs: the fix that a page shows passes all checks. What finds each bug is in the pages' outputs, which
nbval compares."""

import json
import re
from pathlib import Path

import nbformat
import pytest

import mgpu_lib as mgpu
from experiments import museum as experiment
from mgpu_lib.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "chapters" / "museum.ipynb"
CHAPTER = "09-distributeddataparallel.ipynb"  # has the second hall
SHARDING = "12-sharding.ipynb"  # has the third


def sources(notebook, ids=""):
    """The cells whose ids begin with `ids`: {id: source}, and {exhibit: the checks that found it, as its page says}."""
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.id.startswith(ids)]
    said = {cell.id: str(cell.get("outputs")) for cell in cells}
    exhibits = [cell.id for cell in cells if "exhibit" in cell.metadata.get("tags", [])]
    texts = {cell.id: re.sub(r"^%%ranks.*\n", "", cell.source) for cell in cells}
    return texts, {name: set(re.findall(r"assert_(\w+)", said[f"{name}-caught"])) for name in exhibits}


TEXTS, BUGS = sources(NOTEBOOK)
HALL_TEXTS, HALL_BUGS = sources(NOTEBOOK.with_name(CHAPTER), "hall-")
THIRD_TEXTS, THIRD_BUGS = sources(NOTEBOOK.with_name(SHARDING), "hall-")
ALL_TEXTS = TEXTS | HALL_TEXTS | THIRD_TEXTS  # exhibits have different names


def mended(name):
    return experiment.mended(ALL_TEXTS[name], experiment.fix_of(ALL_TEXTS[f"{name}-why"]))


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
    assert BUGS[name] and findings(museum, mended(name)) == set()


def called(name):
    """What the catalog calls an exhibit."""
    return re.fullmatch(r'(?:museum\.)?caught\("(.+)"\)', ALL_TEXTS[f"{name}-caught"]).group(1)


def test_the_page_opens_with_accuracies_of_the_catalog():
    """Of the programs that the paragraph below describes."""
    [catalog] = [cell.outputs[0] for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.id == "catalog"]
    accuracies = dict(re.findall(r"^\| (.+?) \| ([\d.]+)", catalog.data["text/markdown"], re.M))
    names = "born-different", None, "rebinding", "aliased", "mean-of-means"
    shown = [accuracies[called(name) if name else "The right program"] for name in names]
    assert f"| {' | '.join(shown)} |\n" in TEXTS["title"] and shown == sorted(shown)


# The second hall: many processes


@pytest.mark.parametrize("hall, chapter, bugs", [("second", CHAPTER, HALL_BUGS), ("third", SHARDING, THIRD_BUGS)])
def test_the_page_lists_the_other_halls(hall, chapter, bugs):
    """In their order: each exhibit's heading, where it stands, all words of its name, and which checks find it."""
    section = re.split(r"\n##", TEXTS["catalog-why"].partition(f"### The {hall} hall\n")[2])[0]
    rows = [line for line in section.splitlines() if line.startswith("| [")]
    for row, (name, found) in zip(rows, bugs.items(), strict=True):
        title = ALL_TEXTS[f"{name}-intro"].splitlines()[0].removeprefix("### ")
        assert row.startswith(f"| [{title}]({chapter}#{title.replace(' ', '-')})")
        assert row.endswith(f" | {', '.join(f'`{check}`' for check in sorted(found))} |")
        words = [set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", text).lower())) for text in (called(name), row)]
        assert words[0] <= words[1], "what the other chapter's catalog calls it"


BEGIN = """
import os
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
import mgpu_lib as mgpu

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
"""
TWO_STEPS = """
def train(net, batches=batches, whole=train, **rest):
    whole(net, batches=lambda epoch: batches(epoch)[:2], **rest)
"""


@pytest.fixture(scope="module")
def hall():
    """The chapter's own functions on four ranks, with two steps in place of an epoch."""
    ranks = Ranks(4)
    setup = [HALL_TEXTS[f"hall-{cell}"] for cell in ("setup", "train", "show", "caught")]
    for code in (BEGIN, *setup, TWO_STEPS, HALL_TEXTS["hall-right"]):
        ranks.run(code)
    yield ranks
    ranks.stop()


def found_on_ranks(hall, program, capsys):
    """The names of the checks that object to a program of the second hall."""
    hall.run("catalog.clear()")
    hall.run(program)
    capsys.readouterr()
    hall.run("import json\nfor *_, found in catalog.values():\n    print(json.dumps(list(found)))")
    said = [json.loads(line.partition(": ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert said == [said[0]] * 4, "all ranks fail alike"
    return set(said[0])


# The third hall: what is sharded

BEFORE_THIRD = "hello data training adam by-hand-right built fully-shard mesh-make context".split()
THIRD_SETUP = [f"hall-{name}" for name in "setup train show caught right long long-alone".split()]


@pytest.fixture(scope="module")
def third(tmp_path_factory):
    """The chapter's own functions on four ranks."""
    ranks, (texts, _) = Ranks(4), sources(NOTEBOOK.with_name(SHARDING))
    ranks.run(f"import os\nos.environ['SHARED'] = {str(tmp_path_factory.mktemp('shared'))!r}")
    for cell in (*BEFORE_THIRD, *THIRD_SETUP):
        ranks.run(texts[cell])
    yield ranks
    ranks.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture, name", [*(("hall", name) for name in HALL_BUGS), *(("third", name) for name in THIRD_BUGS)]
)
def test_on_ranks_the_fix_passes_all_checks(fixture, name, request, capsys):
    assert found_on_ranks(request.getfixturevalue(fixture), mended(name), capsys) == set()
