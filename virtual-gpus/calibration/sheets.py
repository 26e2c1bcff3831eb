"""Data sheets of GPUs that were measured often, but that virtual GPUs do not offer.

In the units of `virtual_gpus.clock.specs`: peaks, dense, sums in FP32. Memory is what deviceQuery prints. The rates of
GTX 1080 Ti, TITAN V and RTX 2080 Ti are worked out: cores times 2 (tensor cores: 128) times the boost clock. What was
printed about them is rounded, and for the TITAN V lower (13.8, tensor cores 110), as at a clock of 1.35 GHz.
"""

import contextlib

from virtual_gpus.clock.specs import GPUS, SOURCES, Source, gpu_of

_SOURCES = {
    "turing": SOURCES["nvidia-turing"],
    "ga102": Source(
        "nvidia-ga102",
        "NVIDIA Ampere GA102 GPU Architecture (white paper)",
        "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
    ),
    "titan-v": Source("nvidia-titan-v", "NVIDIA TITAN V (product page)", "https://www.nvidia.com/en-us/titan/titan-v/"),
    "1080ti": Source(
        "nvidia-1080ti",
        "GeForce GTX 1080 Ti (product page)",
        "https://www.nvidia.com/en-gb/geforce/products/10series/geforce-gtx-1080-ti/",
    ),
}
_NAMES = "name launched capability sm_count power pcie memory bandwidth fp32 tf32 fp16 bf16 source".split()
_ROWS = {
    "GTX1080Ti": (
        *("GeForce GTX 1080 Ti", 2017, (6, 1), 28, 250, "pcie3"),
        *(11_715_084_288, 484, 11.34, None, None, None, "1080ti"),
    ),
    "TitanV": (
        *("TITAN V", 2017, (7, 0), 80, 250, "pcie3"),
        *(12_618_104_832, 652.8, 14.9, None, 119.2, None, "titan-v"),
    ),
    "RTX2080Ti": (
        *("GeForce RTX 2080 Ti", 2018, (7, 5), 68, 250, "pcie3"),
        *(11_523_260_416, 616, 13.45, None, 53.8, None, "turing"),
    ),
    "RTX3090": (
        *("NVIDIA GeForce RTX 3090", 2020, (8, 6), 82, 350, "pcie4"),
        *(25_447_170_048, 936.2, 35.6, 35.6, 71, 71, "ga102"),
    ),
}


def sheet_of(row):
    sheet = dict(zip(_NAMES, row, strict=True))
    return sheet | {"nvlink": None, "memory_source": sheet["source"]}


SHEETS = {key: gpu_of(key, sheet_of(row), _SOURCES) for key, row in _ROWS.items()}


def find(key):
    """The data sheet of a virtual GPU, or of this module."""
    return SHEETS.get(key) or GPUS[key]


@contextlib.contextmanager
def added():
    """Inside, virtual GPUs can be of these kinds, too."""
    GPUS.update(SHEETS)
    try:
        yield
    finally:
        for key in SHEETS:
            del GPUS[key]
