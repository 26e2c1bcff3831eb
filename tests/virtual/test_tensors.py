"""Tensors on virtual GPUs behave as PyTorch documents it for real ones: making, moving, reading, changing, refusing."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.virtual import virtual_gpus
from mgpu_lib.virtual.shapes import form_of

ZEROS = torch.zeros  # imported, as it were, before any virtual GPU is on


@pytest.fixture
def gpus():
    with virtual_gpus(4) as machine:
        yield machine


CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
FACTORIES = {
    "empty": lambda **k: torch.empty(2, 3, **k),
    "zeros": lambda **k: torch.zeros(2, 3, **k),
    "ones": lambda **k: torch.ones(2, 3, **k),
    "full": lambda **k: torch.full((2, 3), 7.0, **k),
    "rand": lambda **k: torch.rand(2, 3, **k),
    "randn": lambda **k: torch.randn(2, 3, **k),
    "randint": lambda **k: torch.randint(0, 9, (2, 3), **k),
    "randperm": lambda **k: torch.randperm(6, **k),
    "arange": lambda **k: torch.arange(6, **k),
    "linspace": lambda **k: torch.linspace(0, 1, 6, **k),
    "logspace": lambda **k: torch.logspace(0, 1, 6, **k),
    "eye": lambda **k: torch.eye(3, **k),
    "tensor": lambda **k: torch.tensor([[1.0, 2.0], [3.0, 4.0]], **k),
    "as_tensor": lambda **k: torch.as_tensor([1, 2], **k),
    "asarray": lambda **k: torch.asarray([1.0, 2.0], **k),
    "scalar_tensor": lambda **k: torch.scalar_tensor(3.0, **k),
    "empty_strided": lambda **k: torch.empty_strided((2, 3), (3, 1), **k),
    "tril_indices": lambda **k: torch.tril_indices(3, 3, **k),
    "triu_indices": lambda **k: torch.triu_indices(3, 3, **k),
    "hann_window": lambda **k: torch.hann_window(5, **k),
    "fftfreq": lambda **k: torch.fft.fftfreq(5, **k),
    "from numpy": lambda **k: torch.tensor(np.arange(4.0), **k),
    "empty_like": lambda **k: torch.empty_like(CPU_X, **k),
    "zeros_like": lambda **k: torch.zeros_like(CPU_X, **k),
    "ones_like": lambda **k: torch.ones_like(CPU_X, **k),
    "full_like": lambda **k: torch.full_like(CPU_X, 2.0, **k),
    "rand_like": lambda **k: torch.rand_like(CPU_X, **k),
    "randn_like": lambda **k: torch.randn_like(CPU_X, **k),
    "randint_like": lambda **k: torch.randint_like(CPU_X, 9, **k),
    "new_tensor": lambda **k: CPU_X.new_tensor([1.0], **k),
    "new_zeros": lambda **k: CPU_X.new_zeros(2, **k),
    "new_ones": lambda **k: CPU_X.new_ones(2, **k),
    "new_full": lambda **k: CPU_X.new_full((2,), 3.0, **k),
    "new_empty": lambda **k: CPU_X.new_empty(2, **k),
}
CPU_X = torch.arange(6.0).reshape(2, 3)
SAME_VALUES = set(FACTORIES) - {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("device", ["cuda:1", GPU1, 1])
def test_factory_makes_on_the_named_gpu(gpus, name, device):
    made, plain = FACTORIES[name](device=device), FACTORIES[name]()
    assert made.device == GPU1 and made.is_cuda and not made.is_cpu and made.get_device() == 1
    assert (made.shape, made.dtype, made.is_leaf) == (plain.shape, plain.dtype, True)
    if name in SAME_VALUES:
        assert torch.equal(made.cpu(), plain)
    assert plain.device == CPU


@pytest.mark.parametrize(
    "name", sorted(set(FACTORIES) & {"zeros", "rand", "arange", "tensor", "eye", "full", "as_tensor"})
)
def test_default_device_and_device_context(gpus, name):
    make = FACTORIES[name]
    with torch.device("cuda", 1):
        assert make().device == GPU1
        assert make(device="cpu").device == CPU
    torch.set_default_device("cuda:1")
    try:
        assert make().device == GPU1 and torch.get_default_device() == GPU1
    finally:
        torch.set_default_device(None)
    assert make().device == CPU


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu", "meta"])
@pytest.mark.parametrize("make", [lambda: torch.zeros(2), lambda: torch.tensor([1.0]), lambda: torch.rand(2)])
def test_any_device_can_be_the_default(gpus, device, make):
    with torch.device(device):
        inside = make().device
        assert torch.get_default_device().type == inside.type
    torch.set_default_device(device)
    try:
        assert make().device == inside
    finally:
        torch.set_default_device(None)
    assert inside.type == torch.device(device).type and inside.index in (torch.device(device).index, 0, None)


def test_a_function_taken_out_of_torch_earlier_still_sees_the_gpus(gpus):
    assert ZEROS(2, device="cuda:1").device == GPU1


def test_cuda_without_an_index_is_the_current_gpu(gpus):
    assert torch.ones(1, device="cuda").device == GPU0
    with torch.cuda.device(2):
        assert torch.ones(1, device="cuda").device == torch.ones(1).cuda().device == torch.device("cuda", 2)
        assert torch.cuda.current_device() == 2
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").device == GPU1
    with torch.cuda.device_of(torch.ones(1, device="cuda:3")):
        assert torch.cuda.current_device() == 3


def test_requires_grad_and_likes_of_virtual_tensors(gpus):
    w = torch.randn(2, 3, device="cuda:1", requires_grad=True)
    assert w.requires_grad and w.is_leaf
    for like in (
        torch.zeros_like(w),
        w.new_ones(2),
        w.new_tensor([1.0]),
        torch.rand_like(w),
        w.clone(),
        torch.full_like(w, 2),
    ):
        assert like.device == GPU1
    assert torch.zeros_like(w, device="cpu").device == CPU and torch.zeros_like(w, device="cuda:3").get_device() == 3


def test_same_sizes_strides_and_views(gpus):
    x = torch.arange(24.0, device="cuda:1").reshape(2, 3, 4)
    plain = torch.arange(24.0).reshape(2, 3, 4)
    for change in (
        lambda t: t.transpose(0, 2),
        lambda t: t[:, 1:, ::2],
        lambda t: t.permute(2, 0, 1),
        lambda t: t[None],
        lambda t: t.expand(5, 2, 3, 4),
        lambda t: t.flatten(),
        lambda t: t[..., -1],
        lambda t: t.unfold(2, 2, 1),
        lambda t: t[t > 5],
        lambda t: t[torch.tensor([1, 0])],
        lambda t: t.movedim(0, 1),
        lambda t: t.diagonal(),
    ):
        ours, theirs = change(x), change(plain)
        assert (ours.shape, ours.stride(), ours.is_contiguous()) == (
            theirs.shape,
            theirs.stride(),
            theirs.is_contiguous(),
        )
        assert torch.equal(ours.cpu(), theirs) and ours.device == GPU1


def test_views_share_memory_and_in_place_changes_are_seen(gpus):
    x = torch.zeros(2, 3, device="cuda:1")
    row = x[0]
    row += 1
    x[1, 2] = 5
    x[:, 0] = torch.tensor([7.0, 8.0])  # from the CPU, as PyTorch allows
    assert x.tolist() == [[7, 1, 1], [8, 0, 5]]
    before = x
    x.mul_(2).t_()
    assert x is before and x.shape == (3, 2) and x.device == GPU1 and row.tolist() == [14, 2, 2]


def test_out_arguments_keep_identity_and_are_resized(gpus):
    a = torch.ones(2, 2, device="cuda:1")
    out = torch.empty(2, 2, device="cuda:1")
    assert torch.add(a, a, out=out) is out and out.tolist() == [[2, 2], [2, 2]]
    small = torch.empty(0, device="cuda:1")
    torch.cat([a, a], out=small)
    assert small.shape == (4, 2) and small.sum().item() == 8
    small.resize_(2, 2)
    assert small.shape == (2, 2) and small.copy_(3).tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose_(0, 2),
        lambda x: x.squeeze_(),
        lambda x: x.squeeze_().t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(5),
        lambda x: x.resize_as_(torch.ones(3, device="cuda")),
        lambda x: x.as_strided_((2,), (1,)),
        lambda x: x.set_(torch.ones(7, device="cuda")),
        lambda x: torch.cat([x.new_ones(4)] * 2, out=x.resize_(0)),
        lambda x: setattr(x, "data", torch.ones(2, 2, device="cuda")),
    ],
)
def test_what_the_clock_knows_a_tensor_by_follows_its_sizes(gpus, change):
    x = torch.ones(2, 1, 3, device="cuda")
    before = x.form
    change(x)
    assert x.form == form_of(x.inner) == form_of(x) != before


def test_to_in_all_its_forms(gpus):
    x, other = torch.ones(2, 3), torch.zeros(1, dtype=torch.float64, device="cuda:1")
    for moved in (
        x.to("cuda:1"),
        x.to(GPU1),
        x.to(1),
        x.to(device="cuda:1"),
        x.to("cuda:1", torch.float64),
        x.to(other),
        x.to("cuda:1", non_blocking=True),
        x.to("cuda:1", torch.float32, False, True),
        x.cuda(1),
        x.cuda("cuda:1"),
        x.cuda(device=GPU1),
        x.to("cuda:1", memory_format=torch.contiguous_format),
    ):
        assert moved.device == GPU1 and moved.sum().item() == 6
    assert x.to(other).dtype == x.to("cuda:1", torch.float64).dtype == torch.float64
    on_gpu = x.to("cuda:1")
    assert on_gpu.to(torch.float16).device == GPU1 and on_gpu.half().dtype == torch.float16 and on_gpu.double().is_cuda
    assert on_gpu.to("cuda:3").get_device() == 3 and on_gpu.cpu().device == on_gpu.to("cpu").device == CPU


def test_to_copies_between_devices_and_only_then(gpus):
    x = torch.zeros(3, device="cuda:1")
    assert x.to("cuda:1") is x and x.cuda(1) is x and x.to(torch.float32) is x and x.to("cuda:1", copy=True) is not x
    copied = x.to("cuda:2")
    back = copied.cpu()
    copied += 1
    assert x.sum().item() == 0 and back.sum().item() == 0 and copied.sum().item() == 3
    cpu = torch.zeros(3)
    assert cpu.cpu() is cpu and cpu.to("cpu") is cpu


def test_gradients_cross_devices_both_ways(gpus):
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    h = (w.to("cuda:0") * 3).to("cuda:1") ** 2
    assert h.device == GPU1
    h.sum().cpu().backward()
    assert w.grad.device == CPU and w.grad.tolist() == [18, 36]
    v = torch.ones(2, device="cuda:1", requires_grad=True)
    buffer = torch.zeros(2, device="cuda:0")
    buffer.copy_(v * 2)
    buffer.sum().backward()
    assert v.grad.device == GPU1 and v.grad.tolist() == [2, 2]


def test_second_derivatives(gpus):
    x = torch.tensor(3.0, device="cuda:1", requires_grad=True)
    (first,) = torch.autograd.grad(x.to("cuda:0") ** 3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert first.item() == 27 and second.item() == 18


def test_reading(gpus):
    x = torch.tensor([[1, 2], [3, 4]], device="cuda:1")
    assert x.tolist() == [[1, 2], [3, 4]] and x[0, 0].item() == 1 and int(x[1, 1]) == 4 and bool(x[0, 0] == 1)
    assert f"{x.float().mean():.2f}" == "2.50" and len(x) == 2 and [int(v) for v in x[0]] == [1, 2]
    assert x.cpu().numpy().sum() == 10 and x.numpy(force=True).sum() == 10
    assert torch.tensor([x[0, 0], x[1, 1]]).tolist() == [1, 4]
    with pytest.raises(
        TypeError, match=r"can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu\(\) to copy"
    ):
        x.numpy()
    with pytest.raises(TypeError, match="can't convert cuda:1"):
        np.asarray(x)


def test_printing(gpus):
    assert repr(torch.ones(2, device="cuda:1")) == "tensor([1., 1.], device='cuda:1')"
    assert str(torch.tensor(3, device="cuda:0")) == "tensor(3, device='cuda:0')"
    assert (
        repr(torch.ones(1, device="cuda", dtype=torch.float64)) == "tensor([1.], device='cuda:0', dtype=torch.float64)"
    )
    w = torch.ones(1, device="cuda:1", requires_grad=True)
    assert repr(w) == "tensor([1.], device='cuda:1', requires_grad=True)"
    assert repr(w * 2) == "tensor([2.], device='cuda:1', grad_fn=<MulBackward0>)"
    assert repr(torch.nn.Parameter(torch.ones(1, device="cuda:1"))) == (
        "Parameter containing:\ntensor([1.], device='cuda:1', requires_grad=True)"
    )
    assert repr(torch.ones(2, 2, device="cuda:1")) == "tensor([[1., 1.],\n        [1., 1.]], device='cuda:1')"
    assert torch.ones(1, device="cuda").type() == "torch.cuda.FloatTensor"


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: a + b,
        lambda a, b: a.mul_(b),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch.maximum(a, b),
    ],
)
def test_two_devices_mixed_elementwise(gpus, operation):
    on = [torch.ones(2, 2, device=d) for d in ("cuda:0", "cuda:1", "cpu")]
    words = "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"
    for a, b, named in ((0, 1, ("cuda:0", "cuda:1")), (0, 2, ("cuda:0", "cpu"))):
        with pytest.raises(RuntimeError, match=words.format(*named)):
            operation(on[a], on[b])


@pytest.mark.parametrize(
    "operation",
    [
        torch.mm,
        lambda a, b: torch.cat([a, b]),
        torch.nn.functional.linear,
        lambda a, b: torch.nn.functional.embedding(a.long(), b),
        torch.matmul,
    ],
)
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:1", "cpu"), ("cpu", "cuda:1")])
def test_two_devices_mixed_elsewhere(gpus, operation, devices):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but") as raised:
        operation(*(torch.ones(2, 2, device=d) for d in devices))
    assert all(d in str(raised.value) for d in devices)


def test_convolution_says_types(gpus):
    net = torch.nn.Conv2d(1, 2, 3).to("cuda:0")
    words = r"Input type \(torch.FloatTensor\) and weight type \(torch.cuda.FloatTensor\) should be the same"
    with pytest.raises(RuntimeError, match=words + "$"):
        net(torch.ones(1, 1, 5, 5))
    with pytest.raises(RuntimeError, match=words + " or input should be a MKLDNN tensor and weight is a dense tensor$"):
        net(torch.ones(2, 1, 5, 5))
    with pytest.raises(
        RuntimeError, match=r"Input type \(torch.cuda.FloatTensor\) and weight type \(torch.FloatTensor\)"
    ):
        net.cpu()(torch.ones(2, 1, 5, 5, device="cuda:0"))
    with pytest.raises(RuntimeError, match=r"got weight is on cuda:1.*on cuda:0 .*wrapper_CUDA__cudnn_convolution\)"):
        net.cuda(1)(torch.ones(2, 1, 5, 5, device="cuda:0"))


def test_the_first_tensor_is_the_measure(gpus):
    """In PyTorch's words; taken from reports of people with real GPUs."""
    cpu, gpu = torch.ones(2, 2), torch.ones(2, 2, device="cuda:0")
    with pytest.raises(
        RuntimeError, match=r"got mat2 is on cuda:0, different from other tensors on cpu .*wrapper_CUDA_mm\)"
    ):
        cpu @ gpu
    with pytest.raises(
        RuntimeError, match=r"got mat2 is on cpu, different from other tensors on cuda:0 .*wrapper_CUDA_mm\)"
    ):
        gpu @ cpu
    words = r"got index is on cpu, different from other tensors on cuda:0 .*method wrapper_CUDA__index_select\)"
    with pytest.raises(RuntimeError, match=words):
        torch.nn.Embedding(3, 2, device="cuda:0")(torch.tensor([1]))


