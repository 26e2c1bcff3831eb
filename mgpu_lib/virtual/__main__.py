"""python -m mgpu_lib.virtual script.py: see `launch`."""

import sys

from mgpu_lib.virtual.launch import main

if __name__ == "__main__":
    sys.exit(main())
