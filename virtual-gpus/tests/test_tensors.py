"""Tensors on virtual GPUs behave as PyTorch documents it for real ones: making, moving, reading, writing, gradients."""

import copy
import pickle
from functools import partial

import pytest
import torch
from oracle import check_same_on_a_gpu
from torch import nn
from torch.nn import functional as F

from virtual_gpus.meta_cache import tensor_meta_of

np = pytest.importorskip("numpy")

ZEROS = torch.zeros  # imported, as it were, before any virtual GPU is on
CPU, GPU0, GPU1, GPU2 = torch.device("cpu"), *(torch.device("cuda", i) for i in range(3))
CPU_X = torch.arange(6.0).reshape(2, 3)


# Making

FACTORIES = [  # (whose, its name, arguments); those that PyTorch's list of operations has, test_ops compares
    *((torch, name, ((2, 3),)) for name in ("empty", "rand")),
    *((torch, name, (data,)) for name in ("tensor", "as_tensor", "asarray") for data in ([1.0, 2.0], np.arange(4.0))),
    *((torch, name, (5,)) for name in ("randperm", "hann_window")),
    *((torch.fft, "fftfreq", (5,)), (torch, "rand_like", (CPU_X,)), (CPU_X, "new_tensor", ([2, 3],))),
]


@pytest.mark.parametrize(("owner", "name", "args"), FACTORIES)
def test_factories_make_the_same_on_the_named_gpu(gpus, owner, name, args):
    def make(**options):  # looked up now, because virtual GPUs replace it
        torch.manual_seed(0)
        return getattr(owner, name)(*args, **options)

    plain = make()
    for device in ("cuda:1", GPU1, 1):
        made = make(device=device)
        assert made.device == GPU1 and made.is_cuda and not made.is_cpu and made.get_device() == 1
        assert (made.shape, made.dtype, made.is_leaf, plain.device) == (plain.shape, plain.dtype, True, CPU)
        assert name == "empty" or torch.equal(made.cpu(), plain)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu", "meta"])
def test_any_device_can_be_the_default(gpus, device):
    makers = [getattr(torch, name) for name in "zeros rand arange eye tensor as_tensor".split()]
    wanted = GPU0 if device == "cuda" else torch.device(device)

    def check(inside):
        for make in makers:
            assert make(1).device == (wanted if inside else CPU) and make(1, device="cpu").device == CPU
        assert torch.get_default_device().type == (wanted if inside else CPU).type

    with torch.device(device):
        check(inside=True)
        if wanted.type != "meta":  # by torch.randperm, which it has imported
            torch.utils.data.random_split(range(10), [5, 5], generator=torch.Generator(device))
    torch.set_default_device(device)
    try:
        check(inside=True)
    finally:
        torch.set_default_device(None)
    check(inside=False)


def test_cuda_without_an_index_is_the_current_gpu(gpus):
    assert torch.ones(1, device="cuda").device == GPU0 and ZEROS(2, device="cuda:1").device == GPU1
    with torch.cuda.device(2):
        assert torch.ones(1, device="cuda").device == torch.ones(1).cuda().device == GPU2
        assert torch.cuda.current_device() == 2
    with torch.cuda.device_of(torch.ones(1, device="cuda:3")):
        assert torch.cuda.current_device() == 3


def test_new_tensors_are_on_the_same_gpu_unless_they_are_told(gpus):
    """As test_ops says of the functions that have a place in PyTorch's list."""
    w = torch.randn(2, 3, device="cuda:1", requires_grad=True)
    for make in (torch.zeros_like, torch.rand_like, lambda w, **k: w.new_tensor([1], **k)):
        assert make(w).device == GPU1
        assert make(w, device="cpu").device == CPU and make(w, device="cuda:3").get_device() == 3
    with gpus.counting() as moved:
        assert w.new(4, 5).shape == (4, 5) and w.new(4, 5).device == GPU1 and torch.ones(2).new(3).is_cpu
    assert moved.total() == 0
    assert w.new([1, 2]).tolist() == [1, 2] and w.new([1], device=0).device == GPU0


