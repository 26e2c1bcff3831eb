"""A program's TorchDispatchMode, and selective activation checkpointing by it, see what CUDA dispatches.

The names that are expected stand in PyTorch's sources: aten/src/ATen/native/transformers/attention.cpp and
cuda/sdp_utils.cpp, layer_norm.cpp, Linear.cpp.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from virtual_gpus import virtual_gpus

B, T, D, HEADS = 2, 64, 128, 2  # batch, time, channels
PAST, BIAS = torch.ones(8, 8, dtype=torch.bool).tril(), torch.linspace(-1, 1, 64).view(8, 8).bfloat16()
KERNELS = {name: f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")}


class Names(TorchDispatchMode):
    """The names of all operations that come by; views and what autograd makes of them are left out."""

    def __init__(self):
        super().__init__()
        self.seen, self.devices = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.seen.append(func.overloadpacket.__name__)
        self.devices |= {a.device.type for a in args if isinstance(a, torch.Tensor)}
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(D), nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(F.silu(y.transpose(1, 2).reshape(B, T, D)))


def test_a_mode_sees_what_cuda_dispatches():
    with virtual_gpus(1):
        net, x = Block().to("cuda", torch.bfloat16), torch.randn(B, T, D, device="cuda", dtype=torch.bfloat16)
        with Names() as forward:
            y = net(x)
        products = ["mm", "_unsafe_view"]
        assert forward.seen == ["_fused_rms_norm", *products, KERNELS["flash"], "silu", *products, "add"]
        with Names() as backward:
            y.sum().backward()
        names = [name for name in backward.seen if name.startswith("_") and "unsafe" not in name]
        assert names == [f"{KERNELS['flash']}_backward", "_fused_rms_norm_backward"]
        assert forward.devices == {"cuda"}


@pytest.mark.parametrize(
    ("gpu", "dtype", "shape", "mask", "kernels"),
    [
        ("A100-80", torch.float32, (1, 2, 8, 64), None, ["efficient"]),
        ("H100", torch.float16, (1, 2, 8, 64), None, ["cudnn"]),
        ("H100", torch.float32, (1, 2, 8, 64), None, ["efficient"]),
        ("V100", torch.float16, (1, 2, 8, 64), None, ["efficient"]),
        ("A100-80", torch.bfloat16, (1, 2, 8, 64), PAST, ["efficient"]),
        ("H100", torch.bfloat16, (1, 2, 8, 64), PAST, ["cudnn"]),
        ("A100-80", torch.bfloat16, (1, 2, 8, 264), None, ["efficient"]),  # heads too wide for FlashAttention
        ("RTX4090", torch.bfloat16, (1, 2, 8, 200), None, ["efficient"]),  # whose backward pass needs a larger GPU
        ("H100", torch.bfloat16, (1, 2, 8, 200), None, ["flash"]),  # cuDNN has no backward pass for this
        ("H100", torch.bfloat16, (1, 2, 8, 36), None, ["flash"]),  # nor takes this
        ("A100-80", torch.float32, (1, 2, 8, 6), None, []),  # no multiple of 16 bytes
        ("V100", torch.bfloat16, (1, 2, 8, 64), None, []),
        ("A100-80", torch.float64, (1, 2, 8, 64), None, []),
        ("A100-80", torch.bfloat16, (2, 8, 64), None, []),  # three dimensions
        ("H100", torch.bfloat16, (1, 2, 8, 64), BIAS, ["efficient"]),  # the others have no gradient
    ],
)
def test_which_attention_cuda_would_choose(gpu, dtype, shape, mask, kernels):
    """And it gives what one device gives."""
    torch.manual_seed(0)
    tensors = list(torch.randn(3, *shape, dtype=dtype, requires_grad=True))
    if mask is not None:
        tensors.append(mask.clone().requires_grad_(mask.is_floating_point()))
    trained = [t for t in tensors if t.requires_grad]
    out = F.scaled_dot_product_attention(*tensors, is_causal=mask is None)
    expected = torch.autograd.grad(out.sum(), trained)
    with virtual_gpus(1, gpu=gpu):
        there = [t.detach().cuda().requires_grad_(t.requires_grad) for t in tensors]
        with Names() as names:
            out = F.scaled_dot_product_attention(*there, is_causal=mask is None)
        assert [n for n in names.seen if "attention" in n] == [KERNELS[kernel] for kernel in kernels]
        for found, wanted in zip(torch.autograd.grad(out.sum(), there[: len(trained)]), expected, strict=True):
            rounded = {"rtol": 0.05, "atol": 0.01} if dtype.itemsize == 2 else {}  # others' kernels do it elsewhere
            torch.testing.assert_close(found.cpu(), wanted, **rounded)


@pytest.mark.parametrize(("dtype", "kv", "kernel"), [(torch.float32, 4, "efficient"), (torch.float16, 2, "cudnn")])
def test_attention_with_dropout_is_one_kernel(dtype, kv, kernel):
    """Values that are rows of the identity show what is dropped; with that, it equals what one device computes."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 8, 8, requires_grad=True) for heads in (4, kv, kv))
    with virtual_gpus(1, gpu="H100"):
        there = [t.detach().to("cuda", dtype).requires_grad_() for t in (q, k, v)]
        options = {"dropout_p": 0.25, "is_causal": True, "enable_gqa": kv < 4}
        torch.manual_seed(1)
        shown = F.scaled_dot_product_attention(*there[:2], torch.eye(8).expand(v.shape).to(there[2]), **options)
        torch.manual_seed(1)
        with Names() as names:
            out = F.scaled_dot_product_attention(*there, **options)
        found = out, *torch.autograd.grad(out.sum(), there)
        kept, found = shown.cpu() != 0, [t.cpu().float() for t in found]
    k_of, v_of = (t.repeat_interleave(4 // kv, 1) for t in (k, v))
    future = torch.ones(8, 8, dtype=torch.bool).triu(1)
    weights = (q @ k_of.mT / 8**0.5).masked_fill(future, -torch.inf).softmax(-1)
    expected = (weights * kept / 0.75) @ v_of
    assert names.seen == [KERNELS[kernel]] and 0 < (~kept & ~future).sum() < kept.sum()
    rounded = {"rtol": 0.02, "atol": 0.02} if dtype is torch.float16 else {}
    for mine, wanted in zip(found, (expected, *torch.autograd.grad(expected.sum(), (q, k, v))), strict=True):
        torch.testing.assert_close(mine, wanted, **rounded)


def test_fewer_heads_of_keys_are_not_for_the_efficient_kernel():
    """As on an H200: in float32 a real GPU makes attention of products then, and keeps tokens × tokens numbers."""
    with virtual_gpus(1, gpu="H100"):
        q, k = (torch.ones(1, heads, 8, 64, device="cuda") for heads in (4, 2))
        with Names() as names:
            F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        assert "_safe_softmax" in names.seen and not any("attention" in name for name in names.seen)
        with torch.autocast("cuda", torch.bfloat16), Names() as names:
            F.scaled_dot_product_attention(q, k, k.bfloat16(), enable_gqa=True)
        assert names.seen[-1] == KERNELS["cudnn"]


def test_a_program_s_choice_of_attention_counts():
    with virtual_gpus(1, gpu="H100"):
        q = torch.ones(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
        for kind in ("flash", "efficient", "cudnn"):
            with sdpa_kernel(getattr(SDPBackend, f"{kind.upper()}_ATTENTION")), Names() as names:
                F.scaled_dot_product_attention(q, q, q)
            assert names.seen == [KERNELS[kind]]
        with sdpa_kernel(SDPBackend.MATH), Names() as names:
            F.scaled_dot_product_attention(q, q, q)
        assert "bmm" in names.seen
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(*[q.float()] * 3)


INDEX = torch.tensor([1, 2])
MAKES = {  # derivatives in C++ that make tensors, and what an H100 shows a mode, up to the gradient of x[2:]
    "index_put": (lambda x, i: x.index_put((i,), x[2:]), "sum ones_like zeros index_put index"),
    "put": (lambda x, i: x.put(i, x[2:]), "sum ones_like zeros put take"),
    "prod": (lambda x, i: x.prod(), "sum ones_like ones cat cumprod flip cat cumprod flip mul mul"),
    "mvlgamma": (lambda x, i: torch.mvlgamma(x, 2), "sum ones_like arange add digamma_ sum mul"),
    "as_strided": (
        lambda x, i: x.as_strided((2, 2), (1, 1)),
        "sum ones_like new_zeros arange clone _unsafe_view index_add_",
    ),
}


@pytest.mark.parametrize(("function", "names"), MAKES.values(), ids=MAKES)
def test_a_mode_sees_derivatives_that_make_tensors(function, names):
    x = torch.tensor([1.5, 2.5, 3.5, 4.5], requires_grad=True)
    function(x, INDEX).sum().backward()
    with virtual_gpus(1, gpu="H100"):
        there, index = x.detach().cuda().requires_grad_(), INDEX.cuda()
        out = function(there, index)
        with Names() as backward:
            out.sum().backward()
        assert " ".join(backward.seen).startswith(names)
        torch.testing.assert_close(there.grad.cpu(), x.grad)


def test_a_mode_s_own_mistakes_stay_mistakes():
    class Adds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {})) + torch.ones(2)

    with virtual_gpus(1):
        out = torch.ones(2, device="cuda", requires_grad=True).exp()
        with Adds(), pytest.raises(RuntimeError, match="found at least two devices, cuda:0 and cpu"):
            out.backward(torch.ones_like(out))


def test_a_mode_does_not_see_how_virtual_gpus_are_made():
    with virtual_gpus(1), Names() as names:
        x = torch.zeros(3, device="cuda", dtype=torch.int64)
        repr(x), F.one_hot(x, 4)
    assert names.seen == ["zeros"]


# Selective activation checkpointing

SAVED = {getattr(torch.ops.aten, name).default for name in (*KERNELS.values(), "mm")}  # as torchtitan's list


def save_attention(ctx, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def run(blocks, x):
    for block in blocks:
        contexts = lambda: create_selective_checkpoint_contexts(save_attention)  # noqa: E731
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x


@pytest.mark.parametrize(
    ("gpu", "backing", "dtype"), [("A100-80", "cpu", torch.float32), ("H100", "meta", torch.bfloat16)]
)
def test_selective_checkpointing_keeps_what_its_policy_says(gpu, backing, dtype):
    """Bytes by hand = the ledger's; what was kept is computed once; and the gradients are those of one device."""
    torch.manual_seed(0)
    blocks, x, n = nn.ModuleList(Block() for _ in range(3)).to(dtype), torch.randn(B, T, D).to(dtype), 3
    with virtual_gpus(1, gpu=gpu, backing=backing) as gpus:
        there, x_there = copy.deepcopy(blocks).cuda(), x.cuda().requires_grad_()
        for _ in range(2):  # a dry run knows the shapes in the second step
            there.zero_grad()
            before, start = torch.cuda.memory_allocated(), gpus.elapsed()
            y = run(there, x_there)
            activation, log_sums = B * T * D * dtype.itemsize, B * HEADS * T * 4
            # of each block: its result, which is the next one's input, q, k and v, attention, the last product
            assert torch.cuda.memory_allocated() - before == n * (6 * activation + log_sums)
            y.float().square().sum().backward()
            names = [e.name for e in gpus.timeline.since(start)]
            assert names.count("mm") == n * (2 + 4) and names.count("_fused_rms_norm") == n * 2
            assert sum("_scaled_dot_product" in name for name in names) == n * 2  # forward and backward
            del y
        if backing == "cpu":
            out = x.requires_grad_()
            for block in blocks:
                out = block(out)
            out.float().square().sum().backward()
            for ours, theirs in zip(there.parameters(), blocks.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
