"""What is refused, in PyTorch's words: many are taken from reports of people with real GPUs, others were read on one.

What errors.md of the book shows is tested there.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from versions import since

np = pytest.importorskip("numpy")
comm = torch.cuda.comm


def on(device, *shape):
    return torch.ones(shape or (2, 2), device=device)


# Tensors on two devices


def embed(ids, table):
    return F.embedding(ids.long(), table)


POINTWISE = [torch.add, Tensor.mul_, lambda a, b: torch.where(a > 0, a, b), torch.allclose, torch.dist, F.mse_loss]
POINTWISE += [lambda a, b: F.binary_cross_entropy_with_logits(b, a)]  # of which the target comes first
POINTWISE += [lambda a, b: torch.add(a, a, out=b)]
NAMED = {  # what each calls its second argument, or the first that is elsewhere, and its kernel
    **dict.fromkeys((torch.mm, torch.matmul, F.linear), ("mat2", "_mm")),
    **dict.fromkeys((lambda *ab: torch.cat(ab), lambda *ab: torch.stack(ab)), ("tensors", "_cat")),
    **{torch.equal: ("other", "__equal"), embed: ("index", "__index_select")},
}
SAME = "Expected all tensors to be on the same device, but "


@pytest.mark.parametrize("where", [("cuda:0", "cuda:1"), ("cuda:1", "cpu"), ("cpu", "cuda:1")])
def test_two_devices_are_named(gpus, where):
    """The first tensor is the measure."""
    a, b = map(on, where)
    for function in POINTWISE if a.is_cuda else ():
        with pytest.raises(RuntimeError, match=f"^{SAME}found at least two devices, {a.device} and {b.device}!$"):
            function(a, b)
    for function, (name, kernel) in NAMED.items():
        wrong, others = (a, b) if function is embed else (b, a)  # whose first tensor is the table
        words = f"got {name} is on {wrong.device}, different from other tensors on {others.device} "
        with pytest.raises(RuntimeError, match=rf"^{SAME}{words}\(when .* method wrapper_CUDA{kernel}\)$"):
            function(a, b)


class Moved(torch.autograd.Function):
    """The identity of a tensor; its gradient is moved to a device."""

    @staticmethod
    def forward(ctx, device, x):
        ctx.device = device
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return None, grad.to(ctx.device)


def returned(x, device):
    Moved.apply(device, x.requires_grad_()).sum().backward()


def hooked(x, device):
    def moved(grad):
        return grad.to(device)

    x.requires_grad_().register_hook(lambda grad: 2 * grad)
    x.register_hook(moved)
    x.sum().backward()


def differentiate(x, wrong):
    torch.autograd.grad([2 * x, x * 3], [x], [torch.ones_like(x), wrong])


def convolve(weights, x, images=1):
    """`weights` and `x` say where."""
    nn.Conv2d(1, 2, 3).to(weights.device)(torch.ones(images, 1, 5, 5, device=x.device))


def attend(*like, **options):
    F.scaled_dot_product_attention(*(torch.ones(1, 2, 2, 8).to(x) for x in like), **options)


def left_behind():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    for device in ("cpu", "cuda:0"):
        net.to(device)(torch.ones(1, 2, device=device)).sum().backward()
        optimizer.step()


def moved_too_early():
    net = nn.Linear(2, 1).to("cuda:0")
    loss = net(on("cuda:0")).sum()
    net.to("cuda:1")
    loss.backward()


QKV = "^Expected query, key, and value .*, but got query.device: {} key.device: {} and value.device: {} instead.$"
GIVEN = "^invalid gradient at index {} - expected device {} but got {}$"
HOOKED = r"^hook 'moved' has changed the type of value \(was torch.{}FloatTensor got torch.{}FloatTensor\)"
GOT = "got {} is on {}, different from other tensors on {} .*wrapper_CUDA_{}\\)$"
TWO = "found at least two devices, cuda:0 and cpu!"
ELSEWHERE = [  # what is said, by a call with a tensor of the CPU, of cuda:0 and of cuda:1
    (GOT.format("weight", "cuda:0", "cpu", "__slow_conv2d_forward"), lambda c, g, h: convolve(g, c)),
    (r"^Input type \(.*cuda.FloatTensor\) and weight type \(torch.Float", lambda c, g, h: convolve(c, g, 2)),
    (GOT.format("weight", "cuda:1", "cuda:0", "_cudnn_convolution"), lambda c, g, h: convolve(h, g, 2)),
    (GIVEN.format(0, "cuda:0", "cpu"), lambda c, g, h: (g.requires_grad_() * 2).backward(c)),
    (GIVEN.format(1, "cuda:0", "cuda:1"), lambda c, g, h: differentiate(g.requires_grad_(), h)),
    ("^Function MovedBackward returned an " + GIVEN[1:].format(0, "cuda:0", "cpu"), lambda c, g, h: returned(g, "cpu")),
    (HOOKED.format("cuda.", ""), lambda c, g, h: hooked(g, "cpu")),
    (HOOKED.format("", "cuda."), lambda c, g, h: hooked(c, "cuda:0")),
    (r"indices should be .* same device as the indexed tensor \(cpu\)", lambda c, g, h: c[h.long()]),
    (SAME, lambda c, g, h: g.requires_grad_().register_hook(lambda grad: grad + c) and g.sum().backward()),
    (SAME, lambda c, g, h: c + h.sum()),
    (SAME, lambda c, g, h: h + c[:1, 0]),  # one number, but no scalar
    (SAME, lambda c, g, h: c.sum().add_(h.sum())),  # a GPU never writes into a number on the CPU
    (SAME, lambda c, g, h: torch.add(g.sum(), g.sum(), out=torch.empty(()))),
    (SAME, lambda c, g, h: torch.stack([g.sum(), c.sum()])),
    (SAME, lambda c, g, h: F.embedding(torch.tensor(1), g)),
    (SAME, lambda c, g, h: nn.RMSNorm(2)(g)),
    (SAME, lambda c, g, h: g.to_sparse() + h.to_sparse()),
    ("two devices, cpu and cuda:0!", lambda c, g, h: c.index_put_((torch.tensor([0]),), g[0])),
    ("masked_fill_: Expected inputs to be on same device", lambda c, g, h: c.masked_fill_(c == 0, g[0, 0])),
    ("self and mask to be on the same device, but got mask on cpu and", lambda c, g, h: g.masked_fill_(c == 0, 1)),
    (r"method wrapper_CUDA__index_select\)", lambda c, g, h: g.index_select(0, torch.tensor([0]))),
    (r"method wrapper_CUDA_scatter__src\)", lambda c, g, h: g.scatter_(0, c.long(), g)),
    ("device with index '1' to a tensor located on device with index '0'", lambda c, g, h: setattr(g, "grad", h)),
    ("but it's on cuda:0$", lambda c, g, h: torch.tensor_split(g, tensor_indices_or_sections=g[0].long())),
    (QKV.format("cuda:0", "cuda:0", "cuda:1"), lambda c, g, h: attend(g, g, h)),
    (QKV.format("cpu", "cuda:0", "cpu"), lambda c, g, h: attend(c, g, c, is_causal=True)),
    ("same dtype", lambda c, g, h: attend(g.double(), c, g)),  # which comes first
    (GOT.format("attn_bias", "cpu", "cuda:0", "__scaled_dot.*"), lambda c, g, h: attend(g, g, g, attn_mask=c.bool())),
    ("must be on the same device", lambda c, g, h: left_behind()),
    ("before its parameters moved", lambda c, g, h: moved_too_early()),
    # what an H200 says of the CPU's single number beside a tensor of the GPU
    (GOT.format("min", "cpu", "cuda:0", "clamp_Tensor"), lambda c, g, h: g.clamp(c[0, 0])),
    (GOT.format("max", "cuda:0", "cpu", "clamp_max_Tensor"), lambda c, g, h: c[0, 0].clamp_max(g)),
    (GOT.format("imag", "cpu", "cuda:0", "out_complex_out"), lambda c, g, h: torch.complex(g, c[0, 0])),
    (GOT.format("mask", "cpu", "cuda:0", "_masked_select"), lambda c, g, h: g.masked_select(c[0, 0] > 0)),
    (GOT.format("weight", "cpu", "cuda:0", "__fused_rms_norm"), lambda c, g, h: F.rms_norm(g, (2,), c[0])),
    (GOT.format("index", "cpu", "cuda:0", "index_add"), lambda c, g, h: g[0].index_add(0, c[0, 0].long(), g[0, :1])),
    (TWO, lambda c, g, h: torch.addcdiv(g, g, c[0, 0])),
    (TWO, lambda c, g, h: torch.logical_and(c[0, 0], g)),
    (TWO, lambda c, g, h: F.mse_loss(g[0, 0], c[0, 0])),
    (TWO, lambda c, g, h: g.index_fill(0, c[0, 0].long(), 1)),
    ("^CPU Scalar support for self argument is not supported .* addcmul on", lambda c, g, h: c[0, 0].addcmul(g, g)),
    ("^CPU Scalar support for tensor1 .*, please swap your", lambda c, g, h: g.addcmul(c[0, 0], g)),
    ("block_diag: .* 0 is on device cuda:0 and input 1 is on", lambda c, g, h: torch.block_diag(g, c[0, 0])),
]


@pytest.mark.parametrize(("words", "call"), ELSEWHERE)
def test_what_is_elsewhere_is_said(gpus, words, call):
    with pytest.raises(RuntimeError, match=words):
        call(on("cpu"), on("cuda:0"), on("cuda:1"))


@pytest.mark.parametrize(("kind", "packed"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, True), (nn.RNN, False)])
def test_recurrent_networks_say_what_is_elsewhere(gpus, kind, packed):
    """As cuDNN's do, and not the kernels that run on a CPU; in the words of aten/src/ATen/native/RNN.h."""
    net, X, lengths = kind(3, 4), torch.randn(5, 2, 3), torch.tensor([5, 3])

    def run(weights, device, *hidden):
        rows = X.to(device)
        return net.to(weights)(nn.utils.rnn.pack_padded_sequence(rows, lengths) if packed else rows, *hidden)

    for weights, device in (("cuda:0", "cuda:1"), ("cpu", "cuda:1"), ("cuda:0", "cpu")):
        words = "Input and parameter tensors are not at the same device, found input tensor at"
        with pytest.raises(RuntimeError, match=f"^{words} {device} and parameter tensor at {weights}$"):
            run(weights, device)
    hidden = torch.zeros(1, 2, 4)
    hidden = (hidden.cuda(1), hidden) if kind is nn.LSTM else hidden
    words = "Input and hidden tensors are not at the same device, found input tensor at cuda:1 and hidden tensor at cpu"
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        run("cuda:1", "cuda:1", hidden)