def test_pinned_memory(gpus):
    x, on_gpu = torch.arange(6.0), torch.ones(3, device="cuda:1")
    pinned = x.pin_memory()
    assert pinned.is_pinned() and not x.is_pinned() and torch.equal(pinned, x) and pinned.pin_memory() is pinned
    assert pinned.to("cuda:1", non_blocking=True).device == GPU1 and not torch.empty(3, pin_memory=False).is_pinned()
    options = {"dtype": x.dtype, "pin_memory": True, "requires_grad": True}
    for made in (
        *(make([3], **options) for make in (torch.empty, torch.tensor, x.new_zeros)),
        *(make([3], device="cpu", **options) for make in (on_gpu.new_zeros, on_gpu.new_tensor)),
        torch.empty_like(on_gpu, device="cpu", **options),
        torch.tensor(on_gpu[0], device="cpu", **options),
    ):
        assert made.is_pinned() and made.is_leaf and made.is_cpu and made.requires_grad


# The same program on a GPU and on the CPU


def changed_in_place(x):
    row = x[0, 0]
    row += 1
    x[1, 2] = 5
    x[:, 0, 0] = torch.tensor([7.0, 8.0])  # from the CPU, as PyTorch allows
    return x.mul_(2).transpose_(0, 2) is x, x, row


def written_to_out(x):
    out, small = torch.empty_like(x), x.new_empty(0)
    assert torch.add(x, x, out=out) is out
    torch.cat([x, x], out=small)
    return out, small.clone(), small.resize_(2, 2).copy_(3)


def read(x):
    x = x.long()[0]
    numbers = [x[0, 1].item(), int(x[1, 1]), bool(x[0, 0] == 0), [int(v) for v in x[0]], [5, 6][x[0, 1]], len(x)]
    lists = torch.tensor([x[0, 0], x[1, 1]]), torch.LongTensor([*x[0]]), torch.Tensor([*x[0].float()])
    return x.tolist(), numbers, f"{x.float().mean():.2f}", x.numpy(force=True).sum(), [made.tolist() for made in lists]


def copied(x):
    w = x.clone().requires_grad_()
    w.square().sum().backward()
    twin, (base, view) = copy.deepcopy(w), copy.deepcopy((x, x[:1]))
    base += 1
    with torch.no_grad():
        twin += 1
    loaded = pickle.loads(pickle.dumps(w))
    return w, twin, twin.grad, base, view, loaded, loaded.requires_grad, copy.copy(nn.Parameter(x))


def conjugated(x):
    z = torch.complex(x[0, :, :3], x[1, :, :3])
    by_name = torch.ops.aten.abs(self=z)  # without a first argument by position
    return z.conj(), torch.fft.ifft(torch.fft.fft(z)), torch.linalg.pinv(z), by_name  # which conjugate inside C++


def copied_into(x):
    """A copy into a tensor with a history knows its gradient."""
    a = torch.ones(2, 3, 4, requires_grad=True)
    t = a * 1
    t.copy_(x)
    t.sum().backward()
    return a.grad.tolist()


def vandermonde(x):
    x = x[0, 0]
    return [torch.vander(x, *n) for n in ((), (2,), (0,))], torch.vander(x.long(), N=5, increasing=True)


def ctc_with_lengths_on_the_cpu(x):
    X = torch.linspace(-1, 1, 100).reshape(10, 2, 5).to(x.device).requires_grad_()
    loss = F.ctc_loss(
        X.log_softmax(2), torch.tensor([[1, 2], [1, 3]]).to(X.device), torch.tensor([10, 9]), torch.tensor([2, 1])
    )
    return loss, torch.autograd.grad(loss, X)


def zero_gradients(function, x):
    """C++ makes them."""
    x, y, seen = x.clone().requires_grad_(), x.clone().requires_grad_(), []
    x.register_hook(lambda grad: seen.append(grad))
    for factor in (function, function, lambda x: 3 * x):
        factor(x).sum().backward()
    return x.grad, seen, torch.autograd.grad(function(y).sum(), y)


