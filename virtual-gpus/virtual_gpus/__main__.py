"""python -m virtual_gpus: the command `virtual-gpus`."""

import sys

from virtual_gpus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