DRAWS = [  # what is said, by a call with a generator of cuda:1
    ("Expected a 'cpu' device type for generator but found 'cuda'", lambda g: on("cpu").normal_(0, 1, generator=g)),
    ("Expected a 'cpu' device type for generator but found 'cuda'", lambda g: torch.poisson(on("cpu"), g)),
    ("Expected a 'cpu' device type for generator but found 'cuda'", lambda g: torch.randperm(4, generator=g)),
    ("'cuda:0' generator device but found 'cuda:1'", lambda g: torch.rand(2, device="cuda:0", generator=g)),
    ("'cuda' device type for generator but found", lambda g: on("cuda:1").normal_(generator=torch.Generator())),
]


@pytest.mark.parametrize(("words", "draw"), DRAWS)
def test_a_generator_draws_for_its_own_device(gpus, words, draw):
    with pytest.raises(RuntimeError, match=words):
        draw(torch.Generator("cuda:1"))


# What there isn't on CUDA, or on virtual GPUs


def twos():
    return [torch.empty(2, device=device) for device in ("cuda:0", "cuda:1")]


def cast_automatically(function, *args):
    with torch.autocast("cuda"):
        function(*args)


WIDE, SIX = torch.float32, torch.arange(6.0)
LAZY = nn.LazyLinear(3)
REFUSED = {  # (what is said, by which call), by the type of the error
    TypeError: [
        ("only implemented on CPU", lambda: on("cuda").apply_(abs)),
        ("only integer tensors", lambda: [5, 6][on("cuda").sum()]),
        ("can't convert cuda:1 device type tensor to numpy", lambda: np.asarray(on("cuda:1"))),
    ],
    NotImplementedError: [
        ("^Cannot copy out of meta tensor; no data!$", lambda: on("meta").to("cuda:1", torch.float64)),
        ("use torch.nn.Module.to_empty", lambda: nn.Linear(2, 2, device="meta").to("cuda:1")),
        ("storage", lambda: on("cuda").to_sparse().untyped_storage()),
        # what an H200 says of types that its kernels don't take, and of what CUDA hasn't
        ("\"addmm_cuda\" not implemented for 'Long'", lambda: on("cuda").long() @ on("cuda").long()),
        ("^Could not run 'aten::histogram.bin_ct' .* from the 'CUDA' backend. This", lambda: on("cuda").histogram(3)),
    ],
    RuntimeError: [
        ("^HalfTensor is not supported$", lambda: on("cuda").half().histc()),
        ("^getCudnnDataType.* not supported for Long$", lambda: F.conv1d(*2 * [on("cuda", 1, 2, 2).long()])),
        ("input dtypes must be the same", lambda: torch.mm(on("cuda").half(), on("cuda"), out_dtype=WIDE)),
        ("same as input dtype or fp32", lambda: torch.mm(*2 * [on("cuda").half()], out_dtype=torch.float64)),
        ("or mat1 dtype", lambda: torch.addmm(on("cuda").double(), *2 * [on("cuda").half()], out_dtype=WIDE)),
        ("graph leaves", lambda: copy.deepcopy(on("cuda").requires_grad_() * 2)),
        ("leaf Variable that requires grad", lambda: on("cpu").requires_grad_().copy_(on("cuda"))),
        ("Only dense CPU tensors can be", lambda: on("cuda").new_zeros(3, device="cuda:1", pin_memory=True)),
        ("Only dense CPU tensors can be", lambda: torch.tensor([3], device="cuda:1", pin_memory=True)),
        (r"nn\.BCELoss are unsafe to autocast", lambda: cast_automatically(nn.BCELoss(), *2 * [on("cuda")])),
        ("can't be used with `DataParallel`", lambda: nn.DataParallel(LAZY.to("cuda:1"), [1, 0])(on("cuda:1"))),
        # no addresses, and no other layouts
        ("no addresses", lambda: on("cuda").__dlpack__()),
        ("no addresses", lambda: on("cuda").__cuda_array_interface__),
        ("no addresses", lambda: torch.utils.dlpack.to_dlpack(on("cuda"))),
        ("no addresses", lambda: on("cpu").untyped_storage().cuda(1)),  # outside of torch.load
        ("dense", lambda: on("cuda").to_sparse_csr()),
        ("dense", lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 2), device="cuda:1")),
        ("dense", lambda: torch.nested.nested_tensor([SIX, SIX[:1]]).cuda()),
        ("dense", lambda: torch.quantize_per_tensor(SIX, 0.1, 0, torch.qint8).to("cuda:1")),
        ("_sparse_addmm of a sparse tensor is not", lambda: torch.sparse.mm(on("cuda").to_sparse(), on("cuda"))),
        ("but found index 5", lambda: torch.sparse_coo_tensor([[5]], [1.0], (2,), device="cuda")),
        # torch.nn.parallel.comm, in the words of torch/csrc/cuda/comm.cpp
        ("on the same GPU with one of", lambda: comm.reduce_add([on("cuda"), on("cuda")], 1)),
        ("len.devices. = 2 and len.chunk_sizes. = 3", lambda: comm.scatter(SIX, (0, 1), (2, 2, 2))),
        ("at least one device", lambda: comm.scatter(SIX, ())),
        ("to sum exactly to 6", lambda: comm.scatter(SIX, (0, 1), chunk_sizes=(2, 2))),
        ("stream at index 1", lambda: comm.scatter(SIX, (0, 1), streams=[None, torch.cuda.Stream(0)])),
        ("same shape as the source", lambda: comm.broadcast(SIX[:3], out=twos())),
        ("output tensor at index 0 has device 'cpu'", lambda: comm.broadcast(SIX[:2], out=[SIX[:2]])),
        ("Expected 5, but got total size 4", lambda: comm.scatter(SIX[:5], out=twos())),
        ("index 0 has incorrect shape", lambda: comm.scatter(SIX[:4, None], out=twos())),
        ("at least one output", lambda: comm.scatter(SIX, out=[])),
        ("to have shape", lambda: comm.gather(twos(), out=torch.empty(3))),
        ("same number of dimensions", lambda: comm.gather([on("cuda"), on("cuda:1")[0]])),
    ],
    AssertionError: [
        ("Invalid device id", lambda: torch.cuda.get_device_properties(4)),
        ("expects all inputs to be on GPUs", lambda: comm.reduce_add([on("cuda"), SIX], 0)),
        ("expects all inputs to be on GPUs", lambda: comm.reduce_add_coalesced([[on("cuda")], [on("cpu")]], 0)),
    ],
    ValueError: [
        ("invalid type: 'torch.cuda.FooTensor'", lambda: on("cpu").type("torch.cuda.FooTensor")),
        ("got 3x2, but expected 2x2", lambda: comm.reduce_add([on("cuda"), on("cuda:1", 3, 2)], 0)),
    ],
    IndexError: [("Dimension out of range", lambda: comm.gather(twos(), 1))],
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, that some kinds of tensors are young, or old
@pytest.mark.parametrize(("error", "words", "call"), [(error, *case) for error in REFUSED for case in REFUSED[error]])
def test_what_there_is_not_is_said(gpus, error, words, call):
    with pytest.raises(error, match=words):
        call()


