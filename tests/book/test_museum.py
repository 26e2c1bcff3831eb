"""The museum's bugs as its pages show them: the checks named find each, and the fix shown passes all checks."""

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
CHAPTER = "10-distributeddataparallel.ipynb"  # has the second hall
SHARDING = "12-sharding.ipynb"  # has the third


def sources(notebook, ids):
    """({cell id: source} of the exhibits, and of all cells) of those whose ids begin with `ids`."""
    cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.id.startswith(ids)]
    texts = {cell.id: re.sub(r"^%%ranks.*\n", "", cell.source) for cell in cells}
    return {cell.id: texts[cell.id] for cell in cells if "exhibit" in cell.metadata.get("tags", [])}, texts


BUGS, TEXTS = sources(NOTEBOOK, "")
HALL_BUGS, HALL_TEXTS = sources(NOTEBOOK.with_name(CHAPTER), "hall-")
THIRD_BUGS, THIRD_TEXTS = sources(NOTEBOOK.with_name(SHARDING), "hall-")
ALL_BUGS, ALL_TEXTS = BUGS | HALL_BUGS | THIRD_BUGS, TEXTS | HALL_TEXTS | THIRD_TEXTS  # exhibits have different names
STEP = "assert_step_matches_single_device"
FOUND_BY = {
    "rebinding": {"assert_replicas_equal", STEP},
    "aliased": {"assert_no_aliasing", STEP},
    "born-different": {"assert_replicas_equal", STEP},
    "stale": {"assert_gradients_fresh", STEP},
    "mean-of-means": {STEP},
    "sum-loss": {STEP},
    "shard-size": {STEP},
    "early-step": {"assert_replicas_equal", STEP},
    "reduced-parameters": {STEP},
    "unwrapped": {"assert_every_gpu_works"},
    "buffers": {"assert_buffers_equal"},
    "dropout": {"assert_draws_agree"},
    "shuffle": {"assert_every_row_once"},
    "padded": {"assert_every_row_once"},
}
HALL_FOUND_BY = {
    "hall-set-epoch": {"assert_draws_differ"},
    "hall-one-seed": {"assert_draws_differ"},
    "hall-unfrozen": {"assert_replicas_equal"},
    "hall-no-sync": {"assert_replicas_equal"},
    "hall-inner": {"assert_replicas_equal"},
    "hall-mean-over-ranks": {"assert_mean_over_rows"},
    "hall-everybody-saves": {"assert_one_rank_saves"},
}
THIRD_FOUND_BY = {
    "hall-own-norm": {STEP},
    "hall-shard-seed": {"assert_draws_differ"},
    "hall-pair": {"assert_draws_agree"},
    "hall-positions": {STEP},
    "hall-moments": {"assert_replicas_equal"},
}


@pytest.fixture(scope="module")
def museum():
    """The page's own functions, with two steps in place of two epochs: the checks look at no more."""
    names = {}
    for cell in experiment.SETUP:
        exec(TEXTS[cell], names)

    def two_steps(step, replicas, devices=names["devices"], lr=0.1, order=names["shuffled"]):
        for rows in order(0)[:2]:
            step(names["X_train"][rows], names["y_train"][rows], replicas, devices, lr)

    names["run_epochs"] = two_steps
    yield names
    if machine := mgpu.current_machine():  # the page's; other tests expect none
        machine.stop()


def findings(museum, program):
    names = dict(museum, catalog={})
    names["exhibit"] = rebound(museum["exhibit"], names)
    names["show"] = rebound(museum["show"], names)
    exec(program, names)
    [(_, _, found)] = names["catalog"].values()
    return set(found)


def rebound(function, names):
    """`function` with `names` for its globals: exhibits must not see what another one defined."""
    return type(function)(function.__code__, names, function.__name__, function.__defaults__)


def test_every_exhibit_is_tested():
    assert BUGS.keys() == FOUND_BY.keys()
    assert HALL_BUGS.keys() == HALL_FOUND_BY.keys() and THIRD_BUGS.keys() == THIRD_FOUND_BY.keys()
    assert len(ALL_BUGS) == len(BUGS) + len(HALL_BUGS) + len(THIRD_BUGS)


