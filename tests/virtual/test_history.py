"""Snapshots and histories of memory: PyTorch's functions and its viewer's, on what virtual GPUs know."""

import base64
import contextlib
import gc
import inspect
import itertools
import json
import pickle
import pickletools
import random
import re
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz
from torch.cuda.memory import _dump_snapshot, _record_memory_history, _snapshot

from mgpu_lib.virtual import dry_run, off_the_clock, virtual_gpus
from mgpu_lib.virtual.snapshot import State

MiB = 1 << 20
SIZES = 1, 511, 512, 4000, 100_000, MiB, MiB + 1, 3 * MiB, 50 * MiB, 700 * MiB


@pytest.fixture
def gpus():
    with virtual_gpus(2) as machine:
        yield machine


def taken(nbytes, device="cuda"):
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def entries(device=0):
    return _snapshot()["device_traces"][device]


def actions(device=0):
    return [entry["action"] for entry in entries(device)]


def blocks(snapshot=None, device=0):
    segments = (snapshot or _snapshot())["segments"]
    return [
        block
        for segment in segments
        for block in segment["blocks"]
        if segment["device"] == device and block["state"] == "active_allocated"
    ]


def rounded(nbytes):
    return -(-nbytes // 512) * 512


def check_sums(snapshot, device):
    """What the segments of a GPU add up to is what PyTorch's statistics say, in each of the pools, too."""
    stats = torch.cuda.memory_stats(device)
    on_it = [segment for segment in snapshot["segments"] if segment["device"] == device]
    for pool in ("all", "small_pool", "large_pool"):
        segments = [s for s in on_it if pool in ("all", f"{s['segment_type']}_pool")]
        active = [block for segment in segments for block in blocks({"segments": [segment]}, device)]
        assert sum(s["total_size"] for s in segments) == stats[f"reserved_bytes.{pool}.current"]
        assert sum(s["allocated_size"] for s in segments) == stats[f"allocated_bytes.{pool}.current"]
        assert sum(s["active_size"] for s in segments) == stats[f"active_bytes.{pool}.current"]
        assert sum(block["size"] for block in active) == stats[f"allocated_bytes.{pool}.current"]
        assert len(active) == stats[f"active.{pool}.current"]
    for segment in on_it:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"]) > 0
        addresses = [segment["address"], *itertools.accumulate(b["size"] for b in segment["blocks"])]
        addresses[1:] = [segment["address"] + end for end in addresses[1:]]
        assert [block["address"] for block in segment["blocks"]] == addresses[:-1]


# Replaying a trace


class Replay:
    """A trace read backwards from its snapshot, as the viewer does in its "Allocator State History"."""

    def __init__(self, snapshot, device):
        segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
        self.mapped = {segment["address"]: segment["total_size"] for segment in segments}
        self.blocks = {block["address"]: block["size"] for block in blocks(snapshot, device)}
        self.trace = snapshot["device_traces"][device]

    def states(self):
        """(entry, bytes reserved, bytes allocated) when each was entered, the last one first."""
        for entry in reversed(self.trace):
            for address, size in self.blocks.items():
                assert self.holder(address, size) is not None, "a block lies where memory is"
            yield entry, sum(self.mapped.values()), sum(self.blocks.values())
            self.undo(entry)

    def holder(self, address, size):
        found = [a for a, held in self.mapped.items() if a <= address and address + size <= a + held]
        return found[0] if found else None

    def undo(self, entry):
        address, size = entry.get("addr"), entry["size"]
        match entry["action"]:
            case "alloc":
                assert self.blocks.pop(address) == rounded(size)
            case "free_completed":
                assert address not in self.blocks
                self.blocks[address] = rounded(size)
            case "segment_map":
                start = self.holder(address, size)
                held = self.mapped.pop(start)
                rest = {start: address - start, address + size: start + held - address - size}
                self.mapped.update({a: left for a, left in rest.items() if left})
            case "segment_unmap":
                assert not any(a < address + size and address < a + held for a, held in self.mapped.items())
                self.mapped[address] = size  # beside others that it touches: the viewer may not join them


def check_replay(snapshot, seen, device, fewer=False):
    """`seen`: (bytes reserved, allocated) at each snapshot that was taken before this one."""
    check_sums(snapshot, device)
    found = []
    for entry, reserved, allocated in Replay(snapshot, device).states():
        if entry["action"] == "snapshot":
            assert entry["size"] == allocated
            found.insert(0, (reserved, allocated))
    assert 0 < len(found) < len(seen) if fewer else len(found) == len(seen)
    assert found == seen[-len(found) :]


def wander(rng, n_gpus, steps, look):
    """Take and free at random, and call look() after each step."""
    held = []

    def step():
        action = rng.choice(["take"] * 5 + ["free"] * 4 + ["empty", "resize"])
        if action == "take":
            held.append(taken(rng.choice(SIZES) * rng.randint(1, 9), f"cuda:{rng.randrange(n_gpus)}"))
        elif action == "empty":
            torch.cuda.empty_cache()
        elif held and action == "free":
            held.pop(rng.randrange(len(held)))
        elif held:
            rng.choice(held).untyped_storage().resize_(rng.choice((0, *SIZES)))

    for _ in range(steps):
        with contextlib.suppress(torch.OutOfMemoryError):
            step()
        look()
    return held


def now(device):
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("entered", [100_000, 60])
def test_trace_and_segments_agree_with_the_statistics_at_each_moment(seed, entered):
    rng = random.Random(seed)
    with virtual_gpus(3, backing="meta") as machine:
        for ledger in machine.ledgers:
            ledger.capacity = 6 << 30  # full now and then
        before = wander(rng, 3, 50, lambda: None)
        _record_memory_history(max_entries=entered)
        seen = {device: [] for device in range(3)}

        def look():
            for device, states in seen.items():
                states.append(now(device))
            torch.cuda.memory_snapshot()

        after = wander(rng, 3, 250, look)
        assert sum(torch.cuda.memory_stats(device)["num_ooms"] for device in range(3)) > 0
        snapshot = _snapshot()
        for device, states in seen.items():
            check_replay(snapshot, states, device, fewer=entered == 60)
        del before, after


@pytest.mark.parametrize("seed", range(4))
def test_snapshots_without_a_history_agree_with_the_statistics(seed):
    with virtual_gpus(2, "V100", backing="meta"):

        def look():
            snapshot = _snapshot()
            for device in range(2):
                check_sums(snapshot, device)
            assert snapshot["device_traces"] == [[], []]

        held = wander(random.Random(seed), 2, 100, look)
        assert blocks() and not any(block["frames"] for block in blocks())
        del held


def test_blocks_of_the_past_and_of_other_gpus_have_other_addresses(gpus):
    _record_memory_history()
    for _ in range(5):
        for device in gpus.devices:
            for nbytes in (1, 5000, 3 * MiB):
                taken(nbytes, device)
    addresses = [e["addr"] for device in range(2) for e in entries(device) if e["action"] == "alloc"]
    assert len(addresses) == len(set(addresses)) == 30
    assert all(address % 512 == 0 for address in addresses)


# What an entry says


def test_an_entry_says_what_was_asked_for_and_by_which_lines(gpus):
    _record_memory_history()

    def make():
        return nn.functional.relu(taken(4000).view(torch.float32)), inspect.currentframe().f_lineno

    _kept, line = make()
    mapped, first, second = entries()[:3]
    assert (mapped["action"], mapped["size"], mapped["addr"]) == ("segment_map", 2 * MiB, first["addr"])
    assert [(e["action"], e["size"], e["stream"], e["pool_id"]) for e in (first, second)] == 2 * [
        ("alloc", 4000, 0, (0, 0))
    ]
    frames = second["frames"]
    assert (frames[0]["filename"], frames[0]["name"]) == (nn.functional.__file__, "relu")
    assert frames[1] == {"filename": __file__, "line": line, "name": "make"}
    assert frames[2]["filename"] == __file__ and frames[2]["name"] == inspect.currentframe().f_code.co_name
    assert [frame["name"] for frame in first["frames"]][:2] == ["taken", "make"]
    assert blocks()[0]["frames"] == frames
    assert not any("/mgpu_lib/virtual/" in frame["filename"] for frame in frames)


def test_a_gradient_is_taken_by_the_line_that_calls_backward(gpus):
    w = torch.ones(1000, device="cuda", requires_grad=True)
    _record_memory_history()
    (w * 2).sum().backward()
    line = inspect.currentframe().f_lineno - 1
    (grad,) = (block for block in blocks() if block["requested_size"] == w.grad.nbytes and block["frames"])
    assert {"filename": __file__, "line": line, "name": inspect.currentframe().f_code.co_name} in grad["frames"]


def test_a_block_is_freed_at_once_by_the_line_that_lets_go(gpus):
    _record_memory_history()
    x = taken(5000)
    line = inspect.currentframe().f_lineno + 1
    del x
    requested, completed = entries()[-2:]
    assert [requested["action"], completed["action"]] == ["free_requested", "free_completed"]
    assert requested["addr"] == completed["addr"] == next(e["addr"] for e in entries() if e["action"] == "alloc")
    assert requested["size"] == completed["size"] == 5000
    assert requested["frames"][0]["line"] == line


def test_times_are_the_modelled_ones_of_the_host(gpus):
    taken(512)
    _record_memory_history()
    early = round(1e6 * gpus.elapsed())
    first = taken(512)
    gpus.clock.work(0.5)
    second = taken(512)
    times = [entry["time_us"] for entry in entries() if entry["action"] == "alloc"]
    assert early <= times[0] < times[1] <= round(1e6 * gpus.elapsed())
    assert times[1] - times[0] >= 500_000
    del first, second


def test_who_is_off_the_clock_has_the_time_of_the_others(gpus):
    gpus.clock.work(0.5)
    _record_memory_history()
    with off_the_clock():
        taken(512)
    assert {entry["time_us"] for entry in entries()} == {round(1e6 * gpus.elapsed())}


def test_an_entry_names_the_stream_of_its_block(gpus):
    _record_memory_history()
    with torch.cuda.stream(torch.cuda.Stream()):
        x = taken(5000)
    del x
    shown = [entry["stream"] for entry in entries() if not entry["action"].startswith("segment")]
    assert shown == [1, 1, 1], "also when it is freed outside"


def test_out_of_memory_is_entered(gpus):
    kept = taken(3 * MiB)
    _record_memory_history()
    with pytest.raises(torch.OutOfMemoryError):
        taken(1 << 45)
    line = inspect.currentframe().f_lineno - 1
    (entry,) = entries()
    assert (entry["action"], entry["size"]) == ("oom", 1 << 45)
    assert entry["device_free"] == gpus.ledgers[0].capacity - kept.nbytes and "addr" not in entry
    assert entry["frames"][1]["line"] == line
    assert "Tried" not in viz.trace(_snapshot()) and "raise OutOfMemoryError # 32.0TiB" in viz.trace(_snapshot())


def test_a_snapshot_shows_those_before_it(gpus):
    kept = taken(5000)
    _record_memory_history()
    assert actions() == []
    (entry,) = entries()
    assert (entry["action"], entry["size"]) == ("snapshot", rounded(kept.nbytes))
    assert "frames" not in entry


def test_the_same_program_writes_the_same_trace_each_time():
    def program():
        with virtual_gpus(2):
            torch.manual_seed(0)
            _record_memory_history()
            net = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 10)).cuda()
            optimizer = torch.optim.Adam(net.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.rand(500, 30, device="cuda")).sum().backward()
                optimizer.step()
            return _snapshot()

    first, second = [program() for _ in range(2)]
    assert first == second and Counter(e["action"] for e in first["device_traces"][0])["alloc"] > 30
    assert first["device_traces"][1] == []


