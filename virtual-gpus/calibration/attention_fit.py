"""Fit how fast attention kernels are, by the length of the sequences, to one half of what their authors published.

    python -m calibration.attention_fit

writes virtual-gpus/virtual_gpus/clock/attention.json: for each kernel and generation of GPUs the part of the tensor
cores' peak that it comes close to, and the length at which it reaches half of that. A causal mask halves the length
that counts. The law, the curves of published_attention.json that count, which are all, and the halves were decided
before a fit was made: of each kernel's curves on a GPU, by the order of a hash, one is held out and the next one
fitted. Kernels of a head of 64 numbers and of 256 share the constants of those of 128.

The errors of both halves are printed, and those of recorded/measured_h100.json, to which nothing is fitted.
"""

import json
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from calibration.errors import summary
from calibration.halves import halve
from calibration.record import RECORDED, provenance, write
from virtual_gpus.clock import rates
from virtual_gpus.clock.specs import GPUS

PATH = Path(__file__).parent / "published_attention.json"
MEASURED = {"FLASH_ATTENTION": "FlashAttention 2", "CUDNN_ATTENTION": "cuDNN"}  # how measured_h100.json calls them
TOKENS = 2**14  # of a batch in both


def curves() -> list[dict]:
    """The published curves: "points" are (length that counts, part of the peak)."""
    found = json.loads(PATH.read_text())["curves"]
    for curve in found:
        peak = GPUS[curve["gpu"]].fp16 / 1e12
        counts = 1 if curve["causal"] else 2
        curve["points"] = [(counts * int(length), tflops / peak) for length, tflops in curve["tflops"].items()]
        curve["generation"] = rates.generation(GPUS[curve["gpu"]])
        curve["curve"] = f"{curve['kernel']}/{curve['gpu']}/{curve['pass']}/{curve['head']}/{curve['causal']}"
    halve(found, lambda curve: (curve["kernel"], curve["gpu"]))
    return found


def measured() -> list[dict]:
    """The same of what one H100 said; all causal."""
    found: dict[tuple, list] = {}
    for key, ways in json.loads((RECORDED / "measured_h100.json").read_text())["kernels"].items():
        *_, kernel = key.split("/")
        if kernel not in MEASURED:
            continue
        _, length, width, _, _ = key.split("/")
        for way, flops in (("forward", 4), ("backward", 10)):
            seconds = flops * TOKENS * int(length) * int(width) / 2 / GPUS["H100"].bf16
            found.setdefault((MEASURED[kernel], way), []).append((int(length), seconds / ways[way]["median"]))
    return [{"kernel": kernel, "pass": way, "points": points} for (kernel, way), points in found.items()]


def errors(points: list[tuple[float, float]], peak: float, half: float) -> np.ndarray:
    """How much too much time the law says, as logarithms, of (length, part of the peak)."""
    lengths, parts = np.array(points).T
    return np.log(parts) - np.log(peak * lengths / (lengths + half))


def fit(points: list[tuple[float, float]]) -> list[float]:
    """[part of the peak, length of half of that]"""
    found = least_squares(lambda x: errors(points, *np.exp(x)), np.log([0.5, 500.0]), loss="soft_l1", f_scale=0.05)
    return [float(f"{value:.3g}") for value in np.exp(found.x)]


def fit_all() -> dict[str, dict[str, list[float]]]:
    """{kernel: {generation: what `fit` says}}"""
    points: dict[str, dict[str, list]] = {}
    for curve in curves():
        if curve["half"] == "fit":
            points.setdefault(curve["kernel"], {}).setdefault(curve["generation"], []).extend(curve["points"])
    return {kernel: {name: fit(those) for name, those in by.items()} for kernel, by in points.items()}


def report(fitted: dict[str, dict[str, list[float]]]) -> dict[str, dict]:
    """The errors of each half, and of the measured kernels by kernel and pass."""
    groups: dict[str, list] = {}
    for curve in curves():
        groups.setdefault(curve["half"], []).extend(
            errors(curve["points"], *fitted[curve["kernel"]][curve["generation"]])
        )
    for row in measured():
        name = f"measured on an H100: {row['kernel']}, {row['pass']}"
        groups[name] = list(errors(row["points"], *fitted[row["kernel"]]["Hopper"]))
    return {name: summary(map(float, np.expm1(found))) for name, found in groups.items()}


def main() -> None:
    fitted = fit_all()
    write(rates.ATTENTION_PATH, {**fitted, "provenance": provenance("attention_fit")})
    for name, found in report(fitted).items():
        print(f"{name:50}{found['rows']:4}{found['median']:8.1%}{found['worst']:8.1%}")


if __name__ == "__main__":
    main()
