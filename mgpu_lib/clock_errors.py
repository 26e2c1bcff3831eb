"""How far off the clock is: the recorded comparisons with published and measured times, as rows of tables.

An error is modelled / real - 1: below 0, the clock's time is too short.
"""

import statistics

from mgpu_lib.recorded import measured, study


def errors():
    """{what was compared: its errors}. Where measurements were split in halves, those that no fit has seen."""
    clock, transformers, runs = map(study, ("clock_validation", "transformer_validation", "run_validation"))
    nodes = scaling_rows(study("ddp_scaling"))
    near, far = collectives()
    return {
        "images": [row["error"] for row in held_out(clock) if large(row) and row["mode"] == "train"],
        "transformers": [row["error"] for row in held_out(transformers)],
        "one node": [row["efficiency"]["error"] for _, row in nodes if row["nodes"] == 1],
        "several nodes": [row["efficiency"]["error"] for _, row in nodes if row["nodes"] > 1],
        "collectives": near,
        "slow networks": far,
        "runs": [row["time"]["error"] for row in runs["runs"].values() if "time" in row],
        "memory of runs": [row["memory"]["error"] for row in runs["runs"].values() if "memory" in row],
        "tensors": [said["activations"] / real["activations"] - 1 for _, real, said in both("memory")],
        "Llama on Hopper": steps_on_a_gpu("", "llama"),
        "images on Hopper": steps_on_a_gpu("ResNet-18"),
        "LeNet": steps_on_a_gpu("LeNet"),
    }


def by_regime():
    """{what sets the pace: {what was compared: modelled / real times}}.

    Of ResNet-18 on an H200, batches of 64 are left out: either may set the pace. An efficiency counts as the
    time that it stands for, 1 / efficiency.
    """
    found = errors()
    small = [row["error"] for row in held_out(study("clock_validation")) if row["batch_per_gpu"] <= 8]
    small += [row["now"]["error"] for row in study("trial")["rows"] if row["batch_per_gpu"] <= 8]
    resnet, few = h200("resnet18", (256, 1024)), h200("resnet18", (1, 16))
    lenet = h200("lenet", (1, 16, 64, 256, 1024))
    regimes = {
        "the GPU": {
            "image networks, training": found["images"],
            "transformers, training": found["transformers"],
            "ResNet-18, on an H200": resnet["train"] + resnet["infer"],
            "Llama, on an H200": steps_on_a_gpu("", "llama"),
        },
        "the host": {
            "published, up to 8 images": small,
            "ResNet-18, up to 16, on an H200": few["train"],
            "LeNet, training, on an H200": lenet["train"],
            "forward only, on an H200": lenet["infer"] + few["infer"],
        },
        "a link": {
            "collectives, node or InfiniBand": found["collectives"],
            "collectives, other networks": found["slow networks"],
            "slowdown of DDP between nodes": [1 / (1 + error) - 1 for error in found["several nodes"]],
        },
    }
    return {pace: {what: [1 + e for e in rows] for what, rows in each.items()} for pace, each in regimes.items()}


def h200(net, sizes):
    """{"train": errors, "infer": errors} of a network's steps and forward passes on an H200, with so many images."""
    found = {"train": [], "infer": []}
    for key, real, said in both("steps") + both("validation"):
        name, images, how = key.lower().replace("-", "").split("/")
        if name == net and int(images) in sizes:
            found["infer" if how == "infer" else "train"].append(said["median"] / real["median"] - 1)
    return found


def held_out(stored):
    """The rows of a study that no fit has seen."""
    return [row for row in stored["rows"] if row["half"] == "held out"]


def large(row):
    """Whether this row has one GPU and so many images that the GPU sets the pace."""
    return row["n_gpus"] == 1 and row["batch_per_gpu"] > 8


def scaling_rows(stored):
    """(table, row) of all efficiencies: those of the smallest number of GPUs are 1 by definition."""
    return [(table, row) for table in stored["tables"] for row in table["rows"][1:]]


def collectives():
    """The held-out errors of collective operations' times: inside a node and over InfiniBand, and over other networks.

    A row has microseconds, published and modelled. The error that it ends with is the bandwidth's, whose sign is the
    opposite.
    """
    found = {True: [], False: []}
    for table in study("collective_validation")["tables"]:
        if table["half"] == "held out":
            near = table["category"] not in ("RoCE", "EFA", "Slingshot")
            found[near] += [modelled / published - 1 for _, published, modelled, _ in table["rows"]]
    return found[True], found[False]


def both(part):
    """[(key, what a real H200 said, what a virtual one said)] of a part of `experiments.on_a_gpu`."""
    real, said = measured(part)
    return [(key, row, said["rows"][key]) for key, row in real["rows"].items()]


