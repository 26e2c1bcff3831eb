"""Data sheets of GPUs, from data_sheets.json, and of the links between them, each figure with its source.

Rates are peaks: what the maker prints, not what a program reaches. Tensor-core rates are *dense*; where a data sheet
gives them "with sparsity" they are halved here. Compute capabilities: https://developer.nvidia.com/cuda-gpus.

`memory` is what torch.cuda.get_device_properties(0).total_memory is on a real card: up to a tenth less than the nominal
size, because the driver and error correction reserve a part, and some 0.5 % more or less with another driver. Some of
its sources are out-of-memory errors, which print GiB with two decimals; the bytes then are what CUDA's deviceQuery
prints on a card of the same model.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


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
    cache: float | None = None  # MiB of the L2 cache, as CUDA reports it; its sources stand below
    bus: int | None = None  # bits of the memory's bus

    @property
    def frequency(self) -> float:
        """Cycles per second at which the ordinary cores reach `fp32`: each does a multiplication and an addition."""
        cores, *_ = PER_MULTIPROCESSOR[self.capability]
        return self.fp32 / (2 * cores * self.sm_count)


@dataclass(frozen=True)
class Link:
    """A link of one GPU to the others (NVLink) or to the host (PCIe, 16 lanes).

    `bandwidth` is the peak in one direction, over all links of one GPU together. Makers print both directions
    added up: half of that is meant here; of 130 bits that PCIe sends 128 are data. `latency` is what a copy of no bytes
    would take.
    """

    key: str
    name: str
    bandwidth: float  # bytes per second, one direction
    latency: float  # seconds
    source: Source  # of the bandwidth
    latency_source: Source
    links: int = 0  # NVLinks of one GPU, added up here; 0: this is PCIe


# By compute capability: FP32 cores of a multiprocessor (_ConvertSMVer2Cores in helper_cuda.h of NVIDIA's CUDA samples);
# threads, and KiB of shared memory, of a multiprocessor; KiB that one block may ask for. The last three: CUDA C++
# Programming Guide (legacy edition), table 27, "Technical Specifications per Compute Capability". It begins at 7.5: 7.0
# is from arch_traits.h of NVIDIA's CCCL, whose other rows say the same as the table.
PER_MULTIPROCESSOR = {
    (7, 0): (64, 2048, 96, 96),
    (7, 5): (64, 1024, 64, 64),
    (8, 0): (64, 2048, 164, 163),
    (8, 9): (128, 1536, 100, 99),
    (9, 0): (128, 2048, 228, 227),
    (10, 0): (128, 2048, 228, 227),
}

# Caches: V100, A100, H100: l2_cache_size in OpenXLA's device descriptions. T4: gist Terminus-IMRC/5e4b7782. RTX 4090:
#   GitHub chenlb/knowledge, cuda-install-on-windows.md. H200: ai-bot-pro/achatbot,
#   deploy/modal/src/llm/vllm/vlm/skywork_r1v.py. RTX 6000 Ada: the full AD102 of Ada's white paper.
# Buses: "memory interface" in the white papers of Volta, Turing, Ampere, Ada and Hopper; the RTX 6000 Ada's data sheet.
# Both: L4: fpsbench.com. B200: a query in pull request 4002 of pytorch/ao.
SHEETS = json.loads(Path(__file__).with_name("data_sheets.json").read_text(encoding="utf-8"))


def sources_of(entries: dict[str, dict[str, str]]) -> dict[str, Source]:
    """{key: Source} of entries in such a file."""
    return {key: Source(key, **entry) for key, entry in entries.items()}


SOURCES = sources_of(SHEETS["sources"])


def gpu_of(key: str, sheet: dict[str, Any], sources: dict[str, Source] = SOURCES) -> GPU:
    """The GPU of an entry in the file, which has GB/s and TFLOP/s, and keys of `sources`."""
    flops = {name: sheet[name] and sheet[name] * 1e12 for name in ("fp32", "tf32", "fp16", "bf16")}
    read_in = {name: sources[sheet[name]] for name in ("source", "memory_source")}
    capability, bandwidth = tuple(sheet["capability"]), sheet["bandwidth"] * 1e9
    return GPU(key=key, **sheet | flops | read_in | {"capability": capability, "bandwidth": bandwidth})


# Data sheets by name, such as GPUS["H100"]: each a `GPU`. `virtual-gpus gpus` prints them
GPUS = {key: gpu_of(key, sheet) for key, sheet in SHEETS["gpus"].items()}

# Generations of PCIe and NVLink by name, such as LINKS["nvlink4"]: each a `Link`
LINKS = {}
for _key, _sheet in SHEETS["links"].items():
    _cited = {name: SOURCES[_sheet[name]] for name in ("source", "latency_source")}
    LINKS[_key] = Link(_key, **_sheet | _cited | {"bandwidth": _sheet["bandwidth"] * 1e9})


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