@pytest.mark.parametrize("name", FOUND_BY)
@pytest.mark.sweep(3)
def test_the_checks_find_the_bug_and_pass_its_fix(museum, name, capsys):
    assert findings(museum, BUGS[name]) == FOUND_BY[name]
    assert findings(museum, experiment.mended(BUGS[name], experiment.fix_of(ALL_TEXTS[f"{name}-why"]))) == set()


def called(name):
    """What the catalog calls an exhibit."""
    return re.fullmatch(r'caught\("(.+)"\)', ALL_TEXTS[f"{name}-caught"]).group(1)


def heading(name):
    return ALL_TEXTS[f"{name}-intro"].splitlines()[0].removeprefix("### ")


def stored(cell_id):
    """The Markdown that the page shows below a cell."""
    [cell] = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.id == cell_id]
    [output] = cell.outputs
    return output.data["text/markdown"]


def test_the_page_opens_with_accuracies_of_the_catalog():
    """Of the programs that the paragraph below describes."""
    accuracies = dict(re.findall(r"^\| (.+?) \| ([\d.]+)", stored("catalog"), re.M))
    names = "born-different", None, "rebinding", "aliased", "mean-of-means"
    shown = [accuracies[called(name) if name else "The right program"] for name in names]
    assert f"| {' | '.join(shown)} |\n" in TEXTS["title"] and shown == sorted(shown)


def test_the_catalog_shows_all_exhibits_and_what_found_each():
    names = re.findall(r"^\| (.+?) \|", stored("catalog"), re.M)
    assert names == ["program", "The right program", *map(heading, FOUND_BY)]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", stored("finders"), re.M)[1:]
    shown = {(check, name) for check, found in rows for name in found.split("; ")}
    assert shown == {
        (check.removeprefix("assert_").replace("_", " "), heading(name))
        for name, found in FOUND_BY.items()
        for check in found
    }


# The second hall: many processes


@pytest.mark.parametrize(
    "hall, chapter, found_by",
    [("second", CHAPTER, HALL_FOUND_BY), ("third", SHARDING, THIRD_FOUND_BY)],
)
def test_the_page_lists_the_other_halls(hall, chapter, found_by):
    """In their order: each exhibit's heading, where it stands, all words of its name, and which checks find it."""
    section = re.split(r"\n##", TEXTS["catalog-why"].partition(f"### The {hall} hall\n")[2])[0]
    rows = [line for line in section.splitlines() if line.startswith("| [")]
    listed = [re.fullmatch(r"\| \[(.+?)\]\((.+?)#(.+?)\).* \| (.+) \|", row).groups() for row in rows]
    assert listed == [
        (
            heading(name),
            chapter,
            heading(name).replace(" ", "-"),
            ", ".join(f"`{check.removeprefix('assert_')}`" for check in sorted(found)),
        )
        for name, found in found_by.items()
    ]
    for row, name in zip(rows, found_by, strict=True):
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
    ranks, (_, texts) = Ranks(4), sources(NOTEBOOK.with_name(SHARDING), "")
    ranks.run(f"import os\nos.environ['SHARED'] = {str(tmp_path_factory.mktemp('shared'))!r}")
    for cell in (*BEFORE_THIRD, *THIRD_SETUP):
        ranks.run(texts[cell])
    yield ranks
    ranks.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixture, name", [*(("hall", name) for name in HALL_FOUND_BY), *(("third", name) for name in THIRD_FOUND_BY)]
)
def test_on_ranks_the_checks_find_the_bug_and_pass_its_fix(fixture, name, request, capsys):
    ranks, program = request.getfixturevalue(fixture), ALL_BUGS[name]
    assert found_on_ranks(ranks, program, capsys) == (HALL_FOUND_BY | THIRD_FOUND_BY)[name]
    mended = experiment.mended(program, experiment.fix_of(ALL_TEXTS[f"{name}-why"]))
    assert found_on_ranks(ranks, mended, capsys) == set()