UNIQUE = {  # of CUDA, and of no use on virtual GPUs
    "NCCL": lambda: torch.cuda.nccl.all_reduce([on("cuda")]),
    "utilization": lambda: torch.cuda.utilization(),
    "the runtime": lambda: torch.cuda.cudart().cudaHostRegister(0, 8, 0),
    "an offset": lambda: torch.cuda._set_rng_state_offset(8),
    "looking blocks up": lambda: torch.cuda.memory._allocation_traceback(on("cuda").data_ptr()),
    "metadata of memory": lambda: torch.cuda.memory._set_memory_metadata("step 1"),
    "annotations of memory": lambda: torch.cuda.memory._annotate_tensor(on("cuda"), "weights"),
    "out-of-memory observers": lambda: torch._C._cuda_attach_out_of_memory_observer(print),
    "history of pinned memory": lambda: torch.cuda.memory._record_memory_history(record_pinned_host_memory=True),
}
NEWER = {"looking blocks up": "2.13", "history of pinned memory": "2.14", "annotations of memory": "2.15"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=since(NEWER.get(name, "2.10"))) for name in UNIQUE])
def test_what_cannot_be_imitated_is_refused(gpus, name):
    with pytest.raises(RuntimeError, match="can't be imitated"):
        UNIQUE[name]()


