"""Every command line in the docstrings of the examples, as it stands there, and the Slurm script."""

import contextlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import ranks
import running
import torch
from pages import markdown

from examples import train_ddp, train_fsdp

DOCSTRINGS = f"{train_ddp.__doc__}{train_fsdp.__doc__}".replace("\\\n        ", "")
COMMANDS = re.findall(r"^    (\w.+)$", DOCSTRINGS, re.M)
assert len(COMMANDS) == 14
[SBATCH] = (line for line in COMMANDS if line.startswith("sbatch"))
SIZES = {"layers": 2, "width": 24, "heads": 3, "context": 16}
BRIEF = {  # the step at which a command's training ends, and what is added to it, so that it ends soon
    "resnet18": (1, "--images 8 --batch-size 8 --epochs 1"),
    "train_fsdp": (2, " ".join(f"--{name} {size}" for name, size in SIZES.items()) + " --steps 2"),
    "": (6, ""),
}
SLURM = running.ROOT / "examples" / "train_ddp.slurm"
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder like the repository's root, for what the commands write."""
    (tmp_path / "examples").symlink_to(running.ROOT / "examples")
    monkeypatch.setenv("MGPU_DATA", running.write_data(tmp_path / "data", images=512))
    return tmp_path


def test_the_page_on_jobs_that_survive_shows_two_of_them():
    """Its cells run the others; nobody can run these on the page."""
    text = "\n".join(markdown("chapters/jobs-that-survive.ipynb"))
    blocks = "".join(re.findall(r"^```sh$(.*?)^```$", text, re.M | re.S)).replace("\\\n    ", "")
    shown = re.findall(r"^(?:torchrun|sbatch|python) .+$", blocks, re.M)
    assert len(shown) == 2 and set(shown) <= set(COMMANDS)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line != SBATCH])
def test_a_command_runs_as_it_stands(command, folder):
    """But for the size of what is trained. Their ranks are forks; the page on jobs that survive starts such ones as a
    shell does."""
    planned, machines = "virtual-gpus plan" in command, 1 + ("HOST" in command)
    last, brief = next(found for word, found in BRIEF.items() if word in command)
    net = train_fsdp.Transformer(**SIZES).state_dict()
    torch.save(net, folder / "net.pt")
    command = re.sub(r"HOST:\d+", f"127.0.0.1:{running.free_port()}", command) + f" {brief}" * (not planned)
    data = running.write_data(folder / "more", images=4 * 4096) if planned else os.environ["MGPU_DATA"]
    with contextlib.ExitStack() as stack:
        starts = [running.started(running.forked(command), folder, MGPU_DATA=data) for _ in range(machines)]
        runs = [stack.enter_context(start) for start in starts]
        assert [run.ended() for run in runs] == [0] * machines
        assert all(run.vanished() for run in runs)
        said = "".join(run.said for run in runs)
    if planned:
        assert "\n16 H100, DGX H100" in said and "ms from one optimizer step to the next" in said
        return
    assert said.count(f"step {last}: loss") == 1, "rank 0 is on one machine"
    assert "--metrics" not in command or len(running.lines(folder)) == 1 + last
    assert "--checkpoint run.pt" not in command or running.checkpoint(folder)["step"] == last
    assert "--export" not in command or running.checkpoint(folder, "tuned.pt").keys() == net.keys()


@pytest.fixture
def submit(folder):
    """`submit(status)`: what `sbatch` says with stand-ins for Slurm's commands, and a torchrun whose ranks are forks;
    and the calls of those commands, {command: [(its arguments, Slurm's part of its environment), ...]}."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    programs = {name: stand_ins / f"{name}.py" for name in ("sbatch", "srun", "scontrol")}
    for path in programs.values():
        path.symlink_to(running.HERE / "slurm.py")
    for name, program in (programs | {"torchrun": f"{ranks.FORKING} -m torch.distributed.run"}).items():
        (stand_ins / name).write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        (stand_ins / name).chmod(0o755)
    path = os.pathsep.join([str(stand_ins), str(Path(sys.executable).parent), os.environ["PATH"]])

    def submitted(status=0, **environment):
        job = str(running.free_port(range(20_000, 30_000)) + 20_000)  # the script adds 20,000 to its last four digits
        environment |= {"PATH": path, "SLURM_RECORD": str(folder / "slurm.json"), "SLURM_JOB": job}
        said, calls = running.done(["bash", "-c", SBATCH], folder, status, **environment), {}
        for name, *call in map(json.loads, (folder / "slurm.json").read_text().splitlines()):
            calls.setdefault(name, []).append(call)
        return said, calls

    return submitted


def test_slurm_starts_torchrun_on_every_node(submit, folder):
    said, calls = submit()
    ((arguments, got),) = calls["srun"]
    text, job = " ".join(arguments), got["SLURM_JOB_ID"]
    assert text.startswith("--cpus-per-task 16 torchrun --nnodes 2 --nproc-per-node 4 ")
    assert f"--rdzv-endpoint 127.0.0.1:{20_000 + int(job) % 10_000} " in text
    assert f"--rdzv-id {job} --rdzv-backend c10d" in text and got["SLURM_NNODES"] == "2"
    assert [call[0] for call in calls["scontrol"]] == [["show", "hostnames", "node[1-2]"]]  # and no requeue
    assert "step 6: loss" in said and running.checkpoint(folder)["step"] == 6


@pytest.mark.parametrize(("status", "left", "again"), [(1, 50, True), (1, 3000, False), (0, 50, False)])
def test_slurm_queues_a_job_again_if_its_time_is_up(status, left, again, submit):
    _, calls = submit(status, SLURM_FAIL=str(status), SLURM_LEFT=str(left))
    requeued = [arguments for arguments, _ in calls["scontrol"] if arguments[0] == "requeue"]
    assert requeued == [["requeue", calls["srun"][0][1]["SLURM_JOB_ID"]]] * again


def test_slurm_asks_for_sigterm_in_time():
    options = re.findall(r"^#SBATCH --(\S+)", SLURM.read_text(), re.M)
    assert {"requeue", "signal=TERM@60", "nodes=2", "ntasks-per-node=1", "gpus-per-node=4"} <= set(options)
