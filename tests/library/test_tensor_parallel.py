"""Parts of a layer compute what the layer does, forward and backward (test_equivalence.py: whole networks)."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mgpu_lib.mesh import device_mesh
from mgpu_lib.tensor_parallel import SumOutputs, VocabularyPart, split_block, split_embedding, split_layer, together
from mgpu_lib.transformer import Attention, FeedForward, rotary_angles
from virtual_gpus import virtual_gpus

PARTS = st.integers(1, 6)


# Random shapes: parts, put together, equal one device


def close(found, wanted):
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-9, atol=1e-9)


def check_parts(block, X, dims, k, *angles):
    """Forward and backward of `block` on one device and in k parts; dims[name] is how the layer `name` was cut."""
    block, X = block.double(), X.double().requires_grad_()
    out = block(X, *angles)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    with virtual_gpus(k) as machine:
        parts = split_block(block, machine.devices)
        Xs = [X.detach().to(device).requires_grad_() for device in machine.devices]
        moved = [[(cos.to(device), sin.to(device)) for device in machine.devices] for cos, sin in angles]
        outs = together(parts, Xs, *moved)
        torch.autograd.backward(outs, [upstream.to(device) for device in machine.devices])
        for part_out, part_X in zip(outs, Xs, strict=True):
            close(part_out, out)
            close(part_X.grad, X.grad)
        for name, dim in dims.items():
            layers = [getattr(part, name) for part in parts]
            close(torch.cat([layer.weight.grad.cpu() for layer in layers], dim), getattr(block, name).weight.grad)
            sizes = [layer.weight.shape[dim] for layer in layers]
            assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=12)
@given(k=PARTS, groups=st.integers(1, 2), queries=st.integers(1, 3), shape=st.tuples(*[st.integers(1, 5)] * 2))
def test_attention_in_parts_has_whole_heads(k, groups, queries, shape):
    """`groups` key-value heads for each of k devices, and so many `queries` to each of them."""
    torch.manual_seed(k)
    (rows, tokens), kv_heads, head_width = shape, k * groups, 4
    attention = Attention(kv_heads * queries * head_width, kv_heads * queries, kv_heads)
    angles = rotary_angles(tokens, head_width, dtype=torch.float64)
    dims = {"query": 0, "key": 0, "value": 0, "out": 1}
    check_parts(attention, torch.randn(rows, tokens, kv_heads * queries * head_width), dims, k, angles)


@settings(deadline=None, max_examples=12)
@given(k=PARTS, width=st.integers(1, 9), more=st.integers(0, 20), rows=st.integers(1, 5))
def test_a_feed_forward_part_in_uneven_parts(k, width, more, rows):
    torch.manual_seed(more)
    block = FeedForward(width, k + more)
    check_parts(block, torch.randn(rows, 2, width), {"gate": 0, "up": 0, "down": 1}, k)


@settings(deadline=None, max_examples=12)
@given(k=PARTS, more=st.integers(0, 20), width=st.integers(1, 6), tokens=st.integers(0, 30))
def test_an_embedding_in_uneven_parts(k, more, width, tokens):
    torch.manual_seed(more)
    embedding = nn.Embedding(k + more, width).double()
    where = torch.randint(k + more, (2, tokens))
    out = embedding(where)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    with virtual_gpus(k) as machine:
        parts = split_embedding(embedding, machine.devices)
        outs = SumOutputs.apply(*(part(where.to(device)) for part, device in zip(parts, machine.devices)))
        torch.autograd.backward(outs, [upstream.to(device) for device in machine.devices])
        for part_out, device in zip(outs, machine.devices):
            assert part_out.device == device
            close(part_out, out)
        close(torch.cat([part.weight.grad.cpu() for part in parts]), embedding.weight.grad)


def test_what_is_not_a_number_stays_with_its_token():
    """The rows that stand in for other devices' tokens are not multiplied by 0, which would keep NaN and infinity."""
    part = VocabularyPart(torch.full((2, 3), torch.nan), first=4)
    assert part(torch.tensor([0, 3, 6])).tolist() == [[0.0] * 3] * 3
    assert part(torch.tensor([4, 5])).isnan().all()


# What can't be split


@pytest.mark.parametrize(
    "split, k, message",
    [
        (lambda gpus: split_block(Attention(16, 4, 4), gpus), 3, "4 heads with 4 .* over 3 devices.*multiples of 3"),
        (lambda gpus: split_block(Attention(16, 4, 2), gpus), 4, "4 heads with 2 key-value heads .* multiples of 4"),
        (lambda gpus: split_embedding(nn.Embedding(2, 4), gpus), 3, "of 2 tokens can't be cut into 3 parts"),
        (lambda gpus: split_layer(nn.Linear(4, 2), gpus, 0), 3, r"can't cut 2 channels \(weight\) into 3 parts"),
        (lambda gpus: split_layer(nn.Linear(2, 4), gpus, 1), 3, r"can't cut 2 channels \(weight\) into 3 parts"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(split, k, message):
    with virtual_gpus(k) as machine, pytest.raises(ValueError, match=message):
        split(machine.devices)


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 3}, {"pipeline": 3}, {"data": 2, "pipeline": 2, "tensor": 2}])
def test_a_mesh_that_does_not_hold_all_ranks_is_refused(sizes):
    with virtual_gpus(4, backing="meta"):
        dist.init_process_group("nccl", rank=0, world_size=4, store=dist.HashStore())
        product = " × ".join(f"{name}={size}" for name, size in sizes.items())
        with pytest.raises(ValueError, match=f"^{product} makes . ranks, but there are 4"):
            device_mesh(**sizes)
        assert device_mesh(data=2, tensor=2)["tensor"].size() == 2
        dist.destroy_process_group()
