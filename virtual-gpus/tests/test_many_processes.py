"""The clock of all ranks, and what goes wrong between them: programs of many processes."""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ranks

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.slow
KERNEL = 1e-3  # seconds, as in programs/times.py


@pytest.fixture(scope="module")
def runs():
    """What each rank says of its times, in two runs of times.py at once, each a load for the other.

    On H100s, whose collectives slow the kernels beside them. The second run's ranks are processes of their own: what
    depends on a process alone, such as the order of a set, differs.
    """
    command = *ranks.VIRTUAL, "run", "-n", 3, "--gpu", "H100", PROGRAMS / "times.py"
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda fork: ranks.python(*command, fork=fork), (True, False))
        said = [re.findall(r"^rank (\d) (.*)$", each.stdout, re.M) for each in done]
        return [{int(rank): json.loads(times) for rank, times in each} for each in said]


@pytest.fixture
def run(runs):
    return runs[0]


def test_times_are_the_same_in_every_run(runs):
    assert runs[0] == runs[1] and sorted(runs[0]) == [0, 1, 2]


def test_an_operation_starts_when_the_last_rank_is_ready_and_ends_for_all_at_once(run):
    said = [run[rank]["the_last_rank_is_waited_for"] for rank in range(3)]
    for (start, end, launched), (kernel, *_) in said:
        assert start == said[2][0][0] > 3 * KERNEL > launched  # the last rank's kernel takes so long
        assert end == said[0][0][1] == kernel  # what each does next waits for it


def test_a_kernel_waits_for_what_it_was_told_to_wait_for(run):
    for rank in range(3):
        first, second, (kernel, *_) = run[rank]["one_group_after_the_other"]
        assert first[1] == second[0] == kernel


def test_a_message_takes_off_when_both_ends_are_ready(run):
    sent, received = run[0]["messages"], run[1]["messages"]
    assert sent[:2] == received[:2] and sent[0] - sent[2] > 2.9 * KERNEL


def test_buckets_travel_behind_the_backward_pass(run):
    """Six layers of 4 MiB are six buckets; all but the last begin before the backward pass is over."""
    sums = run[0]["buckets"][0]
    assert len(sums) == 6 and all(run[rank]["buckets"][0] == sums for rank in range(3))
    for rank in range(3):
        _, first, last, end, hidden = run[rank]["buckets"]
        assert first < sums[0][0] and all(before[1] <= after[0] for before, after in itertools.pairwise(sums))
        assert sums[-1][1] < last <= end  # what came is copied to the gradients
        assert 0.6 < hidden <= 1


def test_every_rank_hears_of_a_mistake():
    """Also of one that another rank makes; and no group of gloo outlives its communicator."""
    assert "ok one has gone" in ranks.torchrun(3, PROGRAMS / "mistakes.py").stdout
