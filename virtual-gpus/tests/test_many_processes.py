"""The clock of all ranks, and what goes wrong between them: programs of many processes, run by torchrun."""

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
def said():
    """What times.py writes in two runs at once, each a load for the other; the second one goes on to make mistakes.

    On H100s, whose collectives slow the kernels beside them. The second run's ranks are processes of their own: what
    depends on a process alone, such as the order of a set, differs.
    """
    with ThreadPoolExecutor(2) as pool:
        ways = ([], True), (["mistakes"], False)
        options = {"options": ("--gpu", "H100")}
        runs = pool.map(lambda way: ranks.torchrun(3, PROGRAMS / "times.py", *way[0], fork=way[1], **options), ways)
        return [done.stdout for done in runs]


@pytest.fixture(scope="module")
def runs(said):
    """What each rank says of its times, in both runs."""
    return [{int(rank): json.loads(it) for rank, it in re.findall(r"^rank (\d) (.*)$", text, re.M)} for text in said]


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


@pytest.fixture(scope="module")
def words(said):
    """{mistake: the error of each rank}."""
    found = {}
    for line in map(json.loads, re.findall(r"^{.*$", said[1], re.M)):
        found.setdefault(line["mistake"], {})[line["rank"]] = line["words"]
    return found


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("other_sizes", "rank 0: all_reduce of float32[6], SUM\n  rank 1: all_reduce of float32[4], SUM"),
        ("other_operations", "rank 1: all_reduce of float32[4], SUM\n  rank 2: broadcast of float32[4] from rank 0"),
        ("other_reductions", "rank 0: all_reduce of float32[4], SUM\n  rank 1: all_reduce of float32[4], MAX"),
        ("other_reductions_of_many", "called different operations"),
        ("other_sizes_of_many", "called different operations"),
        ("uneven_all_to_all", "all_to_all: rank 0 sends 4 bytes to rank 1, which expects 8"),
        ("gathered_too_much", "gather: rank 2 sends 20 bytes to rank 0, which expects 16"),
        ("after_an_error", "rank 0: all_reduce of float32[6], SUM"),
        ("to_itself", "destination rank should not be the same"),
        ("from_anybody", "does not support recvAnysource"),
        ("on_the_cpu", "No backend type associated with device type cpu"),
        ("on_one_gpu", "Duplicate GPU detected : rank 1 and rank 0 both on GPU 0"),
    ],
)
def test_every_rank_hears_of_a_mistake(mistake, error, words):
    assert all(error in words[mistake][rank] for rank in range(3)), words[mistake]


def test_who_runs_out_of_time_learns_who_did_not_come(words):
    late = words["one_stays_away"]
    assert late[1] == ""
    for rank in (0, 2):
        assert "not all ranks came within 3 s" in late[rank] and "rank 1 waits nowhere" in late[rank]
        assert all(f"rank {r} waits in all_reduce of float32[4], SUM, operation 1" in late[rank] for r in (0, 2))


def test_both_ends_of_a_message_hear_of_its_size(words):
    said = words["a_message_of_another_size"]
    assert said[2] == "" and said[0] == said[1]
    assert "rank 0: message of float32[4]\n  rank 1: message of float32[5]" in said[0]


def test_a_rank_that_can_not_communicate_fails_and_one_that_has_gone_is_not_waited_for(words):
    said, gone = words["a_thread_has_ended"], words["one_has_gone"]
    assert "the thread that communicates for it has ended" in said[1] and 2 not in gone
    assert all("another rank has gone" in each for each in (said[0], said[2], gone[0], gone[1])), said


def test_no_group_of_gloo_outlives_its_communicator(words):
    """An error's traceback would keep it, and a thread of gloo's that comes back to a Python that ends, aborts."""
    for made, left in words["groups_of_gloo"].values():
        assert made > 20 and left == 0
