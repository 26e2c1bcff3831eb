"""The command virtual-gpus, which is python -m virtual_gpus: its options, what it says of mistakes, programs that know
nothing of the library, processes of `run`, tables and JSON of `plan`."""

import functools
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import ranks
import torch
from torch import nn

from virtual_gpus import dry_run
from virtual_gpus.cli import launch, main
from virtual_gpus.cli.main import FAILED, INTERRUPTED, NO_STEP, TOO_SMALL, USAGE

TRAINING = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
net = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
optimizer = torch.optim.Adam(net.parameters())
X = torch.ones(32, 256, device="cuda")
for step in range(100_000):
    optimizer.zero_grad()
    net(X).sum().backward()
    optimizer.step()
    if "end" in sys.argv and step == 2:
        break
    if step == 2 and local_rank == 0:
        print(f"running on {torch.cuda.device_count()} {torch.cuda.get_device_name()}\\n", end="", flush=True)
    if "fail" in sys.argv and step == 2 and dist.get_rank() == 1:
        X + torch.ones(32, 256)
if local_rank == 0:
    print(dist.get_world_size(), torch.cuda.device_count(), dist.is_torchelastic_launched())
dist.destroy_process_group()
"""
HIDING = TRAINING.replace(
    'local_rank = int(os.environ["LOCAL_RANK"])',
    'os.environ["CUDA_VISIBLE_DEVICES"], local_rank = os.environ["LOCAL_RANK"], 0',
)
PIPELINE = """
import os, time
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
X = torch.ones(4, device="cuda")
dist.send(X, 1) if rank == 0 else dist.recv(X, 0)
while rank == 1:
    X.add_(1), print("running", flush=True), {}
dist.recv(X, 1)
"""
NEXT = "import torch; print(torch.ones(2, device='cuda:1').sum().item())"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "small.py").write_text(NEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # other tests' init_process_group has replaced it
    return tmp_path


def started(*arguments):
    """The command as a process of its own."""
    command = [sys.executable, "-m", "virtual_gpus", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Tests that run in the background of a shell ignore Ctrl-C, and so would what they start.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=heed, **pipes)


def test_help_and_tables_come_without_pytorch():
    code = (
        "import sys; from virtual_gpus.cli.main import main; statuses = [main(['--help']), main([]), main(['gpus']),"
        "main(['topo', '--machine', 'dgx-1v']), main(['--version'])];"
        "assert statuses == [0, 2, 0, 0, 0] and not {'torch', 'numpy'} & sys.modules.keys()"
    )
    said = ranks.python("-c", code, fork=False).stdout
    assert "virtual-gpus run -n 8 train.py" in said and "torchrun --nproc-per-node 8 -m virtual_gpus" in said
    assert re.search(r"^A100-40 +39\.4 GiB +1555 GB/s +312 TFLOP/s", said, re.M)
    assert re.search(r"^GPU0 +X +NV1 +NV1 +NV2", said, re.M) and re.search(r"^torch \d+\.\d+", said, re.M)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "V101", "small.py"], "argument --gpu: no GPU named 'V101'. Did you mean 'V100'"),
        (["--gpus", "0", "small.py"], "argument --gpus: 0: use a whole number, at least 1"),
        (["missing.py"], "there is no file or command 'missing.py'"),
        (["--link", "nvlink", "--gpu", "T4", "small.py"], "the T4 has no NVLink"),
        (["--link", "string", "small.py"], "no link named 'string'"),
        (["--host", "-1", "small.py"], "argument --host: -1: use a number above 0"),
        (["--account"], "which program? Name a script"),
        (["--trace", "nowhere/trace.json", "small.py"], "there is no folder"),
        (["plan", "-n", "2", "--html", ".", "small.py"], ". can't be written"),
        (["--dry-run", "--gpus", "64", "small.py"], "--dry-run is a command now: virtual-gpus plan -n 64"),
        (["run", "small.py"], "-n: how many processes"),
        (["plan", "small.py"], "-n: how many processes"),
        (["plan", "-n", "16", "--gpu", "T4", "small.py"], "comes with no network: --network one of InfiniBand"),
        (["run", "-n", "16", "--machine", "dgx-a100", "small.py"], "a DGX A100 has 8. More take a network"),
        (["run", "-n", "2", "--machine", "dgx-a100", "--gpu", "t4", "small.py"], "--link 'DGX A100': its GPUs have"),
        (["plan", "-n", "12", "--per-node", "8", "small.py"], "-n 12 with --per-node 8: 1.50 nodes"),
        (["plan", "-n", "64", "--rank", "99", "small.py"], "--rank 99: with -n 64 it is one of 0 to 63"),
        (["plan", "--sweep", "colour=red", "small.py"], "colour=red: use NAME=VALUE"),
        (["plan", "--sweep", "n=2,0", "small.py"], "0: use a whole number"),
        (["plan", "--sweep", "n=2,4", "--html", "page.html", "small.py"], "--trace and --html are of one plan"),
        (["topo", "--machine", "dgx"], "Did you mean 'DGX-1V' or 'DGX A100'"),
    ],
)
def test_a_mistake_gets_words_about_options_and_a_line_of_usage(folder, arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == USAGE and len(said) == 2 and words in said[0] and said[1].startswith("usage: virtual-gpus")


def parsed(folder, command, *arguments):
    """The options with which the command runs."""
    module = importlib.import_module(f"virtual_gpus.cli.{main.COMMANDS[command]}")
    with mock.patch.object(module, "run", lambda options: options):
        return main.main([*command.split(), *arguments, str(folder / "small.py")])


def test_names_may_be_written_in_any_case(folder):
    options = parsed(folder, "run", "-n", "4", "--gpu", "a100-80", "--machine", "dgx_a100", "--network", "roce100")
    assert (options.gpu, options.link, options.network) == ("A100-80", "DGX A100", "RoCE 100")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_a_project_has_its_own_defaults(folder, monkeypatch, capsys):
    (folder / "pyproject.toml").write_text('[tool.virtual-gpus]\ngpu = "h100"\nn = 16\nper-node = 4\nhost = 0.5\n')
    (folder / "deeper").mkdir()
    monkeypatch.chdir(folder / "deeper")
    options = parsed(folder, "plan")
    assert (options.gpu, options.n, options.per_node, options.host) == ("H100", 16, 4, 0.5)
    assert parsed(folder, "plan", "-n", "8").n == 8 and parsed(folder, "").gpu == "H100"
    assert "n" not in parsed(folder, ""), "a script that isn't started as many processes"
    (folder / "pyproject.toml").write_text('[tool.virtual-gpus]\ncolour = "red"\n')
    with pytest.raises(SystemExit):
        main.main(["plan", "small.py"])
    assert (
        "[tool.virtual-gpus] has 'colour'. Known: n, gpu, link, network, host, software, per-node"
        in capsys.readouterr().err
    )


# A program that starts its own processes, or none


WHOLE = """
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


