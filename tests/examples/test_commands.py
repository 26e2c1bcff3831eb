"""Every command line in examples/train_ddp.py's docstring, as it stands there, and the Slurm script."""

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest
import ranks
import running
from pages import markdown

DOCSTRING = ast.get_docstring(ast.parse(running.SCRIPT.read_text()))
COMMANDS = re.findall(r"^    (\w.+)$", DOCSTRING.replace("\\\n        ", ""), re.M)
assert len(COMMANDS) == 7
BRIEF = "--images 8 --batch-size 8 --epochs 1"  # added for ResNet-18, which takes its time without a GPU
SLURM = running.ROOT / "examples" / "train_ddp.slurm"
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    """A folder like the repository's root, for what the commands write."""
    (tmp_path / "examples").symlink_to(running.ROOT / "examples")
    data = running.write_data(tmp_path / "data", images=512)
    return tmp_path, {"MGPU_DATA": data}


@pytest.fixture
def slurm(folder):
    """The same with stand-ins for Slurm's commands, and a torchrun whose ranks are forks."""
    home, environment = folder
    stand_ins = home / "bin"
    stand_ins.mkdir()
    programs = {name: stand_ins / f"{name}.py" for name in ("sbatch", "srun", "scontrol")}
    for path in programs.values():
        path.symlink_to(running.HERE / "slurm.py")
    for name, program in (programs | {"torchrun": f"{ranks.FORKING} -m torch.distributed.run"}).items():
        (stand_ins / name).write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        (stand_ins / name).chmod(0o755)
    job = str(running.free_port(range(20_000, 30_000)) + 20_000)  # the script adds 20,000 to its last four digits
    path = os.pathsep.join([str(stand_ins), str(Path(sys.executable).parent), os.environ["PATH"]])
    return home, environment | {"SLURM_RECORD": str(home / "slurm.json"), "SLURM_JOB": job, "PATH": path}


def recorded(folder):
    """{command: [(its arguments, Slurm's part of its environment), ...]}"""
    calls = {}
    for name, *call in map(json.loads, (folder / "slurm.json").read_text().splitlines()):
        calls.setdefault(name, []).append(call)
    return calls


def test_the_page_on_jobs_that_survive_shows_two_of_them():
    """Its cells run the others; nobody can run these on the page."""
    text = "\n".join(markdown("chapters/jobs-that-survive.ipynb"))
    blocks = "".join(re.findall(r"^```sh$(.*?)^```$", text, re.M | re.S)).replace("\\\n    ", "")
    shown = re.findall(r"^(?:torchrun|sbatch|python) .+$", blocks, re.M)
    assert len(shown) == 2 and set(shown) <= set(COMMANDS)


def test_a_dry_run_of_it(folder):
    (command,) = (line for line in COMMANDS if "virtual-gpus plan" in line)
    data = running.write_data(folder[0] / "more", images=4 * 4096)
    said = running.done(running.forked(command), folder[0], MGPU_DATA=data)
    assert "\n16 H100, DGX H100" in said and "ms from one optimizer step to the next" in said


ELSEWHERE = "HOST", "sbatch", "virtual-gpus plan"  # words of commands that have tests of their own


@pytest.mark.parametrize("command", [line for line in COMMANDS if not any(words in line for words in ELSEWHERE)])
def test_a_command_runs_as_it_stands(command, folder):
    """Their ranks are forks; the page on jobs that survive starts such ones as a shell does."""
    command += f" {BRIEF}" * ("resnet18" in command)
    said = running.done(running.forked(command), folder[0], **folder[1])
    last = 1 if "resnet18" in command else 6
    assert f"step {last}: loss" in said
    if "--checkpoint" in command:
        assert len(running.lines(folder[0])) == 1 + last and running.checkpoint(folder[0])["step"] == last


@pytest.mark.parametrize("command", [line for line in COMMANDS if "HOST" in line])
def test_two_machines_run_the_same_command(command, folder):
    command = running.forked(re.sub(r"HOST:\d+", f"127.0.0.1:{running.free_port()}", command))
    with running.started(command, folder[0], **folder[1]) as one:
        said = running.done(command, folder[0], **folder[1])
        assert one.ended() == 0 and one.vanished(), one.said
    assert sorted(["step 6: loss" in said, "step 6: loss" in one.said]) == [False, True]  # rank 0 is on one of them


def test_slurm_starts_torchrun_on_every_node(slurm):
    home, environment = slurm
    (command,) = (line for line in COMMANDS if line.startswith("sbatch"))
    said = running.done(["bash", "-c", command], home, **environment)
    calls = recorded(home)
    ((arguments, got),) = calls["srun"]
    port = 20_000 + int(environment["SLURM_JOB"]) % 10_000
    text = " ".join(arguments)
    assert text.startswith("--cpus-per-task 16 torchrun --nnodes 2 --nproc-per-node 4 ")
    assert f"--rdzv-endpoint 127.0.0.1:{port} " in text
    assert f"--rdzv-id {environment['SLURM_JOB']} --rdzv-backend c10d" in text and got["SLURM_NNODES"] == "2"
    assert [call[0] for call in calls["scontrol"]] == [["show", "hostnames", "node[1-2]"]]  # and no requeue
    assert "step 6: loss" in said and running.checkpoint(home)["step"] == 6


@pytest.mark.parametrize(("status", "left", "again"), [(1, 50, True), (1, 3000, False), (0, 50, False)])
def test_slurm_queues_a_job_again_if_its_time_is_up(status, left, again, slurm):
    home, environment = slurm
    environment |= {"SLURM_FAIL": str(status), "SLURM_LEFT": str(left)}
    running.done(["sbatch", "examples/train_ddp.slurm"], home, status, **environment)
    requeued = [call[0] for call in recorded(home)["scontrol"] if call[0][0] == "requeue"]
    assert requeued == [["requeue", environment["SLURM_JOB"]]] * again


def test_slurm_asks_for_sigterm_in_time():
    options = re.findall(r"^#SBATCH --(\S+)", SLURM.read_text(), re.M)
    assert {"requeue", "signal=TERM@60", "nodes=2", "ntasks-per-node=1", "gpus-per-node=4"} <= set(options)
