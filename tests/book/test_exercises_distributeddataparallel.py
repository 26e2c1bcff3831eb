"""The checks of "DistributedDataParallel": typical wrong answers are explained, other right ones taken."""

import os

import pytest
import torch
import torch.distributed as dist
from answers import (  # noqa: F401
    answer,
    changed,
    function,
    said,
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)

from mgpu_lib.exercises import distributeddataparallel, one_rank
from mgpu_lib.models import lenet_module, resnet18
from mgpu_lib.prediction import predict

SIGNATURES = {
    "mended_script": "data",
    "ddp_collectives": "grads, buffers, first, cap",
    "best_cap": "ready, nbytes, latency, bandwidth, caps",
    "count_correct": "net, X, y, rank, world_size",
}

SCRIPT = """
    import os
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    net = DistributedDataParallel(mgpu.lenet_module().cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01 * dist.get_world_size())
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for X, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(X.cuda()), y.cuda()).backward()
            optimizer.step()
    dist.destroy_process_group()"""
REPLICAS = "num_replicas=dist.get_world_size(), rank=rank"

COLLECTIVES = """
    count = len({buffer.dtype for buffer in buffers})
    held, caps = {}, {}
    for grad in grads:
        held[grad.dtype] = held.get(grad.dtype, 0) + grad.nbytes
        if held[grad.dtype] >= caps.get(grad.dtype, first):
            count += 1
            caps[grad.dtype] = cap
            del held[grad.dtype]
    return count + len(held)"""
AT_MOST = """
    count, held = len({buffer.dtype for buffer in buffers}), 0
    for grad in grads:
        if held + grad.nbytes > cap and held:
            count, held = count + 1, 0
        held += grad.nbytes
    return count + 1"""

CAP = """
    def last_end(cap):
        end = held = 0
        for i in range(len(ready)):
            held += nbytes[i]
            if held >= cap or i == len(ready) - 1:
                end = max(end, ready[i]) + latency + held / bandwidth
                held = 0
        return end
    return min(caps, key=last_end)"""

SAMPLED = """
    from torch.utils.data.distributed import DistributedSampler
    rows = list(DistributedSampler(X, world_size, rank, shuffle=False))
    right = net(X[rows]).argmax(1) == y[rows]
    return right.sum(), len(rows)"""


def wrong_scripts(*changes):
    return [("mended_script", changed(SCRIPT, before, after), phrase) for before, after, phrase in changes]