def test_a_program_runs_unmodified(folder):
    (folder / "script.py").write_text(WHOLE)
    (folder / "beside.py").write_text("status = 3\n")
    options = ["--gpus", "3", "--gpu", "T4", "--host", "0.5", "--trace", "trace.json", "--account"]
    program = "-m", "script", "--epochs", "3"
    done = ranks.python(*ranks.VIRTUAL, *options, *program, folder=folder, check=False)
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
    options = "--trace", "trace.json", "script.py"
    done = ranks.python(*ranks.VIRTUAL, *options, folder=folder, fork=False, check=False)
    assert done.returncode == 1 and 'script.py", line 9' in done.stderr.splitlines()[2]
    assert "virtual_gpus" not in done.stderr, "the library's own frames"
    assert "found at least two devices, cuda:1 and cpu!" in done.stderr and (folder / "trace.json").exists()


def test_under_torchrun_there_are_as_many_gpus_as_local_ranks(folder, monkeypatch):
    def gpus(*options):
        return len(launch.config_of(main.here().parse_args([*options, "small.py"])).make().gpus)

    assert gpus() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpus() == 2 and gpus("--gpus", "3") == 3


def test_ranks_of_one_run_know_each_other(monkeypatch):
    assert launch.run_id() != launch.run_id()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    several_computers = launch.run_id()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert several_computers.startswith("none") and several_computers != launch.run_id() == launch.run_id()


# run


