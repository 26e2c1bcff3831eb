"""What macOS or Windows lacks, the library does without: a small program runs the same with all of it taken away."""

import os
import sys

import ranks

TAKEN_AWAY = """
import os, signal, sys
del os.fork, os.forkpty, os.killpg, os.getuid, os.sched_getaffinity, signal.SIGKILL
sys.modules.update(resource=None, fcntl=None)
def check(event, args):
    if event == "open" and str(args[0]).startswith(("/proc/", "/dev/shm/")):
        raise FileNotFoundError(args[0])
sys.addaudithook(check)
"""
PROGRAM = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def train(net, device):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.ones(4, 8, device=device)).sum().backward()
        optimizer.step()

def rank(number, store):
    dist.init_process_group("nccl", f"file://{store}", rank=number, world_size=2)
    x = torch.full((3,), number + 1.0, device=f"cuda:{number}")
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3
    dist.destroy_process_group()

if __name__ == "__main__":
    if "RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        train(nn.parallel.DistributedDataParallel(nn.Linear(8, 1, device=device)), device)
        dist.destroy_process_group()
    else:
        from virtual_gpus import virtual_gpus
        with virtual_gpus(2):
            train(nn.Linear(8, 1, device="cuda"), "cuda")
            mp.spawn(rank, (sys.argv[1],), 2)
        from virtual_gpus.cli.main import main
        main(["plan", "-n", "2", __file__])
    print("done")
"""


def test_a_small_program_runs_without(tmp_path):
    (tmp_path / "small.py").write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text(TAKEN_AWAY)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def output(*command):
        done = ranks.python(*command, folder=tmp_path, fork=False, PYTHONPATH=path, USERNAME="someone")
        return done.stdout + done.stderr

    said = output("small.py", tmp_path / "store")
    assert "parameters" in said and "done" in said
    said = output("-m", "virtual_gpus", "run", "-n", "2", "--account", "--trace", "trace.json", "small.py")
    assert said.count("done") == 2 and "2 processes, 2 virtual A100-80" in said
    assert '"rank 1' in (tmp_path / "trace.json").read_text()
