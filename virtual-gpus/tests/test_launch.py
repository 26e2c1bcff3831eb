"""virtual-gpus, which is python -m virtual_gpus: programs that know nothing of the library."""

import json
import re
import sys
from typing import NamedTuple

import pytest
import ranks
import torch
from torch import nn

from virtual_gpus import dry_run
from virtual_gpus.cli import launch, main
from virtual_gpus.cli.main import FAILED, NO_STEP, TOO_SMALL

SCRIPT = """
import sys
import torch
from torch import nn, zeros
assert __name__ == "__main__" and sys.argv[1:] == ["--epochs", "3"], sys.argv
import beside
net = nn.DataParallel(nn.Linear(4, 2).cuda())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(zeros(6, 4, device="cuda")).sum().backward()
    optimizer.step()
cpu = nn.Linear(2, 2)
for _ in range(4):  # between whose steps no GPU's time goes by: they don't count
    cpu(zeros(1, 2)).sum().backward()
    torch.optim.SGD(cpu.parameters(), lr=0.1).step()
print(torch.cuda.device_count(), torch.cuda.get_device_name(), *net.module.bias.tolist())
sys.exit(beside.status)
"""


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("status = 3\n")
    return tmp_path


@pytest.fixture
def dry(folder, monkeypatch, capsys):
    """dry(script, *options): what a plan of a script prints, with `--epochs 3` for its arguments: an Outcome."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(script, *options):
        (folder / "script.py").write_text(script)
        status = main.main(["plan", *options, "script.py", "--epochs", "3"])
        return Outcome(status, *capsys.readouterr())

    return run


def launched(folder, *arguments, fork=True):
    return ranks.python(*ranks.VIRTUAL, *arguments, folder=folder, fork=fork, check=False)


def test_a_program_runs_unmodified(folder):
    options = ["--gpus", "3", "--gpu", "T4", "--host", "0.5", "--trace", "trace.json", "--account"]
    done = launched(folder, *options, "-m", "script", "--epochs", "3", fork=False)
    assert done.returncode == 3 and done.stdout.startswith("3 Tesla T4 (virtual) ")
    words = done.stderr.splitlines()
    words = words[words.index("3 virtual T4, PCIe 3.0 x16 (all times are modelled)") :]  # PyTorch misses NumPy first
    between = re.fullmatch(r"([0-9.]+) ms from one optimizer step to the next \(median\)", words[1])
    assert float(between[1]) > 0.01
    assert [line.partition(":")[2][:1] for line in words[2:]] == ["0", "1", "2"] and "behind kernels" in words[2]
    names = {event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert "addmm" in names


FAILING = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
from torch.distributed.tensor import DTensor, Shard  # which is imported when there are GPUs already
x = DTensor.from_local(torch.ones(2, device="cuda"), dist.init_device_mesh("cuda", (1,)), [Shard(0)])
assert x.is_cuda and x.full_tensor().cuda(1).cpu().tolist() == [1, 1]
dist.destroy_process_group()
torch.ones(2, device="cuda:1") + torch.ones(2)
"""


def test_errors_are_the_programs_own(folder):
    (folder / "script.py").write_text(FAILING)
    done = launched(folder, "--trace", "trace.json", "script.py", fork=False)
    assert done.returncode == 1 and 'script.py", line 9' in done.stderr.splitlines()[2]
    assert "virtual_gpus" not in done.stderr, "the library's own frames"
    assert "found at least two devices, cuda:1 and cpu!" in done.stderr and (folder / "trace.json").exists()


