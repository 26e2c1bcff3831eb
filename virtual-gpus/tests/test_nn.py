"""Networks on virtual GPUs: layers, optimizers, moving modules, nn.parallel, DataParallel, autocast, checkpoints."""

import copy
import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ranks
import torch
from oracle import check_same_on_a_gpu
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves
from versions import since


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


def batch(n=10):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def test_a_network_goes_where_a_tensor_is(gpus):
    like = torch.ones(2, dtype=torch.float64, device="cuda:1")
    for net in (small_net().to(like), small_net().to(tensor=like), small_net().cuda().to(like, non_blocking=True)):
        assert {(p.device, p.dtype) for p in net.parameters()} == {(like.device, like.dtype)}
    assert net.to(torch.ones(2))[0].weight.device.type == "cpu"


@since("2.11")
def test_complex_parameters_in_data_parallel(gpus):
    net, X = nn.Linear(10, 10, dtype=torch.cfloat), torch.rand(4, 10, dtype=torch.cfloat)
    expected = net(X)
    out = nn.DataParallel(net.cuda())(X.cuda())
    out.real.sum().backward()
    torch.testing.assert_close(out.detach().cpu(), expected)
    assert net.bias.grad.tolist() == [4] * 10


PLAIN = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam Rprop ASGD"
OPTIMIZERS = {
    **{name: getattr(torch.optim, name) for name in PLAIN.split()},
    "SGD for loop, momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=False),
    "Adam fused": partial(torch.optim.Adam, fused=True),
    "Adam capturable": lambda p, lr: torch.optim.Adam(p := [*p], lr, capturable=p[0].is_cuda),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_equal_those_on_the_cpu(gpus, name):
    def train(device):
        net, (X, y) = small_net().to(device), (t.to(device) for t in batch())
        net[0].bias.requires_grad_(False)  # before batch norm its gradient is rounding noise; some blow it up
        optimizer = OPTIMIZERS[name](net.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(X), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return list(net.parameters())

    check_same_on_a_gpu(train)


def test_optimizers_take_their_foreach_path(gpus):
    net, X = small_net().to("cuda:1"), batch()[0].cuda(1)
    net(X).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    assert gpus.timeline[-1].name == "_foreach_add_"


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
def test_a_step_between_two_backward_passes_is_noticed(gpus, options):
    w = nn.Parameter(torch.ones(2, device="cuda:1"))
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    torch.optim.Adam([w], 0.1, **options).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_over_two_gpus(gpus):
    layers = [nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 2).to("cuda:1")]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer, before = torch.optim.Adam(parameters), [p.detach().clone() for p in parameters]
    layers[1](layers[0](torch.ones(3, 4, device="cuda:0")).to("cuda:1")).sum().backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    assert all(not torch.equal(a, b) and a.device == b.device for a, b in zip(before, parameters, strict=True))


def with_gradients(net, X):
    """What a network gives, its gradients, and what it keeps from the batch."""
    out = net(X.requires_grad_())
    out.square().sum().backward()
    return out, [t.grad for t in (X, *net.parameters())], list(net.buffers())


def packed(device):
    lstm, X = nn.LSTM(3, 4, batch_first=True).to(device), torch.randn(2, 5, 3).to(device)
    rows = nn.utils.rnn.pack_padded_sequence(X, torch.tensor([5, 3]), batch_first=True)
    out, sizes = nn.utils.rnn.pad_packed_sequence(lstm(rows)[0], batch_first=True)
    return out, sizes.tolist()


def padded(batch_first, side, device):
    parts = [torch.randn(n, 3, requires_grad=True) for n in (2, 4, 1)]
    options = {"batch_first": batch_first, "padding_value": 7.0, "padding_side": side}
    out = nn.utils.rnn.pad_sequence([part.to(device) for part in parts], **options)
    return out, [grad.tolist() for grad in torch.autograd.grad(out.sum(), parts)]


def normed_twice(device):
    x, w = (torch.randn(*shape, dtype=torch.float64).to(device).requires_grad_() for shape in ((2, 8), (8,)))
    first = torch.autograd.grad(F.rms_norm(x, (8,), w).pow(3).sum(), x, create_graph=True)[0]
    return torch.autograd.grad(first.pow(2).sum(), (x, w))


def recomputed(device):
    net, X = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).to(device), torch.ones(3, 4).to(device)
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(net, X, use_reentrant=False)
    found = torch.autograd.grad(out.sum(), net.parameters())
    torch.manual_seed(1)
    torch.testing.assert_close(found, torch.autograd.grad(net(X).sum(), net.parameters()))
    return found