# Options


def test_the_newest_entries_are_kept(gpus):
    _record_memory_history(max_entries=5)
    for nbytes in range(1, 10):
        taken(nbytes)
    assert [(e["action"], e["size"]) for e in entries()] == [
        ("free_requested", 8),
        ("free_completed", 8),
        *((action, 9) for action in ("alloc", "free_requested", "free_completed")),
    ]
    _record_memory_history(max_entries=0)
    taken(10)
    assert [(e["action"], e["size"]) for e in entries()] == [("free_completed", 10)], "one at least, as in PyTorch"


@pytest.mark.parametrize(
    ("skipped", "left"),
    [
        ([], ["segment_map", "alloc", "free_requested", "free_completed", "oom", "snapshot"]),
        (["free_requested"], ["segment_map", "alloc", "free_completed", "oom", "snapshot"]),
        (["alloc"], ["free_requested", "free_completed", "oom", "snapshot"]),
        (["free_requested", "free_completed", "oom"], ["alloc", "snapshot"]),
        (["snapshot", "oom"], ["segment_map", "alloc", "free_requested", "free_completed"]),
    ],
)
def test_actions_are_skipped(gpus, skipped, left):
    """Where blocks come or go unseen, nothing is said of what is mapped, either."""
    _record_memory_history(skip_actions=skipped)
    taken(5000)
    with pytest.raises(torch.OutOfMemoryError):
        taken(1 << 45)
    _snapshot()
    assert actions() == left
    kept = taken(700)
    check_sums(_snapshot(), 0)
    del kept


