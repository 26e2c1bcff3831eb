"""What operations ask of a GPU, and what that costs: against figures worked out by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from virtual_gpus import virtual_gpus
from virtual_gpus.clock import costs
from virtual_gpus.clock.specs import find_gpu, find_link
from virtual_gpus.clock.work import work_of

NO_TF32, TF32 = (False, False), (True, True)


def works(call, tf32=NO_TF32, backing="meta"):
    """The Work of everything that `call(device)` does on a GPU."""
    found = []
    with virtual_gpus(1, backing=backing) as machine:
        machine.clock.record_op = lambda gpu, func, args, kwargs, out, key: found.append(
            work_of(func, args, kwargs, out, tf32)
        )
        call(machine.devices[0])
    return found


def work_named(name, call):
    """The Work of the one operation of this name."""
    [found] = [work for work in works(call) if work.name == name]
    return found


def convolution(first=False, tf32=NO_TF32, dtype=torch.float32, layout=torch.contiguous_format, batch=8, **options):
    """The Work of a convolution's forward and backward; 32x32 pixels. The first one's input wants no gradient."""
    options = {"kernel": 3, "stride": 1, "groups": 1} | options

    def call(device):
        X = torch.ones(batch, 64, 32, 32, device=device, dtype=dtype).to(memory_format=layout).requires_grad_(not first)
        shape = 64, 64 // options["groups"], options["kernel"], options["kernel"]
        W = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
        out = F.conv2d(X, W, None, options["stride"], options["kernel"] // 2, groups=options["groups"])
        out.backward(torch.ones_like(out))

    found = works(call, tf32)
    return [next(w for w in found if w.name == name) for name in ("convolution", "convolution_backward")]


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"kernel": 1}, "conv1x1"),
        ({"kernel": 3}, "conv3x3"),
        ({"kernel": 3, "stride": 2}, "conv"),
        ({"kernel": 5}, "conv"),
        ({"groups": 8}, "conv_grouped"),
        ({"groups": 64}, "conv_depthwise"),
        ({"groups": 4}, "conv3x3"),
    ],
)
def test_kinds_of_convolutions(options, kind):
    assert [work.kind for work in convolution(**options)] == [kind, kind]


def test_a_convolution_s_work():
    forward, backward = convolution()
    X, W = 8 * 64 * 32 * 32, 64 * 64 * 9
    assert forward.flops == 2 * X * 64 * 9 and backward.flops == 2 * forward.flops
    assert [work.flops for work in convolution(first=True)] == 2 * [forward.flops]
    assert forward.nbytes == 4 * (2 * X + W)  # reads the input and the weight, writes the output
    assert backward.nbytes == 4 * (4 * X + 2 * W)  # the output's gradient twice, the rest once
    assert forward.outputs == backward.outputs == X
    assert (forward.kernels, backward.kernels) == (1, 2)


def test_only_tensor_cores_pay_for_another_layout():
    plain, last = convolution(tf32=TF32)[0], convolution(tf32=TF32, layout=torch.channels_last)[0]
    assert plain.layout_copies == 3 and plain.layout_nbytes == 2 * plain.nbytes
    assert last.layout_copies == 0 and last.layout_nbytes == 0
    A100, V100 = find_gpu("A100-40"), find_gpu("V100")
    assert costs.cost(plain, A100).seconds > 1.5 * costs.cost(last, A100).seconds
    assert costs.cost(plain, V100).seconds == costs.cost(last, V100).seconds  # has no TF32


def test_a_product_s_precision_is_that_of_its_matrices():
    def call(device):
        x, bias = (torch.ones(8, 8, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        torch.addmm(bias, x, x, out_dtype=torch.float32)

    assert work_named("addmm", call).precision == "bf16"


@pytest.mark.parametrize("name, shape", [("mm", (8, 4)), ("mv", (8,))])
def test_a_product_without_numbers_starts_no_kernel(name, shape):
    work = work_named(name, lambda device: torch.ones(0, 8, device=device) @ torch.ones(shape, device=device))
    assert costs.cost(work, find_gpu("H100")).seconds == 0


def test_what_bounds_a_kernel():
    def added(n):
        work = works(lambda device: torch.ones(n, device=device).add_(1))[-1]
        return work, costs.cost(work, find_gpu("V100"))

    work, cost = added(2**26)
    assert work.nbytes == 2 * 2**28 and cost.bound == "memory" and 0.7 < work.nbytes / cost.seconds / 900e9 < 1
    assert added(10)[1].bound == "fixed"
    products = works(lambda device: torch.ones(4096, 4096, device=device).mm(torch.ones(4096, 4096, device=device)))
    assert costs.cost(products[-1], find_gpu("V100")).bound == "compute"


@pytest.mark.parametrize("gpu, pinned", [("V100", 12.6), ("A100-80", 25.2), ("H100", 50.4)])
def test_copies_from_ordinary_memory_are_as_fast_as_the_host_s_memory(gpu, pinned):
    """Whatever PCIe can: as measured by bandwidthTest, cited in rates.py."""
    link = find_link("pcie", find_gpu(gpu))
    reached = {kind: 1 / costs.link_seconds(1e9, link, kind) for kind in ("pageable", "pinned")}
    assert reached["pinned"] == pytest.approx(pinned, rel=0.01) and 5 < reached["pageable"] < 11
    slow = replace(link, bandwidth=4e9)  # as with four lanes: PCIe sets the pace
    assert costs.link_seconds(1e9, slow, "pageable") == costs.link_seconds(1e9, slow, "pinned")


def on_lists(function):
    """A call of `function` with three lists of three tensors of 4000 bytes."""
    return lambda device: function(*([torch.ones(1000, device=device) for _ in range(3)] for _ in range(3)))


def fused_adam(device):
    net = torch.nn.Linear(100, 100, bias=False, device=device)
    net.weight.grad = torch.ones_like(net.weight)
    torch.optim.AdamW(net.parameters(), fused=True).step()


def normed(norm, device):
    X = torch.ones(1000, 256, device=device, requires_grad=True)
    norm(256, device=device)(X).backward(torch.ones_like(X))


def batch_normed(training, device):
    F.batch_norm(torch.ones(1000, 256, device=device), *torch.ones(2, 256, device=device), training=training)


LIST, X = 3 * 4000, 4 * 256_000
BYTES = [  # (operation, its kind, call, bytes, and how many more are parameters, or the number of steps)
    ("_foreach_add_", "foreach", on_lists(lambda p, g, v: torch._foreach_add_(p, g)), 3 * LIST, 0),  # reads 2, writes 1
    ("_foreach_mul_", "foreach", on_lists(lambda p, g, v: torch._foreach_mul_(p, 2.0)), 2 * LIST, 0),
    ("_foreach_copy_", "foreach", on_lists(lambda p, g, v: torch._foreach_copy_(p, g)), 2 * LIST, 0),
    ("_foreach_zero_", "foreach", on_lists(lambda p, g, v: torch._foreach_zero_(p)), LIST, 0),
    ("_foreach_addcdiv_", "foreach", on_lists(lambda p, g, v: torch._foreach_addcdiv_(p, g, v)), 4 * LIST, 0),
    ("_foreach_sqrt", "foreach", on_lists(lambda p, g, v: torch._foreach_sqrt(p)), 2 * LIST, 0),
    ("_fused_adamw_", "foreach", fused_adam, 7 * 40_000, 8),  # reads four lists, writes three
    # X and its gradient twice, for the parameters, too; writes one
    ("native_layer_norm_backward", "layer_norm", partial(normed, torch.nn.LayerNorm), 5 * X, X / 10),
    ("_fused_rms_norm_backward", "layer_norm", partial(normed, torch.nn.RMSNorm), 5 * X, X / 10),
    ("native_batch_norm", "norm", partial(batch_normed, True), 3 * X, X / 10),  # the mean first
    ("native_batch_norm", "norm", partial(batch_normed, False), 2 * X, X / 10),
]


@pytest.mark.parametrize("name, kind, call, nbytes, more", BYTES)
def test_what_an_operation_reads_and_writes(name, kind, call, nbytes, more):
    work = work_named(name, call)
    assert work.kind == kind and nbytes <= work.nbytes <= nbytes + more


def attention(causal):
    def call(device):
        Q = torch.ones(2, 3, 64, 16, device=device, requires_grad=True)
        F.scaled_dot_product_attention(Q, Q, Q, is_causal=causal).sum().backward()

    return call


@pytest.mark.parametrize("backing", ["cpu", "meta"])
def test_causal_attention_computes_half(backing):
    plain, causal = (works(attention(causal), backing=backing) for causal in (False, True))
    kernels = [[work for work in found if work.kind == "attention"] for found in (plain, causal)]
    assert [work.flops for work in kernels[0]] == [2 * work.flops for work in kernels[1]]
    assert kernels[0][0].flops == 4 * 2 * 3 * 64 * 64 * 16 and len(kernels[0]) == 2
    assert [work.name for work in plain if work.nbytes] == [work.name for work in causal if work.nbytes]  # no mask


def test_a_kernel_that_keeps_the_logsumexp_is_not_taken_for_a_causal_one():
    """The one that DTensor calls has another argument that is true."""
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    work = work_named(
        efficient.__name__, lambda gpu: efficient(*[torch.ones(2, 3, 64, 16, device=gpu)] * 3, None, True)
    )
    assert work.flops == 4 * 2 * 3 * 64 * 64 * 16


def test_collectives():
    link = find_link("nvlink", find_gpu("A100-40"))
    # nccl-tests on 8 A100s, as cited in rates.py: 61 µs for 256 KiB, 8.2 ms for 1 GiB
    assert costs.ring_seconds(2**18, 8, link) == pytest.approx(61e-6, rel=0.25)
    assert costs.ring_seconds(2**30, 8, link) == pytest.approx(8.2e-3, rel=0.1)
    assert costs.ring_seconds(2**20, 1, link) == costs.pipeline_seconds(2**20, 1, link) == 0
    assert costs.pipeline_seconds(2**30, 8, link) < costs.ring_seconds(2**30, 8, link)


def attention_seconds(gpu, length, causal=True, backend="flash", software="2026", tokens=2**14):
    """Of the kernels of attention among so many tokens, in sequences of this length: forward, and backward."""
    with virtual_gpus(1, gpu, backing="meta", software=software) as machine:
        shape = tokens // length, 16, length, 128
        q, k, v = (torch.ones(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
        with sdpa_kernel({"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[backend]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.backward(torch.ones_like(out))
        return [event.end - event.start for event in machine.timeline.events if event.kind == "attention"]


@pytest.mark.parametrize(
    ("gpu", "software", "length", "tflops"),
    [  # what FlashAttention's authors printed, forward and backward
        ("A100-80", "2024", 2048, 155),
        ("A100-80", "2024", 16384, 189),
        ("A100-80", "2023", 2048, 69),
        ("H100", "2024", 2048, 265),
        ("H100", "2024", 16384, 328),
        ("H100", "2023", 2048, 108),
    ],
)
def test_attention_is_as_fast_as_its_authors_say(gpu, software, length, tflops):
    flops = 3.5 * 4 * 2**14 * length * 2048 / 2
    assert flops / sum(attention_seconds(gpu, length, software=software)) == pytest.approx(tflops * 1e12, rel=0.25)


def test_short_sequences_use_less_of_the_gpu_and_half_of_a_causal_mask_does_too():
    (short, *_), (long, *_) = (attention_seconds("H100", length) for length in (512, 8192))
    assert long < 16 * short < 2 * long  # as many numbers are compared sixteen times as often
    whole, half = (sum(attention_seconds("H100", 1024, causal)) for causal in (False, True))
    assert half < whole < 2 * half


@pytest.mark.parametrize(
    ("gpu", "software", "faster"),
    [("H100", "2026", True), ("H100", "2024", False), ("A100-80", "2026", False), ("L4", "2026", False)],
)
def test_cudnn_s_attention_is_faster_on_hopper_alone_and_not_before_2026(gpu, software, faster):
    flash, cudnn = (attention_seconds(gpu, 4096, backend=name, software=software) for name in ("flash", "cudnn"))
    assert sum(cudnn) < sum(flash) if faster else cudnn == pytest.approx(flash, rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "shape", "least", "most"),
    [  # a tensor, or rows, inner size and columns of a product: what recorded/measured_h100.json has beside 24 blocks
        ("H100", (8192, 32768, 8192), 0.13, 0.24),
        ("H100", (8192, 6144, 1536), 0.55, 0.8),
        ("H100", (1536, 8192, 6144), 0.8, 0.9),
        ("H100", (2**26,), 0.05, 0.1),
        ("A100-80", (8192, 6144, 1536), 0.25, 0.3),  # its products aren't known to wait
    ],
)
def test_what_a_collective_takes_from_the_kernels_beside_it(gpu, shape, least, most):
    def call(device):
        if len(shape) == 1:
            return torch.ones(shape, device=device) + 1
        return torch.ones(shape[:2], device=device).half() @ torch.ones(shape[1:], device=device).half()

    spec = find_gpu(gpu)
    beside = costs.cost(works(call)[-1], spec).beside
    assert least <= max(beside.waiting, beside.part * 24 / (spec.sm_count - 24)) <= most