def transformer(mode, training, device):
    """Where it isn't padded; without nested tensors, which the CPU's takes where it can."""
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    net, X = nn.TransformerEncoder(layer, 2).train(training).to(device), torch.randn(2, 3, 8).to(device)
    padded = torch.tensor([[False, False, True], [False, True, True]], device=device)
    with mode():
        return net(X, src_key_padding_mask=padded)[~padded].clone()


PROGRAMS = {
    "a network": lambda device: with_gradients(small_net().to(device), batch()[0].to(device)),
    "a deep copy": lambda device: with_gradients(copy.deepcopy(small_net().cuda()).to(device), batch()[0].to(device)),
    **{f"padded {first} {side}": partial(padded, first, side) for first in (False, True) for side in ("left", "right")},
    **{"packed": packed, "RMS norm, twice": normed_twice, "recomputation": recomputed},
    "RMS norm of two types": lambda device: nn.RMSNorm(8).to(device)(torch.randn(2, 8).bfloat16().to(device)),
    "transformer, training": partial(transformer, torch.no_grad, True),
    "transformer, evaluation": partial(transformer, torch.no_grad, False),
    "transformer, inference": partial(transformer, torch.inference_mode, False),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, that it makes such a norm of others
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_same_as_on_the_cpu(gpus, name):
    check_same_on_a_gpu(PROGRAMS[name])


def test_the_first_of_padded_sequences_decides(gpus):
    whole, part = torch.tensor([1], device="cuda:1"), torch.ones(2, device="cuda:0")
    padded = nn.utils.rnn.pad_sequence([whole, part], batch_first=True)
    assert padded.dtype == torch.int64 and padded.get_device() == 1 and padded.tolist() == [[1, 0], [1, 1]]


SCATTERED = "RNN module weights are not part of single contiguous chunk of memory. This"
REPLACED = {  # what a program does with a recurrent network, and whether an H100 warns of its weights then
    "nothing": (lambda net: None, False),
    "clone": (lambda net: each(net, torch.clone), True),
    "clone and flatten": (lambda net: (each(net, torch.clone), net.flatten_parameters()), False),
    "write": (lambda net: each(net, torch.detach), False),
    "deepcopy": (lambda net: setattr(net, "forward", copy.deepcopy(net).forward), True),
    "views of one": (lambda net: vector_to_parameters(parameters_to_vector(net.parameters()), net.parameters()), False),
    "there and back": (lambda net: net.cpu().cuda(), False),
    "bfloat16": (lambda net: net.bfloat16(), True),
}


def each(net, function):
    for parameter in net.parameters():
        parameter.data = function(parameter.data)


@pytest.mark.parametrize(("replace", "warned"), REPLACED.values(), ids=REPLACED)
def test_cudnn_warns_of_weights_that_do_not_lie_together(gpus, replace, warned):
    net = nn.GRU(8, 16).cuda()
    replace(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(torch.ones(1, 1, 8, device="cuda", dtype=net.weight_hh_l0.dtype))
        with torch.backends.cudnn.flags(enabled=False):
            net(torch.ones(1, 1, 8, device="cuda", dtype=net.weight_hh_l0.dtype))
    assert [str(w.message).startswith(SCATTERED) for w in caught] == [True] * warned


def test_modules_move_in_place_and_keep_their_parameters(gpus):
    net = small_net()
    parameters, X, y = list(net.parameters()), *batch()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for device in ("cuda:0", "cuda:3", "cuda:3", "cpu", "cuda:1"):
        assert net.to(device) is net
        assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
        assert all(p.device == torch.device(device) and isinstance(p, nn.Parameter) and p.is_leaf for p in parameters)
        assert {b.device for b in net.buffers()} == {torch.device(device)}
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X.to(device)), y.to(device))  # stays alive while the module moves
        loss.backward()
        before = parameters[0].tolist()
        optimizer.step()
        assert parameters[0].tolist() != before
    assert all(type(p) is nn.Parameter for p in net.cpu().parameters())
    assert net.cuda(2) is net and parameters[0].get_device() == 2
    net.half()
    assert parameters[0].dtype == torch.float16 and parameters[0].get_device() == 2


