"""What a process has once, each rank of a dry run has of its own: modules, environment, random numbers."""

import json
import os
import random
import re
import sys

import pytest
import torch

from virtual_gpus.cli.main import main

np = pytest.importorskip("numpy")

HELPER = """
import os, torch, torch.distributed as dist
RANK = int(os.environ["RANK"])  # as many programs keep it, in a module of their own
STARTED = []

class Word:
    def __init__(self, said):
        self.said = said
"""
KEEPER = """
import torch.distributed as dist
GROUP = None

def start():
    global GROUP
    assert GROUP is None, "already initialized"
    GROUP = dist.group.WORLD
"""
STATED = """
import torch.distributed as dist
import helper
words = [helper.Word(helper.RANK)]
(dist.send_object_list if helper.RANK == 0 else dist.recv_object_list)(words, 1 - helper.RANK)  # others' turn meanwhile
"""
SCRIPT = """
import json, os, random, sys
import numpy, torch, torch.distributed as dist

torch.manual_seed(int(os.environ["RANK"])), random.seed(5), numpy.random.seed(5)
os.environ["MINE"] = sys.argv[1] = os.environ["LOCAL_RANK"]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
if dist.get_rank() == 1:
    torch.set_default_dtype(torch.float64)
import helper, keeper
keeper.start()
import stated
assert not helper.STARTED, "args is already initialized"
helper.STARTED.append(helper.RANK)

class Own:
    pass

net = torch.nn.Linear(256 if helper.RANK == 0 else 4096, 256, device="cuda", dtype=torch.float32)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
drawn = []
for step in range(4):
    y = net(torch.zeros(8, net.in_features, device="cuda", dtype=torch.float32))
    y.sum().backward()
    words = [Own()]
    (dist.send_object_list if helper.RANK == 0 else dist.recv_object_list)(words, 1 - helper.RANK)
    (dist.send if helper.RANK == 0 else dist.recv)(y.detach(), 1 - dist.get_rank(keeper.GROUP))
    drawn.append([torch.rand(()).item(), random.random(), numpy.random.rand()])
    if step == 1:
        mine = [helper.RANK, helper.STARTED, stated.words[0].said, os.environ["MINE"], sys.argv[1:]]
        same = isinstance(words[0], Own) and isinstance(stated.words[0], helper.Word)
        found = {"mine": mine, "same": same, "drawn": drawn, "dtype": str(torch.get_default_dtype())}
        with open(f"rank{dist.get_rank()}.json", "w") as file:
            json.dump(found, file)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A folder with a script of two stages, and modules of its own that keep state; the script's path.

    Another one is installed where pip puts it with --target, and keeps process groups, as Megatron-core does.
    """
    library = tmp_path / "library"
    (library / "keeper-1.0.dist-info").mkdir(parents=True)
    for name, text in (("helper", HELPER), ("stated", STATED), ("script", SCRIPT), ("library/keeper", KEEPER)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", str(library), *sys.path])
    return tmp_path / "script.py"


def state():
    own = {"helper", "stated", "keeper"} & set(sys.modules)
    return dict(os.environ), own, sys.modules["__main__"], sys.argv, torch.get_default_dtype(), random.getstate()


def drawn_with(seed):
    """What a process draws by itself that has seeded its generators as rank `seed` does."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own, arrays = random.Random(5), np.random.RandomState(5)
        return [[torch.rand((), dtype=dtype_of(seed)).item(), own.random(), arrays.rand()] for _ in range(2)]


def dtype_of(rank):
    return torch.float64 if rank == 1 else torch.float32


def test_each_rank_has_a_process_s_state_of_its_own(program, capsys):
    """The first attempt is with rank 0 alone: nothing of it is left when rank 1 is found to be needed."""
    before = state()
    main(["plan", "-n", "2", str(program), "argument"])
    assert state() == before
    for rank in (0, 1):
        found = json.loads((program.parent / f"rank{rank}.json").read_text())
        assert found["mine"] == [rank, [rank], 0, str(rank), [str(rank)]] and found["same"]
        assert found["drawn"] == drawn_with(rank) and found["dtype"] == str(dtype_of(rank))
    said = capsys.readouterr().out
    assert re.search(r"^memory when a step holds most +rank 0 +rank 1$", said, re.M)
    small, large = (line for line in said.splitlines() if "at most" in line)
    assert "KiB" in small and "MiB" in large
