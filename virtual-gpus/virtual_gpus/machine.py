"""The machine that virtual GPUs pretend to be: starting it, stopping it, and which one is on."""

import contextlib
import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from virtual_gpus import patches
from virtual_gpus.clock.clock import Clock
from virtual_gpus.clock.events import Totals
from virtual_gpus.clock.rates import NEWEST, SOFTWARE
from virtual_gpus.clock.specs import find_gpu
from virtual_gpus.clock.timeline import Timeline
from virtual_gpus.clock.topology import find_topology
from virtual_gpus.compat import Base, parse_visible_devices
from virtual_gpus.errors import bad_fork
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.memory import history
from virtual_gpus.memory.ledger import Ledger
from virtual_gpus.ops.device_asserts import device_side_assert
from virtual_gpus.ranks.communicator import Communicator, RealCommunicator
from virtual_gpus.state import RUNNING, current
from virtual_gpus.tensors import dispatch  # noqa: F401  (which registers the handlers of operations)

VISIBLE = "CUDA_VISIBLE_DEVICES"
SET_ONCE = ("spec", "topology", "link", "pcie", "backing")


class Traffic(Counter):
    """Bytes copied between devices: {(source, target): bytes} such as {("cpu", "cuda:1"): 4096}."""

    def total(self, source: Any = None, target: Any = None) -> int:
        """Bytes copied from `source` to `target`, each a device or its name; None: any."""
        return sum(n for (start, end), n in self.items() if str(source or start) == start and str(target or end) == end)


