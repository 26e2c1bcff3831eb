"""All-reduce schedules: on any number of GPUs they give what one device's sum gives, and send what they say."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_lib import collectives
from mgpu_lib.collectives import (
    Send,
    buckets,
    bytes_per_link,
    execute,
    ring,
    ring_allreduce,
    star,
    star_allreduce,
    tree,
    tree_allreduce,
)
from virtual_gpus import virtual_gpus
from virtual_gpus.clock.costs import ring_seconds, round_seconds
from virtual_gpus.clock.specs import LINKS

SCHEDULES = {"star": star, "ring": ring, "tree": tree}
ALLREDUCES = {"star": star_allreduce, "ring": ring_allreduce, "tree": tree_allreduce}
kinds = pytest.mark.parametrize("kind", SCHEDULES)


def shares(k, shape, dtype=torch.float32, seed=0):
    """A tensor for each of `k` GPUs, of small whole numbers, whose sum is exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(k)]


@settings(deadline=None, max_examples=25)
@given(
    k=st.integers(1, 8),
    shape=st.one_of(st.integers(0, 40).map(lambda n: (n,)), st.sampled_from([(), (3, 5), (2, 3, 4)])),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64]),
    seed=st.integers(0, 2**31),
)
@kinds
@pytest.mark.sweep(3)
def test_every_gpu_gets_the_sum_in_place_and_the_bytes_are_those_announced(kind, k, shape, dtype, seed):
    on_one = shares(k, shape, dtype, seed)
    expected = torch.stack(on_one).sum(0)
    nbytes, itemsize = expected.to(dtype).nbytes, on_one[0].element_size()
    with virtual_gpus(k) as machine:
        data = [tensor.to(device) for tensor, device in zip(on_one, machine.devices)]
        before, moved = list(data), machine.traffic.copy()
        assert ALLREDUCES[kind](data) is None
        moved = machine.traffic - moved
        assert all(new is old for new, old in zip(data, before, strict=True))
        for tensor, device in zip(data, machine.devices):
            assert tensor.device == device
            assert torch.equal(tensor.cpu(), expected.to(dtype))
    links = bytes_per_link(SCHEDULES[kind](k), nbytes, k, itemsize)
    assert moved == {(f"cuda:{i}", f"cuda:{j}"): n for (i, j), n in links.items() if n}
    assert sum(links.values()) == 2 * (k - 1) * nbytes  # all three ways move the same in all


@kinds
@pytest.mark.parametrize("k", range(1, 9))
def test_rounds_and_in_each_at_most_one_send_and_one_arrival_per_gpu(kind, k):
    schedule = SCHEDULES[kind](k)
    assert len(schedule) == 2 * (math.ceil(math.log2(k)) if kind == "tree" else k - 1)
    for sends in schedule:
        assert sends and all(send.source != send.target for send in sends)
        for ends in ([send.source for send in sends], [send.target for send in sends]):
            assert len(set(ends)) == len(ends)
    if kind == "ring" and k > 1:  # each GPU sends as little as an all-reduce can; 840 can be divided by 2 to 8
        assert bytes_per_link(schedule, 4 * 840, k) == {(i, (i + 1) % k): 8 * (k - 1) * 840 // k for i in range(k)}


@kinds
def test_on_one_and_the_same_device_and_with_memory_in_another_order(kind):
    """Copies within a device would be views of one tensor, if nobody took care. Gradients in the channels_last format
    are copies when they are flattened, and the sum must not stay in the copy."""
    data = [t.to(memory_format=torch.channels_last) for t in shares(5, (2, 3, 4, 5))]
    assert not data[0].is_contiguous()
    columns, expected = [t[:, 1] for t in data], sum(data)
    ALLREDUCES[kind](data)
    assert all(torch.equal(tensor, expected) for tensor in data)
    assert all(torch.equal(column, expected[:, 1]) for column in columns)
    assert len({tensor.data_ptr() for tensor in data}) == 5


def test_bad_input_is_refused_before_anything_is_sent():
    data, first = shares(3, (4,)), [Send(0, 1, None, True)]
    before = [tensor.clone() for tensor in data]
    for bad in (Send(0, 3, None, True), Send(-1, 0, None, True), Send(0, 1, 3, True)):
        with pytest.raises(ValueError, match="with 3 tensors, GPUs and chunks go from 0 to 2"):
            execute([first, [bad]], data)
    for other, words in ((torch.zeros(5), r"\(4,\).*\(5,\)"), (data[2].double(), "float64")):
        with pytest.raises(ValueError, match=words):
            execute([first], [*data[:2], other])
    assert all(torch.equal(a, b) for a, b in zip(data, before))
    with pytest.raises(ValueError, match="0 GPUs"):
        ring(0)
    with pytest.raises(ValueError, match="10 bytes are no whole number of items of 4"):
        bytes_per_link(ring(2), 10, 2)


# Buckets


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([torch.float32, torch.float16])), max_size=12),
    bucket_bytes=st.integers(1, 200),
)
def test_buckets_hold_every_gradient_once_last_first_and_no_more_than_they_may(sizes, bucket_bytes):
    grads = [torch.zeros(n, dtype=dtype) for n, dtype in sizes]
    filled = buckets(grads, bucket_bytes)
    assert [i for places in filled for i in places] == list(reversed(range(len(grads))))
    for places in filled:
        assert len(places) == 1 or sum(grads[i].nbytes for i in places) <= bucket_bytes
        assert len({grads[i].dtype for i in places}) == 1
    for this, following in pairwise(filled):  # no bucket is closed while the next gradient has room in it
        joined = [grads[i] for i in [*this, following[0]]]
        assert sum(g.nbytes for g in joined) > bucket_bytes or len({g.dtype for g in joined}) == 2


@pytest.mark.parametrize("k", [3, 8])
def test_seconds_of_schedules(k):
    link, nbytes = LINKS["nvlink2"], 4 * 10**7 * k
    found = {name: collectives.seconds(make(k), nbytes, k, link) for name, make in SCHEDULES.items()}
    assert found["ring"] == pytest.approx(ring_seconds(nbytes, k, link))
    assert found["star"] == pytest.approx(2 * (k - 1) * round_seconds(nbytes, link))
    assert found["tree"] == pytest.approx(found["star"] * math.ceil(math.log2(k)) / (k - 1))
    assert collectives.seconds(tree(8), 32, 8, link) < collectives.seconds(ring(8), 32, 8, link), "few bytes"