PROGRAMS = {
    "zero gradients": partial(zero_gradients, torch.sgn),
    "zero gradients, repeat": partial(zero_gradients, lambda x: x.repeat(0, 1, 1)),
    "zero gradients, cat": partial(zero_gradients, lambda x: torch.cat([x[:0], x.detach()])),
    "in place": changed_in_place,
    "out=": written_to_out,
    "a jacobian": lambda x: torch.autograd.functional.jacobian(lambda x: x**2, x[0, 0], vectorize=True),
    "reading": read,
    "copies": copied,
    "conjugates": conjugated,
    "copy_ into the CPU": copied_into,
    "made in C++": vandermonde,
    "lengths on the CPU": ctc_with_lengths_on_the_cpu,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_same_as_on_the_cpu(gpus, name):
    check_same_on_a_gpu(lambda device: PROGRAMS[name](torch.arange(24.0, device=device).reshape(2, 3, 4)))


@pytest.mark.parametrize(
    "change",
    [
        *(lambda x: x.transpose_(0, 2), lambda x: x.squeeze_().t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(5)),
        *(lambda x: x.as_strided_((2,), (1,)), lambda x: x.set_(torch.ones(7, device="cuda"))),
        lambda x: torch.cat([x.new_ones(4)] * 2, out=x.resize_(0)),
        lambda x: setattr(x, "data", torch.ones(2, 2, device="cuda")),
    ],
)
def test_what_the_clock_knows_a_tensor_by_follows_its_sizes(gpus, change):
    x = torch.ones(2, 1, 3, device="cuda")
    before = x.tensor_meta
    change(x)
    assert x.tensor_meta == tensor_meta_of(x.inner) == tensor_meta_of(x) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.cfloat, torch.cdouble])
@pytest.mark.parametrize("shape", [(), (2,), (0,), (0, 3)])
def test_what_is_printed_of_a_tensor_names_its_dtype_where_that_of_one_on_the_cpu_does(gpus, dtype, shape):
    x = torch.ones(shape, dtype=dtype)
    assert repr(x.cuda()).replace("device='cuda:0'", "").replace(", ", "") == repr(x).replace(", ", "")


def test_printing(gpus):
    w = torch.ones(1, device="cuda:1", requires_grad=True)
    for tensor, text in (
        (torch.ones(2, 2, device="cuda:1"), "tensor([[1., 1.],\n        [1., 1.]], device='cuda:1')"),
        (w * 2, "tensor([2.], device='cuda:1', grad_fn=<MulBackward0>)"),
        (nn.Parameter(w.detach()), "Parameter containing:\ntensor([1.], device='cuda:1', requires_grad=True)"),
    ):
        assert repr(tensor) == str(tensor) == text


# Moving


def test_to_in_all_its_forms(gpus):
    x, other = torch.ones(2, 3), torch.zeros(1, dtype=torch.float64, device="cuda:1")
    ways = ["cuda:1", GPU1, 1, other, ("cuda:1", torch.float64), ("cuda:1", torch.float32, False, True)]
    for moved in (
        *(x.to(*(way if isinstance(way, tuple) else (way,))) for way in ways),
        x.to(device=1, non_blocking=True, memory_format=torch.contiguous_format),
        *(x.cuda(1), x.cuda("cuda:1"), x.cuda(device=GPU1), x.type_as(other)),
    ):
        assert moved.device == GPU1 and moved.sum().item() == 6
    assert x.to(other).dtype == x.to("cuda:1", torch.float64).dtype == x.type_as(other).dtype == torch.float64
    y = x.to("cuda:1")
    assert y.to(torch.float16).device == GPU1 and y.half().dtype == torch.float16
    assert y.to("cuda:3").get_device() == 3 and y.cpu().device == y.to("cpu").device == y.type_as(x).device == CPU
    turned = torch.ones(2, 3, device="cuda:0").t()
    assert turned.to("cuda:1").stride() == (1, 3)
    assert turned.to("cuda:1", memory_format=torch.contiguous_format).stride() == (2, 1)


def test_to_copies_between_devices_and_only_then(gpus):
    x = torch.zeros(3, device="cuda:1")
    assert x.to("cuda:1") is x and x.cuda(1) is x and x.to(torch.float32) is x and x.to("cuda:1", copy=True) is not x
    copied = x.to("cuda:2")
    back = copied.cpu()
    copied += 1
    assert x.sum().item() == 0 and back.sum().item() == 0 and copied.sum().item() == 3
    cpu = torch.zeros(3)
    assert cpu.cpu() is cpu and cpu.to("cpu") is cpu
    before = torch.cuda.memory_allocated(1)
    shallow = copy.copy(x)
    shallow[0] = 5
    assert x.tolist() == [5, 0, 0] and torch.cuda.memory_allocated(1) == before


