"""Fit what transformers need of the clock to one half of their published figures.

    python -m calibration.transformer_fit

writes virtual-gpus/virtual_gpus/clock/transformers.json. It comes after `clock_fit` and leaves alone all else that was
fitted there: images say little about large matrix products in half precision, attention, layer norm, large losses and
Adam. As there, each setting is drawn towards a plain starting value, by as much as it is known beforehand.
"""

import math

import numpy as np
from scipy.optimize import least_squares

from calibration import published_transformers, sheets, transformers
from calibration.clock_fit import SPREAD, log_of, replay, soft
from calibration.record import provenance, write
from virtual_gpus.clock import rates

OUT = rates.TRANSFORMERS_PATH
# (table, key) in transformers.json: (starting value, its uncertainty as a factor e**s). Products reach 74 % of the peak
# on an A100 and 76 % on a V100 (github.com/mli/transformers-benchmarks), 73 % being that of the clock's first fit.
# FlashAttention 2 reaches 50 to 73 % forward and 63 % at most backward on an A100 (arxiv.org/abs/2307.08691), the
# first one 30 to 50 %, forward, and 25 to 35 % backward.
START = {
    **{("products", generation): (1.0, 0.15) for generation in ("Volta", "Ampere", "Hopper")},
    ("tensor", "attention"): (0.5, 0.3),
    ("tensor", "attention backward"): (0.4, 0.3),
    **{("memory", kind): (0.79, 0.3) for kind in ("layer_norm", "softmax", "gather", "foreach")},
}
PARTS = {key for key in START if key[0] != "products"}  # parts of a peak, which stay below it


def tables(values):
    """The tables of transformers.json, from {key of START: value}."""
    found = {}
    for (table, key), value in values.items():
        found.setdefault(table, {})[key] = value
    return found


def used(rows):
    """Rows of one GPU; and of programs that were run on eight only what each of these does by itself."""
    alone = {row["program"] for row in rows if row["n_gpus"] == 1}
    return [row for row in rows if row["n_gpus"] == 1 or row["program"] not in alone]


def logs_of(row):
    """[(how often it happens in a step, clock_fit.Log)] of a row: what one micro-batch asks, and each more."""
    more = (row.get("accumulation_steps") or 1) - 1

    def log(micro_batches):
        def step_on(device):
            step = transformers.step_on(device, row)
            return lambda: step(micro_batches)

        return log_of(row["sheet"], published_transformers.tf32(row), step_on)

    return [(1 - more, log(1)), (more, log(2))] if more else [(1, log(1))]


def said(row, logs, table):
    """Seconds of a step, with the rates in `table`."""
    return sum(n * replay(log, sheets.find(row["sheet"]), table) for n, log in logs)


def weights(rows):
    """Every curve counts as much as two rows at most."""
    sizes = {curve: sum(row["curve"] == curve for row in rows) for curve in {row["curve"] for row in rows}}
    return np.array([min(1.0, math.sqrt(2 / sizes[row["curve"]])) for row in rows])


def fit(rows, logs):
    """{key of START: value}: least squares of the logarithms, robust against single rows."""
    start, loose = (np.array(column) for column in zip(*START.values(), strict=True))
    weight = weights(rows)

    def residuals(x):
        table = rates.merged(rates.FITTED, tables(dict(zip(START, np.exp(x), strict=True))))
        errors = [
            math.log(said(row, log, table) / published_transformers.seconds(row))
            for row, log in zip(rows, logs, strict=True)
        ]
        return np.concatenate([soft(np.array(errors) / SPREAD) * weight, (x - np.log(start)) / loose])

    most = np.log([1.0 if key in PARTS else 1e9 for key in START])
    found = least_squares(residuals, np.log(start), x_scale=loose, bounds=(-np.inf, most))
    return {key: float(f"{math.exp(x):.3g}") for key, x in zip(START, found.x, strict=True)}


def main():
    counted = [row for row in published_transformers.rows() if not row["excluded"] and row["half"] == "fit"]
    rows = used(counted)
    settings = fit(rows, [logs_of(row) for row in rows])
    origin = {**provenance("transformer_fit"), "rows": len(rows)}
    write(OUT, {**tables(settings), "provenance": origin})


if __name__ == "__main__":
    main()
