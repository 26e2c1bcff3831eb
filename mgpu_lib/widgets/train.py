"""The Train button: runs what a figure shows on this machine, in a thread, with progress and a way to stop."""

import atexit
import math
import threading
import time

import traitlets

from mgpu_lib import data, training
from mgpu_lib.devices import use_gpus
from mgpu_lib.widgets.explorer_data import BATCH_NORM
from virtual_gpus import current, off_the_clock

PAUSE_S = 0.5  # between two reports of progress
_newest = None  # the job that was started last: there is one at a time, for the machine is one
_starting = threading.Lock()


class Cancelled(Exception):
    """Somebody wants this job to stop."""


class Job:
    """Calls `work(check)` in a thread; `check()` raises Cancelled once somebody has called `cancel()`.

    `done(words)` is called at the end: "" if all went well, None if it was cancelled, else what went wrong.
    """

    def __init__(self, work, done):
        self.work, self.done, self.stop = work, done, threading.Event()
        self.thread = threading.Thread(target=self.run, name="mgpu-train", daemon=True)

    def start(self):
        """Cancel the job before, wait for it, and start."""
        global _newest
        with _starting:
            if _newest is not None:
                _newest.cancel()
            before, _newest = _newest, self
            self.before = before and before.thread
            self.thread.start()

    def run(self):
        try:
            if self.before is not None:
                self.before.join()
            self.work(self.check)
            self.done("")
        except Cancelled:
            self.done(None)
        except Exception as error:  # there is nobody else to tell
            self.done(f"{type(error).__name__}: {error}")

    def check(self):
        if self.stop.is_set():
            raise Cancelled

    def cancel(self, wait=None):
        """Ask the job to stop, which it does after the step that it is at; `wait` for so many seconds."""
        self.stop.set()
        if wait is not None:
            self.thread.join(wait)

    def running(self):
        return self.thread.is_alive()


@atexit.register
def stop_newest():
    if _newest is not None:
        _newest.cancel(wait=5)


class TrainButton(traitlets.HasTraits):
    """For an explorer: `train()` and `cancel()`, which are also what its two buttons do.

    `run` is the newest run, {} before the first: state ("running", "done", "cancelled", "failed"), the values it was
    started with, data (a name), same (whether that is what was recorded), gpus (in words), per_epoch and steps (how
    long it is), marks, accuracy (0.01 %), loss (thousandths), diverged (a step, or None), words (what went wrong).
    """

    run = traitlets.Dict().tag(sync=True)
    job = None

    def __init__(self, *args, **values):
        super().__init__(*args, **values)
        self.on_msg(self._asked)

    def _asked(self, figure, content, buffers):
        asked = {"train": self.train, "cancel": self.cancel}.get(content.get("do"))
        if asked is not None:
            asked()

    def train(self):
        """Start to train with the values chosen now, in a thread; a run that is going on, of any figure, is stopped."""
        run = {
            **{name: getattr(self, name) for name in self.controls},
            "state": "running",
            "marks": [],
            "accuracy": [],
            "loss": [],
            "steps": 0,
            "words": "",
            "diverged": None,
        }
        name, net = self.net_name(), self.net()

        def publish(**changes):
            run.update(changes)
            if self.job is job:  # a run that was replaced is silent
                self.run = dict(run)

        def work(check):
            publish()
            with off_the_clock():  # other cells' modelled times stay theirs
                self._train(name, net, run, publish, check)

        def done(words):
            publish(state="cancelled" if words is None else "failed" if words else "done", words=words or "")

        self.job = job = Job(work, done)
        publish()
        job.start()

    def cancel(self, wait=None):
        """Stop training after the step that it is at; `wait` for that so many seconds."""
        if self.job is not None:
            self.job.cancel(wait)

    def close(self):
        self.cancel()
        super().close()

    def _train(self, name, net, run, publish, check):
        """What the thread does: load the data, find the GPUs, and train step by step."""
        if not name.startswith("LeNet"):
            raise ValueError(f"{name} would take too long here: Train knows LeNet, without and with batch norm")
        images, k, length = data.whole_data(check), run["num_gpus"], net["budgets"][run["budget"]]
        check()
        on = current()  # the virtual GPUs that are on stay the kind that they are
        devices = use_gpus(k, on.spec.key) if on else use_gpus(k)
        machine = current()
        trained_on = len(data.hold_out(images)[0])
        per_epoch = math.ceil(trained_on / run["batch_size"])
        steps = length * per_epoch if run["budget"] == "epochs" else length
        publish(
            data=images.name,
            same=trained_on == net["images"],
            per_epoch=per_epoch,
            steps=steps,
            gpus=f"{k} {'virtual ' * (machine is not None)}GPU{'s' * (k > 1)}",
        )
        started = told = time.monotonic()
        batch_size, lr, batch_norm = run["batch_size"], run["lr"], name.endswith(BATCH_NORM)
        progress = training.validated_steps(images, batch_size, lr, steps, devices, batch_norm)
        for at in while_on(machine, progress):
            check()
            if at.accuracy is not None or at.diverged:
                publish(**measurement(run, at))
            if time.monotonic() - told > PAUSE_S:
                told = time.monotonic()
                self.send({"step": at.step, "left": (told - started) * (steps - at.step) / at.step})


def while_on(machine, steps):
    """Iterate over `steps` as long as `machine` is the one that answers; RuntimeError that says so when it isn't."""
    gone = RuntimeError("other virtual GPUs were turned on or off meanwhile; press Train again")
    try:
        for at in steps:
            if current() is not machine:
                raise gone
            yield at
    except Exception as error:  # whatever went wrong in the middle of a step
        if current() is machine or error is gone:
            raise
        raise gone from error


def measurement(run, at):
    """What a measurement, or an end, adds to a run."""
    found = {"diverged": at.step if at.diverged else None}
    if at.accuracy is not None:
        found["marks"] = [*run["marks"], at.step]
        found["accuracy"] = [*run["accuracy"], round(10_000 * at.accuracy)]
        found["loss"] = [*run["loss"], round(1000 * at.train_loss)]
    return found
