"""data_parallel of the primitives: what PyTorch's own does, and refuses what that cuts wrongly (test_equivalence.py:
one device's step)."""

import copy

import pytest
import torch
from common import images
from torch import nn
from torch.nn import functional as F

from mgpu_lib.primitives import data_parallel
from virtual_gpus import virtual_gpus


@pytest.fixture
def gpus():
    with virtual_gpus(4) as machine:
        yield machine


def test_other_gpus_in_another_order(gpus):
    X, y = images(7)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3, stride=5), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    net = copy.deepcopy(plain).to("cuda:2")
    for output_device in (1, 0):
        out = data_parallel(net, X, [2, 0, 3], output_device)
        assert out.get_device() == output_device
        torch.testing.assert_close(out.cpu(), plain(X))
        F.cross_entropy(out, y.to(out.device)).backward()
    assert {p.grad.get_device() for p in net.parameters()} == {2}


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, pair, scale, *, extra, flag="add"):
        X, names = pair
        assert flag == "add" and names == {"a", "b"}
        return {"out": self.layer(X) * scale + extra["shift"][0], "rows": [X.sum(1)]}


def test_nested_inputs_keywords_and_things_that_are_no_tensors(gpus, rows=5):
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


@pytest.mark.parametrize("k, rows, busy", [(1, 8, 1), (2, 8, 2), (4, 8, 4), (4, 9, 3), (4, 2, 2)])
def test_bytes_of_a_step(gpus, k, rows, busy):
    """Of the rows what others compute; parameters twice, buffers once; nothing for GPUs that get no rows."""
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.BatchNorm1d(4)).to("cuda:0").eval()
    params, buffers = (sum(t.nbytes for t in tensors()) for tensors in (net.parameters, net.buffers))
    X = torch.randn(rows, 6).to("cuda:0")
    gpus.traffic.clear()
    out = data_parallel(net, X, gpus.devices[:k])
    out.sum().backward()
    away = 1 - len(X.chunk(k)[0]) / rows
    assert gpus.traffic.total() == (busy - 1) * (2 * params + buffers) + round(away * (X.nbytes + 2 * out.nbytes))
    assert {end for ends in gpus.traffic for end in ends} == ({f"cuda:{i}" for i in range(busy)} if busy > 1 else set())


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
        (nn.Identity, lambda: torch.ones(9), [0, 1, 2, 3], r"\(9,\), \(3,\)"),
    ],
)
def test_what_cannot_be_done_says_why(gpus, module, inputs, ids, message):
    with pytest.raises(ValueError, match=message):
        mask = {"mask": torch.ones(3)} if torch.is_tensor(inputs()) and inputs().dim() == 1 else None
        data_parallel(module(), inputs(), ids, module_kwargs=mask)
