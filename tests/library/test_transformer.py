"""The language model: sizes, what it computes, and that it sees no later token."""

import pytest
import torch
from torch.nn import functional as F

from mgpu_lib.transformer import LLAMA, Transformer, rotary_angles


@pytest.mark.parametrize(
    "size, parameters", [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)]
)
def test_llama_has_as_many_parameters_as_its_model_card_says(size, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in Transformer(**LLAMA[size]).parameters()) == parameters


@pytest.mark.parametrize("kv_heads", [1, 2, None])
def test_blocks_compute_what_their_formulas_say(kv_heads):
    """Attention to a token and those before it, written out head by head, with complex numbers for the turns."""
    torch.manual_seed(1)
    net, heads_each = Transformer(7, 24, 2, 4, kv_heads, inner=10).double(), 4 // (kv_heads or 4)
    tokens = torch.randint(7, (1, 5))
    X = net.embedding(tokens)[0]

    def norm(X, layer):
        return X / (X.pow(2).mean(-1, keepdim=True) + torch.finfo(X.dtype).eps).sqrt() * layer.weight

    rates = 10_000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turns = torch.polar(torch.ones(5, 3).double(), torch.arange(5)[:, None] * rates)
    for block in net.layers:
        H, attention, attended = norm(X, block.attention_norm), block.attention, []
        for head in range(4):
            rows, first = slice(6 * head, 6 * head + 6), 6 * (head // heads_each)
            shared = slice(first, first + 6)
            q, k = H @ attention.query.weight[rows].T, H @ attention.key.weight[shared].T
            q, k = (torch.complex(*x.chunk(2, -1)) * turns for x in (q, k))
            scores = (q @ k.mH).real / 6**0.5
            weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
            attended.append(weights @ H @ attention.value.weight[shared].T)
        X = X + torch.cat(attended, -1) @ attention.out.weight.T
        H, two = norm(X, block.feed_forward_norm), block.feed_forward
        X = X + (F.silu(H @ two.gate.weight.T) * (H @ two.up.weight.T)) @ two.down.weight.T
    torch.testing.assert_close(net(tokens)[0], norm(X, net.norm) @ net.head.weight.T, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 3e-3)])
def test_angles_are_as_exact_as_their_numbers_and_16_bits_are_rounded_last(dtype, error):
    """Far out: positions up to 3,000, of which bfloat16 has only every sixteenth, times rates that no format has."""
    rates = torch.tensor([10_000.0 ** (-i / 3) for i in range(3)], dtype=torch.float64)
    turns = torch.outer(torch.arange(3001.0, dtype=torch.float64), rates).repeat(1, 2)
    for table, exact in zip(rotary_angles(3001, 6, dtype=dtype), (turns.cos(), turns.sin())):
        assert table.dtype == dtype
        torch.testing.assert_close(table.double(), exact, rtol=0, atol=error)


@pytest.mark.parametrize(
    "sizes", [{"width": 30}, {"width": 12}, {"kv_heads": 3}, {"layers": 0}, {"vocab": 2.5}, {"inner": 0}]
)
def test_sizes_that_do_not_go_together_are_named(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        Transformer(**{"vocab": 10, "width": 32, "layers": 1, "heads": 4} | sizes)