def test_run_does_what_torchrun_does_and_ranks_report_together(folder):
    """Once, and in order."""
    (folder / "trace.json").write_text('{"otherData": {"run": "of before", "processes": ["rank 0"]}, "tra')  # replaced
    options = "-n", 2, "--gpu", "t4", "--account", "--trace", "trace.json"
    done = ranks.python(*ranks.VIRTUAL, "run", *options, "train.py", "end", folder=folder)
    assert done.stdout.endswith("2 2 True\n")  # before PyTorch 2.11 gloo says something before
    first, account, *lines, last = done.stderr.splitlines()
    assert first == "2 processes on 2 virtual T4, PCIe 3.0 x16: values are real, times are modelled"
    assert account == "2 processes, 2 virtual T4, PCIe 3.0 x16 (all times are modelled)"
    assert len(lines) == 4
    for rank, (step, memory) in enumerate((lines[:2], lines[2:])):
        assert step.partition(": ")[::2] == (f"rank {rank}", lines[0].partition(": ")[2]), "they step together"
        assert memory.startswith(f"rank {rank}, cuda:{rank}: at most 1.54 MiB")
    assert last.endswith("trace.json opens at https://ui.perfetto.dev")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {f"rank {r}, {what}" for r in "01" for what in ("host", f"cuda:{r} (virtual T4)")}
    sums = [event["ts"] for event in events if event.get("cat") == "collective"]
    assert len(sums) == 2 * len(set(sums)) > 0, "on one clock"


def test_a_rank_that_fails_is_the_only_one_with_a_traceback(folder):
    done = ranks.python(*ranks.VIRTUAL, "run", "-n", 2, "train.py", "fail", folder=folder, check=False)
    err = done.stderr.splitlines()
    assert done.returncode == FAILED
    assert err[1:3] == [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "train.py", line 21, in <module>',
    ]
    assert sum("Traceback" in line for line in err) == 1 and not any("virtual_gpus" in line for line in err)
    assert "found at least two devices, cuda:1 and cpu!" in "".join(err)
    assert err[-1] == "virtual-gpus: rank 1 ended with exit status 1, so the others were ended"


def test_ctrl_c_ends_it_in_few_words(folder):
    process = started("run", "-n", "2", "--account", "train.py")
    assert any("running" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=600)[1]
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in err and err.endswith("virtual-gpus: 2 processes ended by SIGINT\n")


class Interrupted:
    """A Popen's lock: Ctrl-C comes at the moment when it is first taken."""

    def __init__(self):
        self.lock, self.asked = threading.Lock(), 0

    def acquire(self, *args):
        self.asked += 1
        assert self.asked < 500, "the lock is never given back"
        taken = self.lock.acquire(*args)
        if self.asked == 1:
            signal.raise_signal(signal.SIGINT)
        return taken

    def release(self):
        self.lock.release()


def test_ctrl_c_while_it_asks_whether_a_rank_has_ended(folder, monkeypatch, capsys):
    (folder / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(subprocess, "threading", SimpleNamespace(Lock=Interrupted))
    assert main.main(["run", "-n", "1", "sleep.py"]) == INTERRUPTED
    assert "1 process ended by SIGINT" in capsys.readouterr().err


def test_ranks_do_not_outlive_their_launcher(folder):
    (folder / "sleep.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    process = started("run", "-n", "2", "sleep.py")
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.communicate(timeout=600)
    assert ranks.happens(lambda: not any(is_running(pid) for pid in pids), 60)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "script", ["import os; os.environ['LOCAL_RANK']", "import torch.distributed as d; d.init_process_group()"]
)
def test_a_script_for_torchrun_that_is_started_alone_gets_a_hint(folder, script, capsys):
    (folder / "alone.py").write_text(script)
    assert main.main(["--gpus", "3", "alone.py"]) == FAILED
    said = capsys.readouterr().err
    assert said.splitlines()[-1].endswith("On virtual GPUs that is: virtual-gpus run -n 3 alone.py")
    assert said.splitlines()[2] == '  File "alone.py", line 1, in <module>'


def test_ctrl_c_of_a_program_in_one_process_is_a_line(folder, capsys):
    (folder / "small.py").write_text("import torch\n\nraise KeyboardInterrupt\n")
    assert main.main(["small.py"]) == INTERRUPTED
    assert capsys.readouterr().err.splitlines()[1:] == ["virtual-gpus: interrupted in small.py, line 3"]


LOST = """
import time
class Lost:
    def __del__(self):
        raise KeyboardInterrupt
Lost()
for _ in range(5000):
    time.sleep(0.001)
"""
IN_A_FUTURE = """
import torch
import torch.distributed as dist
def interrupted(value):
    raise KeyboardInterrupt
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
torch._jit_internal.is_rref_instance = interrupted
net(torch.ones(2, 4, device="cuda")).sum().backward()
"""


@pytest.mark.parametrize("program", [LOST, IN_A_FUTURE])
def test_ctrl_c_ends_a_program_wherever_it_comes(folder, program):
    (folder / "small.py").write_text(program)
    process = started("small.py")
    (said,) = process.communicate(timeout=600)[1].splitlines()[1:]
    assert process.returncode == INTERRUPTED
    assert re.fullmatch(r"virtual-gpus: interrupted in small.py, line \d+", said)


# plan


@pytest.mark.parametrize("rank_1", ["time.sleep(0)", "time.sleep(6000)"])
def test_ctrl_c_ends_a_plan_of_several_ranks_whatever_the_one_that_runs_does(folder, rank_1):
    (folder / "pipeline.py").write_text(PIPELINE.format(rank_1))
    before = sorted(os.listdir())
    process = started("plan", "-n", "2", "pipeline.py")
    assert "running" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=600)[1]
    assert process.returncode == INTERRUPTED
    assert err == "virtual-gpus plan: interrupted in pipeline.py, line 11\n"
    assert sorted(os.listdir()) == before


