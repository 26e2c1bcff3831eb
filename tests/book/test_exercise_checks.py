"""What the checks of some exercises rest on: curves, programs and steps that are what the exercise calls them."""

import re

import pytest
import torch
from pages import cells
from test_exercises import SHOWN, answer, said

from mgpu_lib import exercises, planning, recorded
from mgpu_lib.exercises import (
    batch_size_and_learning_rate,
    distributeddataparallel,
    planning_a_run,
    where_the_time_goes,
)
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


# Where the time goes


BOUND_BY = {"products": "compute", "sums": "memory", "tiny": "host", "copies": "link", "hidden": "compute"}
BOUND_BY |= {"half": "link", "waited": "compute"}


@pytest.mark.parametrize("program, right", BOUND_BY.items())
def test_the_programs_have_clear_bottlenecks(program, right):
    """Whatever rates the clock is fitted to: the largest is a quarter more than the next."""
    costs = where_the_time_goes.costs_of(where_the_time_goes.timeline_of(getattr(where_the_time_goes, program)))
    first, second = sorted(costs, key=costs.get, reverse=True)[:2]
    assert first == right and costs[first] > 1.25 * costs[second], costs


def test_a_copy_that_is_hidden_would_look_like_the_bottleneck():
    timeline = where_the_time_goes.timeline_of(where_the_time_goes.hidden)
    assert timeline.overlap()[0] > 0.9
    assert timeline.communication(0) > max(timeline.bound_by(0)[kind] for kind in ("compute", "memory"))


def test_half_of_the_communication_is_hidden_and_no_threshold_will_do():
    half, waited = (where_the_time_goes.timeline_of(getattr(where_the_time_goes, name)) for name in ("half", "waited"))
    assert 0.35 < waited.overlap()[0] < 0.45 and 0.52 < half.overlap()[0] < 0.6
    assert waited.communication(0) > 1.25 * waited.bound_by(0)["compute"], "all of it would look like the bottleneck"


def test_the_cut_traces_have_no_name_for_the_pass_in_which_the_gpu_idles_longest():
    """As the text of exercise 6.2 says."""
    for cut in recorded.study("trace_cut")["traces"]:
        assert not [event for event in cut["traceEvents"] if re.search("forward|backward", event["name"].lower())]
    step = recorded.study("trace_resnet50")["steps"][1]
    kernels = [{"cat": "Kernel", "ts": start, "dur": end - start} for start, end in step["gpu"]]
    parts = {part: {"ts": start, "dur": end - start} for part, (start, end) in step["host"].items()}
    assert step["workers"] == 4
    idle = {part: where_the_time_goes.idle_in(event, kernels) for part, event in parts.items()}
    assert sorted(idle, key=idle.get)[-2:] == ["zero_grad", "forward"], idle
    assert 2.5 < parts["optimizer step"]["dur"] / parts["zero_grad"]["dur"] < 3


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


def test_more_gpus_than_the_batch_feeds_take_as_long():
    """By chapter 14's formula for what `fully_shard` reaches with too few tokens on each GPU."""
    at, peak, cards, gbits = (70.55e9, 1.5e12, 2**20), planning_a_run.H100, 8, 100
    least = planning_a_run.least_tokens(peak, 0.4, cards, gbits, True)

    def days(n_gpus):
        mfu = 0.4 * min(1, at[2] / n_gpus / least)
        return 6 * at[0] * at[1] / (mfu * peak * n_gpus) / 86_400

    for limit in (75, 94, 120, 300):
        in_time = [n_gpus for n_gpus in range(8, 2048, 8) if days(n_gpus) <= limit]
        assert planning_a_run.gpus_in_time(*at, limit, peak, 0.4, cards, gbits) == min(in_time, default=float("inf"))


def test_at_the_least_tokens_both_passes_hide_what_they_send():
    for recompute, done, sent in ((True, (2, 6), (2, 6)), (False, (2, 4), (2, 6))):
        tokens = planning_a_run.least_tokens(1e15, 0.45, 8, 100, recompute)
        flops = 0.45e15 * sum(done) / 6  # what a GPU does, of which MFU counts 6
        passes = [d * tokens / flops - s / 100e9 for d, s in zip(done, sent, strict=True)]
        assert min(passes) == pytest.approx(0, abs=1e-15)


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


@pytest.mark.parametrize("sizes", [(4, 4, 4, 1), (5, 2), (6,)])
def test_the_proof_that_the_page_shows_finds_no_gap(sizes):
    [page] = [cell.source for cell in cells("05-dataparallel") if cell.id == "sync-batch-norm-solution"]
    names = {}
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