def test_kernels_written_in_triton_are_refused_by_name(gpus):
    triton = pytest.importorskip("triton")

    def double(x, y):
        pass

    tuned = triton.autotune([triton.Config({}), triton.Config({}, num_warps=8)], key=[])(triton.jit(double))
    for kernel in (triton.jit(double), tuned):
        with pytest.raises(NotImplementedError, match="double is a Triton kernel"):
            kernel[(1,)](on("cuda"), on("cuda"))


@pytest.mark.filterwarnings("ignore:virtual GPUs don't compile")
def test_operators_that_compile_a_function_are_refused_in_words(gpus):
    x = on("cuda")
    with pytest.raises(NotImplementedError, match="cond takes a function and compiles it, and virtual GPUs"):
        torch.cond(x.sum() > 2, torch.sin, torch.cos, (x,))


def test_what_only_cuda_has_is_refused_unless_the_program_has_a_kernel(gpus):
    x, dropout = on("cuda:1"), torch.ops.aten._fused_dropout
    with pytest.raises(NotImplementedError, match=r'@torch.library.impl\("aten::_fused_dropout", "CPU"\)') as error:
        dropout(x, 0.5)
    assert "'CPU' backend" not in str(error.value)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_dropout", lambda x, p, generator=None: (p * x, x), "CPU")
        assert dropout(x, 0.5)[0].device == x.device and dropout(x, 0.5)[0].tolist() == [[0.5, 0.5]] * 2


