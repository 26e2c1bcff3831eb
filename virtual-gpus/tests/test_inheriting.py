"""Processes that a program starts have virtual GPUs, too, and what the ranks report comes together."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import ranks
import torch

from virtual_gpus import child_environment, virtual_gpus
from virtual_gpus.children import LaunchConfig, inherit
from virtual_gpus.environment import STARTUP, VARIABLE
from virtual_gpus.report import reporting

PROGRAMS = Path(__file__).parent / "programs"
SETUP = LaunchConfig(3, {"gpu": "T4"})


@pytest.mark.slow
def test_processes_of_every_kind_have_the_gpus(tmp_path):
    trace = tmp_path / "trace.json"
    options = "--gpu", "T4", "--account", "--trace", trace
    done = ranks.python(*ranks.VIRTUAL, *options, PROGRAMS / "spawning.py", tmp_path, fork=False)
    assert done.stdout == "ok\n"
    assert "2 processes, 4 virtual T4, PCIe 3.0 x16 (all times are modelled)\nrank 0, cuda:0: at most" in done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {f"rank {r}, cuda:{r} (virtual T4)" for r in range(2)} <= names


MAKES_ITS_OWN = """
import os
import torch
import torch.multiprocessing as mp
from multiprocessing.reduction import ForkingPickler
from virtual_gpus import virtual_gpus

def work(rank, received):
    print(rank, torch.cuda.get_device_name(1), received.add_(rank + 1).device, torch.cuda.device_count(), flush=True)
    ForkingPickler.dumps((received.clone(), torch.empty(0, device="cuda")))
    for sent_on in received, received[:1], torch.nn.Parameter(received):
        try:
            ForkingPickler.dumps(sent_on)
        except RuntimeError as error:
            print(error, flush=True)

if __name__ == "__main__":
    with virtual_gpus(2, gpu="T4"):
        x = torch.zeros(2, device="cuda:1")
        mp.spawn(work, (x,))
        print(x.tolist(), flush=True)
        print("VIRTUAL_GPUS" in os.environ)  # by which other programs that it starts would have them
"""


def test_spawned_processes_have_the_gpus_that_a_program_makes(tmp_path):
    (tmp_path / "script.py").write_text(MAKES_ITS_OWN)
    done = ranks.python(tmp_path / "script.py", fork=False, CUDA_VISIBLE_DEVICES="")  # no real ones
    refused = "Attempted to send CUDA tensor received from another process; this is not currently supported. "
    refused += "Consider cloning before sending.\n"
    assert done.stdout == f"0 Tesla T4 (virtual) cuda:1 2\n{3 * refused}[1.0, 1.0]\nFalse\n", done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where accounts are left, on a computer with two ranks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return tmp_path / f"virtual-gpus-{os.getuid()}"


def ends(monkeypatch, rank, attempt=0, fails=False):
    """Rank `rank` ends, when it has held 1 MiB in torchrun's first attempt, 2 in its second, ..."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    with virtual_gpus(2) as machine, reporting(machine, LaunchConfig(2, {}, account=True, run="a run")):
        torch.ones(2**18 * (attempt + 1), device=f"cuda:{rank}")
        if fails:
            raise ZeroDivisionError


def test_ranks_that_torchrun_starts_again_report_what_they_did_then(folder, monkeypatch, capsys):
    ends(monkeypatch, 0)  # and rank 1 is killed
    ends(monkeypatch, 1, attempt=1)
    assert not capsys.readouterr().err and folder.stat().st_mode & 0o777 == 0o700
    ends(monkeypatch, 0, attempt=1)
    said = capsys.readouterr().err
    assert said.startswith("2 processes, ") and all(f"rank {r}, cuda:{r}: at most 2.00 MiB" in said for r in range(2))
    assert list(folder.iterdir()) == []


def test_a_rank_that_fails_says_at_once_what_it_did(folder, monkeypatch, capsys):
    with pytest.raises(ZeroDivisionError):
        ends(monkeypatch, 1, fails=True)
    said = capsys.readouterr().err
    assert said.startswith("2 processes (only rank 1 had an account to give), ") and "rank 1, cuda:1: at most" in said


@pytest.mark.parametrize("planted", ["garbage", "[1]", '{"run": "a run 0", "accounts": 3}', None])
def test_what_others_leave_where_accounts_lie_does_no_harm(folder, monkeypatch, capsys, planted):
    theirs = folder.with_name("theirs")
    theirs.write_text("theirs")
    ends(monkeypatch, 0)
    [left] = folder.iterdir()
    left.unlink()
    left.write_text(planted) if planted else left.symlink_to(theirs)
    for rank in range(2):
        ends(monkeypatch, rank)
    assert capsys.readouterr().err.startswith("2 processes, ") and theirs.read_text() == "theirs"
    assert list(folder.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_used(folder, monkeypatch, capsys):
    theirs = folder.with_name("theirs")
    theirs.mkdir()
    folder.symlink_to(theirs)
    ends(monkeypatch, 1)
    said = capsys.readouterr().err
    assert "not a folder that only you can enter" in said and "rank 1, cuda:1: at most 1.00 MiB" in said
    assert list(theirs.iterdir()) == []


SAYS = "import sys; print(*[name in sys.modules for name in ('torch', 'virtual_gpus', 'beside')], sys.path.count({!r}))"


@pytest.mark.parametrize("value", [None, "{}"])
def test_a_process_that_imports_no_torch_is_as_it_was(tmp_path, value):
    """Also with the variable, that is; and the sitecustomize of the environment runs."""
    (tmp_path / "sitecustomize.py").write_text("import beside\n")
    (tmp_path / "beside.py").touch()
    environment = {"PYTHONPATH": os.pathsep.join([str(STARTUP), str(tmp_path), os.environ["PYTHONPATH"]])}
    environment |= {VARIABLE: value} if value else {}
    done = ranks.python("-c", SAYS.format(str(STARTUP)), fork=False, **environment)
    assert done.stdout == "False False True 0\n" and not done.stderr


def test_the_environment_is_as_it_was_afterwards(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    before = dict(os.environ)
    with child_environment(SETUP):
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(STARTUP), "somewhere"]
        with child_environment(LaunchConfig(2, {})):
            assert json.loads(os.environ[VARIABLE])["gpus"] == 2
        assert LaunchConfig(**json.loads(os.environ[VARIABLE])) == SETUP
    assert dict(os.environ) == before


@pytest.mark.parametrize("value", ["four", '{"gpus": 4}', '{"gpus": 0, "machine": {}}', "[1]"])
def test_a_variable_that_makes_no_sense_is_refused(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=r"the environment variable VIRTUAL_GPUS=.* names no virtual GPUs: "):
        inherit()