def test_the_ranks_of_a_plan_may_hide_gpus_too(folder, monkeypatch, capsys):
    (folder / "train.py").write_text(HIDING)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main.main(["plan", "-n", "8", "--rank", "3", "train.py"]) == 0
    assert "\nrank 3: at most" in capsys.readouterr().out


BESIDE = """\
    optimizer.step()
    assert __name__ == "__main__" and sys.argv[1:] == ["--epochs", "3"], sys.argv
    if step == 0:
        other = nn.Linear(2, 2).cuda()
        beside = torch.optim.SGD(other.parameters(), 0.1)
    loss = other(torch.ones(1, 2).to(local_rank)).sum()
    loss.backward()
    beside.step()
    print(f"rank {dist.get_rank()}, step {step}: loss {loss.item():.3f}")
"""


def test_a_plan_ends_when_it_knows_what_a_step_takes(folder):
    (folder / "train.py").write_text(TRAINING.replace("    optimizer.step()\n", BESIDE))
    options = "-n", 64, "--gpu", "A100-80", "--per-node", 8, "--rank", 3, "--trace", "trace.json"
    done = ranks.python(*ranks.VIRTUAL, "plan", *options, "train.py", "--epochs", 3, folder=folder)
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
            "at small.py, line 9 the program goes on by a number that is unknown",
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
def test_a_script_that_can_not_be_run_without_values_or_room_hears_why(folder, capsys, script, status, words):
    (folder / "small.py").write_text(script)
    assert main.main(["plan", "-n", "4", "small.py"]) == status
    said = capsys.readouterr().err
    assert re.search(words, said, re.S) and "virtual_gpus/" not in said


def test_a_script_takes_in_a_plan_what_its_step_takes(folder, capsys):
    """What a script's loop does besides, such as copies to the GPU and reading the loss, is in the time."""
    (folder / "small.py").write_text(LOOP.format("torch.ones(9).cuda(), loss.item()"))
    assert main.main(["plan", "-n", "16", "small.py"]) == 0
    milliseconds = float(re.search(r"(\S+) ms from one", capsys.readouterr().out)[1])

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


