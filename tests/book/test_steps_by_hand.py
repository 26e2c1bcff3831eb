"""What "Where the time goes" builds by hand is right: its step with names, its ring, its overlapped all-reduce."""

import copy

import pytest
import torch
from pages import shown
from torch.nn import functional as F

import mgpu_lib as mgpu

PAGE = "07-where-the-time-goes"


def batch(rows, *shape):
    return torch.rand(rows, *shape), torch.arange(rows) % 10


@pytest.mark.parametrize("rows, k", [(8, 1), (9, 2), (7, 4), (2, 3)])
def test_the_step_with_names_is_train_batch(rows, k):
    with mgpu.virtual_gpus(k) as machine:
        named_step = shown(PAGE, "named_step", phase=torch.cuda.nvtx.range)["named_step"]
        X, y = batch(rows, 1, 28, 28)
        ours, theirs = ([mgpu.get_params(mgpu.lenet_params(), device) for device in machine.devices] for _ in range(2))
        for _ in range(2):
            named_step(X, y, ours, machine.devices, 0.1)
            mgpu.train_batch(X, y, theirs, machine.devices, 0.1)
        assert all(a.equal(b) for mine, other in zip(ours, theirs) for a, b in zip(mine, other))
        phases = {event.phase for event in machine.timeline}
    assert {"forward", "backward", "update"} <= phases and ("all-reduce" in phases) == (k > 1)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("numbers", [1, 4, 13])
def test_the_ring_with_two_streams_sums(k, numbers):
    with mgpu.virtual_gpus(k) as machine:
        ring = shown(PAGE, "ring_in_streams", on=torch.cuda.stream)["ring_in_streams"]
        data = [torch.arange(float(numbers), device=device) + i for i, device in enumerate(machine.devices)]
        expected = sum(tensor.cpu() for tensor in data)
        ring(data)
        assert all(tensor.cpu().equal(expected) for tensor in data)


@pytest.mark.parametrize("rows, k, bucket_bytes", [(6, 1, 1), (7, 2, 100_000), (5, 3, 2**22), (2, 3, 1000)])
def test_the_overlapped_step_is_that_of_one_device(rows, k, bucket_bytes):
    """Several steps, so that a hook that fires too early or too late in the second one is found."""
    torch.manual_seed(0)
    net = mgpu.SimpleCNN()
    X, y = batch(rows, 3, 8, 8)
    expected = copy.deepcopy(net)
    for _ in range(3):
        F.cross_entropy(expected(X), y).backward()
        with torch.no_grad():
            for p in expected.parameters():
                p -= 0.1 * p.grad
        expected.zero_grad()
    with mgpu.virtual_gpus(k) as machine:
        names = shown(PAGE, "sum_bucket", "add_hooks", "sum_in", "run_step", phase=torch.cuda.nvtx.range)
        nets = [copy.deepcopy(net).to(device) for device in machine.devices]
        params = [list(replica.parameters()) for replica in nets]
        streams = [torch.cuda.Stream(device) for device in machine.devices]
        names["add_hooks"](params, streams, bucket_bytes)

        def finish():
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)

        for _ in range(3):
            names["run_step"](nets, X, y, finish)
        for replica in params:
            for found, wanted in zip(replica, expected.parameters()):
                torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-4, atol=1e-6)
