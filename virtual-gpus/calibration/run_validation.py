"""Hold dry runs against published figures of large models that were trained on many GPUs.

    python -m calibration.run_validation

writes recorded/run_validation.json: each row of published_runs.json that counts, with what `virtual_gpus.dry_run` says
of its program (large_programs.py), the time of a step and the most memory of a GPU, and how far off they are. Nothing
was fitted to any of these rows: both halves are reported, and the one that is meant for a fit later, too.

Of each curve, rows that differ in one setting only, the first three are run, if they take no more than so many layers
(see `cases`): all would take days. The choice looks at what rows are and not at errors, of which those of some thirty
rows were known when it was made. A step of many micro-batches is not run whole: see `counts`.

FMS FSDP's Llama had fused norms and rotations at first. Its three rows on H100s were 8 to 28% too fast; its source has
chains of operations (llama.py), and so has its program since.
"""

from collections import Counter
from unittest.mock import patch

import virtual_gpus
from calibration import large_programs, published_runs
from calibration.errors import compared
from calibration.errors import summary as errors_of
from calibration.record import RECORDED, record_missing, save
from virtual_gpus.clock.machine_types import MACHINES, NETWORKS

USUAL = {"A100-80": "DGX A100", "H100": "DGX H100"}  # machines, where only the memory counts and the network is unknown
SAMPLE = (  # the two quickest kinds of program
    "DLPerf/16x1536/V100/GPT DP_16x1x1_32_1536x16 (Megatron-LM)/16 GPUs/1 tensor, 1 pipeline x 1, 1 context/"
    "2 of 32 x 2048, 16 heads/ddp, full, fp16",
    "BigScience/8x14400/A100-80/GPT 20B/8 GPUs/8 tensor, 1 pipeline x 1, 1 context/1 of 2048 x 2048, 32 heads/"
    "distributed optimizer (ZeRO-1), full, fp16",
)
SHOWN = (
    "source model half sheet machine n_gpus layers width heads ffn vocab seq_len micro_batch global_batch precision "
    "attention recomputation sharding tensor pipeline virtual_stages sequence_parallel data source_url"
).split()
GIB = 2**30
ROWS, LAYERS = 3, 300  # at most: rows of a curve, and layers that a dry run goes through


def cases():
    """{id of a row: (the row,)}: of each curve its first row that can be run, then of each its second, and so on."""
    seen, counted = Counter(), []
    for row in countable():
        if cost(row) <= LAYERS and seen[row["curve"]] < ROWS:
            seen[row["curve"]] += 1
            counted.append((seen[row["curve"]], cost(row), row["id"], row))
    return {name: (row,) for *_, name, row in sorted(counted, key=lambda each: each[:3])}


def countable():
    """The rows whose time or memory counts."""
    return [row for row in published_runs.rows() if row["excluded"] is None or row["remembers"]]


def cost(row):
    """How many layers a dry run goes through."""
    return row["layers"] * sum(counts(row))


def recipe():
    return {"rows": ROWS, "layers": LAYERS}


# What a dry run says


def micro_batches(row):
    """How many each GPU of a row has in a step."""
    return row["global_batch"] // (row["micro_batch"] * row["data"])


def counts(row):
    """With how many micro-batches steps are run, from which the time of all of them follows.

    Once a pipeline is full, each more of them takes as long as its slowest stage. If that is the last one, it is full
    from the beginning: so it is where all stages have as many layers, since the last one has the output layer besides.
    """
    whole, stages = micro_batches(row), row["pipeline"]
    if row["virtual_stages"] > 1:
        few = stages, 2 * stages
    elif len(set(large_programs.layers_of_parts(row))) == 1:
        few = 1, 2
    else:
        few = stages, stages + 1
    return few if whole > few[1] else (whole,)


def predicted(row):
    """(seconds of a step, the most bytes that a GPU holds)."""
    few, whole = counts(row), micro_batches(row)
    found = [dry_run(row, number) for number in few]
    if len(found) == 1:
        [(seconds, peaks)] = found
        return seconds, max(map(max, peaks))
    (less, first), (more, second) = found
    each = (more - less) / (few[1] - few[0])
    return more + (whole - few[1]) * each, max(most(row, few, *at) for at in enumerate(zip(first, second, strict=True)))


