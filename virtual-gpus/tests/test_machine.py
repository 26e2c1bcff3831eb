"""The machine of virtual GPUs: starting, stopping, memory, streams, random numbers, what is refused, and backings."""

import contextlib
import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracle import check_same_on_a_gpu
from torch import nn
from torch.nn import functional as F

from virtual_gpus import LaunchConfig, current, meta_cache, virtual_gpus
from virtual_gpus.patches.patch import PATCHES

MiB = 1 << 20


@pytest.fixture
def v100s():
    """GPUs that are soon full."""
    with virtual_gpus(2, "V100") as machine:
        yield machine


def pytorch():
    """Everything that is patched."""
    owners = {id(owner): owner for owner, *_ in PATCHES}
    return [dict(owner if isinstance(owner, dict) else vars(owner)) for owner in owners.values()] + [
        list(torch.serialization._package_registry),
        torch._C._len_torch_function_stack(),
        torch.__future__.get_swap_module_params_on_conversion(),
    ]


def check_as_it_was(before):
    for a, b in zip(before, pytorch(), strict=True):
        if isinstance(a, dict):
            assert a.keys() == b.keys() and all(a[k] is b[k] for k in a)
        else:
            assert a == b


@pytest.fixture
def before():
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter"):
        importlib.import_module(name)  # which PyTorch, or the clock, loads when it first needs it
    return pytorch()


def test_stop_puts_back_every_bit(before):
    machine = virtual_gpus(2).start()
    nn.DataParallel(nn.Linear(2, 2).to("cuda:0"), [0, 1])(torch.ones(4, 2))
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and current() is machine
    machine.stop()
    check_as_it_was(before)
    machine.stop()  # off already: nothing to do
    assert current() is None
    with pytest.raises(ZeroDivisionError), virtual_gpus(2):
        1 / 0  # noqa: B018
    check_as_it_was(before)


def test_nesting(before):
    with virtual_gpus(4) as outer:
        torch.cuda.set_device(3)
        x, start = torch.ones(1, device="cuda:3"), outer.elapsed()
        with virtual_gpus(2, gpu="T4") as inner:
            assert torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0 and current() is inner
            assert torch.cuda.get_device_name() == "Tesla T4 (virtual)"
            with pytest.raises(RuntimeError, match="same device"):
                torch.ones(1, device="cuda:1") + x  # it belongs to the outer machine
            with pytest.raises(RuntimeError, match="stop it first"):
                outer.stop()
            assert inner.elapsed() > 0 and outer.elapsed() == start  # each has a clock of its own
        assert torch.cuda.device_count() == 4 and torch.cuda.current_device() == 3 and (x + 1).item() == 2
        with pytest.raises(RuntimeError, match="on already"):
            outer.start()
    check_as_it_was(before)


def test_a_machine_can_be_started_again_and_tensors_outlive_it():
    machine = virtual_gpus(2)
    for _ in range(2):
        with machine:
            assert machine.elapsed() == 0.0 and len(machine.timeline) == 0
            x = torch.ones(2, device="cuda:1")
            assert 0 < machine.elapsed() < 1e-4 and machine.timeline[0].called == 0.0
    assert (x + 1).cpu().tolist() == [2, 2] and x.tolist() == [1, 1] and x.to("cpu").device.type == "cpu"
    with machine:
        assert (x + torch.ones(2, device="cuda:1")).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"n": n}, "whole number, at least 1") for n in (0, 1.5, "2", None, True)),
        *(({"backing": backing}, f"backing='{backing}'") for backing in ("cuda:5", "disk")),
        *(({"host": host}, f"host={host!r}") for host in (0, -1, float("inf"), "fast")),
        ({"link": "DGX-1V", "network": "Infiniband", "gpu": "V100"}, "no network named.*InfiniBand HDR"),
        ({"network": "RoCE 100"}, "needs a machine type.*DGX-1V"),
        ({"link": "DGX-1"}, "Did you mean 'DGX-1V'"),
        ({"software": "2001"}, "software='2001': use one of 2023, 2024, 2026"),
    ],
)
def test_bad_options(options, words):
    """What the command says of others: test_command."""
    with pytest.raises(ValueError, match=words):
        virtual_gpus(**{"n": 2, **options})


