"""Fit what transformers need of the clock to one half of their published figures.

    python -m calibration.transformer_fit

writes virtual-gpus/virtual_gpus/clock/transformers.json. It comes after `clock_fit` and `attention_fit` and leaves
alone all else that was fitted there: images say little about large matrix products in half precision, layer norm, large
losses and Adam. As there, each setting is drawn toward a plain starting value, by as much as it is known beforehand.
"""

import math

from calibration import fitting, published, published_transformers, sheets, transformers
from calibration.clock_fit import SPREAD, log_of, replay
from calibration.fitting import nested
from calibration.record import provenance, write
from virtual_gpus.clock import rates

OUT = rates.TRANSFORMERS_PATH
# (table, key) in transformers.json: (starting value, its uncertainty as a factor e**s). Products reach 74 % of the peak
# on an A100 and 76 % on a V100 (github.com/mli/transformers-benchmarks), 73 % being that of the clock's first fit.
START = {
    **{("products", generation): (1.0, 0.15) for generation in ("Volta", "Ampere", "Hopper")},
    **{("memory", kind): (0.79, 0.3) for kind in ("layer_norm", "softmax", "gather", "foreach")},
}
PARTS = {key for key in START if key[0] != "products"}  # parts of a peak, which stay below it


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

        return log_of(row["sheet"], published.tf32(row), step_on, software=published_transformers.software(row))

    return [(1 - more, log(1)), (more, log(2))] if more else [(1, log(1))]


def said(row, logs, table):
    """Seconds of a step, with the rates in `table`."""
    return sum(n * replay(log, sheets.find(row["sheet"]), table) for n, log in logs)


def fit(rows, logs):
    """{key of START: value}, to these rows and their logs."""

    def errors(values):
        table = rates.merged(rates.FITTED, nested(values))
        for row, log in zip(rows, logs, strict=True):
            yield math.log(said(row, log, table) / published_transformers.seconds(row))

    return fitting.fit(START, errors, SPREAD, fitting.weights(rows, 2), PARTS)


def main():
    counted = [row for row in published_transformers.rows() if not row["excluded"] and row["half"] == "fit"]
    rows = used(counted)
    settings = fit(rows, [logs_of(row) for row in rows])
    origin = {**provenance("transformer_fit"), "rows": len(rows)}
    write(OUT, {**nested(settings), "provenance": origin})


if __name__ == "__main__":
    main()
