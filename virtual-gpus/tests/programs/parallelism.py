"""What PyTorch has for many GPUs, on four ranks: operations, and ways to train, each against one device.

Run by torchrun; with names of checks as arguments, only those.
"""

import sys

import asserted  # noqa: F401, their checks enter themselves
import collectives  # noqa: F401
import graphed  # noqa: F401
import grouped  # noqa: F401
import placed  # noqa: F401
import replicated  # noqa: F401
import sharded  # noqa: F401
import staged  # noqa: F401
from checking import run

if __name__ == "__main__":
    run(sys.argv[1:])
