"""The ways to train on many GPUs that PyTorch has, on four ranks: each against the same network on one device.

Run by torchrun; with names of checks as arguments, only those.
"""

import sys

import gloo  # noqa: F401, their checks enter themselves
import grouped  # noqa: F401
import placed  # noqa: F401
import replicated  # noqa: F401
import sharded  # noqa: F401
import staged  # noqa: F401
from checking import run

if __name__ == "__main__":
    run(sys.argv[1:])
