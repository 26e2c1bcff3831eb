"""Data sheets of GPUs and of the links between them, each figure with its source.

Rates are peaks: what the maker prints, not what a program reaches. Tensor-core rates are *dense*; where a data sheet
gives them "with sparsity" they are halved here. Compute capabilities: https://developer.nvidia.com/cuda-gpus.

`memory` is what torch.cuda.get_device_properties(0).total_memory is on a real card: up to a tenth less than the nominal
size, because the driver and error correction reserve a part, and some 0.5 % more or less with another driver. Some of
its sources are out-of-memory errors, which print GiB with two decimals; the bytes then are what CUDA's deviceQuery
prints on a card of the same model.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Source(NamedTuple):
    """Where a figure comes from."""

    key: str
    title: str
    url: str


@dataclass(frozen=True)
class GPU:
    """Data sheet of one GPU.

    `fp32` is the rate of the ordinary cores; `tf32`, `fp16` and `bf16` are those of the tensor cores, dense, with sums
    in FP32, and None where the tensor cores don't take the type. `memory_source` is the source of `memory` and, where
    the data sheet leaves it out, of `sm_count`; `source` that of all the rest.
    """

    key: str  # short name: find_gpu(key)
    name: str  # as torch.cuda.get_device_name() prints it
    memory: int  # bytes, torch.cuda.get_device_properties().total_memory
    bandwidth: float  # of the memory, bytes per second
    fp32: float  # FLOP per second, as the next three
    tf32: float | None
    fp16: float | None
    bf16: float | None
    sm_count: int  # streaming multiprocessors
    capability: tuple[int, int]  # compute capability (major, minor)
    power: int  # watts, the most the board may draw
    nvlink: str | None  # key in LINKS, None: this GPU has no NVLink
    pcie: str  # key in LINKS
    launched: int  # year of the announcement
    source: Source
    memory_source: Source

    @property
    def frequency(self):
        """Cycles per second at which the ordinary cores reach `fp32`: each does a multiplication and an addition."""
        return self.fp32 / (2 * CORES_PER_SM[self.capability] * self.sm_count)


@dataclass(frozen=True)
class Link:
    """A link of one GPU to the others (NVLink) or to the host (PCIe, 16 lanes).

    `bandwidth` is the peak in one direction, over all links of one GPU together. Makers print both directions
    added up: half of that is meant here. `latency` is what a copy of no bytes would take.
    """

    key: str
    name: str
    bandwidth: float  # bytes per second, one direction
    latency: float  # seconds
    source: Source  # of the bandwidth
    latency_source: Source


# FP32 cores of a multiprocessor, by compute capability: _ConvertSMVer2Cores in helper_cuda.h of NVIDIA's CUDA samples
CORES_PER_SM = {
    (7, 0): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
}

# key: title, and in the next line the address
_SOURCES = """
nvidia-turing: NVIDIA Turing GPU Architecture (white paper, Tesla T4)
    https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf
nvidia-l4: NVIDIA L4 Tensor Core GPU (data sheet)
    https://www.nvidia.com/en-us/data-center/l4/
nvidia-volta: NVIDIA Tesla V100 GPU Architecture (white paper)
    https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf
nvidia-ampere: NVIDIA A100 Tensor Core GPU Architecture (white paper)
    https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
nvidia-a100: NVIDIA A100 Tensor Core GPU (data sheet)
    https://www.nvidia.com/en-us/data-center/a100/
nvidia-ada: NVIDIA Ada GPU Architecture (white paper)
    https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
nvidia-rtx6000-ada: NVIDIA RTX 6000 Ada Generation (data sheet)
    https://www.nvidia.com/en-us/design-visualization/rtx-6000/
nvidia-hopper: NVIDIA H100 Tensor Core GPU Architecture (white paper)
    https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper
nvidia-h200: NVIDIA H200 Tensor Core GPU (data sheet)
    https://www.nvidia.com/en-us/data-center/h200/
nvidia-blackwell: NVIDIA Blackwell Architecture (technical brief and data sheet, HGX B200)
    https://resources.nvidia.com/en-us-blackwell-architecture
pcisig: PCI-SIG, Frequently Asked Questions (8, 16, 32 GT/s per lane, 128b/130b encoding)
    https://pcisig.com/faq

# total_memory, read on real machines
mem-t4: Out-of-memory error on a Tesla T4: total capacity 14.74 GiB
    https://github.com/zai-org/CogVideo/issues/741
