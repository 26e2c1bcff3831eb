"""Hold the scaling of DistributedDataParallel against what others have published of ResNet-50 and BERT.

    python -m calibration.ddp_scaling

writes recorded/ddp_scaling.json: every table of `published_scaling` that counts, with the time of a step on
each number of GPUs as the clock has it, and with the efficiency: samples per second and GPU, as a part of what the
least number of GPUs in the table reaches. The clock's error for one GPU, which other studies look at, cancels there.
Nothing was fitted to any of it but some steps on one GPU. Beside each error stands that of a model which knows nothing
and takes all scaling for perfect.
"""

from functools import partial
from unittest.mock import patch

import torch
import torchvision

from calibration import published_scaling, steps
from calibration.errors import summary
from calibration.record import save
from calibration.transformer_validation import alone, of_micro_batches, replicated
from virtual_gpus.clock.machine_types import MACHINES
from virtual_gpus.clock.specs import GPUS

SAMPLE = (  # both networks, one node and several, a machine type that is offered and one that is not
    "csc-puhti-amp",
    "ray-nodes-fp32",
    "lambdal/deeplearning-benchmark, run log/BERT-large fine-tuning, 384 words, 112 each/H100-SXM5-80GB/"
    "fp16 (apex AMP O2, fp32 master weights)",
)
SHOWN = (
    "key title program model gpu sheet machine network precision batch_per_gpu bucket_mib runs software url quote"
).split()


def cases():
    """{key of a table that counts: (the table,)}."""
    return {table["key"]: (table,) for table in published_scaling.tables() if not table["excluded"]}


def seconds(table, gpus):
    """What the clock says of a step on so many GPUs."""
    with patch.dict(MACHINES, published_scaling.OTHERS), patch.dict(GPUS, published_scaling.LARGER):
        return of_sentences(table, gpus) if "steps" in table else of_images(table, gpus)


def of_images(table, gpus):
    """A step of a network of torchvision."""
    with torch.device("meta"):
        net = getattr(torchvision.models, table["model"])()
        X = torch.empty(gpus * table["batch_per_gpu"], 3, 224, 224)
    where = {"link": table["machine"], "network": table["network"]}
    return steps.seconds(net, X, table["sheet"], gpus, table["precision"], **where)


def of_sentences(table, gpus):
    """A step of BERT: its first micro-batch, and for each more as much as for a second one."""
    where = {"n_gpus": gpus, "gpu": table["sheet"], "link": table["machine"], "network": table["network"]}
    wrapped = partial(replicated, bucket_cap_mb=table["bucket_mib"]) if gpus > 1 else alone
    return of_micro_batches(table["steps"][gpus], wrapped, where)


def record(table):
    """A table with "rows": nodes, GPUs, and the published and the modelled time and efficiency, each with its error.

    An error is by which part the modelled value is too high. The first row is what the others are compared with.
    """
    real = {gpus: rate for _, gpus, rate in table["rows"]}
    published = {row[1]: published_scaling.seconds(table, row) for row in table["rows"]}
    said = {gpus: seconds(table, gpus) for gpus in real}
    rate = {gpus: real[gpus] * published[gpus] / said[gpus] for gpus in real}
    rows = []
    for nodes, gpus, _ in table["rows"]:
        efficiency, modelled = (published_scaling.efficiency(table, found, gpus) for found in (real, rate))
        time = {"published": round(published[gpus], 6), "modelled": round(said[gpus], 6)}
        scale = {"published": round(efficiency, 4), "modelled": round(modelled, 4)}
        time["error"], scale["error"] = round(said[gpus] / published[gpus] - 1, 4), round(modelled / efficiency - 1, 4)
        rows.append({"nodes": nodes, "gpus": gpus, "time": time, "efficiency": scale})
    return {**{key: table[key] for key in SHOWN}, "note": table.get("note"), "rows": rows}


def compared(tables, several):
    """The rows of recorded tables that are compared with a smaller one, on one node, or on `several`."""
    return [row for table in tables for row in table["rows"][1:] if (row["nodes"] > 1) == several]


def about(rows):
    """Errors of the efficiency, of the time, and of the efficiency if all scaling were perfect."""
    return {
        "efficiency": summary([row["efficiency"]["error"] for row in rows]),
        "time": summary([row["time"]["error"] for row in rows]),
        "if it were perfect": summary([round(1 / row["efficiency"]["published"] - 1, 4) for row in rows]),
    }


def left_out(rule, tables):
    """What a rule leaves out."""
    tables = [table for table in tables if table["excluded"] == rule]
    meaning, keys = published_scaling.RULES[rule], [table["key"] for table in tables]
    return {"rule": rule, "meaning": meaning, "rows": sum(len(table["rows"]) for table in tables), "all": keys}


def result():
    """All that is recorded, but for how it came about."""
    tables = [record(*case) for case in cases().values()]
    names = {"ResNet-50": ["resnet50"], "BERT": ["bert-base", "bert-large"]}
    found = {}
    for where, several in (("one node", False), ("several nodes", True)):
        found[where] = about(compared(tables, several))
        for name, models in names.items():
            of = [table for table in tables if table["model"] in models]
            found[f"{where}, {name}"] = about(compared(of, several))
    excluded = [left_out(rule, published_scaling.tables()) for rule in published_scaling.RULES]
    return {"summary": found, "excluded": excluded, "tables": tables}


if __name__ == "__main__":
    save("ddp_scaling", result())
