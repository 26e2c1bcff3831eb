"""Snapshots and histories of memory: PyTorch's functions and its viewers, on what virtual GPUs know."""

import base64
import gc
import inspect
import json
import pickle
import re
import weakref

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viz
from torch.cuda.memory import _dump_snapshot, _record_memory_history, _snapshot
from versions import since

from virtual_gpus import dry_run, virtual_gpus

MiB = 1 << 20


def taken(nbytes, device="cuda"):
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def trace(device=0):
    return [(entry["action"], entry["size"]) for entry in _snapshot()["device_traces"][device]]


def blocks(snapshot, device=0):
    found = [block for segment in snapshot["segments"] if segment["device"] == device for block in segment["blocks"]]
    return [block for block in found if block["state"] == "active_allocated"]


def program():
    """A few steps on one GPU, while a history is recorded: the snapshot and PyTorch's statistics after them."""
    torch.manual_seed(0)
    _record_memory_history()
    net = nn.Sequential(nn.Linear(30, 500), nn.ReLU(), nn.Linear(500, 10)).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.rand(5000, 30, device="cuda")).sum().backward()
        optimizer.step()
    return _snapshot(), torch.cuda.memory_stats()


def test_segments_add_up_to_the_statistics_and_a_trace_leads_to_them(gpus):
    early = taken(5000)
    snapshot, stats = program()
    for pool in ("small", "large"):
        segments = [s for s in snapshot["segments"] if s["segment_type"] == pool]
        held = [block["size"] for block in blocks({"segments": segments})]
        now = [stats[f"{name}.{pool}_pool.current"] for name in ("active", "active_bytes", "allocated_bytes")]
        assert [len(held), sum(held), sum(s["allocated_size"] for s in segments)] == now
        assert sum(s["total_size"] for s in segments) == stats[f"reserved_bytes.{pool}_pool.current"] > sum(held)
        assert all(s["total_size"] == sum(b["size"] for b in s["blocks"]) and s["device"] == 0 for s in segments)
    addresses, left = [], {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            addresses.append(entry["addr"])
            left[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert left.pop(entry["addr"]) == entry["size"]
    # The viewer finds a block where its segment begins, and not where the block says that it is.
    held = {s["address"]: s["requested_size"] for s in snapshot["segments"] if s["requested_size"]}
    assert [n for address, n in held.items() if address not in left] == [early.nbytes]
    assert left.items() < held.items() and 50 < len(addresses) == len(set(addresses))
    times = [entry["time_us"] for entry in snapshot["device_traces"][0]]
    assert times == sorted(times) and times[0] < times[-1]


def test_the_same_program_writes_the_same_snapshot():
    alone = []
    for _ in range(2):
        with virtual_gpus(2):
            alone.append(program())
    assert alone[0] == alone[1]


def test_entries_say_what_happened_where(gpus):
    _record_memory_history()
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        x = taken(5000, "cuda:1")
    line = inspect.currentframe().f_lineno - 1
    (block,), (alloc,) = blocks(_snapshot(), 1), _snapshot()["device_traces"][1]
    assert alloc["frames"] == block["frames"] and alloc["addr"] == block["address"] and alloc["stream"] > 0
    assert [frame["name"] for frame in alloc["frames"][:2]] == ["taken", "test_entries_say_what_happened_where"]
    assert alloc["frames"][1]["line"] == line and alloc["frames"][1]["filename"] == __file__
    assert (block["size"], block["requested_size"]) == (5120, 5000)
    del x
    assert trace(1) == [("alloc", 5000), ("free_requested", 5000), ("free_completed", 5000)]
    with pytest.raises(torch.OutOfMemoryError):
        taken(1 << 45)
    (oom,) = _snapshot()["device_traces"][0]
    assert (oom["action"], oom["size"]) == ("oom", 1 << 45) and oom["device_free"] == gpus.spec.memory
    assert oom["frames"][0]["name"] == "taken"


def let_go(held):
    held.clear()


@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        ("all", ["taken", "let_go", "let_go"]),
        ("alloc", ["taken"] * 3),  # an entry of a release says who took the block, as in PyTorch
        ("state", [None] * 3),
        (None, [None] * 3),
    ],
)
def test_what_has_a_context(gpus, context, wanted):
    _record_memory_history(context=context)
    kept, gone = taken(5000), [taken(5000)]
    let_go(gone)
    assert bool(blocks(_snapshot())[0]["frames"]) == (context is not None) and kept.nbytes == 5000
    found = [(entry.get("frames") or [{"name": None}])[0]["name"] for entry in _snapshot()["device_traces"][0]]
    assert found[1:] == wanted


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ["alloc", "free_requested", "free_completed", "alloc"]),
        ({"max_entries": 2}, ["free_completed", "alloc"]),
        ({"max_entries": 0}, ["alloc"]),  # one at least, as in PyTorch
        ({"enabled": "state"}, ["alloc"]),
        pytest.param({"skip_actions": ["alloc", "free_requested"]}, ["free_completed"], marks=since("2.11")),
        ({"enabled": True, "trace_alloc_max_entries": 3}, ["free_requested", "free_completed", "alloc"]),  # before 2023
        pytest.param({"record_cuda": False}, [], marks=since("2.14")),
    ],
)
def test_options(gpus, options, left):
    _record_memory_history(**options)
    taken(10)
    gpus.grow(5)
    kept = [taken(20), taken(30, "cuda:4")]
    assert [action for action, _ in trace()] == left and len(trace(4)) == ("alloc" in left)
    assert torch._C._cuda_isHistoryEnabled() == bool(left)
    del kept