@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
@pytest.mark.parametrize("origin", ["cpu", "cuda:0", "cuda:1"])
def test_what_writes_a_value_takes_a_single_number_from_anywhere(gpus, home, origin):
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp and Fill.cpp; masked_fill_ is not for tensors on the CPU."""
    seven, first = torch.tensor(7.0, device=origin), torch.tensor([0], device=home)
    writes = [
        lambda x: x.__setitem__(x == 0, seven),
        lambda x: x.__setitem__([0, 1, 2], seven),
        lambda x: x.__setitem__(slice(None), seven),
        lambda x: x.index_put_((torch.arange(3, device=home),), seven),
        lambda x: [x.index_fill_(0, first + i, seven) for i in range(3)],
        lambda x: x.fill_(seven),
    ]
    if home != "cpu":
        writes.append(lambda x: x.masked_fill_(x == 0, seven))
    for write in writes:
        x = torch.zeros(3, device=home)
        write(x)
        assert x.tolist() == [7, 7, 7] and x.device == torch.device(home)


def test_other_values_must_be_where_the_tensor_is(gpus):
    x, y = torch.zeros(3), torch.zeros(3, device="cuda:0")
    for wrong, words in (
        (lambda: x.masked_fill_(x == 0, y[0]), "masked_fill_: Expected inputs to be on same device"),
        (
            lambda: y.masked_fill_(x == 0, 1.0),
            "expected self and mask to be on the same device, but got mask on cpu and",
        ),
        (lambda: x.index_put_((torch.tensor([0]),), y[:1]), "found at least two devices, cpu and cuda:0!"),
        (lambda: x.index_put_((torch.tensor([0]).cuda(),), x[:1]), r"indices should be either on cpu or .*\(cpu\)"),
        (lambda: y.index_select(0, torch.tensor([0])), r"method wrapper_CUDA__index_select\)"),
        (lambda: y.scatter_(0, torch.tensor([0]), y), r"method wrapper_CUDA_scatter__src\)"),
        (lambda: torch.bucketize(y, x), r"method wrapper_CUDA_Tensor_bucketize\)"),
    ):
        with pytest.raises(RuntimeError, match=words):
            wrong()


def test_a_tensor_is_called_a_tensor(gpus):
    x = torch.ones(2, device="cuda")
    assert repr(type(x)) == repr(torch.Tensor)
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \*: 'numpy.ndarray' and 'Tensor'"):
        np.ones(2) * x


def test_indices_may_lie_on_the_cpu_but_not_on_another_gpu(gpus):
    x, picked = torch.arange(4.0, device="cuda:0"), torch.tensor([2, 3])
    assert x[picked].tolist() == x[picked.cuda(0)].tolist() == [2, 3]
    x[picked] = 7
    x[picked] = torch.tensor([5.0, 6.0], device="cuda:0")
    assert x.tolist() == [0, 1, 5, 6]
    for indexed, device in ((x, "cuda:1"), (x.cpu(), "cuda:1")):
        words = rf"indices should be either on cpu or on the same device as the indexed tensor \({indexed.device}\)"
        with pytest.raises(RuntimeError, match=words):
            indexed[picked.to(device)]


def test_cpu_scalars_may_mix_and_others_may_not(gpus):
    x = torch.ones(3, device="cuda:1")
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3] and (torch.tensor(2.0) * x).device == GPU1
    with pytest.raises(RuntimeError, match="cuda:1 and cpu"):
        x + torch.ones(1)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3) + torch.tensor(2.0, device="cuda:1")


def test_invalid_ordinal(gpus):
    for use in (
        lambda: torch.ones(1, device="cuda:4"),
        lambda: torch.ones(1).cuda(9),
        lambda: torch.cuda.set_device(4),
        lambda: torch.nn.Linear(1, 1).to("cuda:4"),
    ):
        with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"):
            use()
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(4)


def test_raw_pointers_are_refused(gpus):
    x = torch.ones(1, device="cuda:1")
    for use in (x.__dlpack__, lambda: x.__cuda_array_interface__):
        with pytest.raises(RuntimeError, match="no addresses"):
            use()


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, that these kinds are young, or old
def test_sparse_is_refused(gpus):
    with pytest.raises(RuntimeError, match="dense"):
        torch.eye(3, device="cuda:1").to_sparse()
    with pytest.raises(RuntimeError, match="dense"):
        torch.sparse_coo_tensor([[0]], [1.0], (2,), device="cuda:1")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for x in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), nested, quantized):
        for move in (x.cuda, lambda x=x: x.to("cuda:1")):
            with pytest.raises(RuntimeError, match="dense"):
                move()


def test_data_and_grad(gpus):
    w = torch.ones(2, device="cuda:1", requires_grad=True)
    w.data = torch.zeros(2, device="cuda:1")
    assert w.tolist() == [0, 0] and w.requires_grad and not w.data.requires_grad
    w.data = torch.ones(3, device="cuda:2")
    assert w.device == torch.device("cuda", 2) and w.shape == (3,)
    with pytest.raises(RuntimeError, match="assigned grad has data located on a different device"):
        w.grad = torch.ones(3)
    w.grad = torch.ones(3, device="cuda:2")
    p = torch.nn.Parameter(torch.ones(2))
    p.data = p.data.cuda(1)  # an old way to move a parameter
    assert p.device == GPU1 and isinstance(p, torch.nn.Parameter) and p.requires_grad
    p.data = p.data.cpu()
    assert type(p) is torch.nn.Parameter and p.device == CPU


def test_deepcopy_and_pickle(gpus):
    w = torch.randn(2, 3, device="cuda:1", requires_grad=True)
    w.sum().backward()
    twin = copy.deepcopy(w)
    assert twin.device == GPU1 and torch.equal(twin, w) and twin.requires_grad and torch.equal(twin.grad, w.grad)
    with torch.no_grad():
        twin += 1
    assert not torch.equal(twin, w)
    loaded = pickle.loads(pickle.dumps(w))
    assert loaded.device == GPU1 and torch.equal(loaded, w) and loaded.requires_grad
    x = torch.zeros(4, device="cuda:0")
    base, view = copy.deepcopy((x, x[:2]))
    base += 1
    assert view.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(w * 2)


def test_conjugates_and_complex_numbers(gpus):
    z = torch.tensor([1 + 2j, 3 - 1j], device="cuda:1")
    assert z.conj().tolist() == [1 - 2j, 3 + 1j] and torch.fft.ifft(torch.fft.fft(z)).cpu().allclose(z.cpu())
    x = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.linalg.pinv(x.to("cuda:1")).cpu(), torch.linalg.pinv(x))  # conjugates inside C++
    assert torch.ops.aten.abs(self=z).tolist() == z.cpu().abs().tolist()  # without a first argument by position


@pytest.mark.parametrize(
    "compare",
    [
        F.mse_loss,
        F.smooth_l1_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        torch.allclose,
        torch.dist,
    ],
)
def test_what_is_pointwise_inside_names_two_devices(gpus, compare):
    words = "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cpu!"
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        compare(torch.ones(3, device="cuda:1"), torch.ones(3))


def test_equal_names_its_argument(gpus):
    with pytest.raises(RuntimeError, match="got other is on cpu, different from other tensors on cuda:1"):
        torch.equal(torch.ones(3, device="cuda:1"), torch.ones(3))


def test_a_shallow_copy_shares_memory(gpus):
    x = torch.ones(2, device="cuda:1")
    before = torch.cuda.memory_allocated(1)
    made = copy.copy(x)
    made[0] = 5
    assert made.device == GPU1 and x.tolist() == [5, 1] and torch.cuda.memory_allocated(1) == before
    weight = copy.copy(nn.Parameter(x))
    assert isinstance(weight, nn.Parameter) and weight.device == GPU1 and weight.requires_grad


def test_random_split_with_the_gpus_generator(gpus):
    generator = torch.Generator("cuda:1").manual_seed(0)
    with torch.device("cuda:1"):
        parts = torch.utils.data.random_split(range(10), [5, 5], generator=generator)
    assert sorted(i for part in parts for i in part) == list(range(10))


def test_what_was_overwritten_is_called_a_tensor_on_a_gpu(gpus):
    p = torch.ones(3, device="cuda:1", requires_grad=True)
    y = p.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"inplace operation: \[torch\.cuda\.FloatTensor \[3\]\], which is output 0"):
        y.sum().backward()


def test_a_vectorized_jacobian(gpus):
    x = torch.tensor([1.0, 2.0], device="cuda:1")
    found = torch.autograd.functional.jacobian(lambda x: x**2, x, vectorize=True)
    assert found.device == GPU1 and found.tolist() == [[2, 0], [0, 4]]


def test_factories_pin_memory(gpus):
    like, on_gpu = torch.ones(3), torch.ones(3, device="cuda:1")
    for made in (
        torch.empty(3, pin_memory=True),
        torch.tensor([1.0], pin_memory=True),
        torch.zeros_like(like, pin_memory=True),
        like.new_zeros(3, pin_memory=True),
        torch.randn(2, pin_memory=True, requires_grad=True),
        torch.empty_like(on_gpu, device="cpu", pin_memory=True),
        on_gpu.new_zeros(3, device="cpu", pin_memory=True),
        on_gpu.new_tensor([1.0], device="cpu", pin_memory=True),
        torch.tensor(on_gpu[0], device="cpu", pin_memory=True),
    ):
        assert made.is_pinned() and made.is_leaf and made.is_cpu
    for make in (torch.empty, on_gpu.new_zeros, torch.tensor):
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            make([3], device="cuda:1", pin_memory=True)
    assert not torch.empty(3, pin_memory=False).is_pinned()
    x = torch.ones(3, device="cuda:1", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = (x * x).sum()
    out.backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_new_is_on_the_same_gpu(gpus):
    x = torch.ones(2, 3, device="cuda:1")
    assert x.new(4, 5).shape == (4, 5) and x.new(4, 5).device == GPU1 and x.new([1, 2]).tolist() == [1, 2]
    assert x.new(2).zero_().tolist() == [0, 0] and torch.ones(2).new(3).is_cpu
    assert torch.distributions.Exponential(x).sample().device == GPU1
    before = gpus.traffic.copy()
    x.new(4, 5)
    assert gpus.traffic == before


def test_lists_of_scalars_become_tensors(gpus):
    losses = [torch.tensor(value, device="cuda:1") for value in (1.0, 3.0)]
    assert torch.Tensor(losses).mean() == 2 and torch.FloatTensor(losses).is_cpu
    assert torch.LongTensor([loss.long() for loss in losses]).tolist() == [1, 3]
    assert (float(losses[1]), int(losses[1]), [5, 6][losses[0].long()]) == (3.0, 3, 6)
    with pytest.raises(TypeError, match="only integer tensors"):
        [5, 6][losses[0]]


def test_what_an_assignment_takes_from_another_device(gpus):
    """A slice takes anything, as copy_ does; chosen elements take a number only."""
    x = torch.zeros(4, device="cuda:1")
    for index in (x == 0, torch.tensor([0, 1], device="cuda:1"), [0, 1]):
        with pytest.raises(RuntimeError, match="at least two devices, cuda:1 and cpu"):
            x[index] = torch.ones(2)
        x[index] = torch.tensor(5.0)
    x[1:3] = torch.tensor([7.0, 8.0])
    assert x.tolist() == [5, 7, 8, 5]
    source = torch.ones(2, requires_grad=True)
    filled = x.clone()
    filled[:2] = source
    filled.sum().backward()
    assert source.grad.tolist() == [1, 1]
    many = torch.zeros(2**18, device="cuda:1")
    torch.cuda.reset_peak_memory_stats(1)
    before = torch.cuda.memory_allocated(1)
    many[:] = torch.ones(2**18)
    assert torch.cuda.max_memory_allocated(1) == before, "no copy is made on the way"


def test_pinned_memory(gpus):
    x = torch.arange(6.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and not x.is_pinned() and torch.equal(pinned, x) and pinned.pin_memory() is pinned
    assert pinned.to("cuda:1", non_blocking=True).device == GPU1
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"):
        pinned.cuda().pin_memory()


def test_a_gpu_never_writes_into_a_scalar_on_the_cpu(gpus):
    loss, total = torch.tensor(1.0, device="cuda:1"), torch.tensor(0.0)
    for wrong in (
        lambda: total.add_(loss),
        lambda: torch.add(loss, loss, out=torch.empty(())),
        lambda: torch.stack([loss, total]),
        lambda: torch.nn.functional.cross_entropy(torch.ones(3, device="cuda:1"), torch.tensor(1)),
        lambda: torch.nn.functional.embedding(torch.tensor(1), torch.ones(3, 2, device="cuda:1")),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            wrong()
    total += loss.cpu()


def test_copies_into_a_cpu_tensor_know_their_gradient(gpus):
    a = torch.ones(3, requires_grad=True)
    t = a * 1
    t.copy_(torch.zeros(3, device="cuda:1"))
    t.sum().backward()
    assert a.grad.tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        a.copy_(torch.zeros(3, device="cuda:1"))


def test_old_names_of_types(gpus):
    x = torch.tensor([1.5, 2.0])
    with torch.cuda.device(2):
        moved = x.type("torch.cuda.DoubleTensor")
    assert moved.device == torch.device("cuda", 2) and moved.dtype == torch.float64
    assert moved.type("torch.cuda.IntTensor").device == moved.device  # stays where it is
    assert moved.type("torch.cuda.IntTensor").type() == "torch.cuda.IntTensor"
    for back in (moved.type("torch.FloatTensor"), moved.type(torch.FloatTensor), x.type(torch.float32)):
        assert back.device == CPU and torch.equal(back, x) and back.type() == "torch.FloatTensor"
    assert moved.type(torch.float16).device == moved.device
    with pytest.raises(ValueError, match=r"invalid type: 'torch.cuda.FooTensor'"):
        x.type("torch.cuda.FooTensor")


def test_meta_tensors_have_nothing_to_copy(gpus):
    for move in (lambda x: x.to("cuda:1"), lambda x: x.cuda(), lambda x: x.to("cuda", torch.float64)):
        with pytest.raises(NotImplementedError, match=r"^Cannot copy out of meta tensor; no data!$"):
            move(torch.ones(2, device="meta"))
    with pytest.raises(NotImplementedError, match=r"use torch.nn.Module.to_empty"):
        torch.nn.Linear(2, 2, device="meta").to("cuda:1")
    net = torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda:1")
    assert net.weight.device == GPU1 and net(torch.ones(1, 2, device=GPU1)).shape == (1, 2)


def test_functions_that_make_tensors_in_cpp(gpus):
    x = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    for function in (
        lambda x: torch.vander(x.detach()),
        lambda x: torch.vander(x.detach(), 2),
        lambda x: torch.vander(x.detach(), N=5, increasing=True),
        lambda x: torch.vander(x.detach(), 0),
        lambda x: torch.vander(x.long()),
        lambda x: torch.quantile(x, 0.3),
        lambda x: x.quantile(q=0.3, dim=0, keepdim=True),
        lambda x: torch.nanquantile(x, 0.3, interpolation="lower"),
        lambda x: torch.quantile(x, x.detach() / 4),
        lambda x: torch.linalg.matrix_rank(torch.outer(x, x)),
        lambda x: torch.linalg.matrix_rank(torch.outer(x, x) + torch.eye(3, device=x.device), tol=1.5, hermitian=True),
    ):
        y = x.detach().to("cuda:1").requires_grad_()
        ours, theirs = function(y), function(x)
        assert ours.device == GPU1 and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs)
        assert ours.requires_grad == theirs.requires_grad
        if ours.requires_grad:
            ours.sum().backward()
            torch.testing.assert_close(y.grad.cpu(), torch.autograd.grad(theirs.sum(), x)[0])


@pytest.mark.parametrize("where", ["cuda:1", "cpu", None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_takes_lengths_from_anywhere(gpus, where, reduction):
    losses, gradients = [], []
    for device in ("cpu", "cuda:1"):
        X = torch.linspace(-1, 1, 100).reshape(10, 2, 5).to(device).requires_grad_()
        lengths = [(10, 9), (2, 1)] if where is None else [torch.tensor(n, device=where) for n in ([10, 9], [2, 1])]
        if device == "cpu" and where:
            lengths = [n.cpu() for n in lengths]
        y = torch.tensor([[1, 2], [1, 3]], device=device)
        losses.append(torch.nn.functional.ctc_loss(X.log_softmax(2), y, *lengths, reduction=reduction))
        losses[-1].sum().backward()
        gradients.append(X.grad)
    assert losses[1].device == gradients[1].device == GPU1
    torch.testing.assert_close(losses[1].cpu(), losses[0])
    torch.testing.assert_close(gradients[1].cpu(), gradients[0])


def test_type_as_moves(gpus):
    x = torch.ones(2, dtype=torch.float64, device="cuda:1")
    assert torch.ones(2).type_as(x).device == GPU1 and torch.ones(2).type_as(x).dtype == torch.float64
    assert x.type_as(torch.ones(1)).device == CPU


def test_what_reads_memory_directly_is_refused(gpus):
    x = torch.ones(2, device="cuda:1")
    for use in (lambda: x.apply_(lambda v: v), lambda: torch.utils.dlpack.to_dlpack(x),
                lambda: torch.utils.dlpack.from_dlpack(x), lambda: torch.from_dlpack(x)):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError), match=r"no addresses|only implemented on CPU"):
            use()


def test_memory_formats_survive_a_move(gpus):
    x = torch.ones(2, 3, device="cuda:0").t()
    assert x.to("cuda:1").stride() == (1, 3)
    assert x.to("cuda:1", memory_format=torch.contiguous_format).stride() == (2, 1)