def test_modules_move_in_inference_mode(gpus):
    net, X = small_net().eval(), batch()[0]
    expected = net(X)
    with torch.inference_mode():
        for device in ("cuda:0", "cuda:3", "cpu", "cuda:1"):
            assert {p.device for p in net.to(device).parameters()} == {torch.device(device)}
            torch.testing.assert_close(net(X.to(device)).cpu(), expected)


def test_modules_that_move_in_several_threads(gpus):
    nets = [nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)]) for _ in range(4)]

    def shuttle(net):
        before = list(net.parameters())
        for i in range(8):
            net.to(f"cuda:{i % 4}" if i % 2 else "cpu")
            net(torch.ones(1, 2, device=before[0].device)).sum().backward()
        assert all(a is b and a.grad.get_device() == 3 for a, b in zip(before, net.parameters(), strict=True))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(shuttle, nets))
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_what_belongs_to_a_parameter_stays_when_its_module_moves(gpus):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[0].weight.decays = False
    net(torch.ones(1, 3)).sum().backward()
    gradient = net[0].weight.grad.tolist()
    for device in ("cuda:0", "cuda:1", "cpu"):
        weight = net.to(device)[0].weight
        assert weight is net[1].weight and weight.decays is False
        assert weight.grad.device == weight.device == torch.device(device) and weight.grad.tolist() == gradient
    assert vars(weight) == {"decays": False}
    for device in ("cuda:0", "cuda:1", "cpu"):  # an old way to move a parameter
        weight.data = torch.zeros(3, 3, device=device)
        assert weight.device == torch.device(device) and not weight.any() and weight.requires_grad
        assert weight.decays is False and isinstance(weight, nn.Parameter) and not weight.data.requires_grad
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_move_to_where_a_module_is_leaves_graphs_alone(gpus, device):
    net = nn.Linear(2, 1).to(device)
    weight, view = net.weight, net.weight.view(-1)
    loss = net(torch.ones(1, 2, device=device)).sum()
    net.to(device).float()
    loss.backward()
    assert net.weight is weight and weight.grad.tolist() == [[1, 1]] and view.tolist() == weight.flatten().tolist()
    with torch.autocast("cuda"):
        net(torch.ones(1, 2, device=device))
        net.to(device)
    assert net.double().weight is weight and weight.dtype == torch.float64 and weight.device == torch.device(device)
    assert weight.grad.dtype == torch.float64


def test_modules_made_on_a_gpu(gpus):
    layer = nn.Linear(2, 2, device="meta").to_empty(device="cuda:1")
    assert layer.weight.get_device() == layer(torch.ones(1, 2, device="cuda:1")).get_device() == 1
    with torch.device("cuda:2"):
        net = small_net()
    assert {t.get_device() for t in net.state_dict().values()} == {2}


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(2)).cuda().to("cuda:1"),
        lambda: nn.Sequential(nn.LazyLinear(4, device="cuda:1"), nn.LazyLinear(2, device="cuda:1")),
    ],
)
def test_lazy_modules(gpus, make):
    net = make()
    optimizer_sees = net[0].weight
    net(torch.ones(3, 5, device="cuda:1")).sum().backward()
    assert net[0].weight.shape == (4, 5) and {t.get_device() for t in net.state_dict().values()} == {1}
    assert net[0].weight is optimizer_sees and net[0].weight.grad is not None and type(net[0]) is nn.Linear


