"""data_parallel of the primitives computes what one device does, and what PyTorch's own does. So does chapter 5."""

import ast
import copy
import inspect
import warnings
from pathlib import Path

import nbformat
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mgpu_lib as mgpu
from mgpu_lib.primitives import check_parallel, data_parallel, tensors_in
from mgpu_lib.virtual import virtual_gpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpus():
    with virtual_gpus(4) as machine:
        yield machine


def small_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def make_batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, 8, 8, generator=generator), torch.randint(3, (rows,), generator=generator)


def step(forward, net, X, y):
    """(output, gradient of the input, gradients of the parameters), all on the CPU, of a mean loss."""
    X = X.clone().requires_grad_()
    net.zero_grad()
    out = forward(X)
    F.cross_entropy(out, y.to(out.device)).backward()
    return [t.detach().cpu() for t in (out, X.grad, *(p.grad for p in net.parameters()))]


@settings(deadline=None, max_examples=25)
@given(k=st.integers(1, 5), rows=st.integers(1, 20), seed=st.integers(0, 2**31), on_cpu=st.booleans())
def test_a_step_equals_that_of_one_device(k, rows, seed, on_cpu):
    X, y = make_batch(rows, seed)
    plain = small_net(seed % 7)
    expected = step(plain, plain, X, y)
    with virtual_gpus(5) as machine:
        net, ids = copy.deepcopy(plain).to("cuda:0"), machine.devices[:k]
        batch = X if on_cpu else X.to("cuda:0")
        found = step(lambda X: data_parallel(net, X, ids), net, batch, y)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 16])
def test_a_step_equals_that_of_pytorch_s_own(gpus, k, rows):
    """Same parts in the same order, so bit by bit."""
    X, y = make_batch(rows)
    net, ids = small_net().to("cuda:0"), list(range(k))
    found = step(lambda X: data_parallel(net, X, ids), net, X.to("cuda:0"), y)
    expected = step(lambda X: nn.parallel.data_parallel(net, X, ids), net, X.to("cuda:0"), y)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [64, 9, 2])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_steps_equal_those_of_chapter_4(gpus, k, rows):
    devices = gpus.devices[:k]
    device_params = [mgpu.get_params(mgpu.lenet_params(), device) for device in devices]

    class LeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = nn.ParameterList(mgpu.lenet_params())

        def forward(self, X):
            return mgpu.lenet(X, list(self.params))

    net = LeNet().to(devices[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):  # a gradient that was not zeroed would show from the second step on
        X, y = torch.rand(rows, 1, 28, 28, generator=generator), torch.randint(10, (rows,), generator=generator)
        mgpu.train_batch(X, y, device_params, devices, lr=0.1)
        optimizer.zero_grad()
        F.cross_entropy(data_parallel(net, X, devices), y.to(devices[0])).backward()
        optimizer.step()
    assert mgpu.max_divergence([list(net.params), *device_params]) < 1e-5


def test_other_gpus_in_another_order(gpus):
    X, y = make_batch(7)
    plain = small_net()
    net = copy.deepcopy(plain).to("cuda:2")
    out = data_parallel(net, X, [2, 0, 3], output_device=1)
    assert out.get_device() == 1
    torch.testing.assert_close(out.cpu(), plain(X))
    F.cross_entropy(out, y.to("cuda:1")).backward()
    assert {p.grad.get_device() for p in net.parameters()} == {2}


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, pair, scale, *, extra, flag="add"):
        X, names = pair
        assert flag == "add" and names == {"a", "b"}
        return {"out": self.layer(X) * scale + extra["shift"][0], "rows": [X.sum(1)]}


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_nested_inputs_keywords_and_things_that_are_no_tensors(gpus, rows):
    plain = Nested()
    X, shift = torch.randn(rows, 2), torch.randn(rows, 2)
    expected = plain((X, {"a", "b"}), 2.0, extra={"shift": [shift]})
    out = data_parallel(
        plain.to("cuda:0"),
        ((X, {"a", "b"}), 2.0),
        gpus.devices,
        module_kwargs={"extra": {"shift": [shift]}, "flag": "add"},
    )
    torch.testing.assert_close(out["out"].cpu(), expected["out"])
    torch.testing.assert_close(out["rows"][0].cpu(), expected["rows"][0])
    assert out["out"].device == gpus.devices[0]


def test_only_keywords_hold_tensors(gpus):
    class Scaled(nn.Module):
        def forward(self, scale, *, X):
            return X * scale

    out = data_parallel(Scaled(), 3, gpus.devices, module_kwargs={"X": torch.arange(9.0)})
    assert out.tolist() == [3.0 * i for i in range(9)]


def test_no_gradient_is_kept_under_no_grad(gpus):
    net = small_net().to("cuda:0")
    with torch.no_grad():
        out = data_parallel(net, make_batch(9)[0], gpus.devices)
    assert not out.requires_grad and out.shape == (9, 3)


def test_idle_gpus_get_no_replica_and_no_bytes(gpus):
    net = small_net().to("cuda:0")
    for rows, busy in ((9, 3), (2, 2), (1, 1), (16, 4)):
        gpus.traffic.clear()
        data_parallel(net, make_batch(rows)[0], gpus.devices).sum().backward()
        assert {end for ends in gpus.traffic for end in ends} - {"cpu"} == {f"cuda:{i}" for i in range(busy)}


