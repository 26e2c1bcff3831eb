"""Other people's libraries on virtual GPUs give what they give on the CPU."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import ranks
import torch
from oracle import check_same_on_a_gpu


def optimized(name, device):
    """The parameters of a small network after three steps of an optimizer of timm's."""
    optim = pytest.importorskip("timm.optim")
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).double().to(device)
    X = torch.randn(5, 6, dtype=torch.float64).to(device)
    optimizer = optim.create_optimizer_v2(net, opt=name, lr=0.01, weight_decay=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        net(X).square().mean().backward()
        optimizer.step()
    return list(net.parameters())


def language_model(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=12, n_layer=2, n_head=3)
    net, X = transformers.GPT2LMHeadModel(config).double().eval().to(device), torch.randint(50, (2, 16)).to(device)
    return torch.autograd.grad(net(X, labels=X).loss, net.parameters())


@pytest.mark.parametrize("program", [*(partial(optimized, name) for name in ("lamb", "muon", "adan")), language_model])
def test_libraries_give_what_they_give_on_the_cpu(gpus, program):
    check_same_on_a_gpu(program)


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