WRONG = [
    *wrong_scripts(
        (REPLICAS, "num_replicas=torch.cuda.device_count(), rank=local_rank", "What did the second machine get to do?"),
        (REPLICAS, "num_replicas=dist.get_world_size(), rank=local_rank", "16 of 32 images are never looked at"),
        (REPLICAS, "num_replicas=torch.cuda.device_count(), rank=rank", "your code raises ValueError: Invalid rank 2"),
        ("set_device(local_rank)", "set_device(rank)", "rank 2 asks for a GPU that isn't there"),
        ("    torch.cuda.set_device(local_rank)\n", "", "rank 1 works on GPU 0 of its machine, and its own is 1"),
        ("        sampler.set_epoch(epoch)\n", "", "every epoch has the same order"),
        (", sampler=sampler", ", shuffle=True", "64 images are looked at in an epoch, and there are 32"),
        (
            "    dist.destroy",
            "    if rank == 0: dist.all_reduce(torch.ones(1).cuda())\n    dist.destroy",
            "wait for each",
        ),
        ("DistributedDataParallel(mgpu.lenet_module().cuda())", "mgpu.lenet_module().cuda()", "calls no collective"),
    ),
    ("mended_script", "return 1", "rank 0 never looks at the data"),
    ("ddp_collectives", changed(COLLECTIVES, "len({buffer.dtype for buffer in buffers})", "0"), "the buffers before"),
    ("ddp_collectives", changed(COLLECTIVES, "{buffer.dtype for buffer in buffers}", "buffers"), "in one broadcast"),
    ("ddp_collectives", changed(COLLECTIVES, " + len(held)", ""), "What is left in a bucket"),
    ("ddp_collectives", changed(COLLECTIVES, "caps.get(grad.dtype, first)", "cap"), "has a cap of its own"),
    ("ddp_collectives", changed(COLLECTIVES, "caps.get(grad.dtype, first)", "first"), "Only the first bucket"),
    ("ddp_collectives", "return len(grads) + len({b.dtype for b in buffers})", "travel together until"),
    ("ddp_collectives", AT_MOST, "may hold more than its cap"),
    ("ddp_collectives", COLLECTIVES.replace("grad.dtype", "0"), "A bucket holds gradients of one type"),
    ("ddp_collectives", "return 10", "Count the broadcasts"),
    ("best_cap", "return max(caps)", "A large bucket waits for its last gradient"),
    ("best_cap", "return min(caps)", "latency 2, bandwidth 2: 1 instead of 8"),
    ("best_cap", "return caps.index(100)", "3 is none of the caps"),
    ("best_cap", changed(CAP, "max(end, ready[i]) + latency", "max(end, ready[i])"), "Every bucket pays the latency"),
    (
        "best_cap",
        changed(CAP, "max(end, ready[i]) +", "max(end, ready[i] +").replace("bandwidth\n", "bandwidth)\n"),
        "all-reduces take turns",
    ),
    ("best_cap", changed(CAP, " or i == len(ready) - 1", ""), "instead of"),
    ("count_correct", SAMPLED, "those in rows [0, 1] twice"),
    ("count_correct", changed(SAMPLED, "shuffle=False", "shuffle=False, drop_last=True"), "those in rows [8, 9] never"),
    ("count_correct", changed(SAMPLED, "right.sum(), len(rows)", "right.float().mean()"), "return two numbers"),
    (
        "count_correct",
        changed(SAMPLED, "right.sum(), len(rows)", "right.float().mean(), 1"),
        "isn't the accuracy of all",
    ),
    ("count_correct", "return (net(X).argmax(1) == y).sum(), len(y)", "every rank counts all of them"),
    (
        "count_correct",
        "return ((net(X).argmax(1) == y).sum(), len(y)) if rank == 0 else (0, 0)",
        "one rank looks at 10 images while others wait",
    ),
    (
        "count_correct",
        "return (net(X[rank::world_size]).argmax(1) == y[:len(y[rank::world_size])]).sum(), len(y[rank::world_size])",
        "compare each with its own label",
    ),
    (
        "count_correct",
        """
        X, y = X[rank::world_size], y[rank::world_size]
        return (net(X).argmax(1) == y).float().mean() * len(y), len(y)""",
        "What is the mean over no images?",
    ),
]
RIGHT = [
    ("mended_script", function("mended_script", "data", changed(SCRIPT, f"data, {REPLICAS}", "data"))),
    ("ddp_collectives", function("ddp_collectives", SIGNATURES["ddp_collectives"], COLLECTIVES)),
    ("best_cap", function("best_cap", SIGNATURES["best_cap"], CAP)),
    (
        "count_correct",
        """
    def count_correct(net, X, y, rank, world_size):  # blocks instead of every fourth row
        X, y = X.tensor_split(world_size)[rank], y.tensor_split(world_size)[rank]
        return torch.stack([(net(X).argmax(1) == y).sum(), torch.tensor(len(y))])""",
    ),
    (
        "count_correct",
        """
    def count_correct(net, X, y, rank, world_size):  # ranks take equally many steps, and what fills up isn't counted
        per_rank = -(-len(X) // world_size)
        rows = torch.arange(rank * per_rank, (rank + 1) * per_rank)
        new = rows < len(X)
        rows = rows.clamp(max=len(X) - 1)
        return ((net(X[rows]).argmax(1) == y[rows]) & new).sum(), new.sum()""",
    ),
]


def test_checks_leave_environment_groups_and_random_numbers_alone(capsys):
    environment, state = dict(os.environ), torch.get_rng_state()
    for name in SIGNATURES:
        program = next(program for other, program in RIGHT if other == name)
        assert said(capsys, name, program).startswith("right: ")
    assert (dict(os.environ), dist.is_initialized()) == (environment, False)
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize(
    "make, first, cap", [(lenet_module, 0.01, 0.01), (resnet18, 1, 25), (resnet18, 4, 4), (resnet18, 1000, 1000)]
)
def test_a_step_sends_buckets_that_have_reached_their_cap(make, first, cap):
    """The rule that the exercise states, against the reducer of the PyTorch that is installed."""
    with torch.device("meta"):
        net, X = make(), torch.empty(4, 1, 28, 28)
    default = (first, cap) == (1, 25)
    grads, buffers, calls = one_rank.ddp_step(net, X, None if default else cap)
    full, left = distributeddataparallel.buckets_of(grads, first * 2**20, cap * 2**20)
    sizes = [nbytes for name, nbytes in calls if name == "all_reduce"]
    assert len(sizes) == full + left and len(calls) - len(sizes) == len({buffer.dtype for buffer in buffers})
    assert sum(sizes) == sum(p.nbytes for p in net.parameters())
    assert len(grads) == len(list(net.parameters()))


def test_the_cap_that_the_exercise_calls_best_is_the_best_of_the_modelled_steps(capsys):
    """The formula leaves out the host, the forward pass and the update; the steps have them all."""
    asked, best_cap = [], answer("best_cap", function("best_cap", SIGNATURES["best_cap"], CAP))

    def ask(*given):
        asked.append(given)
        return best_cap(*given)

    distributeddataparallel.check_best_cap(ask)
    assert capsys.readouterr().out.startswith("right: ")
    *given, caps = asked[-1]
    X = torch.empty(32, 1, 28, 28, device="meta")
    steps = {
        cap: predict(resnet18(), X, "V100", 4, "ddp", link="pcie", bucket_cap_mb=cap / 2**20).seconds for cap in caps
    }
    ends = {cap: distributeddataparallel.last_end(*given, cap) for cap in caps}
    assert sorted(caps, key=steps.get) == sorted(caps, key=ends.get)
    assert min(steps, key=steps.get) not in (min(caps), max(caps)), "the best is between too small and too large"