def test_gradients_cross_devices_both_ways(gpus):
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    h = (w.to("cuda:0") * 3).to("cuda:1") ** 2
    assert h.device == GPU1
    (first,) = torch.autograd.grad(h.sum().cpu(), w, create_graph=True)
    first.sum().backward()
    assert first.device == w.grad.device == CPU and first.tolist() == [18, 36] and w.grad.tolist() == [18, 18]
    v = torch.ones(2, device="cuda:1", requires_grad=True)
    buffer = torch.zeros(2, device="cuda:0")
    buffer.copy_(v * 2)
    buffer.sum().backward()
    assert v.grad.device == GPU1 and v.grad.tolist() == [2, 2]


EMPTY = [[], ([],), (slice(None), []), ([], 0), ([[]],), ([[0, 2], [1, 1]],), [[0, 2], [1, 1]]]  # and nested
INDICES = [[0, 2], ([0, 2],), (slice(None), [0, 2]), (..., [True, False, True]), (0, range(2)), ([3, 0], (0, 2))]
MASKS = [(True,), (False,), (slice(1, 3), True), (True, [0, 2]), (True, ...)]  # without dimensions: all or nothing


@pytest.mark.parametrize("index", [*INDICES, *EMPTY, (None, [1]), *MASKS], ids=str)
@pytest.mark.parametrize("value", [1.5, torch.tensor(2.5), torch.ones(1, 1, 1)])
def test_lists_and_masks_are_indices(gpus, index, value):
    x, expected = torch.zeros(4, 3, device="cuda:1"), torch.zeros(4, 3)
    expected[index] = value
    masks = tuple(torch.tensor(i, device="cuda:1") if isinstance(i, bool) else i for i in index)
    for same in (index, masks) if index in MASKS else (index,):
        x.zero_()[same] = value
        assert x.tolist() == expected.tolist()
    with pytest.raises(RuntimeError, match="expanded size"):
        x[torch.tensor(False, device="cuda:1")] = torch.ones(2)


def test_a_number_of_numpy_is_no_tensor_that_would_be_copied_to_the_gpu(gpus):
    x = torch.zeros(4, 3, device="cuda:1")
    with gpus.counting() as moved:
        x[np.int64(2)] = 1.5
    assert x.tolist()[2] == [1.5] * 3 and moved.total("cpu", "cuda:1") == 0
    x[:, np.arange(2)] = 2.5
    assert x.tolist() == [[2.5, 2.5, 0], [2.5, 2.5, 0], [2.5, 2.5, 1.5], [2.5, 2.5, 0]]


def test_a_slice_takes_anything_and_chosen_elements_a_number_from_another_device(gpus):
    x = torch.zeros(4, device="cuda:1")
    for index in (x == 0, torch.tensor([0, 1], device="cuda:1"), torch.tensor([0, 1]), [0, 1]):
        with pytest.raises(RuntimeError, match="at least two devices, cuda:1 and cpu"):
            x[index] = torch.ones(2)
        x[index] = torch.tensor(5.0)
    x[torch.tensor([0, 3])] = torch.tensor([5.0, 6.0], device="cuda:1")
    x[1:3] = torch.tensor([7.0, 8.0])
    assert x.tolist() == [5, 7, 8, 6] == x[torch.arange(4)].tolist() == x[torch.arange(4).cuda(1)].tolist()
    source, filled = torch.ones(2, requires_grad=True), x.clone()
    filled[:2] = source
    filled.sum().backward()
    assert source.grad.tolist() == [1, 1]
    many = torch.zeros(2**18, device="cuda:1")
    torch.cuda.reset_peak_memory_stats(1)
    before = torch.cuda.memory_allocated(1)
    many[:] = torch.ones(2**18)
    assert torch.cuda.max_memory_allocated(1) == before, "no copy is made on the way"


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
        three = torch.zeros(3, device=home)
        assert (three + torch.tensor(2.0)).tolist() == [2, 2, 2] and (torch.tensor(2.0) * three).device == three.device
        writes.append(lambda x: x.masked_fill_(x == 0, seven))
    for write in writes:
        x = torch.zeros(3, device=home)
        write(x)
        assert x.tolist() == [7, 7, 7] and x.device == torch.device(home)