def test_entries_stay_when_others_are_skipped_from_then_on(gpus):
    _record_memory_history()
    taken(5000)
    _record_memory_history(skip_actions=["alloc"])
    taken(600)
    assert [e["size"] for e in entries() if e["action"] == "alloc"] == [5000]
    assert [e["size"] for e in entries() if e["action"] == "free_completed"] == [5000, 600]
    _record_memory_history()
    taken(3 * MiB)
    assert not any(action.startswith("segment") for action in actions()), "one block came unseen"
    _record_memory_history(clear_history=True)
    taken(700)
    assert actions()[-3:] == ["alloc", "free_requested", "free_completed"]


def test_the_state_alone(gpus):
    _record_memory_history("state")
    x, y = taken(5000), taken(6000)
    assert [block["requested_size"] for block in blocks()] == [5000, 6000]
    lines = [block["frames"][1]["line"] for block in blocks()]
    assert lines == 2 * [inspect.currentframe().f_lineno - 3]
    assert len(entries()) == 1, "as in PyTorch"
    del x, y


@pytest.mark.parametrize(
    ("context", "block", "alloc", "free"),
    [
        ("all", True, "take", "let_go"),
        ("alloc", True, "take", "take"),
        ("state", True, None, None),
        (None, False, None, None),
    ],
)
def test_what_has_a_context(gpus, context, block, alloc, free):
    """With "alloc" an entry of a release says who took the block, as in PyTorch."""

    def take():
        return taken(5000)

    def let_go(held):
        held.clear()

    _record_memory_history(context=context)
    kept, gone = take(), [take()]
    let_go(gone)
    assert bool(blocks()[0]["frames"]) is block
    for action, wanted in (("alloc", alloc), ("free_requested", free), ("free_completed", free)):
        frames = [e for e in entries() if e["action"] == action][-1].get("frames", [])
        assert [f["name"] for f in frames if f["name"] in ("take", "let_go")] == ([wanted] if wanted else [])
    del kept


