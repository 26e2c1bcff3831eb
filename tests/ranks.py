"""Programs of many processes: torchrun, on virtual GPUs."""

import os
import re
import subprocess
import sys


def torchrun(n, program, *arguments, options=(), check=True, seconds=2400):
    """Run `program`, a path, on `n` ranks with as many virtual GPUs; a CompletedProcess with its text."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)
    command = [sys.executable, *launcher, "-m", "mgpu_lib.virtual", *options, str(program), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0 or not check, done.stderr
    return done


def wanted(request, name):
    """The values of the parameter `name` that this run of pytest has chosen for the tests of the request's file."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params[name] for item in items if hasattr(item, "callspec") and name in item.callspec.params]


def passed(request, program, n=4, seconds=2400):
    """The names of the checks of `program` that passed on `n` ranks, of those that the tests of this file want.

    What stands behind a name in the same line, such as a number of ranks, belongs to it.
    """
    done = torchrun(n, program, *wanted(request, "name"), check=False, seconds=seconds)
    print(done.stderr)
    return re.findall(r"^ok (\w+(?: \d+)?)$", done.stdout, re.M)
