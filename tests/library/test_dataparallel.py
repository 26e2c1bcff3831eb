"""Chapter 6: what nn.DataParallel does, SimpleCNN, and checkpoints with and without the prefix `module.`."""

import ast
import copy
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from mgpu_lib import checkpoints
from mgpu_lib.checkpoints import add_prefix, save_checkpoint, strip_prefix
from mgpu_lib.models import SimpleCNN, resnet18
from mgpu_lib.virtual import virtual_gpus

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = ROOT / "chapters" / "06-dataparallel-in-one-line.ipynb"


@pytest.fixture
def machine():
    with virtual_gpus(4) as machine:
        yield machine


def images(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(10, (rows,), generator=generator)


def fresh(make=SimpleCNN, seed=0):
    torch.manual_seed(seed)
    return make()


def gradients(net):
    return [p.grad.cpu() for p in net.parameters()]


def assert_equal_states(state, other):
    assert list(state) == list(other)
    assert all(torch.equal(state[name].cpu(), other[name].cpu()) for name in state)


# SimpleCNN


def test_simple_cnn_has_the_shapes_it_says():
    net = fresh()
    assert sum(p.numel() for p in net.parameters()) == 76_938
    assert [tuple(m.weight.shape) for m in (net.conv1, net.conv2)] == [(64, 3, 3, 3), (128, 64, 3, 3)]
    assert net(torch.zeros(100, 3, 32, 32)).shape == (100, 10)
    assert fresh(lambda: SimpleCNN(7))(torch.zeros(2, 3, 9, 5)).shape == (2, 7)
    assert_equal_states(fresh().state_dict(), net.state_dict())


def test_the_chapter_shows_the_library_s_simple_cnn():
    def class_of(source):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name == "SimpleCNN":
                node.body = [part for part in node.body if not isinstance(part, ast.Expr)]
                return ast.dump(node)

    cells = nbformat.read(CHAPTER, as_version=4).cells
    shown = [class_of(cell.source) for cell in cells if cell.cell_type == "code" and "class SimpleCNN" in cell.source]
    assert shown == [class_of((ROOT / "mgpu_lib" / "models.py").read_text(encoding="utf-8"))]


# One device is the oracle


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 10, 16])
def test_a_step_equals_that_of_one_device(machine, gpus, rows):
    X, y = images(rows)
    plain, wrapped = fresh(), nn.DataParallel(fresh().to("cuda:0"), device_ids=range(gpus))
    F.cross_entropy(plain(X), y).backward()
    F.cross_entropy(wrapped(X), y.to("cuda:0")).backward()
    for expected, found in zip(gradients(plain), gradients(wrapped), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    for net in (plain, wrapped):
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9).step()
    for expected, found in zip(plain.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows, sizes", [(100, [25, 25, 25, 25]), (10, [3, 3, 3, 1]), (9, [3, 3, 3]), (2, [1, 1])])
def test_a_batch_need_not_be_divisible(machine, rows, sizes):
    class Spy(nn.Linear):
        def forward(self, X):
            seen.append((X.device.index, len(X)))
            return super().forward(X)

    seen = []
    assert nn.DataParallel(Spy(4, 3).to("cuda:0"))(torch.zeros(rows, 4)).shape == (rows, 3)
    assert [size for _, size in sorted(seen)] == sizes


def test_batch_norm_makes_resnet_differ_from_one_device_and_eval_mode_does_not(machine):
    X, y = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    for training in (True, False):
        plain = fresh(resnet18).train(training)
        wrapped = nn.DataParallel(fresh(resnet18).to("cuda:0"), device_ids=[0, 1]).train(training)
        F.cross_entropy(plain(X), y).backward()
        F.cross_entropy(wrapped(X), y.to("cuda:0")).backward()
        gap = max((a - b).norm() / a.norm() for a, b in zip(gradients(plain), gradients(wrapped)))
        assert (gap > 0.05) == training and (training or gap < 1e-3)


def test_only_gpu_0_s_batch_norm_statistics_survive(machine):
    norm = nn.BatchNorm1d(1, momentum=1.0).to("cuda:0")
    nn.DataParallel(norm)(torch.arange(4.0).repeat_interleave(2)[:, None])  # GPU i gets two rows that hold i
    assert (norm.running_mean.item(), norm.num_batches_tracked.item()) == (0.0, 1)


def test_mean_of_means_is_wrong_on_uneven_shards_and_sums_are_right(machine):
    class WithLoss(nn.Module):
        def __init__(self, net, reduction):
            super().__init__()
            self.net, self.reduction = net, reduction

        def forward(self, X, y):
            return F.cross_entropy(self.net(X), y, reduction=self.reduction).reshape(1)

    X, y = images(10)
    plain = fresh()
    F.cross_entropy(plain(X), y).backward()
    for reduction, combine in {"mean": torch.mean, "sum": lambda losses: losses.sum() / len(X)}.items():
        wrapped = nn.DataParallel(WithLoss(fresh().to("cuda:0"), reduction))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # vectors of one number: no warning on scalars
            combine(wrapped(X, y)).backward()
        gap = max((a - b).norm() / a.norm() for a, b in zip(gradients(plain), gradients(wrapped)))
        assert (gap > 0.05) == (reduction == "mean") and (reduction == "mean" or gap < 1e-5)


def test_a_wrapped_optimizer_zeroes_nothing(machine):
    net = nn.Linear(2, 1).to("cuda:0")
    wrapped = nn.DataParallel(torch.optim.SGD(net.parameters(), lr=0.1), device_ids=[0, 1])
    net(torch.ones(1, 2, device="cuda:0")).sum().backward()
    wrapped.zero_grad()
    assert net.weight.grad.abs().sum() > 0
    wrapped.module.zero_grad()
    assert net.weight.grad is None


@pytest.mark.parametrize("gpus, moved", [(1, True), (2, False)])
def test_the_network_is_moved_only_to_a_single_gpu(machine, gpus, moved):
    net = nn.Linear(2, 1)
    parallel = nn.DataParallel(net, device_ids=range(gpus))
    assert (net.weight.device.type == "cuda") == moved
    if not moved:
        with pytest.raises(RuntimeError, match=r"parameters and buffers on device cuda:0 .* on device: cpu"):
            parallel(torch.ones(2, 2))


def test_the_first_of_the_listed_gpus_gathers(machine):
    net = nn.DataParallel(nn.Linear(2, 1).to("cuda:2"), device_ids=[2, 3, 1])
    output = net(torch.ones(6, 2))
    output.sum().backward()
    assert {output.device.index, net.module.weight.grad.device.index} == {2}
    assert [ledger.peak > 0 for ledger in machine.ledgers] == [False, True, True, True]


def test_without_gpus_data_parallel_is_the_plain_module():
    program = (
        "import torch; from torch import nn; net = nn.DataParallel(nn.Linear(2, 1), device_ids=[0, 1]); "
        "print(net.device_ids, net(torch.ones(3, 2)).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout == "[] torch.Size([3, 1])\n", done.stderr


# Checkpoints


@pytest.fixture(params=[SimpleCNN, resnet18], ids=["SimpleCNN", "ResNet-18"])
def wrapped(request, machine):
    return nn.DataParallel(fresh(request.param).to("cuda:0"))


def test_stripping_gives_the_plain_network_s_state(wrapped):
    state = wrapped.state_dict()
    before = dict(state)
    stripped, plain = strip_prefix(state), wrapped.module.state_dict()
    assert dict(state) == before, "the argument stays as it is"
    assert list(stripped) == list(plain)
    assert all(stripped[name] is value for name, value in zip(stripped, state.values()))
    assert stripped._metadata == plain._metadata
    consume_prefix_in_state_dict_if_present(state, "module.")  # PyTorch's helper, which works in place
    assert list(state) == list(stripped) and state._metadata == stripped._metadata
    copy.deepcopy(wrapped.module).load_state_dict(stripped)


def test_there_and_back(wrapped):
    plain = wrapped.module.state_dict()
    assert_equal_states(add_prefix(plain), wrapped.state_dict())
    assert_equal_states(strip_prefix(add_prefix(plain)), plain)
    assert strip_prefix(add_prefix(plain))._metadata == plain._metadata
    other = nn.DataParallel(copy.deepcopy(wrapped.module))
    other.load_state_dict(add_prefix(plain))


def test_only_one_prefix_goes_and_only_at_the_front():
    state = {"module.submodule.weight": 1, "module.module.bias": 2, "module.conv1.weight": 3}
    assert strip_prefix(state) == {"submodule.weight": 1, "module.bias": 2, "conv1.weight": 3}
    assert strip_prefix({"conv1.weight": 1}) == {"conv1.weight": 1}
    assert strip_prefix({"modules.weight": 1}) == {"modules.weight": 1}
    assert strip_prefix({}) == add_prefix({}) == {}


def test_mixed_and_doubled_prefixes_are_refused():
    with pytest.raises(ValueError, match=r"1 of 2 names begin with 'module\.'.*'module\.a'.*'b'"):
        strip_prefix({"module.a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"all 1 names begin with 'module\.' already"):
        add_prefix({"module.a": 1})


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: net], ids=["wrapped", "plain"])
def test_a_saved_checkpoint_has_plain_names_and_loads_without_gpus(machine, tmp_path, wrap):
    net = fresh().to("cuda:0")
    save_checkpoint(wrap(net), tmp_path / "net.pt")
    state = torch.load(tmp_path / "net.pt", map_location="cpu", weights_only=True)
    assert_equal_states(state, net.state_dict())
    assert {value.device.type for value in state.values()} == {"cpu"}


def test_a_checkpoint_that_fails_leaves_the_old_one(machine, tmp_path, monkeypatch):
    def dies(state, path):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    path = tmp_path / "net.pt"
    save_checkpoint(fresh(), path)
    before = path.read_bytes()
    monkeypatch.setattr(checkpoints.torch, "save", dies)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(fresh(seed=1), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_is_replaced_in_one_step(tmp_path, monkeypatch):
    """By renaming a file of the same folder that is whole; while another is copied into place there is only a part."""
    replaced, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (replaced.append(paths), replace(*paths)))
    save_checkpoint(fresh(), tmp_path / "net.pt")
    [(temporary, path)] = replaced
    assert path == tmp_path / "net.pt" and temporary.parent == path.parent and list(tmp_path.iterdir()) == [path]


def test_loading_by_position_swaps_layers_of_equal_shape():
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, X):
            return self.second(F.relu(self.first(X)))

    class New(Old):
        def __init__(self):
            super().__init__()
            first = self.first
            del self.first  # defined in another order, and nothing else
            self.first = first

    old, new, X = fresh(Old), fresh(New, seed=1), torch.ones(2, 4)
    new.load_state_dict(dict(zip(new.state_dict(), old.state_dict().values())))
    assert torch.equal(new.first.weight, old.second.weight) and not torch.allclose(new(X), old(X))
    new.load_state_dict(old.state_dict())
    assert torch.equal(new(X), old(X))


# The memory ledger


@pytest.mark.parametrize("inside", [False, True])
def test_the_loss_outside_loads_gpu_0(inside):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)

        def forward(self, X, y=None):
            logits = self.head(self.embed(X))
            return logits if y is None else F.cross_entropy(logits, y).reshape(1)

    with virtual_gpus(4, backing="meta") as machine:
        net, X = nn.DataParallel(Words().to("cuda:0")), torch.zeros(4096, dtype=torch.long)
        loss = net(X, X).mean() if inside else F.cross_entropy(net(X), X.to("cuda:0"))
        loss.backward()
        first, *others = [ledger.peak for ledger in machine.ledgers]
    assert max(others) - min(others) <= 4096
    assert math.isclose(first, others[0], rel_tol=0.3) == inside
    assert inside or first > 4 * others[0]
