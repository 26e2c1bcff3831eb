"""Data sheets of GPUs that were measured often, but that virtual GPUs do not offer: sheets.json has them.

In the units of `virtual_gpus.clock.specs`: peaks, dense, sums in FP32. Memory is what deviceQuery prints. The rates of
GTX 1080 Ti, TITAN V and RTX 2080 Ti are worked out: cores times 2 (tensor cores: 128) times the boost clock. What was
printed about them is rounded, and for the TITAN V lower (13.8, tensor cores 110), as at a clock of 1.35 GHz.
"""

import contextlib
import json
from pathlib import Path
from unittest.mock import patch

from virtual_gpus.clock.specs import GPU, GPUS, SOURCES, gpu_of, sources_of

_FOUND = json.loads(Path(__file__).with_suffix(".json").read_text())
_SOURCES = SOURCES | sources_of(_FOUND["sources"])
SHEETS = {key: gpu_of(key, sheet, _SOURCES) for key, sheet in _FOUND["gpus"].items()}


def find(key: str) -> GPU:
    """The data sheet of a virtual GPU, or of this module."""
    return SHEETS.get(key) or GPUS[key]


def added() -> contextlib.AbstractContextManager:
    """Inside, virtual GPUs can be of these kinds, too."""
    return patch.dict(GPUS, SHEETS)