# --- nn.parallel ------------------------------------------------------------------------------------------------------


def test_threads_see_the_gpus_and_have_their_own_current_one(gpus):
    torch.cuda.set_device(2)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(lambda: (torch.ones(1, device="cuda:1").device, torch.cuda.current_device())).result()
    assert seen == (torch.device("cuda", 1), 0) and torch.cuda.current_device() == 2


def test_data_loader_pins_memory(gpus):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for workers in (0, 1):
            loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)
            loaded = [X for (X,) in loader]
            assert all(X.is_pinned() for X in loaded) and torch.cat(loaded).tolist() == list(range(8))
            assert loaded[0].to("cuda:1", non_blocking=True).get_device() == 1


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(gpus, dtype):
    net, X, y = small_net().to("cuda:1"), *(t.to("cuda:1") for t in batch())
    with torch.autocast("cuda", dtype=dtype):
        assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
        out = net(X)
        assert out.dtype == dtype
        loss = F.cross_entropy(out, y)
    assert loss.dtype == torch.float32 and not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu")
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.get_device() == 1 for p in net.parameters())
    with torch.autocast("cuda", dtype=dtype):
        assert nn.DataParallel(net, [1, 0])(X).dtype == torch.float16  # PyTorch tells its threads no other type
        with torch.autocast("cuda", enabled=False):
            assert net(X).dtype == torch.float32


def test_autocast_has_the_lists_of_cuda(gpus):
    """https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior"""
    x = torch.rand(4, 4, device="cuda:1", requires_grad=True)
    with torch.autocast("cuda"):
        half = x @ x
        assert half.dtype == torch.mv(x, x[0]).dtype == F.linear(x, x).dtype == (half + half).dtype == torch.float16
        in_full = [torch.exp, torch.log, torch.sum, torch.norm, F.softplus, partial(F.softmax, dim=1)]
        in_full += [partial(F.log_softmax, dim=1), partial(F.layer_norm, normalized_shape=(4,)), lambda t: t.sum(0)]
        in_full += [partial(F.rms_norm, normalized_shape=(4,)), lambda t: F.interpolate(t[None], scale_factor=2)]
        for run in (*in_full, lambda t: t**2, lambda t: t.cumsum(0), lambda t: F.mse_loss(t, t), torch.prod):
            assert run(half).dtype == torch.float32
        assert torch.exp(half.double()).dtype == torch.float64
        F.softmax(half, 1).sum().backward()
    assert x.grad.dtype == torch.float32 and torch.exp(half).dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the CPU's own autocast stays as it is
        assert F.softmax(torch.rand(4, 4) @ torch.rand(4, 4), 1).dtype == torch.bfloat16
        assert F.cross_entropy(torch.rand(4, 4).bfloat16(), torch.zeros(4, dtype=torch.long)).dtype == torch.float32
        assert torch.rand(4).bfloat16().prod().dtype == torch.float32


