"""Timing programs on GPUs without fooling oneself: wait for every GPU, warm up first, say how far the times spread."""

import math
import statistics
import time
from typing import NamedTuple

import torch

from virtual_gpus import current


def two_digits(number):
    """A positive number as text, with two significant digits: all that a modelled time deserves."""
    places = 1 - math.floor(math.log10(number))
    rounded = round(number, places)  # 9.96 becomes 10.0, which has a place less
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(rounded)))}f}"


def ms(seconds):
    """Seconds as milliseconds, with two significant digits: "0.52 ms"."""
    return f"{two_digits(1e3 * seconds)} ms"


class Timing(NamedTuple):
    """Seconds of several runs, one per run; `modelled` is the virtual GPU's name, or None for measured times."""

    seconds: list
    modelled: str | None

    @property
    def median(self):
        return statistics.median(self.seconds)

    @property
    def spread(self):
        """The quartiles (a quarter of the runs took less than the first, a quarter more than the second)."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def __repr__(self):
        if self.modelled:
            return f"{1e3 * self.median:.3f} ms (modelled, {self.modelled})"
        low, high = self.spread
        return f"{1e3 * self.median:.3f} ms ({1e3 * low:.3f} to {1e3 * high:.3f}, {len(self.seconds)} runs)"


class Timer:
    """Takes the time on `devices`: all that they were given is done before a reading.

    On virtual GPUs it reads the modelled clock, elsewhere the computer's. `with Timer(devices) as timer: ...` times a
    block (`timer.seconds`), `Timer(devices).measure(step)` a function, several times. ValueError without devices.
    """

    def __init__(self, devices):
        self.devices = [torch.device(device) for device in devices]
        if not self.devices:
            raise ValueError("Timer([]): name the devices that the program uses, such as [torch.device('cuda:0')]")
        kinds = {device.type for device in self.devices}
        self.machine = current() if "cuda" in kinds else None
        self.seconds = None

    def now(self):
        """Seconds since some moment, once every device has done what it was given.

        RuntimeError if the virtual GPUs that the timer was made on are off, or others have been started since.
        """
        if self.machine is not None and self.machine is not current():
            raise RuntimeError(
                f"this Timer was made on {self.machine}, and {current() or 'no virtual machine'} "
                "answers now: make another Timer"
            )
        for device in self.devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return time.perf_counter() if self.machine is None else self.machine.elapsed()

    def __enter__(self):
        self.start = self.now()
        return self

    def __exit__(self, *exc):
        self.seconds = self.now() - self.start

    def measure(self, step, repeats=10, warmup=3):
        """Call `step()` `warmup` times unmeasured, then `repeats` times: a Timing.

        The first calls are slower on real GPUs: libraries are loaded, memory is asked for, algorithms are chosen.
        ValueError for fewer than one repeat.
        """
        if repeats < 1 or warmup < 0:
            raise ValueError(f"repeats={repeats}, warmup={warmup}: there must be at least 1 repeat and 0 warm-ups")
        for _ in range(warmup):
            step()
        seconds = []
        for _ in range(repeats):
            with self:
                step()
            seconds.append(self.seconds)
        return Timing(seconds, self.machine and self.machine.spec.key)
