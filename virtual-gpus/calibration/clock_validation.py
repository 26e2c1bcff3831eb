"""Hold the clock against published measurements.

    python -m calibration.clock_validation

predicts every row of published.json and writes recorded/clock_validation.json. Rows of one half (see
`published.halve`) were used to fit the clock; errors are reported for the other. Rows that a rule leaves out are
predicted as well where that is possible, so that one can see what the rule does to the errors.
"""

import torch

from calibration import published, sheets, steps
from calibration.errors import compared, of_halves, summary
from calibration.record import save
from virtual_gpus import virtual_gpus

SAMPLE = (  # one GPU and several, timm's layout, inference
    "ddp-v100-resnext50_32x4d-n8-b32",
    "timm-rtx-3090-resnet50-train-amp-nhwc-b512",
    "pycls-v100-resnet50-infer-b64",
)
SHOWN = (
    "id source gpu sheet n_gpus model batch_per_gpu precision memory_format mode half framework url where quote"
).split()


def cases():
    """{id of a row that counts: (the row,)}."""
    return {row["id"]: (row,) for row in published.rows() if not row["excluded"]}


def seconds(row):
    """What the clock says of a row's step."""
    if row["n_gpus"] > 1:
        return several(row)
    with sheets.added(), virtual_gpus(1, gpu=row["sheet"], backing="meta") as machine, published.attention(row):
        machine.ledgers[0].capacity = 10**15  # the published batch sizes did fit
        machine.clock.tf32 = published.tf32(row)
        step = published.step_on(machine.devices[0], row)
        step()  # the first one makes the optimizer's state
        start = finished(machine)
        step()
        return finished(machine) - start


def finished(machine):
    """The time when its GPU has done what it was given."""
    torch.cuda.synchronize(machine.devices[0])
    return machine.elapsed()


def several(row):
    """The same for several GPUs, as DistributedDataParallel uses them."""
    layout = torch.channels_last if row["memory_format"] == "nhwc" else torch.contiguous_format
    X = torch.empty(row["n_gpus"] * row["batch_per_gpu"], *row["image"], device="meta").to(memory_format=layout)
    net = published.build(row["model"]).to(memory_format=layout)
    return steps.seconds(net, X, row["sheet"], row["n_gpus"], row["precision"], row["link"])


def record(row):
    """A row with its prediction."""
    return {**{key: row.get(key) for key in SHOWN}, **compared(published.seconds(row), seconds(row))}


def can_be_predicted(row):
    """Whether a row that a rule leaves out can be predicted nevertheless."""
    return row["sheet"] is not None and row["source"] in published.PROGRAMS and published.build_by(row["model"])


def result():
    """All that is recorded, but for how it came about."""
    rows = published.rows()
    found = [record(row) for row in rows if not row["excluded"]]
    left_out, late = {}, []
    for row in rows:
        if row["excluded"]:
            error = record(row)["error"] if can_be_predicted(row) else None
            left_out.setdefault(row["excluded"], []).append(error)
            late += [error] if published.late(row) else []
    excluded = [
        {
            "rule": rule,
            "meaning": published.RULES[rule],
            "all": len(errors),
            **summary([e for e in errors if e is not None]),
        }
        for rule, errors in sorted(left_out.items())
    ]
    return {"summary": of_halves(found, late), "excluded": excluded, "rows": found}


if __name__ == "__main__":
    save("clock_validation", result())