def test_recording_goes_on_starts_anew_and_ends(gpus):
    _record_memory_history()
    x, y = taken(5000), taken(5500)
    _record_memory_history(context="alloc")
    assert trace() == [("alloc", 5000), ("alloc", 5500)]
    _record_memory_history(clear_history=True)
    assert trace() == []
    _record_memory_history(None)
    z = taken(6000)
    del y
    assert not torch._C._cuda_isHistoryEnabled() and trace() == []
    assert [(b["requested_size"], bool(b["frames"])) for b in blocks(_snapshot())] == [(5000, True), (6000, False)]
    gpus.stop()
    gpus.start()
    assert not any(b["frames"] for b in blocks(_snapshot())), "nothing of it outlives the machine"
    del x, z


def test_what_there_is_not_is_refused(gpus):
    for call, message in (
        (lambda: _record_memory_history("some"), "expected state to be 'state', 'all', or None"),
        (lambda: _record_memory_history(context="free"), "expected context to be 'state', 'alloc', 'all', or None"),
        (lambda: _record_memory_history(stacks="c++"), "expected stacks to be 'python', or 'all'"),
        (lambda: torch.cuda.memory_snapshot((0, 1)), r"mempool_id=\(0, 1\): virtual GPUs have one memory pool"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
        assert not torch._C._cuda_isHistoryEnabled()


def test_pytorchs_viewers_read_what_is_dumped(gpus, tmp_path):
    _record_memory_history()
    big, small = taken(700 * MiB), taken(30 * MiB - 100)
    before = torch.cuda.memory_snapshot()
    del big
    _dump_snapshot(tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    flames = viz.memory(snapshot, format_flamegraph=str)
    assert re.search(r"active_allocated.*;test_history.py:\d+:taken 31457180\n", flames)
    assert "only_before" in viz.compare(before, snapshot["segments"], format_flamegraph=str)
    assert "total_reserved: 730.0MiB\ntotal_allocated: 30.0MiB\ntotal_free: 700.0MiB" in viz.segsum(snapshot)
    said = r"a = .*:700.0MiB\]\nb = .*:30.0MiB\]\ndel a # 700.0MiB\n# free completed for a"
    assert re.search(said, viz.trace(snapshot))
    for page in (viz.trace_plot(snapshot), viz.segment_plot(snapshot)):
        (stored,) = json.loads(re.search(r"const local_files = (.*)", page).group(1))
        assert pickle.loads(base64.b64decode(stored["base64"])) == snapshot
    viz.trace_plot(snapshot, filter_freed=True)
    assert [entry["size"] for entry in snapshot["device_traces"][0]] == [small.nbytes]


def test_blocks_may_die_while_others_are_made(gpus):
    """Garbage is collected wherever Python makes an object, also inside the history."""
    before = gc.get_threshold()
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
    found = [action for action, _ in trace()]
    assert found.count("alloc") == found.count("free_completed") == 240 and blocks(_snapshot()) == []


def test_a_history_keeps_nothing_alive(gpus):
    def work():
        net, x = nn.Identity(), taken(5000)
        return weakref.ref(net), x.shape

    _record_memory_history()
    assert work()[0]() is None and torch.cuda.memory_allocated() == 0 and len(trace()) == 3


def test_a_dry_run_says_what_fills_the_memory():
    found = {}

    def program():
        _record_memory_history()
        net = nn.Linear(30_000, 30_000, bias=False, device="cuda")

        def step():
            net(torch.rand(64, 30_000, device="cuda")).sum().backward()
            found.update(_snapshot(), here=torch.cuda.current_device())
            net.zero_grad()

        return step

    dry_run(program, n_gpus=8, gpu="H100")
    large = [block for block in blocks(found, found["here"]) if block["requested_size"] == 4 * 30_000**2]
    assert ["step" in [frame["name"] for frame in block["frames"]] for block in large] == [False, True]