def test_autocast_makes_float32_in_the_kernel(gpus):
    """Bytes as an H200 counted them: a softmax reads half precision, a cross-entropy stays in it until the end."""
    half = torch.rand(64, 512, device="cuda:1", dtype=torch.float16, requires_grad=True)
    y = torch.zeros(64, dtype=torch.long, device="cuda:1")
    kept = {F.softmax: 128, F.log_softmax: 128, torch.sum: 0.5, torch.cumsum: 128, F.cross_entropy: 64 + 128 + 1}
    for function, kib in kept.items():
        before = torch.cuda.memory_allocated(1)
        torch.cuda.reset_peak_memory_stats(1)
        with torch.autocast("cuda"):
            out = function(half, *{F.cross_entropy: [y], torch.sum: []}.get(function, [1]))
        assert torch.cuda.max_memory_allocated(1) - before == kib * 1024, function
        assert out.dtype == torch.float32
        out.sum().backward()
        assert half.grad.dtype == torch.float16
        del out, half.grad
    with torch.autocast("cuda"):
        loss = F.cross_entropy(half, y)
    expected = F.nll_loss(F.log_softmax(half.detach().cpu(), 1).float(), y.cpu())
    torch.testing.assert_close(loss.detach().cpu(), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_autocast_lowers_recurrent_networks(gpus, kind):
    net, X = kind(3, 4).to("cuda:1"), torch.randn(2, 5, 3, device="cuda:1")

    def run():
        """The results, and the last states."""
        return tree_leaves(net(X[0] if isinstance(net, nn.RNNCellBase) else X))

    with torch.autocast("cuda"):
        out = run()
    assert {(t.dtype, t.get_device()) for t in out} == {(torch.float16, 1)}
    out[0].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    torch.testing.assert_close([t.float() for t in out], run(), atol=1e-2, rtol=1e-2)
    with torch.autocast("cuda", torch.bfloat16):  # of which an H100 makes cuDNN's float16
        net.bfloat16()
        assert {t.dtype for t in run()} == {torch.bfloat16 if isinstance(net, nn.RNNCellBase) else torch.float16}
        with torch.backends.cudnn.flags(enabled=False):
            assert {t.dtype for t in run()} == {torch.bfloat16}


@pytest.mark.parametrize("kind, name", [(nn.LSTMCell, "lstm_cell"), (nn.GRUCell, "gru_cell")])
def test_autocast_lowers_a_cell_that_is_called_as_a_function(gpus, kind, name):
    net, x, h = kind(3, 4).cuda(), torch.randn(2, 3, device="cuda"), torch.randn(2, 4, device="cuda")
    state = (h, h) if kind is nn.LSTMCell else h
    with torch.autocast("cuda"):
        called = getattr(torch, name)(x, state, *net.parameters())
        torch.testing.assert_close(called, net(x, state), atol=0, rtol=0)


PROMOTED = {
    "addcmul": lambda a, b: torch.addcmul(a, b, a),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "grid_sample": lambda a, b: F.grid_sample(a[None, None], b.view(1, 2, 4, 2), align_corners=False),
    "index_put": lambda a, b: a.index_put((torch.tensor([1], device=a.device),), b[:1]),
}


@pytest.mark.parametrize("function", PROMOTED.values(), ids=PROMOTED)
def test_autocast_promotes(gpus, function):
    """As on an H100."""
    wide = torch.rand(4, 4, device="cuda:1")
    with torch.autocast("cuda", torch.bfloat16):
        assert function(wide.bfloat16(), wide.bfloat16()).dtype == torch.bfloat16
        assert function(wide.bfloat16(), wide).dtype == function(wide, wide.half()).dtype == torch.float32
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"):
            function(wide.half(), wide.bfloat16())
        assert torch.cat([wide.half(), wide.half()]).dtype == torch.float16


def test_autocast_lowers_the_weights_of_a_cell_once(gpus):
    cell, x, hidden, held = nn.GRUCell(64, 64).to("cuda:1"), torch.randn(1, 64, device="cuda:1"), None, []
    with torch.autocast("cuda"):
        for _ in range(3):
            hidden = cell(x, hidden)
            held.append(torch.cuda.memory_allocated(1))
    assert held[2] - held[1] < sum(p.nbytes for p in cell.parameters()) / 4


# --- checkpoints ------------------------------------------------------------------------------------------------------


def saved(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file, **options)
    return file.getvalue()


def load(written, *where, **options):
    return torch.load(io.BytesIO(written), *where, **{"weights_only": True, **options})


def test_state_dict_roundtrip_and_map_location(gpus):
    net = small_net().to("cuda:1")
    written = saved(net.state_dict())
    places = {None: "cuda:1", "cpu": "cpu", "cuda:3": "cuda:3", torch.device("cuda", 2): "cuda:2", "cuda": "cuda:0"}
    for where, device in (
        *places.items(),
        ({"cuda:1": "cuda:0"}, "cuda:0"),
        (lambda storage, location: storage, "cpu"),
    ):
        state, twin = load(written, map_location=where), small_net()
        assert {t.device for t in state.values()} == {torch.device(device)}
        twin.load_state_dict(state)
        torch.testing.assert_close(twin.state_dict(), net.cpu().state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("move", [lambda s: s.cuda(1), lambda s: s.cuda(device=1), lambda s: s.to(device="cuda:1")])
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_a_map_location_that_moves_storages(gpus, move, options):
    x, seen = torch.arange(6.0), []
    written = saved({"x": x, "view": x[1:3], "y": torch.ones(2, device="cuda:3")}, **options)
    loaded = load(written, lambda storage, where: seen.append(where) or move(storage))
    assert all(t.get_device() == 1 for t in loaded.values()) and sorted(set(seen)) == ["cpu", "cuda:3"]
    loaded["x"][1] = 9
    assert loaded["view"].tolist() == [9, 2] and x[1] == 1
    assert load(written, lambda storage, where: storage)["y"].device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint16, torch.bfloat16])
