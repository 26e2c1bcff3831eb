"""What every test and every notebook under test runs with. Kernels that nbval starts inherit this environment."""

import os
import sys
from pathlib import Path

import ranks
from jupyter_client.provisioning import local_provisioner

collect_ignore_glob = ["_build/*"]  # Jupyter Book keeps copies of the notebooks there

os.environ["MGPU_VIRTUAL"] = "1"  # the same machine for everybody, whatever GPUs are in it
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
os.environ.setdefault("MGPU_DATA_GIVEN", os.environ.get("MGPU_DATA", ""))  # for the one test of the recorded grid
os.environ["MGPU_DATA"] = "digits"  # no download
os.environ["TQDM_DISABLE"] = "1"  # stored outputs hold no timings
os.environ.pop("MGPU_FULL", None)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait in a loop starve the other test processes
# A kernel chooses the inline backend only where nobody chose another one.
os.environ.pop("MPLBACKEND", None)
# A notebook runs in its own folder and must find the library in this one.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

# pytest-xdist's workers share the cores; each with a full set of threads would be slower than one alone.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if workers > 1:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(max(1, (os.cpu_count() or 1) // workers))


def forked_kernel(command, env, cwd, **streams):
    """A kernel that is a fork of a process which has imported PyTorch; what it says beside its cells is lost."""
    arguments = [word for word in command[1:] if not word.startswith("-X")]
    return ranks.Fork(arguments, env | {"OMP_NUM_THREADS": "1"}, cwd, os.devnull, os.devnull)


if sys.platform == "linux":
    local_provisioner.launch_kernel = forked_kernel  # for nbval
