"""The clock of virtual GPUs: what waits for what, and how long. The settings themselves are tested elsewhere."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from versions import since

from virtual_gpus import current, dry_run, off_the_clock, virtual_gpus
from virtual_gpus.clock.timeline import Timeline


def busy(device, n=4096):
    """Some milliseconds of work for `device`, and what the host spent on asking for it."""
    X = torch.empty(n, n, device=device)
    return X @ X


def free(device, stream=0):
    return current().gpus[device.index].streams[stream].done_at


def events(machine, name):
    return [e for e in machine.timeline if e.name == name]


@pytest.fixture
def dry():
    """GPUs without values: large operations cost nothing here."""
    with virtual_gpus(4, backing="meta") as machine:
        yield machine


def test_the_host_runs_ahead_of_gpus_that_work_at_the_same_time(dry):
    busy(dry.devices[0]), busy(dry.devices[1])
    first, second = map(free, dry.devices[:2])
    assert dry.elapsed() < 1e-4 < 5e-3 < first < second < first + 1e-4
    torch.cuda.synchronize()
    assert dry.elapsed() == first


def test_synchronize_waits_for_the_current_device_only(dry):
    torch.cuda.set_sync_debug_mode("error")  # nor is it an error there, as on an H200
    for wait, gpu in ((torch.cuda.synchronize, 0), (lambda: torch.cuda.synchronize("cuda:2"), 2)):
        busy(dry.devices[1]), busy(dry.devices[gpu], 1024)
        wait()
        assert dry.elapsed() == free(dry.devices[gpu]) < free(dry.devices[1])
    with torch.cuda.device(1):
        torch.cuda.synchronize()
    torch.accelerator.synchronize(3)  # nothing to wait for
    assert dry.elapsed() == free(dry.devices[1])


@pytest.mark.parametrize(
    "read",
    [
        *(lambda X: X.sum().item(), lambda X: X.tolist(), lambda X: bool(X.sum() > 0), str, lambda X: X.cpu()),
        *(lambda X: torch.equal(X, X), lambda X: torch.allclose(X, X), lambda X: torch.save(X, io.BytesIO())),
        *(lambda X: X.nonzero(), lambda X: X[X > 0], lambda X: X.unique_consecutive()),
        *(lambda X: X.long()[0].bincount(), lambda X: X[0].repeat_interleave(X[0].long())),
        *(lambda X: torch.ones(3).to(X.device), lambda X: torch.tensor(1.0, device=X.device)),
        lambda X: torch.cuda.current_stream().synchronize(),
    ],
)
def test_reading_a_value_waits_for_the_gpu(gpus, read):
    """In a mode that one can choose this is an error or a warning, in the words that an H200 has for it."""
    X, words = torch.ones(64, 64, device=gpus.devices[0]), "^called a synchronizing CUDA operation$"
    gpus.gpus[0].streams[0].done_at = 1.0  # as if it had a second's work
    read(X)
    assert gpus.elapsed() >= 1.0
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=words):
        read(X)
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match=words):
        read(X)
    assert torch.cuda.get_sync_debug_mode() == 1


@pytest.mark.parametrize(
    "call",
    [
        *(lambda X: X + X, lambda X: X.add_(1), lambda X: X.to("cuda:1"), lambda X: X.clone(), lambda X: X.sum()),
        *(lambda X: torch.zeros(9, device="cuda:0"), lambda X: X.to("cpu", non_blocking=True)),
        lambda X: torch.ones(3).pin_memory().to(X.device, non_blocking=True),
    ],
)
def test_other_calls_do_not_wait(gpus, call):
    X = torch.ones(64, 64, device=gpus.devices[0])
    gpus.gpus[0].streams[0].done_at = 1.0
    torch.cuda.set_sync_debug_mode("error")
    call(X)
    assert gpus.elapsed() < 1e-3


def test_views_run_nothing(gpus):
    X = torch.ones(64, 64, device=gpus.devices[0])
    before = free(gpus.devices[0]), len(gpus.timeline)
    X.T, X[0], X.view(-1), X.detach(), torch.empty(5, device="cuda:0"), X.expand(2, 64, 64), X.requires_grad_()
    X = X.detach()
    X.t_(), X.unsqueeze_(0), X.squeeze_(), X.as_strided_((64, 32), (64, 1)), X.resize_(64, 64)  # in place
    X.is_set_to(X), X.is_same_size(X)
    assert (free(gpus.devices[0]), len(gpus.timeline)) == before
    torch.equal(X, X)
    assert len(gpus.timeline) > before[1]


@since("2.15")
def test_what_fsdp_only_notes_runs_nothing(gpus):
    """An operation of FSDP2 that does nothing on CUDA, and is given the whole gradient."""
    import torch.distributed.fsdp  # registers it

    X = torch.ones(64, device=gpus.devices[0])
    before = len(gpus.timeline)
    torch.ops.fsdp.record_grad_output_stream(X, 0, 0, 1)
    assert len(gpus.timeline) == before


def test_tf32_follows_pytorchs_switches_or_the_clocks():
    def seconds(tf32=None, gpu="A100-40"):
        with virtual_gpus(1, gpu=gpu, backing="meta") as machine:
            machine.clock.tf32 = tf32
            busy(machine.devices[0])
            return free(machine.devices[0])

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        exact = seconds()
        assert exact > 2 * seconds((True, True)) and seconds((True, True), "V100") == seconds(gpu="V100")
        torch.backends.cuda.matmul.allow_tf32 = True
        assert seconds() == seconds((True, True)) and seconds((False, False)) == exact
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_a_copy_takes_latency_and_bandwidth_and_occupies_both_ends(dry):
    X = torch.empty(10**8, dtype=torch.uint8, device="cuda:0")
    X.to("cuda:1")
    out, arriving = events(dry, "copy cuda:0 to cuda:1")
    assert (out.row, arriving.row) == ("copy out", "copy in") and (out.gpu, arriving.gpu) == (0, 1)
    assert (out.start, out.end) == (arriving.start, arriving.end) == (out.launched, free(dry.devices[1]))
    assert free(dry.devices[0]) == out.end and out.nbytes == 10**8
    assert out.end - out.start > dry.link.latency + 1e8 / dry.link.bandwidth
    X[:1].to("cuda:1")
    small = events(dry, "copy cuda:0 to cuda:1")[-1]
    assert dry.link.latency <= small.end - small.start < 1.01 * dry.link.latency


def test_copies_to_one_gpu_take_turns_and_those_of_other_pairs_do_not(dry):
    parts = [torch.empty(10**8, dtype=torch.uint8, device=device) for device in dry.devices]
    parts[1].to("cuda:0"), parts[2].to("cuda:0")
    one, two = [e for e in dry.timeline if e.row == "copy in" and e.gpu == 0]
    assert two.start >= one.end
    torch.cuda.synchronize("cuda:0")
    start = dry.elapsed()
    parts[0].to("cuda:1"), parts[2].to("cuda:3")
    one, two = [e for e in dry.timeline.since(start) if e.row == "copy in"]
    assert two.start < one.end


def staged(X, pin):
    stager = StateDictStager(pin_memory=pin)
    return stager.stage({"X": X}, non_blocking=True)["X"]


def offloaded(X, pin):
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        X.clone().requires_grad_().exp()


COPIES = {
    "to": lambda X, host, wait: host.to("cuda:0", non_blocking=not wait),
    "cuda": lambda X, host, wait: host.cuda(non_blocking=not wait),
    "copy_": lambda X, host, wait: X.copy_(host, non_blocking=not wait),
    "_foreach_copy_": lambda X, host, wait: torch._foreach_copy_([X], [host], non_blocking=not wait),
    "copy_, back": lambda X, host, wait: host.copy_(X, non_blocking=not wait),
    "copy_ of a parameter, back": lambda X, host, wait: host.copy_(nn.Parameter(X), non_blocking=not wait),
    "copy_ to a part, back": lambda X, host, wait: host[:].copy_(X, non_blocking=not wait),
    "_foreach_copy_, back": lambda X, host, wait: torch._foreach_copy_([host], [X], non_blocking=not wait),
}


@pytest.mark.parametrize("name", COPIES)
def test_the_host_waits_for_copies_of_ordinary_memory_and_not_of_pinned(gpus, name):
    X, ordinary = torch.ones(10**6, device="cuda:0"), torch.zeros(10**6)

    def cost(host, wait):
        """What the host waits for, beside what lies before it in the stream, and what the copy takes."""
        torch.cuda.synchronize()
        gpus.gpus[0].streams[0].done_at = busy_until = gpus.elapsed() + 1.0
        COPIES[name](X, host, wait)
        [done] = [e for e in gpus.timeline.since(busy_until - 1.0) if e.kind == "copy"]
        return gpus.elapsed() >= busy_until, done.end - done.start

    (waits, pageable), (waits_too, pinned) = cost(ordinary, True), cost(ordinary.pin_memory(), True)
    assert waits and waits_too and pinned < 0.8 * pageable
    assert cost(ordinary, False) == (True, pytest.approx(pageable))
    assert cost(ordinary.pin_memory(), False) == (False, pytest.approx(pinned))
    if "back" not in name:  # as a DataLoader's workers hand over their batches
        waits, shared = cost(ordinary.clone().share_memory_(), False)
        assert waits and shared > 2 * pageable


@pytest.mark.parametrize(
    "fetch",
    [
        lambda X, wait: X.to("cpu", non_blocking=not wait),
        lambda X, wait: X.to("cpu", torch.float16, not wait),
        lambda X, wait: X.to(torch.ones(1), non_blocking=not wait),
        lambda X, wait: X.type("torch.FloatTensor", non_blocking=not wait),
        lambda X, wait: nn.Linear(99, 99, device="cuda:0").to("cpu", non_blocking=not wait).weight.data,
        lambda X, wait: staged(X, pin=not wait),
        pytest.param(lambda X, wait: offloaded(X, pin=not wait), marks=since("2.13")),
    ],
)
def test_what_comes_to_the_host_without_waiting_is_pinned(gpus, fetch):
    X = torch.ones(99, 99, device="cuda:0")
    for wait in (True, False):
        gpus.gpus[0].streams[0].done_at = until = gpus.elapsed() + 1.0
        host = fetch(X, wait)
        assert (gpus.elapsed() >= until) == wait and (host is None or host.is_pinned() != wait)


def test_streams_overlap_with_copies_but_kernels_share_the_gpu(dry):
    side = torch.cuda.Stream("cuda:0")
    X = torch.empty(10**8, dtype=torch.uint8, device="cuda:0")
    busy(dry.devices[0])
    with torch.cuda.stream(side):
        X.to("cuda:1")
        busy(dry.devices[0])
    copy, (one, two) = events(dry, "copy cuda:0 to cuda:1")[0], events(dry, "mm")
    assert copy.start < one.end and (one.row, two.row) == ("default", "stream 1")
    alone = one.end - one.start
    assert two.end - one.start == pytest.approx(2 * alone), "together they take as long as one after the other"
    assert dry.timeline.overlap()[0] > 0.9


def test_a_kernel_starts_although_another_stream_has_one_in_the_future(dry):
    side = torch.cuda.Stream("cuda:0")
    side.done_at = 1e-3  # waits for something
    with torch.cuda.stream(side):
        torch.empty(8, device="cuda:0").zero_()
    busy(dry.devices[0])
    assert events(dry, "mm")[0].start < events(dry, "zero_")[0].start == 1e-3 < events(dry, "mm")[0].end


def test_events_order_streams_and_measure(dry):
    side, first, last = torch.cuda.Stream("cuda:0"), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    busy(dry.devices[0])
    last.record()
    side.wait_event(last)
    assert free(dry.devices[0], 1) == free(dry.devices[0])
    assert not last.query() and not torch.cuda.current_stream().query()
    with pytest.raises(ValueError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert last.query() and dry.elapsed() >= free(dry.devices[0])
    mm = events(dry, "mm")[0]
    assert first.elapsed_time(last) == pytest.approx(1e3 * (mm.end - 0), rel=0.05)
    other = torch.cuda.Stream("cuda:0")
    other.wait_stream(torch.cuda.current_stream())
    assert other.query() and side.query()


def test_waiting_for_an_event_by_asking_ends(dry):
    busy(dry.devices[0], 512)
    last = torch.cuda.current_stream().record_event()
    while not last.query():
        pass
    assert dry.elapsed() >= free(dry.devices[0])


def test_a_faster_host_takes_its_part_of_the_time_for_every_call():
    def times(host, size):
        with virtual_gpus(1, backing="meta", host=host) as machine:
            x = torch.zeros(size, device="cuda", requires_grad=True)
            for _ in range(100):
                x = x + 1
            x.sum().backward()
            launched = machine.elapsed()
            torch.cuda.synchronize()
            return launched, machine.elapsed(), machine.timeline.waiting_for_host(0) / machine.elapsed()

    slow, fast = times(1, 10), times(1 / 3, 10)
    assert fast[0] == pytest.approx(slow[0] / 3) and fast[1] < 0.4 * slow[1]  # the host sets the pace
    assert slow[2] > 0.5
    slow, fast = times(1, 10**7), times(1 / 3, 10**7)
    assert fast[0] == pytest.approx(slow[0] / 3) and fast[1] > 0.9 * slow[1]  # the GPU does
    assert slow[2] < 0.05


def test_backward_has_a_thread_for_each_gpu(dry):
    """One backward pass over two GPUs launches on both at the same time, two passes one after the other."""

    def launches(together):
        leaves = [torch.empty(8, 8, device=device, requires_grad=True) for device in dry.devices[:2]]
        losses = [(leaf * 1).exp().exp().exp().exp().sum() for leaf in leaves]
        start = dry.elapsed()
        torch.autograd.backward(losses) if together else [loss.backward() for loss in losses]
        return dry.elapsed() - start

    assert launches(True) < 0.7 * launches(False)
    assert {e.thread for e in dry.timeline if e.phase == "backward"} == {"host, backward"}


def test_a_backward_pass_that_crosses_gpus_goes_in_order(gpus):
    X = torch.ones(8, device="cuda:0", requires_grad=True)
    (X * 2).to("cuda:1").exp().sum().backward()
    copy = events(gpus, "copy cuda:1 to cuda:0")[0]
    last = next(e for e in gpus.timeline if e.phase == "backward" and e.gpu == 0 and e.name == "mul")
    assert last.launched > copy.launched and last.start >= copy.end
    assert gpus.elapsed() >= last.launched


def test_replicas_threads_start_together_and_the_main_thread_waits_for_them(dry):
    net = nn.DataParallel(nn.Sequential(*(nn.ReLU() for _ in range(50))), dry.devices)
    net(torch.empty(8, 8, device="cuda:0"))
    by_thread = {}
    for e in dry.timeline:
        by_thread.setdefault(e.thread, []).append(e)
    replicas = [by_thread[f"replica {i}"] for i in range(4)]
    assert max(r[0].called for r in replicas) < min(r[-1].launched for r in replicas)
    assert dry.elapsed() >= max(e.launched for e in dry.timeline if e.thread.startswith("replica"))
    in_turn = replicas[0][0]
    torch.empty(8, 8, device="cuda:0").relu()
    alone = events(dry, "relu")[-1]
    assert in_turn.launched - in_turn.called > alone.launched - alone.called, "threads take turns at the GIL"


def data_parallel_times():
    """Of two steps of DataParallel, which has threads; no row of the timeline has two events at a time."""
    with virtual_gpus(4, backing="meta") as machine:
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(8)]
        net = nn.DataParallel(nn.Sequential(*blocks).cuda(), machine.devices)
        for _ in range(2):
            net(torch.empty(64, 64, device="cuda:0")).sum().backward()
        torch.cuda.synchronize()
        rows = machine.timeline.rows()
        assert any(label.endswith("backward (2)") for label in rows)
        assert all(a.end <= b.start + 1e-12 for row in rows.values() for a, b in pairwise(row))
        assert sum(len(row) for label, row in rows.items() if label.startswith("cuda")) == len(machine.timeline)
        return machine.elapsed(), list(machine.timeline)


def test_the_same_program_takes_the_same_time_with_threads_too():
    assert data_parallel_times() == data_parallel_times()


def test_other_threads_share_the_first_ones_time(gpus):
    """The GIL lets one of them work at a time; what they spend is spent when they are joined."""
    X = torch.ones(4, device="cuda:0")
    alone = -gpus.elapsed() + [X + X, gpus.elapsed()][1]
    before = gpus.elapsed()
    in_threads([lambda: [X + X for _ in range(50)]] * 3, together=True)
    assert gpus.elapsed() - before == pytest.approx(150 * alone)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            gpus.clock.host_work(1.0)
            start = gpus.elapsed()
            pool.submit(lambda: X + X).result()
            assert gpus.timeline[-1].called == pytest.approx(start) and gpus.elapsed() > start


def in_threads(calls, together):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()


def test_what_threads_do_at_the_same_time_may_differ_next_time():
    def products():
        X = torch.empty(8, 8, device="cuda:0")
        return X @ X

    def reproducible(program):
        with virtual_gpus(2, backing="meta") as machine:
            program()
            assert ("not the same in every run" in repr(machine.timeline)) != machine.timeline.reproducible
            return machine.timeline.reproducible

    data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    net = nn.Linear(4, 2)
    assert reproducible(lambda: [X.cuda(non_blocking=True) for (X,) in loader])
    assert reproducible(
        lambda: nn.DataParallel(net.to_empty(device="cuda:0"))(loader.dataset[:][0].cuda()).sum().backward()
    )
    assert reproducible(lambda: in_threads([products] * 2, together=False))
    assert not reproducible(lambda: [products(), in_threads([products], together=True)])
    barrier = threading.Barrier(2, timeout=600)
    assert not reproducible(
        lambda: in_threads([lambda: [barrier.wait(), products(), barrier.wait()]] * 2, together=True)
    )


def test_nvtx_ranges_name_phases(gpus):
    X = torch.ones(4, device="cuda:0", requires_grad=True)
    with torch.cuda.nvtx.range("outer"):
        with torch.cuda.nvtx.range("inner"):
            Y = X * 3
        (Y * Y).sum().backward()
    Y + 1
    phases = [e.phase for e in gpus.timeline]
    assert phases[:3] == ["forward", "inner", "outer"] and phases[-1] == "forward" and "backward" not in phases
    with torch.no_grad():
        Y + 1
    assert gpus.timeline[-1].phase == ""
    X.sum().backward()
    assert gpus.timeline[-1].phase == "backward"
    assert torch.cuda.nvtx.range_push("a") == 0 and torch.cuda.nvtx.range_push("b") == 1
    assert torch.cuda.nvtx.range_pop() == 1 and torch.cuda.nvtx.range_pop() == 0
    torch.cuda.nvtx.mark("here")


def test_loading_batches(gpus):
    def epoch(workers, step):
        start = gpus.elapsed()
        for _ in gpus.loading(range(12), seconds=0.01, workers=workers):
            gpus.clock.host_work(step)
        return gpus.elapsed() - start

    assert epoch(0, 0.005) == pytest.approx(12 * 0.015)
    assert epoch(1, 0.005) == pytest.approx(12 * 0.01 + 0.005), "the loader is slower: the last step comes after it"
    assert epoch(4, 0.005) == pytest.approx(0.01 + 12 * 0.005), "the first batch is waited for, the others are there"
    assert epoch(2, 0.005) == pytest.approx(0.01 + 12 * 0.005)
    assert {e.row for e in gpus.timeline if e.name == "load a batch"} == {"host", *(f"worker {i}" for i in range(4))}
    with pytest.raises(ValueError, match="negative"):
        gpus.loading([], -1.0)


# The timeline


def test_timeline_figures(dry):
    busy(dry.devices[0])
    torch.empty(10**8, device="cuda:0").to("cuda:1")
    timeline = dry.timeline
    mm, copy = events(dry, "mm")[0], events(dry, "copy cuda:0 to cuda:1")[0]
    assert timeline.gpus == [0, 1] and timeline.end == copy.end and timeline.start == mm.called
    assert timeline.busy(0) == pytest.approx(mm.end - mm.start) and timeline.busy(1) == 0
    assert timeline.communication(0) == timeline.communication(1) == pytest.approx(copy.end - copy.start)
    assert timeline.utilization() == {0: pytest.approx(timeline.busy(0) / (timeline.end - timeline.start)), 1: 0.0}
    assert timeline.overlap() == {0: 0.0, 1: 0.0}
    assert timeline.bound_by(0) == pytest.approx({"compute": timeline.busy(0), "link": copy.end - copy.start})
    assert len(timeline.since(mm.called + 1e-9)) == 2 and isinstance(timeline.since(1.0), Timeline)
    assert "modelled, A100-80" in repr(timeline) and timeline[0] == mm and len(list(timeline)) == len(timeline) == 3
    assert list(timeline.rows()) == ["host", "cuda:0 copy out", "cuda:0 default", "cuda:1 copy in"]
    plt = pytest.importorskip("matplotlib.pyplot")
    ax = plt.figure().subplots()
    assert timeline.plot(ax) is ax and "modelled, A100-80" in ax.get_xlabel()
    assert [label.get_text() for label in ax.get_yticklabels()] == list(timeline.rows())
    plt.close()
    empty = timeline.since(99.0)
    assert (empty.start, empty.end, empty.utilization(), list(empty.rows())) == (0.0, 0.0, {}, [])


def test_chrome_trace(dry, tmp_path):
    busy(dry.devices[0])
    torch.empty(10**8, device="cuda:0").to("cuda:1")
    path = dry.timeline.to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads(path.read_text())["traceEvents"]
    complete = [e for e in trace if e["ph"] == "X"]
    assert {e["pid"] for e in complete} == {0, 1, 2}
    processes = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert processes == {"host", "cuda:0 (virtual A100-80)", "cuda:1 (virtual A100-80)"}
    mm = next(e for e in complete if e["name"] == "mm" and e["pid"] == 1)
    assert mm["dur"] == pytest.approx(1e6 * dry.timeline.busy(0)) and mm["args"]["flops"] == 2 * 4096**3
    assert list(tmp_path.iterdir()) == [path]


# Long programs: the older events are dropped


def test_a_dry_run_counts_the_whole_step_however_long_it_is(monkeypatch):
    def program():
        layers = [nn.Linear(512, 512) for _ in range(12)]
        net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
        X = torch.empty(256, 512, device="cuda")
        return lambda: [net(X).sum().backward() for _ in range(3)]

    whole = dry_run(program, 16)
    monkeypatch.setattr("virtual_gpus.clock.events.MAX_EVENTS", 30)
    made = dry_run(program, 16)
    assert made.timeline.dropped > 30 > 0 == whole.timeline.dropped and whole.exposed > 0
    assert made.flops == whole.flops and (made.seconds, made.mfu) == (whole.seconds, whole.mfu)
    shares = [(each.communication, each.exposed) for each in (made, whole)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-9)


def test_a_timeline_says_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr("virtual_gpus.clock.events.MAX_EVENTS", 40)
    with virtual_gpus(1) as machine:
        X = torch.ones(2, device="cuda:0")
        for _ in range(99):
            X + X
        timeline = machine.timeline
        assert 20 <= len(timeline) <= 40 and len(timeline) + timeline.dropped == 100
        assert repr(timeline).startswith(f"<Timeline: the last {len(timeline)} of 100 events in ")
        assert f"{timeline.dropped} events before this" in timeline.to_chrome_trace(tmp_path / "trace").read_text()
        for add_up in Timeline.utilization, Timeline.overlap, lambda t: t.bound_by(0), lambda t: t.waiting_for_host(0):
            with pytest.raises(RuntimeError, match=r"the first \d\d events .* timeline.since"):
                add_up(timeline)
        newest = timeline.since(timeline.dropped_until + 1e-9)
        assert len(newest) == len(timeline) and newest.utilization()[0] > 0
        assert machine.totals[0].busy > newest.busy(0)


def test_a_thread_that_is_off_the_clock_books_on_none():
    """The explorers' Train copies to GPUs of a machine that another cell may turn on in between."""

    def copy_aside():
        with off_the_clock():
            torch.ones(8).to("cuda:0")

    with virtual_gpus(1) as later:
        in_threads([copy_aside], together=False)
        assert len(later.timeline) == later.elapsed() == 0
        torch.ones(8).to("cuda:0")
        assert len(later.timeline) > 0 < later.elapsed()