mem-l4: deviceQuery on an NVIDIA L4: 23583784960 bytes
    https://github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139
mem-v100: Out-of-memory error on a V100-SXM2-16GB (AWS p3.2xlarge): total capacity 15.75 GiB
    https://github.com/pytorch/pytorch/issues/16036
mem-a100-40: deviceQuery on an A100-SXM4-40GB: 42298834944 bytes
    https://github.com/bottlerocket-os/bottlerocket/pull/3873
mem-rtx4090: Out-of-memory error on an RTX 4090: total capacity 23.64 GiB
    https://github.com/ali-vilab/VGen/issues/104
mem-rtx6000-ada: Out-of-memory error on an RTX 6000 Ada, with error correction: total capacity 44.43 GiB
    https://github.com/DINGYANB/MTVCrafter/issues/21
mem-h200: get_device_properties on an H200: total_memory=143156MB
    https://github.com/ai-bot-pro/achatbot/blob/main/deploy/modal/src/llm/vllm/vlm/skywork_r1v.py
openxla: OpenXLA device descriptions: device_memory_size of A100-SXM4-80GB, H100 80GB HBM3, B200
    https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs

# latency: each read on one machine, and assumed here for every generation of NVLink, and of PCIe
p2p-latency: p2pBandwidthLatencyTest on four GPUs with NVLink: 1.8 to 2.3 µs
    https://github.com/NVIDIA/cuda-samples/issues/230
copy-overhead: Memory transfer overhead: about 10 µs for a small cudaMemcpy (PCIe 2.0)
    https://www.cs.virginia.edu/~mwb7w/cuda_support/memory_transfer_overhead.html
