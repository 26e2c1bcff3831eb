"""Many tests run programs as forks of one process, see forking.py, which are to find what a new process finds."""

import re

import pytest
import ranks

pytest.importorskip("numpy")
SAYS = """
import atexit, os, random, re, signal, sys, tempfile, threading, time
import numpy, torch
new = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
print({name: re.sub(r'"run": "[^"]+"', "", value) for name, value in os.environ.items() if name not in new})
print(__name__, sys.argv, sys.path, os.getcwd(), os.listdir("/proc/self/fd"), tempfile.gettempdir())
print(*map(signal.getsignal, (signal.SIGTERM, signal.SIGPIPE)), torch.get_num_threads(), threading.active_count())
print("numbers", torch.initial_seed(), random.random(), numpy.random.random(), file=sys.stderr)
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
sys.exit("words")
"""


@pytest.mark.slow
@pytest.mark.parametrize("starter", [ranks.TORCHRUN, (*ranks.VIRTUAL, "run", "-n")], ids=["torchrun", "virtual-gpus"])
def test_a_rank_that_is_a_fork_of_a_fork_is_as_a_process_of_its_own(tmp_path, starter):
    (tmp_path / "script.py").write_text(SAYS)
    command = *starter, 1, "script.py", "--more"
    said = [ranks.python(*command, folder=tmp_path, fork=fork, check=False) for fork in (True, True, False)]
    for done in said:
        assert done.returncode == 1 and "words\n" in done.stderr
        assert done.stdout == said[-1].stdout and done.stdout.endswith("\na thread\nat the end\n")
    numbers = [re.findall(r"^numbers (\S+) (\S+) (\S+)$", done.stderr, re.M)[0] for done in said]
    assert all(len(set(drawn)) == 3 for drawn in zip(*numbers)), "each draws its own"