def test_recording_as_it_was_called_before(gpus):
    _record_memory_history(True, trace_alloc_max_entries=2, trace_alloc_record_context=True)
    x = taken(5000)
    taken(10)
    assert actions() == ["free_requested", "free_completed"]
    assert entries()[-1]["action"] == "snapshot" and blocks()[0]["frames"][0]["name"] == "taken"
    _record_memory_history(False)
    assert actions() == []
    del x


def test_recording_ends_and_blocks_stay_known(gpus):
    _record_memory_history()
    x, y = taken(5000), taken(5500)
    assert torch._C._cuda_isHistoryEnabled()
    _record_memory_history(None)
    assert not torch._C._cuda_isHistoryEnabled()
    z = taken(6000)
    del y
    assert _snapshot()["device_traces"] == [[], []]
    assert {b["requested_size"]: bool(b["frames"]) for b in blocks()} == {5000: True, 6000: False}, "as in PyTorch"
    _record_memory_history()
    assert set(gpus.ledgers[0].contexts) == {blocks()[0]["address"]}, "what died meanwhile is forgotten"
    del x, z


def test_recording_ends_with_the_machine():
    machine = virtual_gpus(1)
    with machine:
        _record_memory_history()
        x = taken(5000)
    with virtual_gpus(1):
        y = taken(6000)
        assert _snapshot()["device_traces"] == [[]] and not blocks()[0]["frames"]
    with machine:
        z = taken(7000)
        assert _snapshot()["device_traces"] == [[]]
        assert [b["requested_size"] for b in blocks()] == [5000, 7000] and not any(b["frames"] for b in blocks())
    del x, y, z