"""


def read_sources(text: str) -> dict[str, Source]:
    """{key: Source}: `text` has "key: title" in a line, and the address in the next."""
    return {found[0]: Source(*found) for found in re.findall(r"^(\S+): (.+)\n +(\S+)$", text, re.MULTILINE)}


SOURCES = read_sources(_SOURCES)

_GPUS = (
    # key, name, year, capability, SMs, W, NVLink, PCIe
    # memory in bytes, GB/s, TFLOP/s in fp32, tf32, fp16, bf16
    # source, memory_source
    (
        ("T4", "Tesla T4", 2018, (7, 5), 40, 70, None, "pcie3"),
        (15_828_320_256, 320, 8.1, None, 65, None),
        ("nvidia-turing", "mem-t4"),
    ),
    (
        ("L4", "NVIDIA L4", 2023, (8, 9), 58, 72, None, "pcie4"),
        (23_583_784_960, 300, 30.3, 60, 121, 121),
        ("nvidia-l4", "mem-l4"),
    ),
    (
        ("V100", "Tesla V100-SXM2-16GB", 2017, (7, 0), 80, 300, "nvlink2", "pcie3"),
        (16_914_055_168, 900, 15.7, None, 125, None),
        ("nvidia-volta", "mem-v100"),
    ),
    (
        ("A100-40", "NVIDIA A100-SXM4-40GB", 2020, (8, 0), 108, 400, "nvlink3", "pcie4"),
        (42_298_834_944, 1555, 19.5, 156, 312, 312),
        ("nvidia-ampere", "mem-a100-40"),
    ),
    (
        ("A100-80", "NVIDIA A100-SXM4-80GB", 2020, (8, 0), 108, 400, "nvlink3", "pcie4"),
        (85_100_068_864, 2039, 19.5, 156, 312, 312),
        ("nvidia-a100", "openxla"),
    ),
    (
        ("RTX4090", "NVIDIA GeForce RTX 4090", 2022, (8, 9), 128, 450, None, "pcie4"),
        (25_386_352_640, 1008, 82.6, 82.6, 165.2, 165.2),
        ("nvidia-ada", "mem-rtx4090"),
    ),
    (
        ("RTX6000-Ada", "NVIDIA RTX 6000 Ada Generation", 2022, (8, 9), 142, 300, None, "pcie4"),
        (45_496 * 2**20, 960, 91.1, 182.1, 364.2, 364.2),
        ("nvidia-rtx6000-ada", "mem-rtx6000-ada"),
    ),
    (
        ("H100", "NVIDIA H100 80GB HBM3", 2022, (9, 0), 132, 700, "nvlink4", "pcie5"),
        (84_942_979_072, 3350, 66.9, 494.7, 989.4, 989.4),
        ("nvidia-hopper", "openxla"),
    ),
    (
        ("H200", "NVIDIA H200", 2023, (9, 0), 132, 700, "nvlink4", "pcie5"),
        (143_156 * 2**20, 4800, 67, 494.5, 989.5, 989.5),
        ("nvidia-h200", "mem-h200"),
    ),
    (
        ("B200", "NVIDIA B200", 2024, (10, 0), 148, 1000, "nvlink5", "pcie5"),
        (191_514_411_008, 7700, 75, 1100, 2250, 2250),
        ("nvidia-blackwell", "openxla"),
    ),
)


def gpu_of_row(board: tuple, rates: tuple, source: Source, memory_source: Source) -> GPU:
    """The data sheet with these rows of numbers, as they stand in _GPUS."""
    key, name, launched, capability, sm_count, power, nvlink, pcie = board
    memory, bandwidth, *flops = rates
    flops = [None if rate is None else rate * 1e12 for rate in flops]
    rest: list = [sm_count, capability, power, nvlink, pcie, launched, source, memory_source]
    return GPU(key, name, memory, bandwidth * 1e9, *flops, *rest)


# Data sheets by name, such as GPUS["H100"]: each a `GPU`. `virtual-gpus gpus` prints them
GPUS = {board[0]: gpu_of_row(board, rates, *map(SOURCES.get, sources)) for board, rates, sources in _GPUS}

_PCIE_X16 = 16 * 128 / 130 / 8  # bytes that 16 lanes move per transfer of each lane: 130 bits sent carry 128 of data
# Generations of PCIe and NVLink by name, such as LINKS["nvlink4"]: each a `Link`
LINKS = {
    key: Link(key, name, bandwidth, latency, SOURCES[source], SOURCES[latency_source])
    for key, name, bandwidth, latency, source, latency_source in (
        ("pcie3", "PCIe 3.0 x16", 8e9 * _PCIE_X16, 10e-6, "pcisig", "copy-overhead"),
        ("pcie4", "PCIe 4.0 x16", 16e9 * _PCIE_X16, 10e-6, "pcisig", "copy-overhead"),
        ("pcie5", "PCIe 5.0 x16", 32e9 * _PCIE_X16, 10e-6, "pcisig", "copy-overhead"),
        ("nvlink2", "NVLink 2, 6 links", 6 * 25e9, 2e-6, "nvidia-volta", "p2p-latency"),
        ("nvlink3", "NVLink 3, 12 links", 12 * 25e9, 2e-6, "nvidia-ampere", "p2p-latency"),
        ("nvlink4", "NVLink 4, 18 links", 18 * 25e9, 2e-6, "nvidia-hopper", "p2p-latency"),
        ("nvlink5", "NVLink 5, 18 links", 18 * 50e9, 2e-6, "nvidia-blackwell", "p2p-latency"),
    )
}


def unknown(kind: str, key: object, known: Sequence[str]) -> ValueError:
    """The ValueError for a name that isn't there, with those that would do."""
    wanted, lower = str(key).lower(), {name.lower(): name for name in known}
    close = [name for name in lower if name.startswith(wanted)] or difflib.get_close_matches(wanted, lower, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(lower[name]) for name in close)}?" if close else ""
    return ValueError(f"no {kind} named {key!r}.{hint} Known: {', '.join(known)}.")


def find_gpu(key: str) -> GPU:
    """The data sheet named `key`, such as "V100". ValueError for any other name, with the names that would do.

    >>> find_gpu("V100").memory
    16914055168
    """
    if key not in GPUS:
        raise unknown("GPU", key, list(GPUS))
    return GPUS[key]


def find_link(key: str | None, gpu: GPU) -> Link:
    """The link named `key`, for a `gpu`.

    "nvlink" and "pcie" mean that GPU's own generation, None its NVLink if it has one, else its PCIe. A generation, such
    as "nvlink3" or "pcie5", is taken as it is, to ask "what if". ValueError for an unknown name, and for "nvlink" on a
    GPU that has none.
    """
    if key == "nvlink" and gpu.nvlink is None:
        raise ValueError(f'link="nvlink": the {gpu.key} has no NVLink; link="pcie" would do ({LINKS[gpu.pcie].name}).')
    own = {None: gpu.nvlink or gpu.pcie, "nvlink": gpu.nvlink, "pcie": gpu.pcie}
    key = own.get(key, key)
    if key not in LINKS:
        raise unknown("link", key, ["nvlink", "pcie", *LINKS])
    return LINKS[key]