def test_a_plan_has_tables_of_memory_and_of_time(folder, capsys):
    assert main.main(["plan", "-n", "64", "--gpu", "h100", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "64 H100, DGX H100" in said and "\nassumed: the ranks that are not run do the same" in said
    assert re.search(
        r"^memory when a step holds most +rank 0\nparameters +257.00 KiB\ngradients +257.00 KiB\n", said, re.M
    )
    assert re.search(r"^milliseconds of a step +rank 0\nforward +0\.\d+\nbackward +0\.\d+\n", said, re.M)
    assert re.search(r"^all_reduce +0\.\d+", said, re.M) and re.search(r"^idle +0\.\d+$", said, re.M)


DECIDING = TRAINING.replace(
    "    optimizer.step()\n", "    optimizer.step()\n    if X.sum() > 3: torch.isnan(X).any().item()\n"
)


def test_what_a_program_decides_by_is_told_and_listed(folder, capsys):
    (folder / "train.py").write_text(DECIDING)
    line = DECIDING[: DECIDING.index("if X.sum()")].count("\n") + 1
    assert main.main(["plan", "-n", "4", "train.py"]) == FAILED
    assert f"or say what to take it for: --assume train.py:{line}=true" in capsys.readouterr().err
    assert main.main(["plan", "-n", "4", "--assume", f"train.py:{line}=true", "train.py"]) == 0
    finite = f"no number is infinite or NaN: tested at train.py, line {line}"
    assert f";\n  train.py:{line} = true;\n  {finite}\n" in capsys.readouterr().out
    (folder / "pyproject.toml").write_text(f'[tool.virtual-gpus]\nassume = ["train.py:{line}=false"]\n')
    assert main.main(["plan", "-n", "4", "--json", "train.py"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == [f"train.py:{line} = false"]
    with pytest.raises(SystemExit):
        main.main(["plan", "-n", "4", "--assume", "train.py=true", "train.py"])
    words = "train.py=true: use FILE:LINE=VALUE, with true, false or a number"
    assert words in capsys.readouterr().err


def test_json_of_a_plan_and_a_page_that_draws_it(folder, capsys):
    options = "--json", "--fits", "--host", "0.5", "--software", "2024", "--html", "page.html"
    assert main.main(["plan", "-n", "4", *options, "train.py", "</script><b>"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == 1 and made["fits"] is True and made["program"] == ["train.py", "</script><b>"]
    assert made["assumed"] == {
        **{"n": 4, "gpu": "H100", "per_node": 8, "host": 0.5, "software": "2024", "rank": 0},
        "nodes": "DGX H100 (NVLink 4, 18 links)",
    }
    [rank] = made["ranks"]
    assert sum(rank["memory"].values()) == rank["peak"] < made["capacity"]
    weights = 4 * 256 * 257
    assert rank["memory"]["optimizer state"] >= 2 * weights and rank["memory"]["in transit"] >= weights
    time, step = rank["time"], made["step"]
    assert list(time) == ["forward", "backward", "other kernels", "all_reduce", "idle"]
    kernels = sum(time[kind]["seconds"] for kind in ("forward", "backward", "other kernels"))
    exposed = time["all_reduce"]["seconds"] - time["all_reduce"]["hidden"]
    assert kernels + exposed + time["idle"]["seconds"] == pytest.approx(step["seconds"])
    assert exposed == pytest.approx(step["exposed"] * step["seconds"])
    page = (folder / "page.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["plan"] == made and not re.search(r"https?:|\b(?:src|href)=", page)
    assert max(itertools.accumulate(n for _, _, n in data["changes"])) == rank["peak"]
    assert {row["label"] for row in data["rows"]} >= {"rank 0 host", "rank 0 default", "rank 0 collective"}
    [default] = (row["events"] for row in data["rows"] if row["label"] == "rank 0 default")
    forward = sum(default[i + 3] for i in range(0, len(default), 4) if data["parts"][default[i + 1]] == "forward")
    assert forward == pytest.approx(1e3 * rank["time"]["forward"]["seconds"], rel=1e-3)
    seconds = {name: seconds for name, part, times, seconds, *_ in data["operations"]}
    assert seconds["all_reduce"] == pytest.approx(rank["time"]["all_reduce"]["seconds"])
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium to open the page in")
    options = f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", "--dump-dom"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *options, f"file://{folder / 'page.html'}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600).stdout
    assert "data-error" not in shown and "<td>all_reduce</td>" in shown
    assert re.search(r'<canvas id="memory"[^>]* aria-label="Memory by kind[^>]* style="height: 222px;"', shown)


LARGE = """
import torch
net = torch.nn.Linear(8, {}).cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(5):
    net(torch.ones(1, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("width", "fits", "statuses"), [(10, True, (0, 0)), (145 * 10**6, False, (0, 3)), (10**10, False, (3, 3))]
)
def test_exit_statuses_say_whether_it_fits(folder, width, fits, statuses, capsys):
    """Little; all but a tenth of a T4; more than there is."""
    (folder / "large.py").write_text(f'import torch\ntorch.set_default_device("cuda")\n{LARGE.format(width)}')
    for more, status in zip(((), ("--fits",)), statuses, strict=True):
        assert main.main(["plan", "-n", "1", "--gpu", "T4", "--json", *more, "large.py"]) == status
        made = json.loads(capsys.readouterr().out)
        assert made["fits"] is fits and ("error" in made) == (status == statuses[0] == TOO_SMALL)


def test_what_has_no_step_fits_nobody_knows(folder, capsys):
    (folder / "small.py").write_text("print('what a program prints is not in the way')")
    assert main.main(["plan", "-n", "1", "--json", "small.py"]) == NO_STEP
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] is None and "without a step of an optimizer" in made["error"]


def test_a_sweep_is_a_table(folder, capsys):
    assert main.main(["plan", "--sweep", "gpu=h100,a100-80", "n=8,16", "train.py", "a=b"]) == 0
    heading, *rows = capsys.readouterr().out.strip().splitlines()
    assert heading.split()[:2] == ["gpu", "n"]
    assert [row.split()[:2] for row in rows] == [["H100", "8"], ["H100", "16"], ["A100-80", "8"], ["A100-80", "16"]]
    assert all(row.endswith("GiB   fits") or row.endswith("fits") for row in rows)