def test_under_torchrun_there_are_as_many_gpus_as_local_ranks(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def gpus(*options):
        return len(launch.setup_of(main.here().parse_args([*options, "script.py"])).make().gpus)

    assert gpus() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpus() == 2 and gpus("--gpus", "3") == 3


def test_ranks_of_one_run_know_each_other(monkeypatch):
    assert launch.run_id() != launch.run_id()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    several_computers = launch.run_id()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert several_computers.startswith("none") and several_computers != launch.run_id() == launch.run_id()


# Dry runs

TRAINING = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group()
assert __name__ == "__main__" and sys.argv[1:] == ["--epochs", "3"], sys.argv
net = nn.parallel.DistributedDataParallel(nn.Linear(4096, 4096).cuda())
other, optimizer = nn.Linear(2, 2).cuda(), torch.optim.Adam(net.parameters())
beside = torch.optim.SGD(other.parameters(), 0.1)
for step in range(100):
    loss = net(torch.ones(32, 4096).to(local_rank)).sum() + other(torch.ones(1, 2).to(local_rank)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    beside.step()
    print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
"""


def test_the_ranks_of_a_dry_run_may_hide_gpus_too(dry, monkeypatch):
    hide = 'os.environ["CUDA_VISIBLE_DEVICES"], local_rank = os.environ["LOCAL_RANK"], 0'
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = dry(TRAINING.replace('local_rank = int(os.environ["LOCAL_RANK"])', hide), "-n", "8", "--rank", "3")
    assert "\nrank 3: at most" in said.out


def test_a_dry_run_ends_when_it_knows_what_a_step_takes(folder):
    (folder / "script.py").write_text(TRAINING)
    options = "-n", "64", "--gpu", "A100-80", "--per-node", "8", "--rank", "3", "--trace", "trace.json"
    done = launched(folder, "plan", *options, "script.py", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    *printed, before, first, second, third = done.stdout.partition("\nassumed: ")[0].splitlines()
    assert printed == [f"rank 3, step {step}: loss ?" for step in range(len(printed))] and 1 < len(printed) < 9
    assert first == "64 A100-80, DGX A100 (NVLink 3, 12 links, InfiniBand HDR): a dry run, all times are modelled"
    assert "ms from one optimizer step to the next, " in second and third.startswith("rank 3: at most ")
    assert before == "(What the program has printed of its own speed is that of this computer, without GPUs.)"
    step = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "addmm" and event["cat"] == "matmul" for event in step) == 2, "of each network"
    processes = {event["args"]["name"] for event in step if event["name"] == "process_name"}
    assert processes == {"host", "cuda:3 (virtual A100-80)"}


LOOP = """
import torch
net, kept = torch.nn.Linear(8, 8).cuda(), []
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(99):
    loss = net(torch.zeros(5, 8, device='cuda')).sum()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
    {}
"""


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (
            LOOP.format("if loss.item() > 3: break"),
            FAILED,
            "at script.py, line 9 the program goes on by a number that is unknown",
        ),
        (LOOP.format("if step == 1: break"), NO_STEP, "after 2 steps of its optimizer, and no two were alike: let"),
        (LOOP.format("kept.append(loss)"), NO_STEP, "no two of 8 steps are alike"),
        (LOOP.format("kept.append(torch.ones(10**10, device='cuda'))"), TOO_SMALL, "in the forward pass of step 3"),
        ("import sys; sys.exit()", NO_STEP, "sys.exit"),
        (
            "import torch\ntorch.zeros(10**11, device='cuda')\n",
            TOO_SMALL,
            "line 2: rank 0, in the set-up: .* more GPUs",
        ),
    ],
)
def test_a_script_that_can_not_be_run_without_values_or_room_hears_why(dry, script, status, words):
    said = dry(script, "-n", "4")
    assert said.status == status and re.search(words, said.err, re.S) and "virtual_gpus/" not in said.err


def test_a_script_takes_in_a_dry_run_what_its_step_takes(dry):
    """What a script's loop does besides, such as copies to the GPU and reading the loss, is in the time."""
    milliseconds = float(
        re.search(r"(\S+) ms from one", dry(LOOP.format("torch.ones(9).cuda(), loss.item()"), "-n", "16").out)[1]
    )

    def program():
        net = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step():
            loss = net(torch.zeros(5, 8, device="cuda")).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.ones(9).cuda(), loss.item()

        return step

    assert milliseconds == pytest.approx(1e3 * dry_run(program, 16).seconds, rel=0.03)