def steps_on_a_gpu(net, part="steps"):
    """Errors of the steps on an H200 whose names begin like that."""
    return [said["median"] / real["median"] - 1 for key, real, said in both(part) if key.startswith(net)]


def beside_a_copy():
    """{kernel: how many times as long it takes on an H100 while a copy keeps 24 thread blocks running}."""
    work = study("measured_h100")["contention"]["work"]
    return {kernel: times["24/2048"] / times["alone"] for kernel, times in work.items()}


# Tables


def verdict(question, found, advice):
    """A row of the page's table of questions; `found` are errors.

    "yes" where nine in ten of them are at most a quarter, "with care" where half are, "no" where fewer are.
    """
    within = sum(abs(error) <= 0.25 for error in found) / len(found)
    return {
        "question": question,
        "typical error": percent(statistics.median(map(abs, found))),
        "within 25%": f"{within:.0%}",
        "comparisons": len(found),
        "rely on it?": "yes" if within >= 0.9 else "with care" if within >= 0.5 else "no",
        "advice": advice,
    }


def percent(error):
    """Two digits at most."""
    return f"{error:.0%}" if error >= 0.0095 else f"{error:.1%}"


def summary_row(name, found, blind=None):
    """What a study says of one group of measurements, and whether they were blind."""
    row = {
        "compared": name,
        "rows": found["rows"],
        "typical error": f"{found['median']:.1%}",
        "nine in ten up to": f"{found['nine in ten']:.1%}",
    }
    return row | ({"worst": f"{found['worst']:.1%}"} if blind is None else {"blind?": blind})


def trial_table(rows):
    """The errors that the clock of the first edition made in the trial, by what sets the pace and what it was told."""
    half = [row for row in rows if row["precision"] == "amp"]
    full = [row for row in rows if row["precision"] != "amp"]
    groups = {
        "FP32 or TF32, 16 images and more": [row["then"] for row in full if row["batch_per_gpu"] > 8],
        "FP32, up to 8 images": [row["then"] for row in full if row["batch_per_gpu"] <= 8],
        "half precision, layout not told": [row["then"] for row in half],
        "half precision, layout told later": [row["now, channels last"] for row in half],
    }
    return [trial_row(name, [row["error"] for row in found]) for name, found in groups.items()]


def trial_row(name, found):
    """How many of these errors are at most a tenth, the least and the greatest."""
    return {
        "ResNet-50": name,
        "rows": len(found),
        "within a tenth": sum(abs(error) <= 0.1 for error in found),
        "from": f"{min(found):+.0%}",
        "to": f"{max(found):+.0%}",
    }


def several(row):
    """The GPUs of a row, in words."""
    return row["sheet"] if row["n_gpus"] == 1 else f"{row['n_gpus']} {row['sheet']}"


def run_row(row):
    """A run on many GPUs: published / dry run."""

    def compared(what, digits):
        if what not in row:
            return "–"
        found = row[what]
        return f"{found['published']:.{digits}f} / {found['predicted']:.{digits}f} ({found['error']:+.0%})"

    return {
        "source": row["source"],
        "model": row["model"],
        "GPUs": several(row),
        "split": f"{row['data']} x {row['tensor']} x {row['pipeline']}",
        "s per step": compared("time", 2),
        "GiB": compared("memory", 1),
        "half": row["half"],
    }


def ratio_rows():
    """Steps on an H200: modelled / measured, by network and by what it does."""
    ratios = {}
    for key, real, said in both("llama"):
        ratios.setdefault(f"Llama 3, 2 layers, {key.split('/')[1]}", []).append(said["median"] / real["median"])
    for key, real, said in both("steps") + both("validation"):
        name, _, how = key.split("/")
        how = {"fp32": "train", "amp": "train, autocast"}.get(how, how)
        name = "ResNet-18" if "18" in name else "LeNet"
        ratios.setdefault(f"{name}, {how}", []).append(said["median"] / real["median"])
    return [
        {
            "step": name,
            "number": len(found),
            "modelled / measured, median": f"{statistics.median(found):.2f}",
            "from": f"{min(found):.2f}",
            "to": f"{max(found):.2f}",
        }
        for name, found in ratios.items()
    ]


def memory_row(key, real, said):
    """MiB on an H200: measured / counted on a virtual one."""
    row = {"step": key.replace("/", ", ")}
    for name in ("parameters", "gradients", "activations", "peak"):
        row[name] = f"{real[name] / 2**20:,.1f} / {said[name] / 2**20:,.1f}" if name in real else "–"
    return row | {"peak, more": f"{(real['peak'] - said['peak']) / 2**20:.1f}"}
