"""Published figures of training transformers on one GPU and on one node: which count, and which half each belongs to.

The figures stand in published_transformers.json, as they were printed. The rules and the halves were decided from what
the sources say of their programs, and committed, before the clock had been asked for a training step of a transformer.
Errors of the half for the fit led to three changes: the rule in `late`, which kernels FlashAttention's program fuses,
and an optimizer that takes one parameter after the other. MosaicML's and torchtitan's tables are kept for another,
independent trial: none of their rows is here.
"""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from calibration.halves import halve

PATH = Path(__file__).parent / "published_transformers.json"
# How the sources name GPUs, up to what is put into parentheses -> key of a data sheet, and the machine they stand in
SHEETS = {
    "V100-SXM2-16GB": ("V100", "DGX-1V"),
    "V100-SXM2-32GB": ("V100", "DGX-1V"),
    "A100-SXM4-40GB": ("A100-40", "DGX A100"),
    "A100-SXM4-80GB": ("A100-80", "DGX A100"),
    "H100-SXM-80GB": ("H100", "DGX H100"),
    "H100-SXM5-80GB": ("H100", "DGX H100"),
}


class Program(NamedTuple):
    """What a program's step is made of. `fused` has the chains of operations that are one kernel there.

    task: "masked", "span" or "causal", see `transformers.Transformer`; dense: guesses only the masked words, not all.
    """

    task: str
    fused: tuple = ()
    dense: bool = False


# the beginnings of a row's title and model -> (name, Program)
PROGRAMS = {
    # scripted, so that NVFuser makes one kernel of each chain (run_pretraining.py, modeling.py)
    ("BERT for PyTorch", "BERT-large pre-training"): (
        "DeepLearningExamples, pre-training",
        Program("masked", ("softmax", "gelu", "norm"), dense=True),
    ),
    ("BERT for PyTorch", "BERT-large fine-tuning"): ("DeepLearningExamples, SQuAD", Program("span")),
    # the same program as it was in 2020: only GELU and its bias are fused, all words are guessed
    ("DLPerf: NVIDIA/DeepLearningExamples", "BERT-base"): (
        "DeepLearningExamples of 2020",
        Program("masked", ("gelu",)),
    ),
    ("lambdal", "BERT-"): ("Lambda, SQuAD", Program("span")),
    ("DLPerf GPT", "GPT"): ("Megatron-LM", Program("causal", ("softmax", "gelu", "add"))),
    ("Optimized Transformer", "GPT3"): ("FlashAttention", Program("causal", ("gelu", "add", "norm", "loss"))),
}
RULES = {
    "trust": "the source doesn't state the batch, or the number of GPUs, beside the figure",
    "compiled": "torch.compile decides which operations become one kernel, and the source doesn't say which",
    "program": "the program isn't PyTorch with the matrix products of cuBLAS, or its network isn't rebuilt here",
    "split": "the network itself is split over GPUs, or its parameters are",
    "nodes": "more than one node: for another table",
    "sheet": "the form of the GPU isn't stated, or has no data sheet",
    "lengths": "sequences lie in bins by their length, 64 words wide, so that most steps have fewer than the row says",
}


def software(row):
    """The year whose attention kernels a row's program runs, as virtual_gpus takes it."""
    return "2023" if "v1" in row["attention"] else "2024"


def rows():
    """All rows, with the keys "id", "program", "sheet", "machine", "curve", "half" and "excluded" (a key of RULES)."""
    found, names = json.loads(PATH.read_text())["rows"], Counter()
    for row in found:
        name, row["program"] = program_of(row)
        row["printed precision"], row["precision"] = row["precision"], row["precision"].split()[0]
        row["sheet"], row["machine"] = SHEETS.get(row["gpu"].split(" (")[0], (None, None))
        row["curve"] = f"{name}/{row['layers']}x{row['width']}/{row['sheet']}/{row['precision']}"
        shape = f"{row['curve']}/{row['seq_len']} tokens/{row['micro_batch']} on each of {row['n_gpus']}"
        names[shape] += 1
        row["id"] = shape if names[shape] == 1 else f"{shape}, again {names[shape]}"
        row["excluded"] = excluded(row)
    halve([row for row in found if not row["excluded"] or late(row)], lambda row: row["program"])
    return found


def program_of(row):
    """(Name, Program) of a row; (its title, None) if it isn't one that is rebuilt here."""
    for (title, model), program in PROGRAMS.items():
        if row["source_title"].startswith(title) and row["model"].startswith(model):
            return program
    return row["source_title"], None


def excluded(row):
    """The rule by which a row does not count, or None."""
    if row.get("trust") == "low":
        return "trust"
    if row["compiled"]:
        return "compiled"
    if row["program"] is None or "OneFlow" in row["model"]:
        return "program"
    if max(row.get("tensor_parallel") or 1, row.get("pipeline_parallel") or 1) > 1:
        return "split"
    if row["n_gpus"] > 8 or (row.get("nodes") or 1) > 1:
        return "nodes"
    if row["sheet"] is None:
        return "sheet"
    binned = row["program"].task == "masked" and row["seq_len"] == 512  # phase2_bin_size=64 in pretrain_config.sh
    return "lengths" if binned else None


def late(row):
    """Whether a row is left out by a rule that was written when errors of the fit's half had been seen.

    There 512 words cost fewer FLOPs than the GPU can do in the published time, which led to the bins.
    """
    return row["excluded"] == "lengths"


def seconds(row):
    """Published seconds of one step, which has `accumulation_steps` micro-batches on each GPU."""
    if row["unit"].startswith("ms"):
        return row["measured"] / 1e3
    if "steady_iterations_per_s" in row:  # the rate that is printed counts a step too few, and the first one's start
        return 1 / row["steady_iterations_per_s"]
    per_gpu = row["micro_batch"] * (row.get("accumulation_steps") or 1)
    sequences = row["measured"] / (row["seq_len"] if row["unit"].startswith("tokens") else 1)
    return per_gpu * row["n_gpus"] / (sequences * (row["n_gpus"] if "per GPU" in row["unit"] else 1))