class Machine:
    """`n` GPUs named `gpu`, joined by `link`, made of `backing`: a context manager; see also start() and stop().

    n        at least 1
    gpu      a name in `GPUS`
    link     joins every pair: "nvlink", "pcie", a name in `LINKS`, or None for the best that the GPU has. Or the name
             of a machine type, such as "DGX-1V": then pairs are joined as in that machine, and more GPUs than it has
             take several of them. `virtual-gpus gpus` lists machine types and networks
    backing  where the values are: "cpu"; "cuda:0" or "mps" (one real GPU acts as several); or "meta" (no values, only
             shapes: a dry run of a network of any size)
    network  what joins machines of a type, such as "InfiniBand HDR"; None: there is one machine
    host     how long the host takes for a call, 1 being the servers of 2018 to 2022 that the clock was fitted to; a
             fast processor of today may need a third
    software the year of the software whose attention kernels run: "2023" (FlashAttention 1), "2024" (FlashAttention 2)
             or "2026" (on an H100, if the program leaves PyTorch the choice, cuDNN's)
    ValueError for anything else.

    >>> with Machine(4) as machine:
    ...     x = torch.ones(3, device="cuda:3")
    ...     print(x, machine.ledgers[3].allocated)
    tensor([1., 1., 1.], device='cuda:3') 512

    Its attributes:

    spec, link, pcie  the data sheets of its GPUs, of what joins them, and of what joins them to the host
    topology          what joins each pair of them, see `topology.Topology`
    backing           the torch.device that the values are on
    installed, gpus   its VirtualGPUs, and those of them that a program sees, in its order; `devices` and `ledgers` have
                      one entry for each of `gpus`
    reads_environment whether CUDA_VISIBLE_DEVICES says which GPUs a program sees. False: the variable is for real GPUs,
                      and whoever makes a machine has all of its GPUs
    traffic           bytes copied so far, a Traffic; `counting()` has those of a block of code
    clock             the modelled times of the host and of every stream, see `clock.Clock`; `elapsed()` and `timeline`
                      read it. `clock.tf32` = (convolutions, matrix products) overrides PyTorch's TF32 switches
    rank, ranks       the number of this process in its program and how many there are; None, 1: it is the only one
    """

    def __init__(
        self,
        n: int,
        gpu: str = "A100-80",
        link: str | None = None,
        backing: str | torch.device = "cpu",
        network: str | None = None,
        host: float = 1.0,
        software: str = NEWEST,
    ):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"virtual_gpus({n!r}): the number of GPUs must be a whole number, at least 1")
        if not isinstance(host, (int, float)) or not 0 < host < float("inf"):
            raise ValueError(f"host={host!r}: how long a call takes must be a number above 0; 1 for a server of 2020")
        if software not in SOFTWARE:
            raise ValueError(f"software={software!r}: use one of {', '.join(SOFTWARE)}")
        self.options = {"gpu": gpu, "link": link, "backing": str(backing), "network": network, "host": host}
        self.options["software"] = software
        self.spec = find_gpu(gpu)
        self.topology = find_topology(link, self.spec, network)
        self.link, self.pcie = self.topology.link, self.topology.pcie
        self.backing = find_backing(backing)
        self.is_meta = self.backing.type == "meta"
        self.clock, self.started = Clock(host, software), 0.0
        self.traffic = Traffic()
        self.selected = threading.local()  # each thread has its own current GPU, as in CUDA
        self.rank, self.ranks = None, 1
        self.communicator_class: Callable[..., Communicator] = Communicator if self.is_meta else RealCommunicator
        self.rendezvous: Any = None  # in a dry run, where its ranks meet: see `dry_runs.rendezvous`
        self.step_memory: Any = None  # in a dry run, its StepMemory
        self.capture: Any = None  # the graphs.Capture that goes on
        self.default_device = None  # what torch.set_default_tensor_type has made of it
        self.used = False  # whether a GPU has been asked for: until then, as with CUDA, a process may fork
        self.reads_environment = False
        self.visible, self.cuda_started = None, False  # CUDA_VISIBLE_DEVICES, and whether CUDA has read it for good
        self.forked = False  # whether this process is a copy, made by os.fork(), of one that has used the machine
        self.asserted: str | None = None  # what a kernel has found wrong, which the host may not know yet
        # makes the error of every further use, after that or in a fork
        self.unusable: Callable[[], BaseException] | None = None
        self.sync_debug = 0  # torch.cuda.set_sync_debug_mode: 1 warns where the host waits, 2 is an error there
        self.installed: list[VirtualGPU] = []
        self.seen: list[VirtualGPU] = []  # those of `installed` that the program sees
        self.grow(n)

    def __setattr__(self, name, value):
        if name in SET_ONCE and name in vars(self):
            raise AttributeError(f"{name} of {self} is fixed: its memory and its times follow from it. Make another")
        super().__setattr__(name, value)

    def __repr__(self):
        on = "on" if self in RUNNING else "off"
        return f"<{len(self.installed)} virtual {self.spec.key}, {self.topology.name}, {on}>"

    @property
    def gpus(self) -> list[VirtualGPU]:
        """The GPUs that a program sees, cuda:0 first: what CUDA_VISIBLE_DEVICES says counts until CUDA has started."""
        if self.reads_environment and not self.cuda_started:
            self.visible = os.environ.get(VISIBLE)
            numbers = range(len(self.installed)) if self.visible is None else parse_visible_devices()
            if any(isinstance(number, str) for number in numbers):
                raise RuntimeError(f"{VISIBLE}={self.visible!r}: virtual GPUs have numbers and no IDs; write 0,1, say")
            there = itertools.takewhile(lambda number: number < len(self.installed), numbers)  # as CUDA, up to the
            self.seen = [self.installed[number] for number in there]  # first that there isn't
            for index, gpu in enumerate(self.seen):
                gpu.set_index(index)
        return self.seen

    def start_cuda(self) -> list[VirtualGPU]:
        """CUDA starts, and reads CUDA_VISIBLE_DEVICES: the GPUs that the program sees from now on."""
        seen, self.cuda_started = self.gpus, True
        return seen

    @property
    def devices(self) -> list[torch.device]:
        """The torch.devices of its GPUs, cuda:0 first."""
        return [gpu.device for gpu in self.gpus]

    @property
    def ledgers(self) -> list[Ledger]:
        """What each of its GPUs holds (`memory.Ledger`): bytes `allocated`, their `peak`, `capacity`, ..."""
        return [gpu.ledger for gpu in self.gpus]

    def grow(self, n: int) -> None:
        """Have at least `n` GPUs; what lies on those there are stays where it is. ValueError if there is no room."""
        self.topology.check(n)
        new = [VirtualGPU(i, self) for i in range(len(self.installed), n)]
        if self.installed and self.installed[0].ledger.history is not None:  # what is recorded is recorded of all
            history.record(new, self.installed[0].ledger.history.settings)
        self.installed += new
        if self.visible is None:
            self.seen = list(self.installed)

    def gpu(self, index: int) -> VirtualGPU:
        """GPU `index`, a VirtualGPU; torch.AcceleratorError, as PyTorch raises it, if there is no such GPU."""
        gpu = self.look_up(index)
        if self.unusable is not None:
            raise self.unusable()
        return gpu

    def look_up(self, index: int) -> VirtualGPU:
        """GPU `index`, which still says what it is and holds after a device-side assert."""
        if not self.used:
            self.use()
        if not 0 <= index < len(self.seen):
            raise torch.AcceleratorError(
                f"CUDA error: invalid device ordinal\nThere are {len(self.seen)} (virtual) GPUs, cuda:0 to "
                f"cuda:{len(self.seen) - 1}; cuda:{index} is not one of them.{self.hidden()}"
            )
        if self.unusable is not None and self.asserted is None:
            raise self.unusable()
        return self.seen[index]

    def use(self) -> None:
        """The program asks for a GPU. RuntimeError if it sees none."""
        if not self.start_cuda():
            raise RuntimeError(f"No CUDA GPUs are available{self.hidden()}")
        self.used = True

    def hidden(self) -> str:
        """In words, why the program doesn't see all GPUs; empty if it does."""
        if len(self.seen) == len(self.installed):
            return ""
        return f"\n{VISIBLE}={self.visible!r} shows {len(self.seen)} of {len(self.installed)}."

    def raise_assert(self) -> None:
        """The host waits for a GPU: torch.AcceleratorError, now and at every further use, if a kernel has asserted."""
        if self.asserted is not None:
            self.unusable = functools.partial(device_side_assert, self.asserted)
            raise self.unusable()

    @contextlib.contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Count what is copied inside the block: `with machine.counting() as moved: ...`, and then `moved.total()`."""
        before, moved = self.traffic.copy(), Traffic()
        yield moved
        moved.update(self.traffic - before)

    def elapsed(self) -> float:
        """Seconds on this thread's modelled clock since the machine was started.

        The GPUs may still be at work: torch.cuda.synchronize(device) waits for one of them.
        """
        return self.clock.host().now - self.started

    @property
    def timeline(self) -> Timeline:
        """What happened since the machine was started: a Timeline, in seconds of `elapsed()`."""
        log = self.clock.log
        dropped = log.dropped, log.dropped_until - self.started
        return Timeline(log.since(self.started), self.spec, self.link, self.clock.reproducible, *dropped)

    @property
    def totals(self) -> list[Totals]:
        """What each of its GPUs has done since then, in all: a list of `events.Totals`."""
        timeline, dropped = self.timeline, self.clock.log.totals
        return [dropped.get(gpu.index, Totals()) + timeline.totals(gpu.index) for gpu in self.gpus]

    def loading(self, batches: Iterable, seconds: float, workers: int = 0) -> Iterator:
        """Iterate over `batches`, each of which costs the host `seconds` of modelled time to prepare.

        With workers=0 this thread prepares them, when they are asked for. More workers prepare them beside it, at most
        two batches ahead each, as a DataLoader's do. ValueError for negative numbers.
        """
        if seconds < 0 or workers < 0:
            raise ValueError(f"loading(seconds={seconds}, workers={workers}): neither can be negative")
        return self.clock.load(batches, seconds, workers)

    def start(self) -> "Machine":
        """Turn the GPUs on, and return the machine. Machines nest: the one started last answers."""
        if self in RUNNING:
            raise RuntimeError(f"{self} is on already; stop() it first")
        if not RUNNING:
            patches.install()
        self.selected, self.started = threading.local(), self.clock.host().now
        self.clock.reset()
        RUNNING.append(self)
        return self

    def stop(self) -> None:
        """Turn the GPUs off: PyTorch is as it was before start(). Does nothing if they are off.

        A recorded history of memory is forgotten.
        """
        if self not in RUNNING:
            return
        if current() is not self:
            raise RuntimeError(f"{current()} was started after {self}: stop it first")
        RUNNING.pop()
        self.asserted, self.unusable = None, bad_fork if self.forked else None
        history.forget_history(self.installed)
        if not RUNNING:
            patches.remove()

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        while self in RUNNING:  # machines that were left on inside the block go first
            current().stop()


def mark_fork() -> None:
    for machine in RUNNING:
        machine.forked = machine.used
        machine.unusable = bad_fork if machine.used else None


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=mark_fork)


def find_backing(name: str | torch.device) -> torch.device:
    try:
        backing = torch.device(name)
        if backing.type in ("cpu", "meta"):
            return backing
        if backing.type in ("cuda", "mps") and not RUNNING:
            Base.to(torch.zeros(1), backing)  # wakes the driver up, or says what is wrong
            return backing
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"backing={name!r} can't be used here: {error}") from None
    raise ValueError(f'backing={name!r}: use "cpu", "meta", or a real GPU such as "cuda:0" or "mps"')