# --- what torch.cuda answers ----------------------------------------------------------------------------------------


def test_what_torch_cuda_says(gpus):
    """Figures of data sheets: test_specs."""
    assert "name='NVIDIA A100-SXM4-80GB (virtual)'" in repr(properties := torch.cuda.get_device_properties(1))
    assert "total_memory=81157MB" in repr(properties) and properties.total_memory == gpus.spec.memory
    assert torch.cuda.can_device_access_peer(0, 1) and torch.cuda.get_arch_list() == ["sm_80"]
    torch.cuda.init()
    assert torch.cuda.is_initialized() and torch.cuda.is_bf16_supported(including_emulation=False)
    with virtual_gpus(1, gpu="V100"):
        assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)


def test_torch_accelerator(gpus):
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator().type == "cuda"
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == torch.cuda.current_device() == 1
    with torch.accelerator.device_index(0):
        assert torch.cuda.current_device() == 0
    X = torch.ones(1000, device="cuda:1")
    assert torch.accelerator.memory_allocated(1) == torch.cuda.memory_allocated(1) >= X.nbytes
    assert torch.accelerator.get_memory_info(1) == torch.cuda.mem_get_info(1)
    torch.accelerator.reset_accumulated_memory_stats(1)
    assert torch.accelerator.memory_stats(1)["allocated_bytes.all.allocated"] == 0


# --- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_counted_and_freed(gpus):
    x = torch.empty(MiB, device="cuda:1")
    y = x[: MiB // 2]  # a view takes none
    z = x + 1
    assert torch.cuda.memory_allocated(1) == gpus.ledgers[1].allocated == 8 * MiB > torch.cuda.memory_allocated(0) == 0
    del x, z
    assert torch.cuda.memory_allocated(1) == 4 * MiB  # the view keeps its base's memory
    del y
    assert torch.cuda.memory_allocated(1) == 0 and torch.cuda.max_memory_allocated(1) == gpus.ledgers[1].peak == 8 * MiB
    assert torch.cuda.memory_reserved(1) == gpus.ledgers[1].reserved == 8 * MiB


def test_dropout_keeps_a_mask_of_one_byte_a_number(gpus):
    """What else a step keeps: the book's test_footprint."""
    x = torch.ones(MiB, device="cuda", requires_grad=True)
    out = F.dropout(x)
    assert torch.cuda.memory_allocated() == x.nbytes + out.nbytes + MiB


def taken(gib, device="cuda:0"):
    return torch.empty(gib << 30, dtype=torch.uint8, device=device)


def test_running_out(v100s):
    """What errors.md doesn't show of it."""
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 1 has a total capacity of 15\.75 GiB") as raised:
        taken(16, "cuda:1")
    assert str(raised.value).endswith("unallocated. (virtual GPU: the capacity is a data sheet's)")
    blocks = [taken(1) for _ in range(15)]
    for use in (lambda: taken(1), blocks[0].clone, lambda: taken(1, "cpu").to("cuda:0")):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.00 GiB"):
            use()
    assert torch.cuda.memory_stats()["num_ooms"] == 3
    blocks[0] = None
    blocks[0] = taken(1)  # room again
    v100s.ledgers[1].capacity = 5 * MiB
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 5.00 MiB .* unallocated. \(virtual GPU\)$"):
        taken(1, "cuda:1")


def test_memory_fraction(v100s):
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"of which 15.75 GiB is free. 7.88 GiB allowed; Of the allocated"):
        taken(9)
    assert torch.cuda.get_per_process_memory_fraction(0) == 0.5 and torch.cuda.get_per_process_memory_fraction(1) == 1
    assert torch.cuda.mem_get_info(0) == (v100s.spec.memory, v100s.spec.memory)  # the GPU is as large as before


