"""What part of a data sheet's rates GPUs reach, and what the host spends on an operation.

What stands in rates.json was fitted by `python -m calibration.clock_fit` to one half of the published measurements in
calibration/published.json, what stands in transformers.json by `python -m calibration.transformer_fit` to one half of
those in calibration/published_transformers.json, and what stands in attention.json by `python -m
calibration.attention_fit` to one half of those in calibration/published_attention.json. The rest stands here, each with
its source.
"""

import json
from pathlib import Path

from virtual_gpus.clock.specs import GPU

GENERATIONS = {6: "Pascal", 7: "Volta", 8: "Ampere", 9: "Hopper", 10: "Blackwell"}
LOW_POWER = 75  # watts: boards without a power plug of their own don't hold their clock rate under load


def generation(spec: GPU) -> str:
    """The name of a GPU's generation, by its compute capability."""
    named = {(7, 5): "Turing", (8, 6): "Ampere GeForce", (8, 9): "Ada"}
    return named.get(spec.capability) or GENERATIONS[spec.capability[0]]


PATH = Path(__file__).parent / "rates.json"
TRANSFORMERS_PATH, ATTENTION_PATH = (PATH.with_name(f"{name}.json") for name in ("transformers", "attention"))
FITTED, TRANSFORMERS, ATTENTION = (json.loads(path.read_text()) for path in (PATH, TRANSFORMERS_PATH, ATTENTION_PATH))
ATTENTION["cuDNN"]["Ampere"] = ATTENTION["FlashAttention 2"]["Ampere"]  # assumed: no figures of it were found
# Kinds whose kernels and calls take as long beside as another's
AS_OTHERS = {"layer_norm": "reduce", "softmax": "reduce", "scatter": "gather"}
SCATTER = 0.22  # part of the memory's bandwidth: gradients of four embeddings in recorded/measured_h100.json


def merged(fitted: dict, transformers: dict) -> dict:
    """All tables, from what stands in the two files."""
    tables = {**fitted, "factor": {**fitted["factor"]}}
    tables["cores"] = {**fitted["cores"], "attention backward": fitted["cores"]["attention"]}
    tables["memory"] = {**fitted["memory"], **transformers["memory"], "scatter": SCATTER}
    for name in ("fixed", "host"):
        tables[name] = {**fitted[name], **{kind: fitted[name][like] for kind, like in AS_OTHERS.items()}}
    products = {**fitted["factor"]["tensor cores"], **transformers["products"]}
    tables["factor"]["products"] = {**products, "Blackwell": products["Hopper"]}  # assumed: no figures of it were found
    return tables


TABLES = merged(FITTED, TRANSFORMERS)
CORES = TABLES["cores"]  # kind of operation: part of the peak that the ordinary cores reach
TENSOR = TABLES["tensor"]  # the same for tensor cores
# {"cores" or "tensor cores": {generation: factor on all of these}}; "products": on matrix products on tensor cores
FACTOR = TABLES["factor"]
HALF = TABLES["half"]  # results of a product or convolution for each multiprocessor at which it runs half as fast
MEMORY = TABLES["memory"]  # kind: part of the memory's peak bandwidth
FIXED = TABLES["fixed"]  # kind: seconds that a kernel takes beside
HOST = TABLES["host"]  # kind: seconds of the host's time, called by Python, and by autograd's engine

# year: which kernel PyTorch's attention runs, of those in attention.json. FlashAttention 2 came with PyTorch 2.2
# (https://github.com/pytorch/pytorch/releases/tag/v2.2.0), and with 2.11 cuDNN's came first on Hopper
# (https://github.com/huggingface/transformers/pull/48163).
SOFTWARE = {
    "2023": {"flash": "FlashAttention 1", "cudnn": "FlashAttention 1"},
    "2024": {"flash": "FlashAttention 2", "cudnn": "FlashAttention 2"},
    "2026": {"flash": "FlashAttention 2", "cudnn": "cuDNN"},
}
NEWEST = "2026"
# Part of a link's peak rate that a copy reaches: from and to pinned memory of the host, between two GPUs, and in a
# collective operation (NCCL). Measured: 12.4 of 15.8 GB/s from pinned memory to a T4 (bandwidthTest); 270 to 276 of
# 300 GB/s between A100s, 376 of 450 between H100s (p2pBandwidthLatencyTest); 229 of 300 GB/s in an all-reduce of 1 GiB
# on 8 A100s (nccl-tests).
COPY = {"pinned": 0.8, "peer": 0.9, "collective": 0.76}
# Bytes per second from and to ordinary (pageable) memory of the host, unless PCIe is slower: the driver copies piece by
# piece to or from pinned memory of its own, with one thread of the host. Measured by bandwidthTest, in and out, GB/s:
# 10.0 and 10.8 on a DGX A100, 3.3 and 8.5 on a server with A100s on PCIe (github.com/gengwg/gpu,
# nvda_gpu_benchmark.md); 5 to 6 on V100s, with 11 to 12 from pinned memory (github.com/rapidsai/dask-cuda/pull/98).
# This is the median of the five; they lie between 0.4 and 1.3 of it. Memory that is touched for the first time is much
# slower: 1.4 (github.com/pytorch/pytorch/pull/138018). So is shared memory, in which a DataLoader's workers hand over
# their batches: fitted to steps that contain such a copy, while eight workers are busy.
HOST_MEMORY = {"pageable": 8.5e9, **FITTED["copy"]}
ROUND = 5e-6  # seconds of each round of a collective operation: 61 µs for 14 rounds of 256 KiB on those A100s
# Multiprocessors that a collective keeps from the kernels beside it, one for each of NCCL's channels: 24 over NVLink on
# an A100 (https://github.com/NVIDIA/nccl/issues/1225) and on an H100 (https://forums.developer.nvidia.com/t/337991);
# between nodes two for each network adapter of a node, as logs have them: 16 for 8
# (https://github.com/NVIDIA/nccl/issues/1453), 2 for one (https://github.com/NVIDIA/nccl-tests/issues/133). Without 24
# a kernel takes a fifth longer on an H100, which is what recorded/measured_h100.json has beside a copy by as many
# thread blocks, and a pointwise kernel 0.3 of that. Many of Hopper's matrix products count on all multiprocessors, and
# what would run on those that are taken, be they few, waits until the rest is done (by a factor of 1.7 in that forum,
# where each had one block): WAITING over the number of blocks that each multiprocessor gets, blocks of TILE numbers,
# and at most MOST.
CHANNELS, CHANNELS_OF_ADAPTER = 24, 2
POINTWISE_BESIDE = 0.3
WAITING, TILE, MOST = 1.85, 128 * 256, 0.85
QUERY = 1e-6  # seconds of the host's time to ask whether something is done
# Seconds of the host's time to launch a CUDA graph, and for each of its nodes: 2.5 µs and about 1 ns in CUDA 12.6, for
# graphs without branches (NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024; a Xeon Silver 4208)
GRAPH_LAUNCH, GRAPH_NODE = 2.5e-6, 1e-9
HOST_COPY = 12e-6  # seconds of the host's time to ask for a copy
THREAD = 50e-6  # seconds of the host's time to start a thread
REPLICATE = 25e-6  # to copy one module for one GPU in nn.parallel.replicate
UNPACK = 2e-6  # to find one tensor in a buffer of many
GIL = 0.6  # the part of a call that holds the GIL: threads take turns at it