def test_gpus_that_join_are_recorded_too(gpus):
    _record_memory_history(max_entries=2)
    gpus.grow(3)
    taken(5000, "cuda:2")
    assert actions(2) == ["free_requested", "free_completed"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _record_memory_history("some"), "expected state to be 'state', 'all', or None"),
        (lambda: _record_memory_history(context="free"), "expected context to be 'state', 'alloc', 'all', or None"),
        (lambda: _record_memory_history(stacks="c++"), "expected stacks to be 'python', or 'all'"),
        (lambda: torch.cuda.memory_snapshot((0, 1)), r"mempool_id=\(0, 1\): virtual GPUs have one memory pool"),
    ],
)
def test_what_there_is_not_is_refused(gpus, call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
    assert not torch._C._cuda_isHistoryEnabled()


def test_without_cuda_nothing_is_recorded(gpus):
    _record_memory_history(record_cuda=False)
    assert not torch._C._cuda_isHistoryEnabled()


def test_traces_can_be_left_out(gpus):
    _record_memory_history()
    x = taken(5000)
    short = torch._C._cuda_memorySnapshot((0, 0, False))
    assert short["device_traces"] == [[], []]
    assert short["segments"] == torch.cuda.memory_snapshot() == torch.cuda.memory_snapshot((0, 0))
    del x


# Viewers


@pytest.fixture
def pictured(gpus):
    """A snapshot with 30 MiB of 700 MiB in use, and its bytes: (snapshot, reserved, allocated)."""
    _record_memory_history()
    x, y, z = taken(700 * MiB), taken(30 * MiB - 100), taken(1000)
    del x
    yield _snapshot(), *now(0)
    del y, z


def flames(lines):
    """{state: bytes} of what a flame graph is drawn from."""
    found = Counter()
    for line in lines.splitlines():
        stack, _, nbytes = line.rpartition(" ")
        found[next(part for part in stack.split(";") if part in ("active_allocated", "inactive"))] += int(nbytes)
    return found


def test_flame_graphs_have_all_bytes(pictured):
    snapshot, reserved, allocated = pictured
    for draw in (viz.segments, viz.memory):
        lines = draw(snapshot, format_flamegraph=str)
        assert flames(lines) == {"active_allocated": allocated, "inactive": reserved - allocated}
        assert re.search(r"test_history.py:\d+:pictured;test_history.py:\d+:taken 31457180\n", lines)


def test_snapshots_are_compared(pictured, capsys):
    before = torch.cuda.memory_snapshot()
    new = taken(800 * MiB)
    lines = viz.compare(before, torch.cuda.memory_snapshot(), format_flamegraph=str)
    after = [line for line in lines.splitlines() if line.startswith("only_after")]
    assert sum(flames("\n".join(after)).values()) >= new.nbytes
    assert "only_after" in capsys.readouterr().out


def test_the_summary_of_segments(pictured):
    snapshot, reserved, allocated = pictured
    summary = viz.segsum(snapshot)
    requested = allocated - 100 - 24
    assert f"total_reserved: {viz.Bytes(reserved)}\ntotal_allocated: {viz.Bytes(requested)}\n" in summary
    assert f"total_free: {viz.Bytes(reserved - requested)}" in summary


def test_the_trace_in_words(pictured):
    text = viz.trace(pictured[0])
    assert text.startswith("Device 0 ----------------\n")
    assert "700.0MiB]" in text and "30.0MiB]" in text and "1000.0B]" in text
    assert "# free completed for" in text and "Device 1" not in text


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        (viz.trace_plot, "Active Memory Timeline"),
        (lambda data: viz.trace_plot(data, plot_segments=True), "Active Cached Memory Timeline"),
        (viz.segment_plot, "Allocator State History"),
    ],
)
def test_pages_hold_the_snapshot(pictured, draw, kind):
    page = draw(pictured[0])
    (stored,) = json.loads(re.search(r"const local_files = (.*)", page).group(1))
    assert pickle.loads(base64.b64decode(stored["base64"])) == pictured[0]
    assert f"'{kind}'" in page


def test_what_was_freed_is_filtered(pictured, capsys):
    viz.trace_plot(pictured[0], filter_freed=True)
    left = [e["size"] for e in pictured[0]["device_traces"][0] if e["action"] in ("alloc", "free_completed")]
    assert left == [30 * MiB - 100, 1000]
    assert capsys.readouterr().out == ""


