"""virtual-gpus, which is python -m virtual_gpus: programs that know nothing of the library."""

import json
import re

import pytest
import ranks

from virtual_gpus.cli import launch, main

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


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("status = 3\n")
    return tmp_path


def launched(folder, *arguments):
    return ranks.python(*ranks.VIRTUAL, *arguments, folder=folder, fork=False, check=False)


def test_a_program_runs_unmodified(folder):
    options = ["--gpus", "3", "--gpu", "T4", "--host", "0.5", "--trace", "trace.json", "--account"]
    done = launched(folder, *options, "-m", "script", "--epochs", "3")
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
    done = launched(folder, "--trace", "trace.json", "script.py")
    assert done.returncode == 1 and 'script.py", line 9' in done.stderr.splitlines()[2]
    assert "virtual_gpus" not in done.stderr, "the library's own frames"
    assert "found at least two devices, cuda:1 and cpu!" in done.stderr and (folder / "trace.json").exists()


def test_under_torchrun_there_are_as_many_gpus_as_local_ranks(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def gpus(*options):
        return len(launch.config_of(main.here().parse_args([*options, "script.py"])).make().gpus)

    assert gpus() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpus() == 2 and gpus("--gpus", "3") == 3


def test_ranks_of_one_run_know_each_other(monkeypatch):
    assert launch.run_id() != launch.run_id()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    several_computers = launch.run_id()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert several_computers.startswith("none") and several_computers != launch.run_id() == launch.run_id()