@pytest.mark.parametrize("k", [1, 2, 4])
def test_bytes_of_a_step(gpus, k):
    """(k - 1) of k parts of the rows travel; parameters twice, buffers once."""
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).to("cuda:0")
    params = sum(p.nbytes for p in net.parameters())
    buffers = sum(b.nbytes for b in net.buffers())
    X = torch.randn(8, 6).to("cuda:0")
    gpus.traffic.clear()
    out = data_parallel(net, X, gpus.devices[:k])
    out.sum().backward()
    each = 2 * params + buffers + (X.nbytes + 2 * out.nbytes) // k
    assert gpus.bytes_moved() == (k - 1) * each
    if k > 1:
        assert gpus.bytes_moved(source="cuda:0") + gpus.bytes_moved(target="cuda:0") == gpus.bytes_moved()


def test_buffers_of_replica_0_survive(gpus):
    net = nn.BatchNorm1d(1, momentum=1.0).to("cuda:0")
    data_parallel(net, torch.tensor([[1.0], [3.0], [10.0], [20.0]]), gpus.devices[:2])
    assert net.running_mean.tolist() == [2.0] and net.num_batches_tracked.item() == 1


def test_an_exception_says_in_which_replica_it_was(gpus):
    class Picky(nn.Module):
        def forward(self, X):
            if (X < 0).any():
                raise ValueError("a negative row")
            return X

    with pytest.raises(ValueError, match=r"(?s)Caught ValueError in replica 1 on device 1.*a negative row"):
        data_parallel(Picky(), torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0]), gpus.devices[:3])
    assert data_parallel(Picky(), torch.ones(6), gpus.devices[:3]).tolist() == [1.0] * 6


@pytest.mark.parametrize(
    "module, inputs, ids, message",
    [
        (
            lambda: nn.Linear(2, 2),
            lambda: torch.ones(4, 2),
            [0, 1],
            r"weight is on cpu.* to cuda:0, which is device_ids\[0\]",
        ),
        (lambda: nn.Linear(2, 2).to("cuda:1"), lambda: torch.ones(4, 2), [0, 1], "weight is on cuda:1: .* cuda:0"),
        (lambda: nn.BatchNorm1d(2, affine=False), lambda: torch.ones(4, 2), [2], "running_mean is on cpu.* cuda:2"),
        (nn.Identity, lambda: torch.ones(4, 2), [], "device_ids is empty"),
        (nn.Identity, lambda: torch.ones(4, 2), ["cpu"], "begins with the CPU"),
        (nn.Identity, lambda: (torch.ones(9, 2), torch.ones(4)), [0, 1, 2, 3], r"\[\(9, 2\), \(4,\)\].*number of rows"),
        (nn.Identity, lambda: (torch.ones(9), [torch.tensor(1.0)]), [0, 1], r"\[\(9,\), \(\)\]"),
        (nn.Identity, lambda: "no tensor", [0, 1], r"shapes \[\]"),
    ],
)
def test_what_cannot_be_done_says_why(gpus, module, inputs, ids, message):
    with pytest.raises(ValueError, match=message):
        data_parallel(module(), inputs(), ids)


def test_keywords_are_checked_too(gpus):
    with pytest.raises(ValueError, match=r"\(9,\), \(3,\)"):
        data_parallel(nn.Identity(), torch.ones(9), [0, 1, 2, 3], module_kwargs={"mask": torch.ones(3)})


def test_pytorch_s_own_loses_rows_where_ours_refuses(gpus):
    """Negative control: the reason for `check_parallel`."""

    class Second(nn.Module):
        def forward(self, X, other):
            return other

    inputs = (torch.ones(9), torch.arange(4.0))
    assert nn.parallel.data_parallel(Second(), inputs, [0, 1, 2, 3]).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="same number of rows"):
        data_parallel(Second(), inputs, [0, 1, 2, 3])


def test_tensors_in_looks_where_scatter_cuts():
    tensors = [torch.tensor(float(i)) for i in range(5)]
    nest = {"a": tensors[0], "b": [(tensors[1], 3), {"c": (tensors[2], [tensors[3]])}], "d": "text", "e": tensors[4]}
    assert [t.item() for t in tensors_in([nest])] == [0, 1, 2, 3, 4]
    assert list(tensors_in(["text", None, []])) == []


def functions(source):
    """Functions at the top level of `source` by name, as text without docstrings and layout."""
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for node in found.values():
        node.body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return {name: ast.dump(node) for name, node in found.items()}


def test_chapter_5_shows_the_whole_module():
    notebook = nbformat.read(ROOT / "chapters" / "05-the-parallel-primitives.ipynb", as_version=4)
    shown = {
        name: text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for name, text in functions(cell.source).items()
    }
    shipped = functions((ROOT / "mgpu_lib" / "primitives.py").read_text(encoding="utf-8"))
    shipped |= functions(inspect.getsource(tensors_in).replace(", Tensor)", ", torch.Tensor)"))
    assert shipped.keys() == {"tensors_in", "check_rows", "check_parallel", "data_parallel"}
    assert {name: shown.get(name) for name in shipped} == shipped


def test_a_right_call_passes_without_a_warning(gpus):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_parallel(nn.Linear(2, 2).to("cuda:0"), (torch.ones(4, 2), {"n": 3}), gpus.devices)
        data_parallel(nn.Linear(2, 2).to("cuda:0"), torch.ones(4, 2), gpus.devices)