def most(row, few, stage, peaks):
    """Bytes of a stage that keeps as many micro-batches as it may, from the peaks of steps with a `few` of them."""
    (less, _), (more, update) = peaks
    kept = [min(number, row["pipeline"] - stage) for number in (*few, micro_batches(row))]
    if row["pipeline"] == 1 or row["virtual_stages"] > 1 or kept[0] == kept[1]:
        return max(less, more, update)
    return max(more + (kept[2] - kept[1]) * (more - less) // (kept[1] - kept[0]), update)


def dry_run(row, number):
    """(seconds, [[bytes in the passes, in the optimizer's step] of each stage]) of a step of `number` micro-batches."""
    peaks, machine = {}, row["machine"] or USUAL[row["sheet"]]
    with patch.dict(MACHINES, published_runs.ALL_MACHINES), patch.dict(NETWORKS, published_runs.OTHER_NETWORKS):
        made = virtual_gpus.dry_run(
            large_programs.program(row, number, peaks),
            *(row["n_gpus"], row["sheet"], row["gpus_per_node"], machine, row["network key"]),
            software="2024",  # all that have a kernel for attention have FlashAttention 2, as far as they say which
        )
    return made.seconds, [peaks[rank] for rank in made.ranks]


def record(row):
    """A row with its predictions; "error" is how much too large they are, as a part of what was published. Of programs
    with FSDP also the time if collectives took nothing from the kernels beside them."""
    seconds, held = predicted(row)
    found = {key: row[key] for key in SHOWN}
    found |= {"network": row["network key"], "strategies": sorted(published_runs.strategies(row))}
    if row["excluded"] is None:
        found["time"] = compared(published_runs.seconds(row), seconds)
        if row["source"] == "FMS FSDP":
            with patch("virtual_gpus.ranks.communicator.collective_channels", return_value=0):
                found["time without contention"] = compared(published_runs.seconds(row), predicted(row)[0])
    if row["remembers"]:
        found["memory"] = compared(row["memory_gib"], held / GIB)
    return found


# Summing up


def summary(runs):
    """Errors of time and memory in each half and in both, by source and strategy; and which rows were not run."""
    found = {}
    for what in ("time", "memory"):
        there = [run for run in runs.values() if what in run]
        for half in ("held out", "fit", "both"):
            rows = [run for run in there if half in (run["half"], "both")]
            sources = sorted({run["source"] for run in rows})
            found.setdefault(what, {})[half] = {
                "all": errors(rows, what),
                "sources": {name: errors([r for r in rows if r["source"] == name], what) for name in sources},
                "strategies": {
                    name: errors([r for r in rows if name in kinds(r)], what)
                    for name in ("ddp", "fsdp", "tensor", "pipeline", "two or more nodes")
                },
            }
    return found | {"excluded": left_out(), "not run": [row["id"] for row in countable() if row["id"] not in runs]}


def kinds(run):
    """How a run's model is spread."""
    return {*run["strategies"], *(["two or more nodes"] if run["n_gpus"] > 8 else [])}


def errors(rows, what):
    """How far off, and on which side: with their signs the median, and between what the middle eight of ten lie."""
    found = sorted(row[what]["error"] for row in rows)
    if not found:
        return errors_of(found)
    low, high = (found[round(part * (len(found) - 1))] for part in (0.1, 0.9))
    return errors_of(found) | {"typically": found[len(found) // 2], "eight of ten": [low, high]}


def left_out():
    """What each rule leaves out: how many rows, of which sources."""
    rows, found = published_runs.rows(), []
    for rule, meaning in published_runs.RULES.items():
        sources = Counter(row["source"] for row in rows if row["excluded"] == rule)
        found.append({"rule": rule, "meaning": meaning, "rows": sources.total(), "sources": sources})
    return found


def main():
    unfinished = RECORDED / "run_validation.unfinished.json"
    runs = record_missing(cases(), record, unfinished)
    save("run_validation", {"recipe": recipe(), "summary": summary(runs), "runs": runs})
    unfinished.unlink()


if __name__ == "__main__":
    main()
