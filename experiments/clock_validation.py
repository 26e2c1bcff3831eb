"""Hold the clock against published measurements, and against a real GPU where one is at hand.

    python -m experiments.clock_validation             predicts every row of published.json
    python -m experiments.clock_validation --measure   times steps on this machine's GPU

The first writes mgpu_lib/recorded/clock_validation.json. Rows of one half (see `published.halve`) were used to fit the
clock; errors are reported for the other. Rows that a rule leaves out are predicted as well where that is possible, so
that one can see what the rule does to the errors. The second writes measured_validation.json beside it.
"""

import argparse
import itertools
import statistics
import sys

import torch
import torchvision

import mgpu_lib as mgpu
from experiments import published, sheets
from experiments.record import provenance, write
from mgpu_lib.prediction import predict
from mgpu_lib.recorded import RESULTS

OUT = RESULTS / "clock_validation.json"
SAMPLE = None  # all: a row takes less than a second
SHOWN = (
    "id",
    "source",
    "gpu",
    "sheet",
    "n_gpus",
    "model",
    "batch_per_gpu",
    "precision",
    "memory_format",
    "mode",
    "half",
    "framework",
    "url",
    "where",
    "quote",
)


def cases():
    """{id of a row that counts: (the row,)}."""
    return {row["id"]: (row,) for row in published.rows() if not row["excluded"]}


def seconds(row):
    """What the clock says of a row's step."""
    if row["n_gpus"] > 1:
        return several(row)
    with sheets.added(), mgpu.virtual_gpus(1, gpu=row["sheet"], backing="meta") as machine, published.attention(row):
        machine.ledgers[0].capacity = 10**15  # the published batch sizes did fit
        machine.clock.tf32 = published.tf32(row)
        step = published.step_on(machine.devices[0], row)
        step()  # the first one makes the optimizer's state
        with mgpu.Timer(machine.devices) as timer:
            step()
    return timer.seconds


def several(row):
    """The same for several GPUs, as DistributedDataParallel uses them."""
    layout = torch.channels_last if row["memory_format"] == "nhwc" else torch.contiguous_format
    X = torch.empty(row["n_gpus"] * row["batch_per_gpu"], *row["image"], device="meta").to(memory_format=layout)
    net = published.build(row["model"]).to(memory_format=layout)
    return predict(net, X, row["sheet"], row["n_gpus"], "ddp", row["precision"], row["link"]).seconds


def record(row):
    """A row with its prediction; "error" is how much too long that is, as a part of the published time."""
    real, said = published.seconds(row), seconds(row)
    return {
        **{key: row.get(key) for key in SHOWN},
        "published": round(real, 6),
        "predicted": round(said, 6),
        "error": round(said / real - 1, 4),
    }


def can_be_predicted(row):
    """Whether a row that a rule leaves out can be predicted nevertheless."""
    return row["sheet"] is not None and row["source"] in published.PROGRAMS and published.build_by(row["model"])


def summary(errors):
    """How far off the predictions are: median, nine in ten, and worst, of the sizes of the errors."""
    sizes = sorted(map(abs, errors))
    if not sizes:
        return {"rows": 0}
    return {
        "rows": len(sizes),
        "median": statistics.median(sizes),
        "nine in ten": sizes[int(0.9 * (len(sizes) - 1))],
        "worst": sizes[-1],
    }


def validate():
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
    errors = {half: [row["error"] for row in found if row["half"] == half] for half in ("held out", "fit")}
    errors["held out, and what late rules left out"] = errors["held out"] + late
    halves = {name: summary(found) for name, found in errors.items()}
    write(
        OUT,
        {
            "provenance": provenance("experiments.clock_validation"),
            "summary": halves,
            "excluded": excluded,
            "rows": found,
        },
    )
    for half, numbers in halves.items():
        print(half, numbers)


def measured_cases():
    """{name of a step: arguments of `measured`} of what a real GPU is asked: LeNet and ResNet-18, trained and not."""
    images = {"lenet": (1, 28, 28), "resnet18": (3, 224, 224)}
    steps = itertools.product(images.items(), (1, 16, 64, 256), ("train", "infer"))
    return {f"{name}/{batch}/{mode}": (name, image, batch, mode) for (name, image), batch, mode in steps}


def measured(name, image, batch, mode):
    """Seconds of one of these steps on the first GPU: median and quartiles."""
    device = torch.device("cuda", 0)
    timing = mgpu.Timer([device]).measure(real_step(name, image, batch, mode, device))
    low, high = timing.spread
    return {"model": name, "batch": batch, "mode": mode, "median": timing.median, "low": low, "high": high}


def real_step(name, image, batch, mode, device):
    """One step with real values."""
    net = (torchvision.models.resnet18() if name == "resnet18" else LeNet()).to(device).train(mode == "train")
    X, y = torch.randn(batch, *image, device=device), torch.zeros(batch, dtype=torch.int64, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step():
        with torch.set_grad_enabled(net.training):
            loss = torch.nn.functional.cross_entropy(net(X), y)
        if net.training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


class LeNet(torch.nn.Module):
    """The book's LeNet as a module."""

    def __init__(self):
        super().__init__()
        self.params = torch.nn.ParameterList(mgpu.lenet_params())

    def forward(self, X):
        return mgpu.lenet(X, list(self.params))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="time steps on this machine's GPU instead")
    if not parser.parse_args().measure:
        return validate()
    if mgpu.current_machine() is not None or not torch.cuda.is_available():
        sys.exit("--measure needs a real GPU, and PyTorch sees none here")
    from experiments import on_a_gpu  # which knows these steps, too

    return on_a_gpu.measure("validation", RESULTS)


if __name__ == "__main__":
    main()
