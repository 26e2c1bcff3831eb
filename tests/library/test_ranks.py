"""mgpu.start_ranks: processes that stay, and run the cells of a notebook in order."""

import signal
import subprocess
import sys

import psutil
import pytest
from common import without_marks
from IPython.core.interactiveshell import InteractiveShell
from ranks import happens

import mgpu_lib as mgpu
from mgpu_lib.ranks import Ranks

BEGIN = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
"""
SUM = """
import sys, time
x = torch.full((2,), rank + 1.0, device="cuda")
dist.all_reduce(x)
time.sleep(0.2 * (rank == 0))  # rank 1 speaks first
print(rank, torch.cuda.get_device_name())
print("a warning", file=sys.stderr)
x
"""
ONE_FAILS = """\
def step():
    return x.view(7)

if rank == 1:
    step()
dist.all_reduce(x)  # waits for rank 1
torch.cuda.synchronize()"""
ERROR = """\
rank 1 failed
Traceback (most recent call last):
  File "<cell>", line 5, in <module>
    step()
  File "<cell>", line 2, in step
    return x.view(7)
           ^^^^^^^^^
RuntimeError: shape '[7]' is invalid for input of size 2"""


def listening(pid):
    """The addresses at which a process listens."""
    return {c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN}


def gone(pid):
    """Whether the process has ended, or does so soon."""
    return happens(lambda: not psutil.pid_exists(pid))


def test_cells_run_on_all_ranks(capsys):
    shell = InteractiveShell.instance()
    try:
        ranks = mgpu.start_ranks(2, gpu="T4")
        shell.run_cell_magic("ranks", "", BEGIN)
        shell.run_cell_magic("ranks", "", SUM)
        said = capsys.readouterr()
        lines = [
            f"[rank{r}]: {line}\n" for r in (0, 1) for line in (f"{r} Tesla T4 (virtual)", f"tensor([3., 3.], {r})")
        ]
        assert said.out == "".join(lines).replace(", 0)", ", device='cuda:0')").replace(", 1)", ", device='cuda:1')")
        assert said.err == "[rank0]: a warning\n[rank1]: a warning\n"
        ranks.run("dist.all_reduce(torch.ones(1), group=dist.new_group(backend='gloo'))")
        assert [listening(process.pid) for process in ranks.processes] == [{"127.0.0.1"}] * 2
        ranks.run("dist.destroy_process_group()")  # in a cell of its own: when all have left, they can meet again
        ranks.run("dist.init_process_group('nccl')\ndist.all_reduce(x)\nprint(x[0].item())")
        assert capsys.readouterr().out == "[rank0]: 6.0\n[rank1]: 6.0\n"
        ranks.run("x /= 2")
        shell.run_cell_magic("ranks", "--local", "print(1 + 1)")
        assert capsys.readouterr().out == "[rank0]: 2\n[rank1]: 2\n2\n"
        with pytest.raises(ValueError, match="%%ranks --all: write %%ranks alone, or %%ranks --local"):
            shell.run_cell_magic("ranks", "--all", "1")
        with pytest.raises(RuntimeError) as raised:
            ranks.run(ONE_FAILS)
        assert without_marks(str(raised.value)) == without_marks(ERROR)
        ranks.run("def older():\n    return x.view(7)")
        with pytest.raises(RuntimeError, match=r"File \"<cell>\", line 2, in older\n +return x.view\(7\)"):
            ranks.run("# A comment\n# takes up\n# the first lines\nolder()")
        ranks.run("print(x.tolist())")  # they are still there
        assert capsys.readouterr().out.startswith("[rank0]: [3.0, 3.0]\n")
        mgpu.start_ranks(1).stop()
        assert all(gone(process.pid) for process in ranks.processes), "a notebook has one set of ranks"
    finally:
        InteractiveShell.clear_instance()


@pytest.mark.slow
def test_what_hangs_is_interrupted_or_ended(capsys, monkeypatch):
    ranks = Ranks(2)
    ranks.run("import os, time")
    with pytest.raises(TimeoutError, match="rank 1: still running after 2 s, and interrupted"):
        ranks.run("if os.environ['RANK'] == '1':\n    time.sleep(600)", 2)
    ranks.run("print(1 + 1)")
    assert capsys.readouterr().out.endswith("[rank0]: 2\n[rank1]: 2\n")
    with pytest.raises(RuntimeError, match="rank 1 failed\nits process has ended, with exit status 3"):
        ranks.run("if os.environ['RANK'] == '1': os._exit(3)")
    assert all(gone(process.pid) for process in ranks.processes)
    with pytest.raises(RuntimeError, match="these ranks have been stopped"):
        ranks.run("1")
    deaf = Ranks(1)
    deaf.run("import signal, subprocess, time\n_ = signal.signal(signal.SIGINT, signal.SIG_IGN)")
    deaf.run("print(subprocess.Popen(['sleep', '600']).pid)")
    monkeypatch.setattr("mgpu_lib.ranks.GRACE", 0.5)
    with pytest.raises(TimeoutError):
        deaf.run("time.sleep(600)", 1)
    started = int(capsys.readouterr().out.split()[-1])
    assert gone(deaf.processes[0].pid) and gone(started)


@pytest.mark.slow
def test_a_rank_that_crashes_has_last_words(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError) as raised:
        Ranks(1).run("import ctypes\n\nctypes.string_at(0)")
    words = str(raised.value)
    assert words.startswith("rank 0 failed\nits process has ended, with signal 11 (SIGSEGV)\n")
    assert "Fatal Python error: Segmentation fault\n" in words and 'File "<cell>", line 3 in <module>' in words
    (tmp_path / "torch.py").write_text("raise ImportError('libcublas.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"with exit status 1\n(.|\n)*ImportError: libcublas.so.13: cannot open"):
        Ranks(1).run("1 + 1")


@pytest.mark.slow
def test_ranks_end_with_a_notebook_that_is_killed():
    code = """if True:
        import os, mgpu_lib
        ranks = mgpu_lib.start_ranks(2)
        ranks.run("signal = os = sys = io = 0.5  # names that the process uses itself")
        ranks.run("signal, __name__")
        print(*[process.pid for process in ranks.processes], flush=True)
        os.kill(os.getpid(), 9)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    *said, pids = done.stdout.splitlines()
    assert done.returncode == -signal.SIGKILL and said == [f"[rank{rank}]: (0.5, '__main__')" for rank in range(2)]
    assert len(pids.split()) == 2 and all(gone(int(pid)) for pid in pids.split())
