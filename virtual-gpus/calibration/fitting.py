"""What all fits have in common: few published figures, so each setting is drawn toward a plain starting value."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import numpy as np
from scipy.optimize import least_squares


def fit(
    start: dict, errors: Callable[[dict], Iterable[float]], spread: float, weights: np.ndarray, parts: Collection = ()
) -> dict:
    """{setting: value}: robust least squares of `errors`({setting: value}), logarithms of predicted over published.

    start    {setting: (starting value, its uncertainty as a factor e**s, ...)}
    spread   how far a good prediction may be off, as a factor e**s; weights: how much each of the errors counts
    parts    settings that are parts of a peak, and stay below it
    """
    begin, loose = (np.array([values[i] for values in start.values()]) for i in (0, 1))

    def residuals(x):
        found = np.array(list(errors(dict(zip(start, np.exp(x), strict=True))))) / spread
        soft = np.sign(found) * np.sqrt(2 * (np.sqrt(1 + found**2) - 1))  # large ones count less than by their square
        return np.concatenate([soft * weights, (x - np.log(begin)) / loose])

    most = np.array([0.0 if name in parts else np.inf for name in start])
    found = least_squares(residuals, np.log(begin), x_scale=loose, bounds=(-np.inf, most))
    return {name: float(f"{math.exp(x):.3g}") for name, x in zip(start, found.x, strict=True)}


def weights(rows: list[dict], most: int) -> np.ndarray:
    """Every curve counts as much as `most` rows at most."""
    sizes = Counter(row["curve"] for row in rows)
    return np.array([min(1.0, math.sqrt(most / sizes[row["curve"]])) for row in rows])


def nested(values: dict[tuple, float]) -> dict:
    """Tables in tables: {("a", "b"): 1} is {"a": {"b": 1}}."""
    found = {}
    for (*path, last), value in values.items():
        table = found
        for key in path:
            table = table.setdefault(key, {})
        table[last] = value
    return found
