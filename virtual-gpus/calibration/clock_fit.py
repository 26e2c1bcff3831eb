"""Fit the clock's rates to one half of the published measurements.

    python -m calibration.clock_fit

writes virtual-gpus/virtual_gpus/clock/rates.json. Every setting is one for all models; those of the generations are
factors on settings that all generations share. Each setting is drawn toward a plain starting value, by as much as it
is known beforehand: what the measurements say nothing about stays there.
"""

import math
from typing import NamedTuple

import numpy as np

from calibration import fitting, published, sheets
from calibration.fitting import nested
from calibration.record import provenance, write
from virtual_gpus import virtual_gpus
from virtual_gpus.clock import costs, rates
from virtual_gpus.clock.specs import LINKS
from virtual_gpus.clock.work import work_of

OUT = rates.PATH
CONVOLUTIONS = ("conv1x1", "conv3x3", "conv", "conv_grouped", "conv_depthwise")
LIGHT = ("pool", "reduce", "gather", "pointwise", "foreach")
# setting -> (starting value, its uncertainty as a factor e**s, the places in rates.json that it sets)
START = {}


def setting(name, value, uncertainty, *places):
    START[name] = (value, uncertainty, places)


# Large matrix products reach 74 % on an A100, 76 % on a V100 (github.com/mli/transformers-benchmarks): known well.
# A 3x3 convolution of unit stride may exceed 1 on the cores: Winograd's way takes up to 2.25 times fewer operations.
for kind, on_cores, on_tensor_cores in (
    ("conv1x1", 0.75, 0.5),
    ("conv3x3", 1.2, 0.5),
    ("conv", 0.6, 0.35),
    ("conv_grouped", 0.2, 0.1),
    ("conv_depthwise", 0.15, None),
    ("matmul", 0.85, 0.75),
):
    more = ("attention",) if kind == "matmul" else ()
    setting(f"cores {kind}", on_cores, 0.3, *(("cores", k) for k in (kind, *more)))
    if on_tensor_cores:
        setting(f"tensor cores {kind}", on_tensor_cores, 0.1 if more else 0.3, *(("tensor", k) for k in (kind, *more)))
# Of the rate of a forward convolution, its backward reaches this part.
setting("backward on cores", 0.9, 0.3)
setting("backward on tensor cores", 0.8, 0.3)
setting("backward depthwise", 0.5, 0.3)
setting("half", 4000, 0.5, ("half",))
setting("memory convolutions", 0.75, 0.15, *(("memory", k) for k in (*CONVOLUTIONS[:3], "matmul", "attention")))
setting("memory grouped", 0.6, 0.3, ("memory", "conv_grouped"))
setting("memory depthwise", 0.6, 0.3, ("memory", "conv_depthwise"))
setting("memory norm", 0.7, 0.15, ("memory", "norm"))
setting("memory elementwise", 0.8, 0.1, *(("memory", k) for k in LIGHT))
setting("memory layout", 0.6, 0.3, ("memory", "layout"))
for generation in ("Pascal", "Turing"):
    setting(f"cores of {generation}", 1.0, 0.2, ("factor", "cores", generation))
for generation in ("Pascal", "Turing", "Ampere", "Ampere GeForce", "Ada"):
    setting(f"memory of {generation}", 1.0, 0.1, ("factor", "memory", generation))
setting("low power", 0.8, 0.2, ("factor", "low power"))
for generation in ("Turing", "Ampere", "Ampere GeForce", "Ada"):
    setting(f"tensor cores of {generation}", 1.0, 0.3, ("factor", "tensor cores", generation))