def test_a_tensor_is_called_a_tensor(gpus):
    x = torch.ones(2, device="cuda")
    assert repr(type(x)) == repr(torch.Tensor)
    for kind in (type(x), type(x.to_sparse())):  # as the class of a real one, torch.Tensor
        assert all(isinstance(t, kind) for t in (x, x.cpu(), x.to_sparse(), nn.Parameter(x))) and not isinstance(
            2, kind
        )
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \*: 'numpy.ndarray' and 'Tensor'"):
        np.ones(2) * x


# Numbers

INF, NAN = float("inf"), float("nan")
CONVERTED = {  # what an H100 makes of these, by the type that they are converted to; NaN is another one from float64
    torch.int8: [0, -1, 0, -1, 44, -1, -64],
    torch.uint8: [0, 255, 0, 255, 44, 0, 192],
    torch.int16: [0, -1, 0, -1, 300, -1, 25536],
    torch.int32: [0, 2**31 - 1, -(2**31), -1, 300, 2**31 - 1, -40000],
    torch.int64: [-(2**63), 2**63 - 1, -(2**63), -1, 300, 3 * 10**9, -40000],
}


@pytest.mark.parametrize(("dtype", "expected"), CONVERTED.items())
def test_what_integers_do_not_hold_is_converted_as_on_gpus(gpus, dtype, expected):
    x = torch.tensor([NAN, INF, -INF, -1.5, 300, 3e9, -40000], device="cuda:0")
    assert x.to(dtype).tolist() == torch.zeros(7, dtype=dtype, device="cuda:0").copy_(x).tolist() == expected
    assert x.double().to(dtype).tolist() == [-(2**31) if dtype is torch.int32 else expected[0], *expected[1:]]


TAKEN = [  # what an H200 computes from a tensor of the CPU and one of its own
    lambda c, g: g.select_scatter(c[0], 0, 1),
    lambda c, g: g.as_strided_scatter(c, (2, 2), (2, 1)),
    lambda c, g: torch.addcmul(g, g, c[0, 0]),
    lambda c, g: torch.lerp(g, g, c[0, 0]),
    lambda c, g: g.tensor_split(torch.tensor([1]))[0],
]


@pytest.mark.parametrize("call", TAKEN)
def test_what_takes_tensors_of_two_devices(gpus, call):
    c = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = call(c, c.to("cuda:0") + 1)
    assert out.device == torch.device("cuda:0") and torch.equal(out.cpu(), call(c, c + 1))


# Gradients


class Twice(torch.autograd.Function):
    """Two results, of which the second often has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x, x.sum()

    @staticmethod
    def backward(ctx, grad, other):
        assert grad.device == other.device
        return 2 * grad + other


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_gradients_that_fit_are_taken(gpus, device):
    """What does not fit is refused, as test_refusals says."""
    x = torch.ones(2, device=device, requires_grad=True)
    x.sum().backward(torch.tensor(3.0))  # a single number moves
    (x * 2).backward(torch.ones(2, device=device))
    assert x.grad.device == x.device and x.grad.tolist() == [5, 5]
    Twice.apply(x)[0].sum().backward()  # the other result's gradient is zeros, made in C++
    y, seen = x * 1, []
    for hooked in (x, y):
        hooked.register_hook(lambda grad: 2 * grad)
        hooked.register_hook(seen.append)
    y.sum().backward()
    assert x.grad.tolist() == [11, 11] and [grad.device for grad in (*seen, x.grad)] == 3 * [x.device]


def test_a_hook_follows_its_parameter(gpus):
    net, seen = nn.Linear(2, 1), []
    handle = net.weight.register_hook(lambda grad: seen.append(grad.device))
    net.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.device))
    for device in ("cuda:1", "cpu", "cuda:0"):
        net.to(device)
        net(torch.ones(1, 2, device=device)).sum().backward()
    assert seen == [GPU1, GPU1, CPU, CPU, GPU0, GPU0]
    handle.remove()
    net(torch.ones(1, 2, device="cuda:0")).sum().backward()
    assert seen[6:] == [GPU0]


def test_zero_gradients_cross_devices(gpus):
    x = torch.ones(2, device="cuda:0", requires_grad=True)
    torch.sgn(x.to("cuda:1")).sum().backward()
    assert x.grad.device == GPU0 and x.grad.tolist() == [0, 0] and torch.cuda.memory_allocated(0) == 2 * 512
