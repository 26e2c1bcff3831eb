"""dry_run: programs of many processes without those processes. Times and memory are those of real processes."""

import functools
import gc
import io
import json
import math
import os
import socket
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from virtual_gpus import current, dry_run, virtual_gpus
from virtual_gpus.state import RUNNING

FOLDER = Path(__file__).parent / "programs"
sys.path.insert(0, str(FOLDER))
import split  # noqa: E402


def linear(width=64, batch=32):
    """A program that trains one layer with DistributedDataParallel."""

    def program():
        net = nn.parallel.DistributedDataParallel(nn.Linear(width, width).cuda())
        optimizer, X = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), torch.zeros(batch, width, device="cuda")

        def step():
            net(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return program


@pytest.fixture(scope="module")
def with_values(request):
    """What the ranks of the programs in split.py say that the tests ask for."""
    names = ranks.wanted(request, "split_as")
    done = ranks.torchrun(4, FOLDER / "split.py", *names, options=["--link", "DGX A100"])
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("split_as", split.PROGRAMS)
def test_seconds_and_memory_are_those_of_processes_with_values(split_as, with_values):
    made = dry_run(split.started(split.PROGRAMS[split_as]), 4, "A100-80")
    found = {said["rank"]: said for said in with_values if said["program"] == split_as}
    assert len(found) == 4 and (made.ranks == [0, 1, 2, 3] if "pipeline" in split_as else [0])
    assert [found[rank]["peak"] for rank in made.ranks] == made.peak_memory
    assert max(rank["seconds"] for rank in found.values()) == pytest.approx(made.seconds, rel=1e-9)


def test_a_thousand_ranks_take_as_long_to_run_as_eight():
    """The same operations, whatever their number: in the time that they are modelled to take, the network is added."""
    few, many = (dry_run(linear(4096), n, "H100") for n in (8, 1024))
    assert len(few.timeline) == len(many.timeline) and few.seconds < many.seconds
    assert few.peak_memory == many.peak_memory and few.flops == many.flops


def test_whole_gradients_of_fsdp_are_gradients():
    """At the peak, in the backward pass, one layer's gradient is there as a whole, and its shard of those before."""
    whole = 4 * 1024**2

    def program():
        torch.cuda.memory._record_memory_history()  # which sees the same blocks
        net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step():
            net(torch.empty(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    [held] = dry_run(program, 8).memory
    assert held["parameters"] == held["optimizer state"] == 4 * whole / 8
    assert held["gradients"] in [whole + shards * whole / 8 for shards in range(4)]
    assert held["temporary"] < whole / 8


def test_before_an_all_gather_fsdp_copies_one_shard():
    """Into the buffer for all of them: that was once taken to be written as a whole."""

    def program():
        net = fully_shard(nn.Linear(256, 256, bias=False)).cuda()
        return lambda: net(torch.zeros(8, 256, device="cuda")).sum().backward()

    made = dry_run(program, 16)
    moved = {event.nbytes for event in made.timeline if event.name == "all_gather_copy_in"}
    assert moved == {2 * 4 * 256 * 256 // 16}


def test_what_a_prediction_says():
    made = dry_run(linear(4096), 16, "A100-80", host=1 / 3)
    [gpu] = made.timeline.gpus
    assert gpu == 0 and made.ranks == [0] and 0 <= made.timeline.start < 1e-5
    assert made.flops == 6 * 32 * 4096**2 - 2 * 32 * 4096**2  # X needs no gradient
    assert made.mfu == pytest.approx(made.flops / made.seconds / 312e12)
    alone = made.timeline.communication(0) - made.timeline.hidden(0)
    assert made.exposed == pytest.approx(alone / made.seconds) and 0 < made.exposed <= made.communication < 1
    assert "modelled, A100-80" in repr(made) and "MFU" in repr(made)


class Product(torch.autograd.Function):
    """Inside it no gradients are on, as in a backward pass."""

    @staticmethod
    def forward(ctx, X, W):
        ctx.save_for_backward(X, W)
        return X @ W.t()

    @staticmethod
    def backward(ctx, grad):
        X, W = ctx.saved_tensors
        return grad @ W, grad.t() @ X


@pytest.mark.parametrize("multiply", [F.linear, Product.apply])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_once_more_does_not_count(multiply, reentrant):
    def program():
        X, V, W = (torch.zeros(64, 64, device="cuda", requires_grad=True) for _ in range(3))

        def step():
            checkpoint(lambda X: multiply(multiply(X, V).relu(), W), X, use_reentrant=reentrant).sum().backward()
            X.grad = V.grad = W.grad = None

        return step

    made, product = dry_run(program, 1), 2 * 64**3
    phases = {e.phase for e in made.timeline if e.kind == "matmul"}
    first = "forward" if (multiply, reentrant) == (F.linear, False) else ""  # "": where no gradients are on
    assert phases == {first, "recomputation", "backward"}
    assert made.flops == 6 * product
    again = 1 if not reentrant and multiply is F.linear else 2  # it stops as soon as all is there that backward needs
    assert sum(e.flops for e in made.timeline) == made.flops + again * product


def test_the_network_counts_between_nodes():
    def seconds(**options):
        return dry_run(linear(4096), 32, "A100-80", **options).seconds

    slow, usual, fast = (seconds(network=n) for n in ("Ethernet 100", None, "InfiniBand NDR"))
    assert slow > usual > fast and usual == seconds(network="InfiniBand HDR")
    assert seconds(per_node=4) == seconds(link="HGX A100 4-GPU", per_node=4, network="Slingshot 11")


def test_what_a_group_s_root_broadcasts_is_known():
    """Of ranks 2 and 3 the first says it; the group's rank 0 is the program's rank 2."""

    def program():
        x, net = torch.tensor([7], device="cuda"), nn.Linear(2, 2).cuda()
        dist.broadcast(x, src=2, group=dist.new_group([2, 3]))
        assert x.item() == 7
        return lambda: net(torch.ones(1, 2, device="cuda"))

    assert dry_run(program, 4, rank=2).seconds > 0


@pytest.mark.parametrize("stages, lengths", [(1, [3, 3]), (2, [3, 4])])
def test_lengths_that_are_gathered_are_known(stages, lengths):
    """With one stage rank 0 is run for all; with two that send to each other, both."""

    def program():
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        net = nn.Linear(2, 2).cuda()
        n, found = torch.tensor([3 + rank], device="cuda"), [torch.zeros(1, dtype=torch.int64).cuda() for _ in range(2)]
        if stages == 2:
            dist.send(net.bias, 1) if rank == 0 else dist.recv(net.bias, 0)
        dist.all_gather(found, n)
        dist.all_gather_into_tensor(joined := n.new_empty(2), n)
        uneven = [torch.zeros(1 + r, dtype=torch.int64, device="cuda") for r in range(2)]  # rank 1 may have others
        dist.all_gather(uneven, n.new_ones(1 + rank))
        assert f"{uneven[0].tolist()} {uneven[1].tolist()}" == ("[1] [?, ?]" if stages == 1 else "[1] [1, 1]")
        n += 1  # what was gathered stays
        assert [int(length) for length in found] == joined.tolist() == lengths
        return lambda: net(torch.ones(max(lengths), 2, device="cuda"))

    assert dry_run(program, 2).seconds > 0


def test_what_is_gathered_in_a_cuda_graph_goes_when_the_program_lets_go_of_it():
    n = 2**22  # numbers: 16 MiB

    def program():
        x, graph = torch.zeros(n, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                dist.all_gather_into_tensor(torch.empty(2 * n, device="cuda"), x)
        return graph.replay

    assert max(dry_run(program, 2).peak_memory) < 4 * n * (1 + 2 * 2.5)  # x, and not four results


def test_numbers_travel_with_messages():
    """Rank 1 hears a number that rank 0 knows, and takes one that nobody knows for unknown."""
    heard = {}

    def program():
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        known, unknown = (torch.tensor(7 * (rank == 0), device="cuda") for _ in range(2))
        unknown.random_()
        for x in (known, unknown):
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        heard[rank] = known.item()
        assert f"{unknown.item()} {unknown.cpu()}" == "? ?"
        return linear()()

    dry_run(program, 2)
    assert heard == {0: 7, 1: 7}


def test_tensors_move_to_where_none_has_values():
    def program():
        x = torch.ones(4, 2, device="cuda", requires_grad=True).to("meta", torch.bfloat16)
        assert (x.device.type, x.shape, x.dtype, x.requires_grad) == ("meta", (4, 2), torch.bfloat16, True)
        assert next(nn.Linear(2, 2).cuda().to("meta").parameters()).is_meta
        return linear()()

    dry_run(program, 2)


@pytest.mark.parametrize("makes", ["new_group", "mesh", "split_group"])
def test_groups_of_ranks_share_the_network_card_of_their_node(makes):
    """Rank i of one node and rank i of the other: eight groups, or as many as the node has ranks."""

    def program():
        n = dist.get_world_size() // 2
        pairs = [[i, i + n] for i in range(n)]
        if makes == "mesh":
            group = init_device_mesh("cuda", (2, n), mesh_dim_names=("nodes", "gpus")).get_group("nodes")
        elif makes == "split_group":
            torch.cuda.set_device(0)
            dist.destroy_process_group()
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
            group = dist.split_group(split_ranks=pairs)
        else:
            group = next(group for group in map(dist.new_group, pairs) if group != dist.GroupMember.NON_GROUP_MEMBER)
        X = torch.zeros(2**27, device="cuda")
        return lambda: dist.all_reduce(X, group=group)

    def seconds(n, network):
        return dry_run(program, 2 * n, "H100", per_node=n, link="DGX H100", network=network).seconds

    alone, eight = seconds(1, "Ethernet 100"), seconds(8, "Ethernet 100")
    assert eight == pytest.approx(8 * alone, rel=0.02)
    assert seconds(8, "InfiniBand NDR") == seconds(1, "InfiniBand NDR")  # which has a card for each GPU


def test_the_stages_of_one_pipeline_have_the_card_to_themselves():
    def program():
        rank, X = dist.get_rank(), torch.zeros(2**27, device="cuda")

        def step():
            if rank == 7:
                dist.send(X, 8)
            if rank == 8:
                dist.recv(X, 7)

        return step

    one_card = dry_run(program, 16, "H100", network="Ethernet 100", rank=7).seconds
    each_its_card = dry_run(program, 16, "H100", network="RoCE 100", rank=7).seconds
    assert 0.5 < one_card / each_its_card < 2  # other protocols, but as many bytes per second at their best


def beside(communicate, n=8, link=None, network=None, rank=0):
    """(seconds that the matrix products of a step lost, and those in which communication ran beside them)"""

    def program():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        X, Y = torch.zeros(2**28, device="cuda"), torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)

        def step():
            work = communicate(X)
            for _ in range(50):
                Y @ Y
            if work is not None:
                work.wait()
            torch.cuda.synchronize()
            Y @ Y

        return step

    events = dry_run(program, n, "H100", link=link, network=network, rank=rank).timeline.on(int(rank))
    made_up = sum(event.end - event.start for event in events if event.kind == "contention")
    runs = [event for event in events if event.kind == "collective"]
    *products, alone = [event for event in events if event.kind == "matmul"]
    both = sum(max(0.0, min(r.end, p.end) - max(r.start, p.start)) for r in runs for p in products)
    return made_up + sum(p.end - p.start for p in products) - 50 * (alone.end - alone.start), both


def begun(X):
    return dist.all_reduce(X, async_op=True)


def begun_in_another_stream(X):
    """As FSDP's are, which wait there."""
    with torch.cuda.stream(torch.cuda.Stream()):
        dist.all_reduce(X)


def messages(X):
    rank = dist.get_rank()
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, X, (rank + 1) % 8), dist.P2POp(dist.irecv, X, (rank - 1) % 8)]
    )[0]


@pytest.mark.parametrize(
    ("communicate", "options", "part"),
    [
        (begun, {}, 24 / 132),
        (begun, {"n": 16, "network": "InfiniBand NDR"}, 16 / 132),
        (begun, {"n": 16, "network": "Ethernet 25"}, 0.119 / 1.119),  # a few are enough to have these products wait
        (begun_in_another_stream, {}, 24 / 132),
        (begun, {"link": "pcie"}, 0),  # which takes nobody knows how much
        (messages, {}, 0),  # nor is it known of them
    ],
)
def test_kernels_are_slowed_beside_a_collective(communicate, options, part):
    lost, both = beside(communicate, **options)
    assert both > 1e-3 and lost == pytest.approx(part * both, rel=0.01, abs=1e-9)


def test_kernels_that_were_launched_before_are_slowed_too():
    def program():
        X, Y = torch.zeros(2**28, device="cuda"), torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        marks[:] = [torch.cuda.Event(enable_timing=True) for _ in range(20)]

        def step():
            Y @ Y
            for mark in marks:
                mark.record()
                Y @ Y
            with torch.cuda.stream(side):
                dist.all_reduce(X)

        return step

    marks = []
    events = dry_run(program, 8, "H100").timeline.on(0)
    products = [event for event in events if event.kind == "matmul"]
    (run,), (lost,) = ([e for e in events if e.kind == kind] for kind in ("collective", "contention"))
    assert lost.name == "beside all_reduce" and lost.start == products[-1].end
    assert lost.end - lost.start == pytest.approx(24 / 132 * (run.end - run.start), rel=0.01)
    alone = products[0].end - products[0].start
    took = [1e-3 * first.elapsed_time(then) for first, then in pairwise(marks)]  # recorded before the collective, too
    assert (took[0], took[-1]) == pytest.approx((alone * 132 / 108, alone), rel=1e-4)


def test_kernels_without_a_collective_beside_them_take_their_time():
    assert beside(lambda X: None) == pytest.approx((0, 0))
    lost, both = beside(lambda X: dist.all_reduce(X))  # the stream waits for the collective
    assert (lost, both) == pytest.approx((0, 0))


def test_what_slowed_kernels_compute_is_sent_later():
    def program(ways):
        X, Y = torch.zeros(2**28, device="cuda"), torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)

        def step():
            works = [dist.all_reduce(X, async_op=True) for _ in range(ways)]
            for _ in range(50):
                Y @ Y
            works.append(dist.all_reduce(X, async_op=True))
            for work in works:
                work.wait()

        return step

    runs = [dry_run(functools.partial(program, ways), 8, "H100").timeline for ways in (0, 1)]
    alone, after = ([e for e in run.on(0) if e.kind == "collective"][-1].start - run.start for run in runs)
    assert after - alone > 5e-4


