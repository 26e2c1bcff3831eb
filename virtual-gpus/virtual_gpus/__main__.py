"""python -m virtual_gpus script.py: see `launch`."""

import sys

from virtual_gpus.cli.launch import main

if __name__ == "__main__":
    sys.exit(main())
