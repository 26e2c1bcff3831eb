"""mgpu.launch: torchrun from a notebook, with everything in order, and nothing left behind."""

import functools
import os
import subprocess
import sys

import psutil
import pytest
from common import without_marks
from ranks import happens

import mgpu_lib as mgpu
from mgpu_lib import launching

FAILS = """
import sys
import torch, torch.distributed as dist
import beside
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
print(rank, torch.cuda.get_device_name(), sys.argv[1:], flush=True)
print("a second line", file=sys.stderr)
x = torch.ones(4, device="cuda")
dist.all_reduce(x), torch.cuda.synchronize()
if rank == 1:
    beside.step(x)
dist.all_reduce(x), torch.cuda.synchronize()
"""
HANGS = """
import os, pathlib, signal, time
{}
pathlib.Path(__file__).with_name("is there " + os.environ["RANK"]).touch()
time.sleep(6000)
"""
MEETING = "import torch.distributed as dist; dist.init_process_group('gloo')"
ERROR = """\
rank 1 failed
Traceback (most recent call last):
  File "script.py", line 13, in <module>
    beside.step(x)
  File "beside.py", line 2, in step
    return x.view(7)
           ^^^^^^^^^
RuntimeError: shape '[7]' is invalid for input of size 4"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("def step(x):\n    return x.view(7)\n")
    return tmp_path / "script.py"


@pytest.mark.slow
def test_what_ranks_print_comes_in_order_and_an_error_is_the_programs_own(script, capsys):
    """What programs print that end well is in chapter 9 and in the appendix."""
    script.write_text(FAILS)
    with pytest.raises(RuntimeError) as raised:
        mgpu.launch(script, 2, "--epochs", 3, gpu="T4")
    assert without_marks(str(raised.value)) == without_marks(ERROR)
    said = capsys.readouterr()
    assert said.out == "".join(f"[rank{r}]: {r} Tesla T4 (virtual) ['--epochs', '3']\n" for r in range(2))
    assert said.err == "[rank0]: a second line\n[rank1]: a second line\n"


def processes(script):
    """Those that run the script, or start it."""
    return [process for process in psutil.process_iter() if str(script) in " ".join(cmdline(process))]


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


@pytest.mark.slow
def test_what_takes_too_long_is_ended_also_by_force(script, monkeypatch):
    script.write_text(HANGS.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    monkeypatch.setattr(launching, "ENDING", 0.1)
    with pytest.raises(TimeoutError, match=r"script\.py was still running on 2 ranks after 8 s, and was ended"):
        mgpu.launch(script, 2, seconds=8)
    assert happens(lambda: not processes(script))


@pytest.mark.slow
def test_no_rank_outlives_the_notebook_and_none_can_be_reached_from_outside(script):
    script.write_text(HANGS.format(MEETING))
    code = f"import mgpu_lib; mgpu_lib.launch({str(script)!r}, 2)"
    notebook = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    assert happens(lambda: len([*script.parent.glob("is there *")]) == 2)
    everybody = notebook, *processes(script)
    found = [psutil.Process(process.pid).net_connections() for process in everybody]
    assert {c.laddr.ip for each in found for c in each if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    notebook.kill()
    assert notebook.wait(600) != 0
    assert happens(lambda: not processes(script))


def test_who_failed_first():
    said = "\n".join(
        f"  rank : {r} (local_rank: {r})\n  exitcode : {code} (pid: 5)" for r, code in [(2, 1), (0, 1), (1, -9)]
    )
    first, second = (launching.Output("", "", f"Traceback {n}", n) for n in (1, 2))
    assert launching.what_failed(said, [second, first, first]) == "rank 1 was ended by signal 9 (SIGKILL)"
    assert launching.what_failed(said.replace("-9", "-15"), [second, first, second]) == "rank 1 failed\nTraceback 1"
    silent = [launching.Output("", "", "", 0)] * 3
    assert launching.what_failed(said.replace("-9", "3"), silent) == "rank 1 ended with exit status 3"
    assert launching.what_failed("no port is free", []) == "torchrun failed before its ranks ran:\nno port is free"


def test_what_makes_no_sense_is_refused(script):
    for start in functools.partial(mgpu.launch, __file__), mgpu.start_ranks:
        for n in (0, 2.0, True):
            with pytest.raises(ValueError, match="the number of ranks must be a whole number, at least 1"):
                start(n)
        with pytest.raises(ValueError, match="V101"):
            start(2, gpu="V101")
    with pytest.raises(FileNotFoundError, match=r"launch\('script.py'\): there is no such file in "):
        mgpu.launch("script.py", 2)


IMPORTED_ON_WINDOWS = """
import importlib, os, pkgutil, signal, sys
del os.fork, os.killpg, os.getuid, os.sched_getaffinity, signal.SIGKILL
sys.modules.update(resource=None, fcntl=None)
import mgpu_lib as mgpu
print(*(name for name in ("matplotlib", "anywidget", "IPython", "torchvision", "tqdm.auto") if name in sys.modules))
for module in pkgutil.iter_modules(mgpu.__path__, "mgpu_lib."):
    if module.name != "mgpu_lib.virtual":  # which says its new name
        importlib.import_module(module.name)
for start in (lambda: mgpu.launch("train.py", 2), lambda: mgpu.start_ranks(2)):
    try:
        start()
    except RuntimeError as error:
        print(error)
"""


def test_windows_has_the_library_without_ranks_and_to_import_it_loads_nothing_slow():
    env = os.environ | {"USERNAME": "someone"}  # as Windows has it
    done = subprocess.run([sys.executable, "-c", IMPORTED_ON_WINDOWS], env=env, capture_output=True, text=True)
    slow, *said = done.stdout.splitlines()
    assert slow == "" and [line.count("ranks of a notebook need Linux or macOS") for line in said] == [1, 1], (
        done.stderr
    )