setting("copies from shared memory", 3e9, 0.5, ("copy", "shared"))  # bytes per second
setting("fixed heavy", 6e-6, 0.4, *(("fixed", k) for k in (*CONVOLUTIONS, "matmul", "attention", "norm")))
setting("fixed light", 2e-6, 0.5, *(("fixed", k) for k in LIGHT))
setting("fixed layout", 3e-6, 0.3, ("fixed", "layout"))
for i, (way, conv, norm, matmul, light) in enumerate(
    (("called", 40e-6, 35e-6, 25e-6, 15e-6), ("by the engine", 45e-6, 25e-6, 20e-6, 10e-6))
):
    setting(f"host convolutions, {way}", conv, 0.4, *(("host", k, i) for k in CONVOLUTIONS))
    setting(f"host norm, {way}", norm, 0.4, ("host", "norm", i))
    setting(f"host matmul, {way}", matmul, 0.4, ("host", "matmul", i), ("host", "attention", i))
    setting(f"host others, {way}", light, 0.4, *(("host", k, i) for k in LIGHT))
    setting(f"host views, {way}", (3e-6, 1e-6)[i], 0.4, ("host", "view", i))
    setting(f"host tensors in a list, {way}", 0.7e-6, 0.4, ("host", "tensor", i))


def tables(values):
    """The tables of rates.json, from {setting: value}."""
    found = nested({place: values[name] for name, (_, _, places) in START.items() for place in places})
    found["host"] = {kind: [times[0], times[1]] for kind, times in found["host"].items()}
    for kind in CONVOLUTIONS:
        for units, name in (("cores", "cores"), ("tensor", "tensor cores")):
            if kind in found[units]:
                name = "depthwise" if kind == "conv_depthwise" else f"on {name}"
                found[units][f"{kind} backward"] = found[units][kind] * values[f"backward {name}"]
    return found


class Log(NamedTuple):
    """The operations of one step, as arrays over the operations."""

    kind: np.ndarray  # index into KINDS
    deep: np.ndarray  # whether it is the backward of a convolution, or of an attention on ordinary cores
    flops: np.ndarray
    outputs: np.ndarray
    nbytes: np.ndarray
    layout_nbytes: np.ndarray
    layout_copies: np.ndarray
    kernels: np.ndarray
    tensors: np.ndarray
    engine: np.ndarray  # whether autograd's engine called it
    fast: np.ndarray  # FLOP per second of the tensor cores at this precision, 0: not on them
    attention: np.ndarray  # the part of it that attention reaches, 0: no attention on tensor cores
    copied: int  # bytes of the batch that are copied to the GPU first


KINDS = sorted(rates.HOST)
OF_WORK = "flops outputs nbytes layout_nbytes layout_copies kernels tensors".split()  # fields of a Work that a Log has


def record(row):
    """The Log of a row."""
    copied = 0
    if published.PROGRAMS[row["source"]].get("copied"):
        copied = math.prod(published.batch_shape(row)) * (2 if row["precision"] == "fp16" else 4)
    with published.attention(row):
        return log_of(row["sheet"], published.tf32(row), lambda device: published.step_on(device, row), copied)


def log_of(sheet, tf32, step_on, copied=0, software=rates.NEWEST):
    """The Log of the step that `step_on` makes for a device, on a GPU with the data sheet named `sheet`."""
    spec, found = sheets.find(sheet), []
    with sheets.added(), virtual_gpus(1, gpu=sheet, backing="meta") as machine:
        machine.ledgers[0].capacity = 10**15  # the published batch sizes did fit
        machine.clock.tf32 = tf32
        step = step_on(machine.devices[0])
        step()  # the first one makes the optimizer's state

        def record_op(gpu, func, args, kwargs, out, key):
            host = machine.clock.host()
            if not host.paused:
                found.append((work_of(func, args, kwargs, out, machine.clock.tf32), host.engine is not None))

        machine.clock.record_op = record_op
        step()
    work, engine = zip(*found, strict=True)
    fast = [getattr(spec, w.precision) if costs.on_tensor_cores(w, spec) else 0.0 for w in work]
    group = rates.generation(spec)
    attention = [
        costs.attention_part(w, group, software) if w.kind == "attention" and peak else 0.0
        for w, peak in zip(work, fast, strict=True)
    ]
    columns = {
        "kind": [KINDS.index(w.kind) for w in work],
        "deep": [w.kind in costs.SLOWER_BACKWARD and w.name.endswith("backward") for w in work],
        **{name: [getattr(w, name) for w in work] for name in OF_WORK},
        "engine": engine,
        "fast": fast,
        "attention": attention,
    }
    arrays = {name: np.array(column, dtype=int if name == "kind" else float) for name, column in columns.items()}
    return Log(**arrays, copied=copied)