def statistics(*rows):
    found = torch.cuda.memory_stats(0)
    return [found[row] for row in rows]


def test_memory_statistics(gpus):
    def stats(kind):
        return statistics(*(f"{kind}.all.{name}" for name in ("current", "peak", "allocated", "freed")))

    kept = torch.empty(MiB, device="cuda:0")
    for _ in range(3):
        torch.empty(MiB, device="cuda:0")
    assert stats("allocation") == [1, 2, 4, 3]
    assert stats("allocated_bytes") == [4 * MiB, 8 * MiB, 16 * MiB, 12 * MiB]
    torch.cuda.empty_cache()
    assert stats("reserved_bytes") == [4 * MiB, 8 * MiB, 8 * MiB, 4 * MiB]
    torch.cuda.reset_accumulated_memory_stats(0)
    torch.cuda.reset_peak_memory_stats(0)
    assert stats("allocation") == [1, 1, 0, 0] and stats("allocated_bytes") == [4 * MiB, 4 * MiB, 0, 0]
    kept.resize_(2 * MiB)  # takes new memory before it gives back the old, as aten/src/ATen/native/cuda/Resize.cpp
    assert stats("allocation") == [1, 2, 1, 1]
    assert stats("allocated_bytes") == [8 * MiB, 12 * MiB, 8 * MiB, 4 * MiB]
    documented = set(re.findall(r'``"(\w+)"``:', torch.cuda.memory_stats.__doc__))
    missing = documented - torch.cuda.memory_stats(0).keys()
    assert missing <= {"reserved_bytes_by_private_pools"}  # of which there are none