def test_a_collective_is_beside_kernels_from_when_its_own_stream_has_come_to_it():
    """It waits for the others on the multiprocessors that it takes. Rank 0 hears of them only by the collective."""

    def communicate(X):
        if dist.get_rank() == 1:
            torch.cuda._sleep(round(5e-3 * current().spec.frequency))
        dist.batch_isend_irecv([dist.P2POp((dist.isend, dist.irecv)[dist.get_rank()], X[:1], 1 - dist.get_rank())])
        return dist.all_reduce(X, async_op=True)

    lost, both = beside(communicate, n=2)
    assert both > 1e-3 and lost > 1.5 * 24 / 132 * both


# What a program may do


def test_the_environment_is_that_of_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    found = {}

    def program():
        found.update({name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")})
        found.update(rank=dist.get_rank(), size=dist.get_world_size(), gpus=torch.cuda.device_count())
        return linear()()

    dry_run(program, 32, rank=13)
    assert found == {
        **{"RANK": "13", "LOCAL_RANK": "5", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"},
        **{"rank": 13, "size": 32, "gpus": 8},
    }
    assert os.environ["RANK"] == "7" and "LOCAL_WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("gpus", [8, 16])
def test_a_program_that_asks_whether_torchrun_started_it_has_as_many_ranks_as_it_would_have(gpus):
    """It would otherwise be planned for one GPU, without a word."""
    sizes = []

    def program():
        store, rank, size = dist.HashStore(), 0, 1
        if dist.is_torchelastic_launched():
            store, rank, size = next(dist.rendezvous("env://"))
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
        sizes.append(dist.get_world_size())
        return linear()()

    assert dry_run(program, gpus).seconds > 0 and sizes == [gpus]


@pytest.mark.parametrize(
    "arguments",
    [("nccl",), ("cpu:gloo,cuda:nccl",), (), ("nccl", "tcp://10.1.2.3:99"), ("nccl", "env://", None, 16, 3)],
)
def test_a_program_may_make_its_process_group_and_no_dry_run_touches_the_network(arguments, monkeypatch):
    def refuse(*args):
        raise AssertionError("a dry run opened a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    for names in (vars(dist), dist.rendezvous.__globals__):  # in C++, of which Python's sockets know nothing
        monkeypatch.setitem(names, "TCPStore", refuse)
    where = {"rank": 3, "world_size": 16} if arguments[1:2] == ("tcp://10.1.2.3:99",) else {}

    def program():
        assert dist.is_initialized()
        dist.init_process_group(*arguments, **where)
        assert (dist.get_rank(), dist.get_world_size()) == (3, 16)
        sub = dist.new_group([0, 3, 5])
        dist.all_reduce(torch.zeros(3, device="cuda"), group=sub)
        dist.barrier()
        return linear()()

    assert dry_run(program, 16, rank=3).seconds > 0


def test_what_is_read_from_disk_stays_real(tmp_path):
    torch.save(torch.arange(6.0), tmp_path / "data.pt")
    found = []

    def program():
        data = torch.load(tmp_path / "data.pt")
        found.append(data.sum().item())
        net = nn.Linear(6, 1).cuda()
        return lambda: net(data.cuda()).sum().backward()

    assert dry_run(program, 2).seconds > 0 and found == [15.0]


def test_collectives_of_tensors_on_the_cpu_are_refused():
    def program():
        dist.init_process_group("cpu:gloo,cuda:nccl")
        dist.all_reduce(torch.zeros(2))

    with pytest.raises(RuntimeError, match="rank 0: a collective operation on tensors of the CPU, with gloo"):
        dry_run(program, 4)


def test_objects_are_those_of_the_ranks_that_are_run():
    said = {}

    def program():
        everything, own = [None] * 4, {"rank": dist.get_rank()}
        dist.all_gather_object(everything, own)
        words = [own, "more"] if dist.get_rank() == 1 else [None, None]
        dist.broadcast_object_list(words, src=1)
        here = [None]
        dist.scatter_object_list(here, ["a", "b", "c", "d"] if dist.get_rank() == 1 else None, src=1)
        gathered = [None] * 4
        dist.gather_object(own, gathered, dst=1)
        said.update(everything=everything, words=words, here=here, gathered=gathered)
        own["rank"] = -1
        return linear()()

    dry_run(program, 4, rank=1)
    assert said["everything"] == said["gathered"] == [{"rank": 1}] * 4
    assert said["words"] == [{"rank": 1}, "more"] and said["here"] == ["b"]
    with pytest.raises(RuntimeError, match=r"rank 0 waits for objects of rank 1.*use rank=1"):
        dry_run(program, 4)


def test_ranks_that_send_to_each_other_are_run():
    """Each sends to the next one, as in a ring; they are found one after the other, and only what they say differs."""
    heard = {}

    def program():
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        dist.send_object_list([f"rank {rank}"], dst=(rank + 1) % 3)
        words = [None]
        dist.recv_object_list(words, src=(rank - 1) % 3)
        heard[rank] = words[0]
        X, Y = torch.zeros(10**6, device="cuda"), torch.zeros(10**6, device="cuda")

        def step():
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, X, (rank + 1) % 3), dist.P2POp(dist.irecv, Y, (rank - 1) % 3)]
            )
            for work in works:
                work.wait()

        return step

    made = dry_run(program, 3, "A100-80")
    assert made.ranks == [0, 1, 2] and heard == {0: "rank 2", 1: "rank 0", 2: "rank 1"}
    messages = {rank: [(e.name, e.start, e.end) for e in made.timeline.on(rank)] for rank in made.ranks}
    for rank in made.ranks:
        sent = next(times for name, *times in messages[rank] if name == "send")
        assert sent in [times for name, *times in messages[(rank + 1) % 3] if name == "recv"]


def test_a_pipeline_s_stages_wait_for_each_other():
    """Of m micro-batches and p equal stages each is idle for p - 1 of m + p - 1 slots, but for what messages take.

    The first one computes no gradient of its input.
    """

    def program():
        torch.cuda.set_device(dist.get_rank())
        return split.pipeline(width=4096, batch=8 * 4096)

    made, ideal = dry_run(program, 3, "A100-80", link="nvlink"), 8 / (8 + 3 - 1)
    assert made.ranks == [0, 1, 2]
    busy = [made.timeline.busy(rank) / made.seconds for rank in made.ranks]
    assert all(0.95 * ideal < share < 1.02 * ideal for share in busy[1:]) and busy[0] < 0.9 * busy[1]


# Numbers that steer the program


DECISIONS = [
    *(lambda loss: [1][loss.item() > 2], lambda loss: bool(loss.item()), lambda loss: [1, 2][int(loss.item())]),
    *(lambda loss: min(1.0, loss.item()), lambda loss: 1 if loss.item() == 0 else 2, lambda loss: {loss.item(): 1}),
    *(lambda loss: float(-loss.item()), lambda loss: bool(loss > 2), float, lambda loss: [1, 2][loss.long()]),
    *(lambda loss: bool(loss.cpu() > 2), lambda loss: torch.zeros(4)[loss.long().item() :]),
    *(lambda loss: torch.zeros(loss.long().item()), lambda loss: torch.zeros(4).view(2, loss.cpu().long().item())),
    *(lambda loss: int(torch.tensor([loss.item()])), lambda loss: 1 if math.exp(loss.item()) < 3 else 2),
]
NEED_VALUES = [
    *(lambda loss: loss.cpu().numpy(), lambda loss: loss.view(1)[loss.view(1) > 0], lambda loss: loss.nonzero()),
    *(lambda loss: torch.equal(loss, loss), lambda loss: torch.zeros(4)[loss.cpu().long()]),
    *(lambda loss: loss.cpu().reshape(1).nonzero(), lambda loss: torch.save(loss.cpu(), io.BytesIO())),
]
DECIDES = (
    r"no values: at test_dry.py, line \d+ the program goes on by a number that is unknown.* --assume test_dry.py:\d+="
)
NEEDED = r"no values: .* needs some, at test_dry.py, line \d+\. Leave it out of the step"


@pytest.mark.parametrize(
    ("decide", "words"), [*((decide, DECIDES) for decide in DECISIONS), *((decide, NEEDED) for decide in NEED_VALUES)]
)
def test_a_program_that_decides_by_unknown_values_hears_where(decide, words):
    with pytest.raises(RuntimeError, match=words):
        dry_run(lambda: lambda: decide(torch.zeros(99, device="cuda").sum()), 2)


def test_flags_that_come_from_python_are_known():
    """Ranks vote on whether to stop; a small tensor that nothing unknown was written to keeps its numbers."""
    found = {}

    def program():
        stop = torch.tensor([0, 3], device="cuda")
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        count = torch.ones((), dtype=torch.int64, device="cuda")
        dist.all_reduce(count)
        count += 1
        moved = torch.full((2,), 5).cuda()
        moved[1] = 7
        dist.broadcast(moved, src=0)
        found.update(stop=stop.tolist(), count=count.item(), moved=moved.tolist(), view=moved[1:].cpu().tolist())
        assert not (stop > 3).any()
        drawn = torch.zeros(2, dtype=torch.int64, device="cuda").random_()
        moved += drawn
        assert [str(number) for number in (*drawn.tolist(), *moved.cpu().tolist())] == ["?"] * 4
        return linear()()

    dry_run(program, 64)
    assert found == {"stop": [0, 3], "count": 65, "moved": [5, 7], "view": [7]}


def test_gradients_are_taken_for_finite():
    def program():
        net, scaler = nn.Linear(8, 8).cuda(), torch.amp.GradScaler("cuda")
        optimizer = torch.optim.Adam(net.parameters())

        def step():
            with torch.autocast("cuda", torch.float16):
                loss = net(torch.zeros(4, 8, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    made = dry_run(program, 2)
    assert any("addcdiv" in e.name for e in made.timeline)  # Adam has stepped


# What goes wrong


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_gpus": 0}, "n_gpus=0"),
        ({"n_gpus": 2.5}, r"n_gpus=2\.5"),
        ({"per_node": True}, "per_node=True"),
        ({"n_gpus": 12}, r"n_gpus=12 with per_node=8: 1\.50 nodes"),
        ({"gpu": "H1000"}, "H1000"),
        ({"rank": 64}, "rank=64.*0 to 63"),
        ({"rank": "0"}, "rank='0'"),
        ({"link": "nvlink"}, "link='nvlink' for several nodes: use a machine type"),
        ({"link": "DGX A100"}, "H100"),
        ({"per_node": 16}, "no machine type has 16 H100"),
        ({"link": "DGX H100", "per_node": 16}, "a DGX H100 has 8 GPUs"),
        ({"network": "string"}, "string"),
        ({"host": 0}, "host=0"),
        ({"gpu": "T4"}, "comes with no network"),
    ],
)
def test_a_machine_that_there_can_not_be_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        dry_run(linear(), **options)


def test_a_program_without_a_step_and_one_whose_steps_are_never_alike():
    with pytest.raises(TypeError, match="pass a function that returns a function"):
        dry_run(nn.Linear(1, 1).weight)
    with pytest.raises(TypeError, match="returned a NoneType: return a function that takes a step"):
        dry_run(lambda: None)
    with pytest.raises(ValueError, match="runs nothing on a GPU"):
        dry_run(lambda: lambda: None)
    kept = []
    with pytest.raises(ValueError, match=r"no two of 8 steps are alike.*held \+4,096 bytes"):
        dry_run(lambda: lambda: kept.append(torch.zeros(1024, device="cuda")), 2)


@pytest.mark.parametrize(
    "where, message",
    [
        ("set-up", r"rank 5, in the set-up: CUDA out of memory.*What would help: more GPUs"),
        ("forward", r"rank 5, in the forward pass of step 1: .*It held \d.* when that began.*smaller micro-batch"),
        ("backward", r"rank 5, in the backward pass of step 1: .*sharded gradients"),
        ("update", r"rank 5, in the optimizer's step of step 1: .*keeps less"),
    ],
)
def test_out_of_memory_says_where_and_what_would_help(where, message):
    width = {"set-up": 160_000, "forward": 60_000, "backward": 110_000, "update": 80_000}[where]  # 40 GB are 100,000²

    def program():
        net = nn.Linear(width, width, bias=False, device="cuda")
        optimizer = torch.optim.Adam(net.parameters())
        X = torch.zeros(150_000 if where == "forward" else 8, width, device="cuda")

        def step():
            net(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    with pytest.raises(torch.OutOfMemoryError, match=message):
        dry_run(program, 8, rank=5)


def first_receives(x, rank):
    dist.recv(x, 1 - rank)
    dist.send(x, 1 - rank)


def sum_up_other_sizes(x, rank):
    (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    dist.all_reduce(torch.zeros(4 + rank, device="cuda"))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (first_receives, RuntimeError, r"would hang(.|\n)*rank 0 waits in message of float32\[4\](.|\n)*rank 1 waits"),
        (sum_up_other_sizes, dist.DistBackendError, r"rank 0: all_reduce of float32\[4\](.|\n)*rank 1: .*\[5\]"),
        (None, dist.DistBackendError, "Duplicate GPU detected"),  # a program that never says which GPU is its own
    ],
)
def test_two_ranks_that_can_not_go_on_are_named(call, error, words):
    def program():
        rank = dist.get_rank()
        if call:
            torch.cuda.set_device(rank)
        x = torch.zeros(4, device="cuda")
        return lambda: (call or sum_up_other_sizes)(x, rank)

    with pytest.raises(error, match=words):
        dry_run(program, 2)


# Afterwards


def state():
    return (
        dict(os.environ),
        sys.excepthook,
        dist.is_initialized(),
        dist.distributed_c10d._world,
        torch.cuda.is_available(),
        list(RUNNING),
        torch.get_rng_state().tolist(),
        threading.active_count(),
        dist.init_process_group,
        dist.all_gather_object,
        torch.is_grad_enabled(),
        torch.get_default_device(),
    )


class Stop(BaseException):
    pass


@pytest.mark.parametrize(("several", "ends"), [(False, None), (False, Stop), (True, None), (True, ValueError)])
def test_all_is_as_it_was(several, ends):
    before = state()

    def program():
        torch.manual_seed(5)
        torch.set_default_device("cuda")
        rank, n = dist.get_rank(), dist.get_world_size()
        torch.cuda.set_device(rank)
        step, x, steps = linear()(), torch.zeros(9, device="cuda"), []

        def ending():
            if several:
                dist.send(x, rank + 1) if rank + 1 < n else None
                dist.recv(x, rank - 1) if rank else None
            steps.append(step())
            if ends and len(steps) == 2 and rank == (n - 1) * several:
                raise ends("enough")

        return ending

    if ends:
        with pytest.raises(ends):
            dry_run(program, 3, "A100-80")
    else:
        assert dry_run(program, 3, "A100-80").ranks == [0, 1, 2][: 3 if several else 1]
    gc.collect()
    assert state() == before
    assert dry_run(linear(), 4).seconds > 0


def test_a_dry_run_does_not_mix_with_a_program_of_many_processes():
    with virtual_gpus(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        with pytest.raises(RuntimeError, match="do it before yours"):
            dry_run(linear(), 4)
        dist.destroy_process_group()


def test_virtual_gpus_that_are_on_stay_as_they_are():
    with virtual_gpus(2) as machine:
        x = torch.ones(3, device="cuda:1")
        dry_run(linear(), 16)
        assert current() is machine and (x + 1).tolist() == [2, 2, 2]


def test_numbers_of_other_classes_of_tensors_can_be_read_and_are_unknown():
    read = []

    def program():
        mesh, x = dist.init_device_mesh("cuda", (8,)), torch.randn(1, device="cuda")
        read.extend([all_reduce(x, "sum", mesh).item(), DTensor.from_local(x, mesh, [Replicate()]).item()])
        return linear()()

    dry_run(program, 8)
    assert [str(number) for number in read] == ["?", "?"]
