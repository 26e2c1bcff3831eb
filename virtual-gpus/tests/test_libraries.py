"""Other people's libraries on virtual GPUs give what they give on the CPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import ranks
import torch

from virtual_gpus import virtual_gpus


def trained(device, make_optimizer):
    """The parameters of a small network in float64 after three steps on `device`."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).double()
    X = torch.randn(5, 6, dtype=torch.float64).to(device)
    net.to(device)
    optimizer = make_optimizer(net)
    for _ in range(3):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()
    assert {p.device for p in net.parameters()} == {torch.device(device)}
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.parametrize("name", ["lamb", "muon", "adan"])
def test_optimizers_of_timm(name):
    optim = pytest.importorskip("timm.optim")

    def make(net):
        return optim.create_optimizer_v2(net, opt=name, lr=0.01, weight_decay=0.05)

    expected = trained("cpu", make)
    with virtual_gpus(1):
        found = trained("cuda:0", make)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_language_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    torch.manual_seed(0)
    net, X = transformers.GPT2LMHeadModel(config).double().eval(), torch.randint(50, (2, 16))
    net(X, labels=X).loss.backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with virtual_gpus(1):
        net.cuda()
        net(X.cuda(), labels=X.cuda()).loss.backward()
        found = [p.grad.cpu() for p in net.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER = "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "program"),
    [("accelerate", (*LAUNCHER, PROGRAMS / "accelerated.py")), ("lightning", (PROGRAMS / "lightning_ddp.py",))],
)
def test_launchers_of_two_ranks(library, program):
    if find_spec(library) is None:  # not imported here: that changes the environment
        pytest.skip(f"no {library}")
    assert ranks.python(*ranks.VIRTUAL, "--gpus", 2, *program).stdout.splitlines()[-1] == "ok"
