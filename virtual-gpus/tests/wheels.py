"""Libraries as others install them: wheels, in an environment of their own."""

import os
import site
import subprocess
import sys
from pathlib import Path

PIP = sys.executable, "-m", "pip", "--disable-pip-version-check"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which names this checkout
LIMIT = 3000  # seconds for each of the steps


def run(*command, **options):
    options = {"env": ENVIRONMENT, "stdin": subprocess.DEVNULL, "timeout": LIMIT, **options}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command[:4]}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def make(command, cwd):
    """Run `pip wheel ...`, which needs no network, and return the wheels that it has made in cwd/wheels."""
    run(*PIP, *command.split(), "--no-index", "--no-build-isolation", cwd=cwd)
    return sorted(Path(cwd).glob("wheels/*"))


def environment(folder, wheels):
    """The Python of an environment that holds the `wheels`; other libraries are those of the environment around it.

    A .pth file names them. Such files in there are not read: this checkout, which one of them names, isn't found.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = next(path for path in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if path.exists())
    if wheels:
        run(*PIP, "--python", python, "install", "--no-index", "--no-deps", *wheels)
    (there,) = run(python, "-c", "import site; print(*site.getsitepackages())").split()
    Path(there, "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python
