"""How far off predictions are, as records hold it."""

import statistics
from collections.abc import Iterable


def compared(real: float, said: float) -> dict[str, float]:
    """What was published and what is predicted; "error" is how much too much that is, as a part of the former."""
    return {"published": round(real, 6), "predicted": round(said, 6), "error": round(said / real - 1, 4)}


def summary(errors: Iterable[float]) -> dict[str, float]:
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


def of_halves(rows: list[dict], late: list[float]) -> dict[str, dict]:
    """The summary for each half of recorded rows, and for the held-out half with the errors of what `late` rules left
    out, those that were written when first errors had been seen."""
    errors = {half: [row["error"] for row in rows if row["half"] == half] for half in ("held out", "fit")}
    errors["held out, and what late rules left out"] = errors["held out"] + late
    return {name: summary(found) for name, found in errors.items()}