def test_views_and_later_types_are_saved(gpus, dtype):
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda:1").to(dtype)
    for where, device in ((None, "cuda:1"), ("cuda:2", "cuda:2"), ("cpu", "cpu")):
        whole, part = load(saved([x, x[1:]]), where)
        assert whole.device == part.device == torch.device(device) and whole.dtype == whole.cpu().dtype == dtype
        whole[1] = 4  # still one storage
        assert whole.float().tolist() == [1, 4, 3] and part.float().tolist() == [4, 3]
    assert copy.deepcopy(x).float().tolist() == x.float().tolist() == [1, 2, 3]


READ = """
import sys, torch
state = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
print(type(state["w"]).__name__, state["w"].device, state["w"].tolist(), state["p"].requires_grad)
assert not any(name.startswith("virtual_gpus") for name in sys.modules)
try:
    torch.load(sys.argv[1], weights_only=True)
except RuntimeError as error:
    print(error)
"""


def test_a_checkpoint_loads_where_this_library_is_not(gpus, tmp_path):
    path, parameter = tmp_path / "checkpoint.pt", nn.Parameter(torch.ones(1, device="cuda:2"))
    torch.save({"w": torch.tensor([1.0, 2.0], device="cuda:1"), "p": parameter}, path)
    (tmp_path / "read.py").write_text(READ)
    said = ranks.python(tmp_path / "read.py", path).stdout
    assert "Tensor cpu [1.0, 2.0] True" in said
    assert said.count("\n") == 1 or "Attempting to deserialize object on" in said  # where there is no GPU


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_an_activation_s_backward_is_one_kernel(gpus, function):
    """PyTorch knows how to make these of others, and has a kernel for CUDA."""
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    y = function(x)
    start = gpus.elapsed()
    y.backward(torch.ones_like(y))
    kernels = [e.name for e in gpus.timeline.since(start) if e.gpu is not None and e.phase == "backward"]
    assert kernels == [f"{function.__name__}_backward"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_half_precision_with_an_output_in_float32(gpus, dtype):
    a, b, bias, wide = torch.randn(8, 16).to(dtype), torch.randn(16, 4).to(dtype), torch.randn(8, 4), torch.float32
    x, w, c = (t.to("cuda:1") for t in (a, b, bias))
    product, start = a.float() @ b.float(), gpus.elapsed()
    for found, expected in [
        (torch.mm(x, w, out_dtype=wide), product),
        (torch.bmm(x[None], w[None], out_dtype=wide), product[None]),
        (torch.addmm(c, x, w, out_dtype=wide, beta=0.5, alpha=2), 0.5 * bias + 2 * product),
        (torch.baddbmm(c[None], x[None], w[None], out_dtype=wide), (bias + product)[None]),
    ]:
        assert found.device == x.device
        torch.testing.assert_close(found.cpu(), expected)
    names = [event.name for event in gpus.timeline.since(start)]
    assert [name for name in names if name.endswith("mm")] == ["mm", "bmm", "addmm", "baddbmm"]