def test_a_call_around_the_gpus_says_so(gpus):
    kept = [torch._C._VariableFunctions.zeros]  # the original, in a place where nobody looks for it
    with pytest.raises(RuntimeError, match="went around the virtual GPUs"):
        kept[0](2, device="cuda:1")


# What torch.use_deterministic_algorithms(True) forbids


def differentiated(function, *shape):
    out = function(torch.rand(shape, device="cuda:0", requires_grad=True))
    out.sum().backward()


UNCERTAIN = {  # what an H200 calls the kernels
    "_bincount_cuda": lambda x: torch.bincount(x[0].long(), x[0]),
    "_histc_cuda with floating point input": lambda x: x.histc(),
    "adaptive_avg_pool2d_backward_cuda": lambda x: differentiated(lambda x: F.adaptive_avg_pool2d(x, 2), 1, 1, 4, 4),
    "median CUDA with indices output": lambda x: x.median(0),
    "scatter_reduce_cuda_prod_": lambda x: x.scatter_reduce(0, x.long(), x, "prod"),
    "upsample_linear1d_backward_out_cuda": lambda x: differentiated(
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"), 1, 1, 2
    ),
}
CERTAIN = [
    lambda x: x.median(),
    lambda x: torch.bincount(x[0].long()),
    lambda x: x.scatter(0, x.long(), x),
    lambda x: x.scatter_reduce(0, x.long(), x, "sum"),
    lambda x: differentiated(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 1, 1, 2, 2),
]


@pytest.fixture
def deterministic(gpus):
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", UNCERTAIN)
def test_what_cuda_has_no_deterministic_algorithm_for(deterministic, kernel):
    call, x = UNCERTAIN[kernel], on("cuda:0")
    call(x)
    words = f"^{kernel} does not have a deterministic implementation, but you set 'torch.use_determ"
    deterministic(True)
    with pytest.raises(RuntimeError, match=words):
        call(x)
    deterministic(True, warn_only=True)
    with pytest.warns(UserWarning, match=words):
        call(x)


def test_what_cuda_has_deterministic_algorithms_for(deterministic):
    deterministic(True)
    for call in CERTAIN:
        call(on("cuda:0"))
