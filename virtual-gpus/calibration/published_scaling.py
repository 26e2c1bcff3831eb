"""Published scaling of data-parallel training: ResNet-50 and BERT, on several GPUs and nodes. Which tables count.

ResNet-50's tables stand in published_scaling.json, as they were printed. BERT's rows stand in
published_transformers.json; here they are put together into tables, one for each network, program, GPU, precision and
batch. All of it only tests the clock: nothing is fitted. What counts, and on which machine it is predicted, was decided
from what the sources say of their programs, and committed, before the clock had been asked for any of it. NVIDIA's own
tables for ResNet-50, and all runs of that program, are left alone: they are another trial's.
"""

import json
import statistics
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from calibration import published_transformers
from virtual_gpus.clock.machine_types import MACHINES, MachineType
from virtual_gpus.clock.specs import GPUS

PATH = Path(__file__).parent / "published_scaling.json"
# How the sources name GPUs, up to what is put into parentheses -> key of a data sheet
SHEETS = {name: sheet for name, (sheet, _) in published_transformers.SHEETS.items()}
SHEETS |= {"V100": "V100", "V100-SXM2-32GB": "V100-32"}
LARGER = {"V100-32": replace(GPUS["V100"], key="V100-32", memory=34_089_730_048)}  # bytes, as deviceQuery prints them
_DGX1, _HGX = MACHINES["DGX-1V"], MACHINES["HGX A100 4-GPU"]
OTHERS = {  # machines that virtual GPUs do not offer
    kind.key: kind
    for kind in (
        replace(_DGX1, key="DGX-1V, 1 card", nics=1),
        replace(_HGX, key="Mahti", nics=1),
        MachineType("Puhti", "nvlink2", 4, 2, _DGX1.socket_bandwidth, None, {pair: 2 for pair in _HGX.nvlinks}),
    )
}
NETWORKS = {  # how published_transformers.json describes a network -> (machine, network)
    "1x InfiniBand EDR 100 Gb/s per node": ("DGX-1V, 1 card", "InfiniBand EDR"),
    "not stated in the table; DGX A100": ("DGX A100", "InfiniBand HDR"),  # what a DGX A100 has
}
# Gradients that travel together, as numbers or as MiB (None: all). Read in run_pretraining.py and run_squad.py of
# DeepLearningExamples, at commits 729963d and, for 2020, 5cc03ca; Apex takes 10 million numbers if nobody says more.
BUCKETS = {
    "DeepLearningExamples, pre-training": None,
    "DeepLearningExamples of 2020": 250e6,
    "DeepLearningExamples, SQuAD": 10e6,
    "Lambda, SQuAD": 10e6,
}
ALL_MIB = 1e5  # more than any of these networks has
RULES = {
    "model": "the network is neither ResNet-50 nor BERT",
    "program": "neither PyTorch's DistributedDataParallel nor Apex's: one process for all GPUs, or Horovod",
    "loading": "a step waits for images that are read and decoded, which the clock leaves out",
    "lone": "there is nothing smaller to compare with: one number of GPUs only",
    **{rule: published_transformers.RULES[rule] for rule in ("sheet", "lengths")},
}


def tables():
    """All tables, with "rows" as [(nodes, GPUs, samples per second of all GPUs)] and with "excluded" (a key of RULES).

    Several runs of one program on one kind of machine are one row, which has their median.
    """
    found = [*images(), *sentences()]
    for table in found:
        table["excluded"] = excluded(table)
    return found


def images():
    """The tables of convolutional networks."""
    found = json.loads(PATH.read_text())["tables"]
    for table in found:
        table["sheet"] = SHEETS.get(table["gpu"].split(" (")[0])
        each = "per GPU" in table["unit"]
        rows = [(nodes, gpus, statistics.median(values), len(values)) for nodes, gpus, values in table["rows"]]
        table["rows"] = [(nodes, gpus, value * (gpus if each else 1)) for nodes, gpus, value, _ in rows]
        table["runs"] = sum(runs for *_, runs in rows)
        table["bucket_mib"] = 25
    return found


def sentences():
    """BERT's rows, put together. "steps" has the row of published_transformers for each number of GPUs."""
    rows = [row for row in published_transformers.rows() if row["model"].startswith("BERT")]
    return [table_of(list(group)) for _, group in groupby(sorted(rows, key=same), key=same)]


def same(row):
    """What rows of one table have in common."""
    shape = row["gpu"], row["printed precision"], row["seq_len"], row["micro_batch"]
    return tuple(map(str, (row["source_title"], row["model"], *shape)))


def table_of(rows):
    first, last = rows[0], max(rows, key=lambda row: row["n_gpus"])
    machine, network = NETWORKS.get(last.get("network"), (first["machine"], None))
    steps = {row["n_gpus"]: row for row in sorted(rows, key=lambda row: row["n_gpus"])}
    values = {k: [sequences(row) for row in rows if row["n_gpus"] == k] for k in steps}
    about = f"{first['model'].split(' (')[0]}, {first['seq_len']} words, {first['micro_batch']} each"
    return {
        "key": f"{first['source_title']}/{about}/{first['gpu']}/{first['printed precision']}",
        "title": first["source_title"],
        "program": first["curve"].split("/")[0],
        "model": "-".join(first["model"].split(" ")[0].split("-")[:2]).lower(),
        "batch_per_gpu": first["micro_batch"],
        **{key: first[key] for key in ("gpu", "sheet", "precision", "software")},
        **{"machine": machine, "network": network, "url": first["source_url"], "quote": last["quote"]},
        "rows": [(row.get("nodes") or 1, k, statistics.median(values[k])) for k, row in steps.items()],
        "runs": len(rows),
        "steps": steps,
        "bucket_mib": bucket_mib(first),
        "left out there": {row["excluded"] for row in rows} - {None, "nodes"},
    }


def sequences(row):
    """Published sequences per second of all GPUs."""
    return per_step(row) * row["n_gpus"] / published_transformers.seconds(row)


def per_step(row):
    """Sequences that one GPU takes in a step, in all micro-batches."""
    return row["micro_batch"] * (row.get("accumulation_steps") or 1)


def bucket_mib(row):
    numbers = BUCKETS.get(row["curve"].split("/")[0])
    return ALL_MIB if numbers is None else numbers * (2 if row["precision"] == "fp16" else 4) / 2**20


def excluded(table):
    """The rule by which a table does not count, or None."""
    if table["model"] not in ("resnet50", "bert-base", "bert-large"):
        return "model"
    if "steps" not in table and table["program"] != "DistributedDataParallel":
        return "program"
    if table.get("loading"):
        return "loading"
    if table.get("left out there"):
        return min(table["left out there"])
    return "lone" if len(table["rows"]) == 1 else None


def seconds(table, row):
    """Published seconds of a step, of a row of "rows"."""
    _, gpus, rate = row
    batch = per_step(table["steps"][gpus]) if "steps" in table else table["batch_per_gpu"]
    return batch * gpus / rate


def efficiency(table, rate, gpus):
    """Samples per second and GPU, as a part of what the least number of GPUs in the table reaches.

    rate: {number of GPUs: samples per second of all of them}.
    """
    least = table["rows"][0][1]
    return rate[gpus] / gpus / (rate[least] / least)