def test_blocks_above_a_mebibyte_have_a_pool_of_their_own(gpus):
    """And each pool calls the driver for what it has not."""
    calls = "num_device_alloc", "num_device_free", "num_sync_all_streams"
    small, large = torch.empty(MiB // 4, device="cuda:0"), torch.empty(MiB // 4 + 1, device="cuda:0")  # in 512 bytes
    names = "allocation", "allocated_bytes", "reserved_bytes", "segment"
    now = [statistics(*(f"{name}.{pool}.current" for name in names)) for pool in ("small_pool", "large_pool", "all")]
    assert now == [[1, MiB, 2 * MiB, 1], [1, MiB + 512, 2 * MiB, 1], [2, 2 * MiB + 512, 4 * MiB, 2]]
    assert torch.cuda.mem_get_info(0) == (gpus.spec.memory - 4 * MiB, gpus.spec.memory)
    summary = torch.cuda.memory_summary(0)  # PyTorch's own table, which asks for every row
    assert "from large pool |   1024 KiB" in summary and "CUDA OOMs: 0" in summary
    del large
    assert statistics("allocated_bytes.all.peak", *calls) == [2 * MiB + 512, 2, 0, 0]
    large = torch.empty(MiB // 2, device="cuda:0")  # the allocator still has it
    assert statistics(*calls) == [2, 0, 0]
    del large
    for synchronized in (1, 2):
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats(0)
        assert statistics(*calls) == [2, 1, synchronized]
    del small
    assert statistics("allocated_bytes.small_pool.current", "allocated_bytes.large_pool.current") == [0, 0]


def test_reserved_memory_gives_way(v100s):
    """What one pool keeps for later, the other may have."""
    v100s.ledgers[0].capacity = 64 * MiB
    blocks = [torch.empty(MiB, dtype=torch.uint8, device="cuda:0") for _ in range(60)]
    del blocks
    assert torch.cuda.memory_reserved(0) == 60 * MiB
    large = torch.empty(60 * MiB, dtype=torch.uint8, device="cuda:0")
    assert torch.cuda.memory_reserved(0) == large.nbytes and torch.cuda.memory_stats(0)["num_alloc_retries"] == 1
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(5 * MiB, dtype=torch.uint8, device="cuda:0")


@pytest.mark.parametrize("backing", ["cpu", "meta"])
def test_a_tensor_that_finds_no_room_stays_as_it_was(backing):
    with virtual_gpus(1, "V100", backing=backing):
        x = torch.ones(2, 3, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1e-4)
        for grow in (lambda: x.resize_(MiB), lambda: torch.cat([x, torch.ones(MiB // 4, 3, device="cuda")], out=x)):
            with pytest.raises(torch.OutOfMemoryError):
                grow()
            assert x.shape == x.inner.shape == (2, 3) and x.untyped_storage().nbytes() <= 512
        assert torch.cuda.memory_allocated() == 512
        assert backing == "meta" or x.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_traffic_is_counted(gpus):
    x = torch.ones(256)
    y = x.to("cuda:0")
    y.to("cuda:0")
    y.to("cuda:1").cpu()
    z = torch.zeros(256, device="cuda:1")
    z.copy_(y)
    assert gpus.traffic == Counter({("cuda:0", "cuda:1"): 2048, ("cpu", "cuda:0"): 1024, ("cuda:1", "cpu"): 1024})
    moved = gpus.traffic.total(), gpus.traffic.total("cuda:0"), gpus.traffic.total(target=torch.device("cpu"))
    assert moved == (4096, 2048, 1024)


def test_what_prices_and_capacities_follow_from_is_fixed(gpus):
    with pytest.raises(AttributeError, match="spec of <4 virtual A100-80, NVLink 3, 12 links, on> is fixed"):
        gpus.spec = gpus.spec
    with pytest.raises(AttributeError, match="memory"):
        gpus.spec.memory = 1


def test_numbers_that_are_read_and_indices_travel_too(gpus):
    x = torch.arange(4.0, device="cuda:1")
    for read, nbytes in ((x.tolist, 16), (x[0].item, 4), (lambda: bool(x[0] == 0), 1), (lambda: f"{x[1]:.1f}", 4)):
        gpus.traffic.clear()
        read()
        assert gpus.traffic == Counter({("cuda:1", "cpu"): nbytes})
    gpus.traffic.clear()
    x[torch.tensor([0, 1])]
    x + torch.tensor(1.0)  # a scalar goes along with the call
    assert gpus.traffic == Counter({("cpu", "cuda:1"): 16})


# --- streams, events, random numbers --------------------------------------------------------------------------------


def test_streams_and_events(gpus):
    """What they wait for: test_clock."""
    stream = torch.cuda.Stream(device=1)
    assert stream.device == torch.device("cuda", 1) and stream != torch.cuda.default_stream(1)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream and torch.cuda.current_device() == 1
        event = stream.record_event()
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1) and torch.cuda.current_device() == 0
    for wait in (event.wait, stream.synchronize, event.synchronize):
        wait()
    assert event.query() and stream.query()
    with torch.cuda.stream(None):
        assert torch.cuda.current_device() == 0
    torch.cuda.set_stream(stream)
    assert torch.cuda.current_stream() == stream and torch.cuda.current_device() == 1
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.cuda.Event().elapsed_time(end)


@pytest.mark.parametrize(("device", "index"), [(None, 0), ("cuda", 0), ("cuda:1", 1), (1, 1)])
def test_torch_stream_and_event(gpus, device, index):
    stream, event = torch.Stream(device=device), torch.Event(device, enable_timing=True)
    assert isinstance(stream, torch.Stream) and isinstance(event, torch.Event)
    assert type(stream) is type(torch.cuda.Stream()) and stream.device == torch.device("cuda", index)
    with stream:
        assert torch.accelerator.current_stream() == stream
    event.record(stream)
    assert event.query() and stream.query()


def test_streams_are_of_a_gpu(gpus):
    for make in (torch.cuda.Stream, torch.cuda.current_stream, torch.cuda.default_stream):
        with pytest.raises(ValueError, match="Expected a cuda device, but got: cpu"):
            make("cpu")
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            make(4)


def test_each_gpu_has_its_own_random_numbers(gpus):
    torch.manual_seed(0)
    a, b = torch.rand(3, device="cuda:0"), torch.rand(3, device="cuda:1")
    assert torch.equal(a.cpu(), b.cpu())  # manual_seed seeds all of them, with the same number
    assert not torch.equal(torch.rand(3, device="cuda:0"), a)
    torch.cuda.set_device(1)
    torch.cuda.manual_seed(7)
    assert torch.cuda.initial_seed() == 7
    state = torch.cuda.get_rng_state("cuda:1")
    c = torch.empty(5, device="cuda:1").normal_()
    torch.cuda.set_rng_state(state, "cuda:1")
    assert torch.equal(torch.randn_like(c), c) and not torch.equal(torch.randn_like(c), c)
    with torch.random.fork_rng(devices=[0, 1]):
        inside = torch.rand(2, device="cuda:1")
    assert torch.equal(torch.rand(2, device="cuda:1"), inside)


def test_generators(gpus):
    generator = torch.Generator(device="cuda:1").manual_seed(3)
    assert isinstance(generator, torch.Generator) and isinstance(torch.Generator(), torch.Generator)
    assert generator.device == torch.device("cuda", 1) and generator.initial_seed() == 3
    a = torch.randn(4, device="cuda:1", generator=generator)
    b = torch.empty(4, device="cuda:1").normal_(generator=generator.manual_seed(3))
    assert torch.equal(a, b) and torch.multinomial(a.abs(), 2, generator=generator).get_device() == a.get_device() == 1
    for clone in (copy.copy, copy.deepcopy, lambda g: g.clone_state(), lambda g: pickle.loads(pickle.dumps(g))):
        other = clone(generator)
        assert other.device == generator.device and other is not generator
        assert torch.equal(*[torch.rand(3, device="cuda:1", generator=g) for g in (generator, other)])


def test_draws_leave_the_numbers_of_the_cpu_alone(gpus):
    """Another thread may be drawing there. test_ops says the same of single operations."""
    x = torch.ones(64, device="cuda:1", requires_grad=True)
    net = nn.Sequential(nn.Linear(64, 3), nn.Dropout(), nn.AlphaDropout(), nn.LSTM(3, 4, 2, dropout=0.5)).to("cuda:1")
    draws = (
        lambda: F.gumbel_softmax(x),
        lambda: torch.randperm(64, device="cuda:1"),
        lambda: net(x.expand(9, 64))[0],
        lambda: torch.inference_mode()(net)(x.expand(9, 64))[0],
    )
    state = torch.get_rng_state()
    torch.cuda.manual_seed_all(0)
    first, second = ([draw().detach() for draw in draws] for _ in range(2))
    assert all(t.get_device() == 1 for t in first) and torch.equal(torch.get_rng_state(), state)
    assert not any(map(torch.equal, first, second))
    torch.cuda.manual_seed_all(0)
    assert all(map(torch.equal, first, [draw().detach() for draw in draws]))


@pytest.mark.parametrize(("train", "p"), [(True, 0.25), (True, 1.0), (True, 0.0), (False, 0.5)])
def test_dropout_draws_what_the_cpu_draws(gpus, train, p):
    check_same_on_a_gpu(lambda device: torch.native_dropout(torch.ones(64, device=device), p, train))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_may_not_use_the_gpus(gpus):
    x = torch.ones(2, device="cuda:1")
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(x)
    uses = [lambda: torch.ones(1, device="cuda"), lambda: x + 1, lambda: x.cpu(), lambda: torch.ones(2).cuda()]
    uses += [torch.cuda.synchronize, lambda: x[0].item(), lambda: x.zero_(), lambda: dist.all_reduce(x)]
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            torch.manual_seed(0)  # as the workers of a DataLoader do
            assert torch.ones(2).sum() == 2 and torch.cuda.device_count() == 4 and not torch.cuda.is_initialized()
            for use in uses:
                with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
                    use()
            with virtual_gpus(1):  # its own
                assert torch.ones(2, device="cuda").tolist() == [1, 1]
            os._exit(0)
        os._exit(1)
    dist.destroy_process_group()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and x.tolist() == [1, 1]


# --- CUDA_VISIBLE_DEVICES -------------------------------------------------------------------------------------------


def found(n=4, **options):
    """A machine as a program finds it that knows nothing of the library."""
    return LaunchConfig(n, options).make()


@pytest.mark.parametrize(
    ("value", "seen"),
    [(None, [0, 1, 2, 3]), ("1", [1]), ("2,0", [2, 0]), ("", []), ("-1", []), ("1,1", []), ("0,7,1", [0])],
)
def test_cuda_visible_devices_hides_and_orders_gpus(monkeypatch, value, seen):
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with found() as machine:
        assert torch.cuda.device_count() == len(seen) and torch.cuda.is_available() == bool(seen)
        assert [gpu.number for gpu in machine.gpus] == seen
        assert [torch.ones(1, device=i).device for i in range(len(seen))] == machine.devices
        last = f"shows {len(seen)} of 4" if len(seen) < 4 else "cuda:4 is not one of them"
        error = rf"invalid device ordinal(.|\n)*{last}" if seen else rf"^No CUDA GPUs are available\n.*{last}"
        uses = torch.ones(1).cuda, torch.cuda.set_device, lambda i: torch.ones(1, device=f"cuda:{i}")
        for use in (partial(use, len(seen)) for use in uses):
            with pytest.raises(RuntimeError, match=error):
                use()
        for use in () if seen else (torch.cuda.current_device, torch.cuda.synchronize):
            with pytest.raises(RuntimeError, match=r"^No CUDA GPUs are available"):
                use()
        assert nn.DataParallel(nn.Linear(2, 2)).device_ids == list(range(len(seen)))


def test_cuda_visible_devices_counts_until_cuda_starts(monkeypatch):
    for start in (lambda: torch.ones(1).cuda(), lambda: torch.cuda.is_available(), lambda: torch.cuda.init()):
        with found():
            torch.manual_seed(0)
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
            assert torch.cuda.device_count() == 2 and not torch.cuda.is_initialized()
            start()
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
            assert torch.cuda.device_count() == 2 and torch.ones(1, device="cuda:1").item() == 1
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with found():
        assert torch.cuda.is_available()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert not torch.cuda.is_available()


def test_hidden_gpus_stay_where_they_are(monkeypatch):
    """In a DGX-1, two NVLinks join GPUs 0 and 3, one 0 and 1, none 0 and 7; an ID belongs to the GPU."""
    seconds, ids = [], []
    for value in ("0,3", "0,1", "0,7", "3,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with found(8, gpu="V100", link="DGX-1V") as machine:
            x = torch.ones(1 << 24, device="cuda:0")
            start = machine.elapsed()
            x.to("cuda:1")
            torch.cuda.synchronize(0)
            [event] = {(e.start, e.end) for e in machine.timeline.since(start) if e.kind == "copy"}
            seconds.append(event[1] - event[0])
            ids.append([torch.cuda.get_device_properties(i).uuid for i in range(2)])
            assert machine.ledgers[0].allocated == x.nbytes and machine.traffic == {("cuda:0", "cuda:1"): x.nbytes}
    assert seconds[0] == seconds[3] == pytest.approx(seconds[1] / 2, rel=0.01) and seconds[2] > 4 * seconds[1]
    assert ids[0] == ids[3][::-1] and ids[0][1] != ids[1][1]


@pytest.mark.parametrize("value", ["", "GPU-8932f937,GPU-1a5b", "MIG-8932f937"])
def test_whoever_makes_gpus_has_all_of_them_and_they_have_no_ids(monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with virtual_gpus(2):
        assert torch.cuda.device_count() == 2
    if value:
        with found(), pytest.raises(RuntimeError, match=f"'{value}': virtual GPUs have numbers and no IDs"):
            torch.cuda.device_count()


# --- backings -------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_calls_apart_and_keeps_few_of_them(monkeypatch):
    """A program with ever new shapes, such as batches of sentences, takes no ever growing memory."""
    with virtual_gpus(1, backing="meta"):
        x, yes = torch.ones(4, 4, device="cuda"), torch.ones(2, dtype=torch.bool, device="cuda")
        for _ in range(2):  # it knows them in the second one
            assert [(yes + n).dtype for n in (1, True, 1.0)] == [torch.int64, torch.bool, torch.float32]
            assert torch.var(x, 1, correction=1).shape == (4,)
            assert torch.var(x, 1, correction=None, keepdim=True).shape == (4, 1)
            assert x.repeat(1, 2).shape == (4, 8) and x.repeat(2, 1).shape == (8, 4)
            assert [torch.cat([x, x], dim).shape for dim in (0, 1)] == [(8, 4), (4, 8)]
            assert [x.to(dtype).dtype for dtype in (torch.float16, torch.int8)] == [torch.float16, torch.int8]
            assert x[None, x.long()].shape == (1, 4, 4, 4) and x[x.long(), None].shape == (4, 4, 1, 4)
        known = len(meta_cache.CACHE)
        x * 0.1, x * 0.2  # such as the learning rate of each step
        assert len(meta_cache.CACHE) == known + 1
        monkeypatch.setattr(meta_cache, "CACHE_LIMIT", 10)
        for n in (*range(50), *range(50)):
            assert (torch.empty(n, 3, device="cuda") @ torch.empty(3, 2, device="cuda")).shape == (n, 2)
        assert len(meta_cache.CACHE) <= 10


def test_what_one_dry_run_knows_holds_for_the_next():
    try:
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with virtual_gpus(1, backing="meta"):
                whole, x = torch.ones(3, dtype=torch.long, device="cuda"), torch.ones(3, device="cuda")
                assert (whole * 0.5).dtype is x.dtype is dtype
                for size in (3, 0, 3, 0):
                    assert torch.mul(x, x, out=x.new_empty(size)).shape == (3,)
    finally:
        torch.set_default_dtype(torch.float32)


def test_meta_has_shapes_memory_and_no_values():
    with virtual_gpus(2, gpu="A100-80", backing="meta") as machine:
        net = nn.DataParallel(nn.Linear(8, 4).to("cuda:0"), [0, 1])
        X = torch.ones(1 << 20, 8).to("cuda:0")
        out = net(X)
        out.sum().backward()
        assert out.shape == (1 << 20, 4) and net.module.weight.grad.shape == (4, 8)
        assert machine.ledgers[1].peak > 16 << 20
        assert repr(X) == "tensor(..., device='cuda:0', size=(1048576, 8))"
        for use in (lambda: out[0].tolist(), lambda: out.numpy(force=True), lambda: torch.zeros(1 << 20, 4).copy_(out)):
            with pytest.raises((RuntimeError, ValueError), match="no values here"):
                use()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a real GPU")
def test_one_real_gpu_acts_as_several():
    with virtual_gpus(3, backing="cuda:0"):
        net = nn.DataParallel(nn.Linear(4, 2).to("cuda:0"), [0, 1, 2])
        X = torch.randn(7, 4, device="cuda:0")
        out = net(X)
        out.sum().backward()
        assert X.inner.is_cuda and type(X.inner) is torch.Tensor and out.shape == (7, 2)
        torch.testing.assert_close(net.module.weight.grad.cpu(), X.cpu().sum(0).expand(2, 4))
        with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
            torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


CPU_BUILD = """
import torch
for name in [n for n in vars(torch._C) if n.startswith(("_cuda_", "_Cuda"))]:
    delattr(torch._C, name)  # a PyTorch that was built without CUDA has none of these
from virtual_gpus import virtual_gpus
with virtual_gpus(2):
    net = torch.nn.DataParallel(torch.nn.Linear(2, 2).to(0), [0, 1])
    optimizer = torch.optim.Adam(net.parameters())  # loads parts of PyTorch that look for CUDA
    net(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    print(torch.cuda.memory_allocated() > 0)
"""


@pytest.mark.slow
def test_a_pytorch_built_without_cuda():
    run = subprocess.run([sys.executable, "-c", CPU_BUILD], capture_output=True, text=True, timeout=1200)
    assert run.stdout == "True\n", run.stderr
