"""Layers of experts, as far as one process can tell; the ranks' part is checked by programs/moe.py."""

import pytest
import torch

import mgpu_lib as mgpu
from mgpu_lib.experts import AssumedLoad, MoE, auxiliary_loss, choose


def test_with_all_experts_it_is_their_weighted_mean():
    torch.manual_seed(0)
    moe, X = MoE(6, 5, experts=3, k=3).double(), torch.randn(7, 6, dtype=torch.float64)
    weights = moe.router(X).softmax(dim=1)
    mean = sum(weights[:, e, None] * expert(X) for e, expert in enumerate(moe.experts))
    torch.testing.assert_close(moe(X), mean)


def test_a_bias_decides_who_is_chosen_and_not_the_weights():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).log()
    weights, chosen = choose(logits, 2)
    assert chosen.tolist() == [[0, 1]] and weights.tolist() == [pytest.approx([0.6, 0.4])]
    weights, chosen = choose(logits, 2, bias=torch.tensor([0.0, 0.0, 0.4, 0.0]))
    assert chosen.tolist() == [[2, 0]] and weights.tolist() == [pytest.approx([0.25, 0.75])]


def test_the_auxiliary_loss_is_1_for_equal_loads_and_the_number_of_experts_for_one():
    equal = torch.eye(4) * 50
    assert auxiliary_loss(equal, choose(equal, 1)[1]).item() == pytest.approx(1)
    one = torch.tensor([[50.0, 0, 0, 0]] * 4)
    assert auxiliary_loss(one, choose(one, 1)[1]).item() == pytest.approx(4)


def exchanges(popularity, rank, **options):
    """A dry run of four experts on two ranks, eight tokens each that choose two, and the bytes of its exchanges."""

    def program():
        with torch.device("meta"):
            moe = MoE(16, 8, experts=4, k=2)
        layer = AssumedLoad(moe, popularity).to_empty(device="cuda")
        X = torch.zeros(8, 16, device="cuda", requires_grad=True)
        return lambda: layer(X).sum().backward()

    made = mgpu.dry_run(program, 2, "H100", per_node=2, rank=rank, **options)
    return made, [event.nbytes for event in made.timeline if event.kind == "collective"]


def test_a_dry_run_takes_the_load_that_it_is_told():
    """A row has 16 numbers of 4 bytes; of an exchange the larger side counts, so 32 of rank 0's rows in place of 16."""
    assert exchanges([1, 1, 1, 1], 0)[1] == [16 * 64] * 4
    assert exchanges([2, 2, 0, 0], 0)[1] == [32 * 64] * 4
    assert exchanges([2, 2, 0, 0], 1)[1] == [16 * 64] * 4
    with pytest.raises(ValueError, match="4 numbers with the mean 1"):
        exchanges([2, 2, 1, 0], 0)
    with pytest.raises(ValueError, match="4 numbers"):
        exchanges([1, 1], 0)
