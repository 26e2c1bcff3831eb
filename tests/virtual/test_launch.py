"""python -m mgpu_lib.virtual: programs that know nothing of the library."""

import json
import subprocess
import sys

import pytest

from mgpu_lib.virtual import launch

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
print(torch.cuda.device_count(), torch.cuda.get_device_name(), *net.module.bias.tolist())
sys.exit(beside.status)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("status = 3\n")
    return tmp_path


def launched(folder, *arguments):
    command = [sys.executable, "-m", "mgpu_lib.virtual", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("program", [["script.py"], ["-m", "script"]])
def test_a_program_runs_unmodified(folder, program):
    options = ["--gpus", "3", "--gpu", "T4", "--trace", "trace.json", "--account"]
    done = launched(folder, *options, *program, "--epochs", "3")
    assert done.returncode == 3 and done.stdout.startswith("3 Tesla T4 (virtual) ")
    words = done.stderr.splitlines()
    assert words[0] == "3 virtual T4, PCIe 3.0 x16 (all times are modelled)"
    assert "ms from one optimizer step to the next (median)" in words[1]
    assert [line.partition(":")[2][:1] for line in words[2:]] == ["0", "1", "2"] and "behind kernels" in words[2]
    names = {event["name"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]}
    assert "addmm" in names


def test_errors_are_the_programs_own(folder):
    (folder / "script.py").write_text("import torch\ntorch.ones(2, device='cuda:1') + torch.ones(2)\n")
    done = launched(folder, "--trace", "trace.json", "script.py")
    assert done.returncode == 1 and 'script.py", line 2' in done.stderr
    assert "found at least two devices, cuda:1 and cpu!" in done.stderr and (folder / "trace.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "V101", "script.py"], "V101"),
        (["--gpus", "0", "script.py"], "at least 1"),
        (["missing.py"], "there is no file 'missing.py'"),
        (["--link", "string", "script.py"], "string"),
        ([], "program"),
    ],
)
def test_what_makes_no_sense_is_refused(folder, arguments, words, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match="2"):
        launch.main(arguments)
    assert words in capsys.readouterr().err


def test_under_torchrun_there_are_as_many_gpus_as_local_ranks(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert len(launch.parse(["script.py"]).setup.make().gpus) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert len(launch.parse(["script.py"]).setup.make().gpus) == 2
    assert len(launch.parse(["--gpus", "3", "script.py"]).setup.make().gpus) == 3


def test_ranks_of_one_run_know_each_other(monkeypatch):
    assert launch.run_id() != launch.run_id()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    several_computers = launch.run_id()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert several_computers.startswith("none") and several_computers != launch.run_id() == launch.run_id()