def replay(log, spec, table):
    """Seconds of a step, with the rates in `table` (see rates.merged): what the clock says, all operations at once."""

    def of(name, more=""):
        return np.array([table[name].get(kind + more, 1.0) for kind in KINDS])[log.kind]

    def part(name):
        return np.where(log.deep, of(name, " backward"), of(name))

    group = rates.generation(spec)
    better = {units: table["factor"][units].get(group, 1.0) for units in ("cores", "tensor cores", "products")}
    product = log.kind == KINDS.index("matmul")
    reached = np.minimum(1.0, part("tensor") * np.where(product, better["products"], better["tensor cores"]))
    rate = np.where(
        log.fast > 0,
        log.fast * np.where(log.attention > 0, log.attention, reached),
        spec.fp32 * part("cores") * better["cores"],
    )
    rate *= np.where(log.outputs > 0, log.outputs / (log.outputs + table["half"] * spec.sm_count), 1.0)
    rate *= table["factor"]["low power"] if spec.power <= rates.LOW_POWER else 1.0
    good = table["factor"]["memory"].get(group, 1.0)
    traffic = log.nbytes / (spec.bandwidth * np.minimum(1.0, of("memory") * good))
    layout = np.where(log.fast > 0, log.layout_nbytes, 0) / (
        spec.bandwidth * min(1.0, table["memory"]["layout"] * good)
    )
    copies = np.where(log.fast > 0, log.layout_copies, 0) * table["fixed"]["layout"]
    seconds = log.kernels * of("fixed") + copies + np.maximum(log.flops / rate, traffic) + layout
    host = np.array([table["host"][kind] for kind in KINDS])[log.kind, log.engine.astype(int)]
    host = host + log.tensors * np.array(table["host"]["tensor"])[log.engine.astype(int)]
    seconds = np.where(log.kernels > 0, seconds, 0.0)
    launched, behind = np.cumsum(host), np.cumsum(seconds[::-1])[::-1]
    copying = log.copied and rates.HOST_COPY + LINKS[spec.pcie].latency + log.copied / table["copy"]["shared"]
    return copying + max(launched[-1], np.max(launched + behind))


def fit(rows, logs):
    """{setting: value}, to these rows and their logs. MXNet's count half."""

    def errors(values):
        table = rates.merged(tables(values), rates.TRANSFORMERS)
        for row, log in zip(rows, logs, strict=True):
            yield math.log(replay(log, sheets.find(row["sheet"]), table) / published.seconds(row))

    weights = fitting.weights(rows, 3) * np.array([0.5 if row["source"] == "mx" else 1.0 for row in rows])
    return fitting.fit(START, errors, SPREAD, weights, PARTS)


# settings that are parts of a peak, and stay below it
PARTS = {n for n in START if n.startswith(("tensor cores ", "memory ")) and " of " not in n}
SPREAD = 0.1  # how far a good prediction may be off, as a factor e**s


def used(rows):
    return [r for r in rows if not r["excluded"] and r["n_gpus"] == 1]


def main():
    rows = [r for r in used(published.rows()) if r["half"] == "fit"]
    settings = fit(rows, [record(row) for row in rows])
    about = {**provenance("clock_fit"), "rows": len(rows)}
    write(OUT, {**tables(settings), "settings": settings, "provenance": about})


if __name__ == "__main__":
    main()