def test_a_snapshot_is_written_that_needs_nothing_to_be_read(gpus, tmp_path):
    _record_memory_history()
    kept = taken(5000)
    _dump_snapshot(tmp_path / "snapshot.pickle")
    written = (tmp_path / "snapshot.pickle").read_bytes()
    assert not [op.name for op, _, _ in pickletools.genops(written) if "GLOBAL" in op.name or "REDUCE" in op.name]
    read = pickle.loads(written)
    (block,) = blocks(read)
    assert block["requested_size"] == kept.nbytes and block["frames"][0]["name"] == "taken"
    assert {"segments", "device_traces", "allocator_settings", "external_annotations"} <= read.keys()


# Moments at which blocks die


def test_blocks_may_die_while_others_are_made(gpus):
    """Garbage is collected wherever Python makes an object, also inside the history."""
    seen, before = [], gc.get_threshold()
    _record_memory_history()
    try:
        gc.set_threshold(1)
        for nbytes in 40 * (600, 2 * MiB, 5000):
            cycle = [taken(nbytes)]
            cycle.append(cycle)
            del cycle
            taken(nbytes)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    seen.append(now(0))
    _snapshot()
    check_replay(_snapshot(), seen, 0)
    assert Counter(actions())["alloc"] == Counter(actions())["free_completed"] == 240
    assert blocks() == []


def test_a_snapshot_is_of_one_moment(gpus, monkeypatch):
    """If a block dies while the ledger is copied, it is copied once more."""
    held, copied = [taken(5000), taken(6000)], State.copied.__func__

    def dying(cls, ledger):
        made = copied(cls, ledger)
        del held[1:]
        return made

    monkeypatch.setattr(State, "copied", classmethod(dying))
    assert [block["requested_size"] for block in blocks()] == [5000]


def test_blocks_are_taken_and_freed_by_many_threads(gpus):
    _record_memory_history()
    handed_over, start = [[] for _ in range(4)], threading.Barrier(4)

    def work(number):
        start.wait()
        for nbytes in range(1, 200):
            handed_over[(number + 1) % 4].append(taken(nbytes * 7000, f"cuda:{number % 2}"))
            if handed_over[number]:
                handed_over[number].pop()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = _snapshot()
    for device in range(2):
        check_sums(snapshot, device)
        freed = {e["addr"] for e in snapshot["device_traces"][device] if e["action"] == "free_completed"}
        alloced = [e["addr"] for e in snapshot["device_traces"][device] if e["action"] == "alloc"]
        assert len(alloced) == len(set(alloced)) == 2 * 199
        assert set(alloced) - freed == {block["address"] for block in blocks(snapshot, device)} and freed < set(alloced)
        assert len(list(Replay(snapshot, device).states())) == len(snapshot["device_traces"][device])
    handed_over.clear()


def test_a_history_keeps_nothing_alive(gpus):
    class Thing:
        pass

    def work():
        thing = Thing()
        x = taken(5000)
        return weakref.ref(thing), x.shape

    _record_memory_history()
    thing, _ = work()
    snapshot = _snapshot()
    assert thing() is None and torch.cuda.memory_allocated() == 0
    assert len(snapshot["device_traces"][0]) == 4


# Without values


def test_a_dry_run_says_what_fills_the_memory():
    found = {}

    def program():
        _record_memory_history()
        net = nn.Sequential(*(nn.Linear(30_000, 30_000, bias=False, device="cuda") for _ in range(3)))
        X = torch.rand(64, 30_000, device="cuda")

        def step():
            net(X).sum().backward()
            net.zero_grad()
            found.update(_snapshot(), device=torch.cuda.current_device(), now=now(torch.cuda.current_device()))

        return step

    dry_run(program, n_gpus=8, gpu="H100")
    assert found["now"][0] == sum(segment["total_size"] for segment in found["segments"])
    weights = [b for b in blocks(found, found["device"]) if b["requested_size"] == 4 * 30_000**2]
    assert len(weights) == 3 and all("program" in [f["name"] for f in b["frames"]] for b in weights)
    trace = found["device_traces"][found["device"]]
    grads = [e for e in trace if e["action"] == "alloc" and e["size"] == 4 * 30_000**2 and e["frames"]]
    assert any("step" in [f["name"] for f in e["frames"]] for e in grads)
