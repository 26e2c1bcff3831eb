"""Published figures of training language models on many GPUs: which count, on which machine, and in which half.

The figures stand in published_runs.json, as they were printed: seconds or throughput of a step and, where the source
has it, the peak memory of a GPU. The rules and the halves were decided from what the sources say of their programs,
before any of these runs had been predicted. Nothing is fitted for now, so two of three curves are held out.
Compiled steps don't count, as in published_transformers, whatever part of them is matrix products. Programs that don't
run on PyTorch were not collected. MosaicML's and torchtitan's tables, and NVIDIA's performance summaries, are kept for
another, independent trial: none of their rows is here.
"""

import json
from collections import Counter
from pathlib import Path

from calibration.halves import digest
from calibration.published_scaling import OTHERS
from calibration.published_transformers import SHEETS
from virtual_gpus.clock.machine_types import MACHINE_SOURCES, MACHINES, Network

PATH = Path(__file__).parent / "published_runs.json"
NETWORKS = {  # how a network is described -> (machine, network)
    "1x InfiniBand EDR 100 Gb/s per node": ("DGX-1V, 1 card", "InfiniBand EDR"),
    "8x InfiniBand HDR 200 Gb/s per node": ("DGX A100", "InfiniBand HDR"),
    # FMS FSDP states rates only. Its A100 have what such instances of AWS have, and its scripts load EFA's library;
    # of its H100 no product is known, and eight cards are taken to share the rate.
    # Added before any run was predicted, so that the largest source counts between nodes, too: Jean Zay's Omni-Path has
    # 100 Gb/s a link (Bekman's list has the rate, the source the links), and NCCL takes it for what speaks RDMA.
    "4 Omni-Path links per node": ("DGX A100", "Omni-Path"),
    "400 Gb/s per node": ("p4d.24xlarge", "EFA"),
    "800 Gb/s per node": ("DGX H100", "RoCE 100"),
}
ALL_MACHINES = MACHINES | OTHERS
OTHER_NETWORKS = {"Omni-Path": Network("Omni-Path", "RDMA", 100e9 / 8, 4, MACHINE_SOURCES["networks"])}
SOURCES = {  # the beginnings of titles -> names in ids
    "Efficient Large-Scale Language Model Training": "Megatron-LM 2021",
    "Megatron-LM, README": "Megatron-LM README",
    "Calculon": "Megatron-LM 2022",
    "DLPerf GPT": "DLPerf",
    "BigScience, chronicles": "BigScience",
    "BigScience, GPT2": "BigScience V100",
    "FMS FSDP": "FMS FSDP",
    "Zero Bubble": "Zero Bubble",
    "nanotron": "nanotron",
    "The Llama 3 Herd": "Llama 3",
    "PyTorch FSDP": "PyTorch FSDP",
    "TinyLlama": "TinyLlama",
}
NEEDED = """layers width heads kv_heads ffn vocab seq_len micro_batch global_batch recomputation sharding tensor
pipeline virtual_stages context data n_gpus""".split()
MOST_GPUS = 1024
STEADY = 1.25  # slowest over fastest of the printed steps
RULES = {
    "trust": "the source contradicts itself in this row",
    "noise": "the source says itself that its figures are only good to 40%",
    "compiled": "torch.compile decides which operations become one kernel, and the source doesn't say which",
    "elsewhere": "counts in published_transformers already: data parallelism in one node",
    "schedule": "a pipeline's schedule that splits the backward pass",
    "layout": "the source lacks a size of the model, the batch, the parallel sizes or how many layers are recomputed",
    "uneven": "layers don't go evenly into the pipeline's stages, and the source doesn't say how they lie",
    "many": f"more than {MOST_GPUS:,} GPUs",
    "unsteady": f"printed steps of one run differ by more than {STEADY - 1:.0%}",
    "network": "more than one node, and the network isn't stated, or is none that the library knows",
}
FAILS = {  # the first that holds excludes a row
    "trust": lambda row: row.get("trust") == "low",
    "noise": lambda row: row.get("noisy"),
    "compiled": lambda row: row["compiled"],
    "elsewhere": lambda row: row.get("elsewhere"),
    "schedule": lambda row: row.get("schedule", "").startswith("ZB"),
    "layout": lambda row: row["recomputation"] == "some layers" or any(row[key] is None for key in NEEDED),
    "uneven": lambda row: row.get("uneven"),
    "many": lambda row: row["n_gpus"] > MOST_GPUS,
    "unsteady": lambda row: max(steps(row)) > STEADY * min(steps(row)),
    "network": lambda row: row["machine"] is None,
}
TIME_ONLY = (None, "unsteady", "network", "noise")  # what excludes a row's time leaves its memory as it is


