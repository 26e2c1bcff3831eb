"""What the checks of some exercises rest on: curves, programs and steps that are what the exercise calls them."""

import re

import pytest
import torch
from pages import cells
from test_exercises import SHOWN, answer, said

from mgpu_lib import exercises, planning
from mgpu_lib.exercises import batch_size_and_learning_rate, distributeddataparallel, planning_a_run
from mgpu_lib.models import resnet18
from mgpu_lib.prediction import predict
from virtual_gpus import virtual_gpus

ALIASES = {"X[:2]", "X.detach()", "X.to(devices[0])"}
SETS = (ALIASES, "right: all six"), (set(), "yours"), (ALIASES - {"X.detach()"}, "not yet: look again at X.detach()")
SETS += (
    (ALIASES | {"X.cpu()"}, "not yet: look again at X.cpu(): the values had to"),
    ({"X"}, "not yet: ['X'] isn't among"),
)
TOKENS = (
    (39_936, 6144, "right: measured are 39,936 tokens with fused attention and 6,144 tokens with"),
    (..., 1, "yours"),
)
TOKENS += (
    (40_960, 7168, "right: measured are 39,936 tokens with fused attention (you: 40,960) and"),
    (1000, 1, "not yet"),
)
TOKENS += (47_104, 6144, "not yet: fused: 47,104 tokens are far too many"), (30_720, 6144, "not yet: fused: far more")
TOKENS += (39_936, 2000, "not yet: plain: 2000 is no multiple"), (39_936, 8192, "not yet: plain: 8,192 tokens are")
TOKENS += ((39_936, 1024, "not yet: plain: far more than 1,024 tokens fit; only the table"),)
FASTEST = {"dtype": torch.float16, "recomputed": True}
WAYS = (FASTEST, "right: 2.0 GiB and 1 s"), (..., "yours"), ({}, "not yet: {} runs out of memory")
WAYS += ({"recomputed": True}, "not yet: it fits, in 5 s, but"), (FASTEST | {"pieces": 4}, "not yet: a single text is")


def test_three_exercises_ask_for_a_value(capsys):
    def try_out(dtype=None, recomputed=False, pieces=1):
        if not recomputed:
            raise torch.OutOfMemoryError
        return 2.0, 1.0 if dtype else 5.0

    for names, _ in SETS:
        exercises.check_aliases(names)
    for fused, plain, _ in TOKENS:
        answer, room = {"fused": fused, "plain": plain}, {"fused": 40_000, "plain": 7000}
        exercises.check_longest(answer, lambda kind, tokens, room=room: tokens <= room[kind])
    for options, _ in WAYS:
        exercises.check_cheapest(options, try_out)
    for line, (*_, start) in zip(capsys.readouterr().out.splitlines(), SETS + TOKENS + WAYS, strict=True):
        assert line.startswith(start)


# Batch size and learning rate


def test_the_chapter_s_run_at_a_rate_of_2_dies_on_the_way(capsys):
    """The last line of exercise 7.1 has a step at which all images already get the same logits, not just the last."""
    died_at = answer("died_at", SHOWN["died_at"])
    step = died_at(*batch_size_and_learning_rate.too_fast())
    assert 0 < step < 59
    exercises.check_died_at(died_at)
    assert capsys.readouterr().out.endswith(f"after step {step} of 60\n")


# DistributedDataParallel


@pytest.mark.slow
def test_the_cap_that_the_exercise_calls_best_is_the_best_of_the_modelled_steps(capsys):
    """The formula leaves out the host, the forward pass and the update; the steps have them all."""
    asked, best_cap = [], answer("best_cap", SHOWN["best_cap"])
    distributeddataparallel.check_best_cap(lambda *given: [asked.append(given), best_cap(*given)][1])
    assert capsys.readouterr().out.startswith("right: ")
    *given, caps = asked[-1]
    X = torch.empty(32, 1, 28, 28, device="meta")
    steps = {
        cap: predict(resnet18(), X, "V100", 4, "ddp", link="pcie", bucket_cap_mb=cap / 2**20).seconds for cap in caps
    }
    ends = {cap: distributeddataparallel.last_end(*given, cap) for cap in caps}
    assert sorted(caps, key=steps.get) == sorted(caps, key=ends.get)
    assert min(steps, key=steps.get) not in (min(caps), max(caps)), "the best is between too small and too large"


# Plan a run on a thousand GPUs


def test_the_model_page_says_what_the_dry_runs_say():
    """Exercise 14.4: the numbers in the text of its solution are those of the record."""
    [text] = [cell.source for cell in cells("14-planning-a-run") if cell.id == "ex-page-solution"]
    fits, full, small = (
        planning.recorded_plan("13B", 64, "RoCE 100", **options)
        for options in (
            {"rows": 8, "micro_batches": 1},
            {"rows": 2, "micro_batches": 4, "recompute": False},
            {"rows": 1, "micro_batches": 8, "recompute": False},
        )
    )
    for run in (fits, full, small):
        mfu = run["flops"] / run["seconds"] / planning_a_run.H100
        assert f"| {run['gib']:.0f} GiB | {mfu:.0%} | {2**15 / run['seconds']:,.0f} |" in text
    assert f"tokens = {2**15 / fits['seconds']:.0f} * 3600 * hours" in text


# DataParallel


def test_the_proof_that_the_page_shows_finds_no_gap():
    [page] = [cell.source for cell in cells("05-dataparallel") if cell.id == "sync-batch-norm-solution"]
    names, sizes = {}, (4, 4, 4, 1)
    for program in ("import torch\nfrom torch import nn\n", *re.findall(r"```python\n(.*?)```", page, re.S)):
        exec(program, names)
    with virtual_gpus(len(sizes)):
        assert names["gap"](sizes) < 1e-12
        right = names["sync_batch_norm"]
        names["sync_batch_norm"] = lambda shards, *running: right([X - X.detach().mean() for X in shards], *running)
        assert names["gap"](sizes) > 1e-3


@pytest.mark.parametrize("order, whole", [("norm().full_tensor()", False), ("full_tensor().norm()", True)])
def test_who_sends_the_matrix_for_its_norm_is_told(order, whole, capsys):
    program = f"def logged_norm(net, rank):\n    norm = net.head.weight.{order}\n    return norm if rank == 0 else None"
    line = said(capsys, "logged_norm", program)
    assert line.startswith("right: ") and ("you sent the whole matrix" in line) is whole, line
