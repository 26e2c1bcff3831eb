"""An index out of range on a GPU: the host hears of it late, and the GPUs are of no use afterwards."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from virtual_gpus import virtual_gpus

THREE = torch.tensor([3])
WRONG = {
    "embedding": lambda x: F.embedding(THREE.cuda(), x),
    "index": lambda x: x[THREE.cuda()],
    "index_put_": lambda x: x.index_put_((THREE.cuda(),), x[0] + 1),
    "index_select": lambda x: x.index_select(0, THREE.cuda()),
    "index_add_": lambda x: x.index_add_(0, THREE.cuda(), x[:1] + 1),
    "scatter_": lambda x: x.scatter_(0, THREE.cuda()[None], 1.0),
    "take": lambda x: x.take(THREE.cuda() + 9),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 4]).cuda()),
    "one_hot": lambda x: F.one_hot(THREE.cuda(), 3),
    "embedding_bag": lambda x: F.embedding_bag(THREE.cuda()[None], x),
    "bernoulli": lambda x: torch.bernoulli(x + 2),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x + 2, x),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_host_hears_of_an_assert_when_it_waits(wrong):
    with virtual_gpus(2):
        x = torch.zeros(3, 4, device="cuda")
        wrong(x)
        x + 1  # is queued behind it
        with pytest.raises(torch.AcceleratorError, match="CUDA error: device-side assert triggered"):
            torch.cuda.synchronize()


def test_shapes_are_right_until_then_also_of_gradients():
    with virtual_gpus(1):
        net = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)).cuda()
        out = net(torch.tensor([[0, 7]]).cuda())
        assert out.shape == (1, 2, 2) and out.dtype == torch.float32
        out.sum().backward()
        with pytest.raises(
            torch.AcceleratorError, match=r"embedding at .*test_asserts.py, line \d+, index out of range"
        ):
            net[1].weight.grad.sum().item()


@pytest.mark.parametrize(
    "wait", [repr, lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.nonzero(), lambda x: x.to("cuda:1")]
)
def test_afterwards_no_gpu_of_the_process_works(wait):
    with virtual_gpus(2) as gpus:
        x, event = torch.zeros(3, 4, device="cuda"), torch.cuda.Event()
        event.record()
        x[THREE.cuda()]
        uses = torch.zeros_like, lambda x: torch.zeros(1, device="cuda:1"), lambda x: x + 1, lambda x: event.query()
        for use in (wait, wait, *uses, lambda x: torch.cuda.mem_get_info()):
            with pytest.raises(torch.AcceleratorError, match="device-side assert"):
                use(x)
        # As on an H100, they still say what they are and hold, and of tensors there are views.
        assert torch.cuda.memory_allocated() > 0 and torch.cuda.get_device_name() and x.view(12).shape == (12,)
        torch.cuda.set_device(1)
    with gpus:  # but those of a new one do
        assert torch.ones(2, device="cuda").sum().item() == 2


def test_launches_may_block(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with virtual_gpus(1), pytest.raises(torch.AcceleratorError, match="it was index_select at"):
        torch.zeros(3, 4, device="cuda").index_select(0, THREE.cuda())


def test_what_the_host_checks_is_said_at_once():
    with virtual_gpus(1):
        x = torch.zeros(3, 4, device="cuda")
        for wrong, words in (
            (lambda: x[3], "index 3 is out of bounds"),
            (lambda: x.index_select(2, THREE.cuda()), "Dimension out of range"),
            (lambda: x[THREE.cuda(), THREE.cuda(), THREE.cuda()], "too many indices"),
            (lambda: torch.multinomial(x - 1, 1), "probability tensor contains"),
        ):
            with pytest.raises((IndexError, RuntimeError), match=words):
                wrong()
        assert x.sum().item() == 0


def test_whole_numbers_divided_by_zero_are_an_error_that_says_what_gpus_do():
    with virtual_gpus(1), pytest.raises(RuntimeError, match="A real GPU says nothing"):
        torch.tensor([1], device="cuda") // torch.tensor([0], device="cuda")