def rows():
    """All rows, with the keys "id", "sheet", "machine", "network key", "curve", "excluded", "remembers" and "half".

    excluded: a key of RULES, or None: the row's time counts. remembers: whether its memory does.
    """
    found, names = json.loads(PATH.read_text())["rows"], Counter()
    for row in found:
        row["sheet"], row["machine"], row["network key"] = place(row)
        row["source"] = next(name for title, name in SOURCES.items() if row["source_title"].startswith(title))
        size = f"{row['layers']}x{row['width']}" if row["layers"] else row["model"]
        row["curve"] = f"{row['source']}/{size}/{row['sheet']}"
        shape = name_of(row)
        names[shape] += 1
        row["id"] = shape if names[shape] == 1 else f"{shape}, again {names[shape]}"
        row["excluded"] = next((rule for rule, fails in FAILS.items() if fails(row)), None)
        row["remembers"] = row["memory_gib"] is not None and row["excluded"] in TIME_ONLY
    halve([row for row in found if row["excluded"] is None or row["remembers"]])
    return found


def place(row):
    """Keys of the data sheet, of a machine in ALL_MACHINES, and of a network; no machine if the network isn't known."""
    sheet, machine = SHEETS[row["gpu"].split(" (")[0]]
    if row["n_gpus"] and row["n_gpus"] <= row["gpus_per_node"]:
        return sheet, machine, None
    return sheet, *NETWORKS.get(row["network"], (None, None))


def name_of(row):
    """What a row is of, in words."""
    sizes = f"{row['tensor']} tensor, {row['pipeline']} pipeline x {row['virtual_stages']}, {row['context']} context"
    batch = f"{row['micro_batch']} of {row['global_batch']} x {row['seq_len']}, {row['heads']} heads"
    how = ", ".join(str(row[key]) for key in ("sharding", "recomputation", "precision") if row[key])
    extra = f", {row['schedule']}" if row.get("schedule") else ""
    return f"{row['curve']}/{row['model']}/{row['n_gpus']} GPUs/{sizes}/{batch}/{how}{extra}"


def halve(counted):
    """Give every row its half: "fit" or "held out". Source by source every third curve, by a hash, is for the fit.

    A curve is one model in one source on one kind of GPU, however it is split, and stays together: a clock would be
    fitted to the neighbors of what it is tested on.
    """
    curves = sorted({(row["source"], digest(row["curve"])) for row in counted})
    for row in counted:
        place = curves.index((row["source"], digest(row["curve"])))
        row["half"] = "fit" if place % 3 == 2 else "held out"


def steps(row):
    """Printed milliseconds of the steps of a run, without the seventh, when a profiler ran; [1] if there are none."""
    return [ms for step, ms in enumerate(row.get("steps_ms", []), 2) if step != 7] or [1]


def strategies(row):
    """How a row's model is spread over GPUs: a set of "ddp", "fsdp", "tensor" and "pipeline"."""
    split = {key for key in ("tensor", "pipeline") if row[key] > 1}
    if row["data"] == 1:
        return split
    return split | {"fsdp" if "ZeRO-3" in row["sharding"] else "ddp"}


def seconds(row):
    """Published seconds of one step, of all micro-batches."""
    value, unit = row["measured"], row["unit"]
    if unit.endswith("per step"):
        return value / (1e3 if unit.startswith("ms") else 1)
    rate = value * (row["n_gpus"] if "per GPU" in unit else 1)
    if unit.startswith("TFLOP"):
        return flops(row) / (rate * 1e12)
    return row["global_batch"] * (row["seq_len"] if unit.startswith("tokens") else 1) / rate


def flops(row):
    """FLOPs of one step as Megatron-LM's authors count them in 2021, with a forward pass for recomputation."""
    batch, seq, layers, width, vocab = (row[key] for key in "global_batch seq_len layers width vocab".split())
    return 96 * batch * seq * layers * width**2 * (1 + seq / (6 * width) + vocab / (16 * layers * width))
