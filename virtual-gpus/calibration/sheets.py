"""Data sheets of GPUs that were measured often, but that virtual GPUs do not offer.

In the units of `virtual_gpus.clock.specs`: peaks, dense, sums in FP32. Memory is what deviceQuery prints. The rates of
GTX 1080 Ti, TITAN V and RTX 2080 Ti are worked out: cores times 2 (tensor cores: 128) times the boost clock. What was
printed about them is rounded, and for the TITAN V lower (13.8, tensor cores 110), as at a clock of 1.35 GHz.
"""

import contextlib

from virtual_gpus.clock.specs import GPU, GPUS, Source

GEFORCE_3090 = Source(
    "nvidia-ga102",
    "NVIDIA Ampere GA102 GPU Architecture (white paper)",
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
)
TURING = Source(
    "nvidia-turing",
    "NVIDIA Turing GPU Architecture (white paper)",
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/"
    "turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf",
)
TITAN_V = Source("nvidia-titan-v", "NVIDIA TITAN V (product page)", "https://www.nvidia.com/en-us/titan/titan-v/")
PASCAL = Source(
    "nvidia-1080ti",
    "GeForce GTX 1080 Ti (product page)",
    "https://www.nvidia.com/en-gb/geforce/products/10series/geforce-gtx-1080-ti/",
)

# key, name, memory in bytes, GB/s, TFLOP/s fp32, tf32, fp16, bf16, SMs, capability, W, year, source
_ROWS = (
    ("GTX1080Ti", "GeForce GTX 1080 Ti", 11_715_084_288, 484, 11.34, None, None, None, 28, (6, 1), 250, 2017, PASCAL),
    ("TitanV", "TITAN V", 12_618_104_832, 652.8, 14.9, None, 119.2, None, 80, (7, 0), 250, 2017, TITAN_V),
    ("RTX2080Ti", "GeForce RTX 2080 Ti", 11_523_260_416, 616, 13.45, None, 53.8, None, 68, (7, 5), 250, 2018, TURING),
    (
        "RTX3090",
        "NVIDIA GeForce RTX 3090",
        25_447_170_048,
        936.2,
        35.6,
        35.6,
        71,
        71,
        82,
        (8, 6),
        350,
        2020,
        GEFORCE_3090,
    ),
)


def sheet(key, name, memory, bandwidth, fp32, tf32, fp16, bf16, sm_count, capability, power, year, source):
    rates = [None if rate is None else rate * 1e12 for rate in (fp32, tf32, fp16, bf16)]
    pcie = "pcie4" if capability >= (8, 0) else "pcie3"
    return GPU(
        key, name, memory, bandwidth * 1e9, *rates, sm_count, capability, power, None, pcie, year, source, source
    )


SHEETS = {row[0]: sheet(*row) for row in _ROWS}


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
