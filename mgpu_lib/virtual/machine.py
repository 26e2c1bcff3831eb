"""The machine that virtual GPUs pretend to be: starting it, stopping it, and which one is on."""
import contextlib
import os
import sys
import threading
import types
from collections import Counter

import torch

from . import streams
from .clock import Clock
from .errors import GENERATORS, bad_fork, no_values
from .memory import Ledger
from .shapes import Shapes
from .specs import LINKS, find_gpu, find_link
from .tensor import Base, key_of
from .timeline import Timeline

RUNNING = []  # machines that are on; the last one answers


def current():
    """The machine that is on, or None."""
    return RUNNING[-1] if RUNNING else None


def current_index():
    """The number of this thread's current GPU."""
    return getattr(current().selected, "index", 0)


def select(index):
    """Make GPU `index` this thread's current one, and return the one it was; an error if there is no such GPU."""
    before = current_index()
    if index >= 0:
        current().gpu(index)
        current().selected.index = index
    return before


def find(device):
    """The virtual GPU that `device` (a torch.device, string or index) names, or None if it names no CUDA device."""
    machine = current()
    if machine is None or device is None:
        return None
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return None
    return machine.gpu(current_index() if device.index is None else device.index)


class VirtualGPU:
    """One GPU: its number, what it holds, and its random numbers."""

    def __init__(self, index, machine):
        self.index, self.device, self.machine = index, torch.device("cuda", index), machine
        self.name = str(self.device)
        self.spec, self.backing, self.traffic = machine.spec, machine.backing, machine.traffic
        self.clock, self.dry = machine.clock, machine.dry
        self.ledger = Ledger(index, self.spec.memory)
        self.generator = VirtualGenerator(gpu=self)
        self.streams, self.chosen = [], streams.Chosen()
        streams.Stream(gpu=self)  # the default one enters itself as the first

    def run(self, func, args, kwargs, key=None, call=None):
        """Call `func`, or what does the same, on inner tensors; `key` as `tensor.unwrap` gathers it."""
        if self.machine.forked:
            raise bad_fork()
        key = key or key_of(func, args, kwargs, self)
        try:
            out = (call or func)(*args, **kwargs) if self.dry is None else self.dry(func, args, kwargs, key)
        except RuntimeError as error:
            better = self.explained(error, func)
            if better is None:
                raise
            raise better from error
        self.clock.book(self, func, args, kwargs, out, key)
        return out

    def explained(self, error, func):
        """An error that says more than `error` about a virtual GPU, or None."""
        if self.backing.type == "meta" and (isinstance(error, NotImplementedError) or "meta tensor" in str(error)):
            return no_values(str(getattr(func, "overloadpacket", func.__name__)))
        if "DefaultCPUAllocator" in str(error):
            return RuntimeError(f"{self.device} is made of this computer's memory, and that is full: {error}. The "
                                f'virtual GPU itself has room. Use less, or backing="meta" (shapes only).')
        return None


class VirtualGenerator(torch._C.Generator):
    """torch.Generator(device='cuda:i')."""

    def __new__(cls, *, gpu):
        kind = "cpu" if gpu.backing.type == "meta" else gpu.backing
        self = super().__new__(cls, kind)
        self.gpu = gpu
        GENERATORS[self._cdata] = self
        return self.manual_seed(torch.initial_seed())

    device = property(lambda self: self.gpu.device)

    def clone_state(self):
        return generator_on(self.device, self.get_state())

    def __reduce__(self):
        return generator_on, (self.device, self.get_state())


def generator_on(device, state):
    return torch.Generator(device).set_state(state)


class Machine:
    """`n` GPUs named `gpu`, joined by `link`, made of `backing`: a context manager; see also start() and stop().

    n: at least 1. gpu: a name in `specs.GPUS`. link: "nvlink", "pcie", a name in `specs.LINKS`, or None for the best
    that the GPU has. backing: where the values are: "cpu"; "cuda:0" or "mps" (one real GPU acts as several); or "meta"
    (no values, only shapes: a dry run of a network of any size). ValueError for anything else.
    """

    def __init__(self, n, gpu="V100", link=None, backing="cpu"):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"virtual_gpus({n!r}): the number of GPUs must be a whole number, at least 1")
        self.spec = find_gpu(gpu)
        self.link = find_link(link, self.spec)
        self.backing = find_backing(backing)
        self.dry = Shapes() if self.backing.type == "meta" else None  # calls operations without values
        self.clock, self.started = Clock(self.spec, self.link, LINKS[self.spec.pcie]), 0.0
        self.traffic = Counter()  # (from, to) -> bytes, such as ("cpu", "cuda:1") -> 4096
        self.selected = threading.local()  # each thread has its own current GPU, as in CUDA
        self.forked = False  # whether this process is a copy, made by os.fork(), of the one that started the machine
        self.gpus = []
        self.grow(n)

    def __repr__(self):
        return f"<{len(self.gpus)} virtual {self.spec.key}, {self.link.name}, {'on' if self in RUNNING else 'off'}>"

    @property
    def devices(self):
        return [gpu.device for gpu in self.gpus]

    @property
    def ledgers(self):
        return [gpu.ledger for gpu in self.gpus]

    def grow(self, n):
        """Have at least `n` GPUs; what lies on those there are stays where it is."""
        self.gpus += [VirtualGPU(i, self) for i in range(len(self.gpus), n)]

    def gpu(self, index):
        if not 0 <= index < len(self.gpus):
            raise torch.AcceleratorError(
                f"CUDA error: invalid device ordinal\nThere are {len(self.gpus)} (virtual) GPUs, cuda:0 to "
                f"cuda:{len(self.gpus) - 1}; cuda:{index} is not one of them.")
        if self.forked:
            raise bad_fork()
        return self.gpus[index]

    def bytes_moved(self, source=None, target=None):
        """Bytes copied from `source` to `target`, each a device or its name; None: any."""
        wanted = [None if d is None else str(d) for d in (source, target)]
        return sum(nbytes for ends, nbytes in self.traffic.items()
                   if all(w in (None, end) for w, end in zip(wanted, ends, strict=True)))

    def elapsed(self):
        """Seconds on this thread's modelled clock since the machine was started.

        The GPUs may still be at work: torch.cuda.synchronize(device) waits for one of them.
        """
        return self.clock.host().now - self.started

    @property
    def timeline(self):
        """What happened since the machine was started: a Timeline, in seconds of `elapsed()`."""
        return Timeline(self.clock.since(self.started), self.spec, self.link)

    def loading(self, batches, seconds, workers=0):
        """Iterate over `batches`, each of which costs the host `seconds` of modelled time to prepare.

        With workers=0 this thread prepares them, when they are asked for. More workers prepare them beside it, at most
        two batches ahead each, as a DataLoader's do. ValueError for negative numbers.
        """
        if seconds < 0 or workers < 0:
            raise ValueError(f"loading(seconds={seconds}, workers={workers}): neither can be negative")
        return self.clock.load(batches, seconds, workers)

    def start(self):
        """Turn the GPUs on, and return the machine. Machines nest: the one started last answers."""
        if self in RUNNING:
            raise RuntimeError(f"{self} is on already; stop() it first")
        if not RUNNING:
            patch_everything()
        self.selected, self.started = threading.local(), self.clock.host().now
        RUNNING.append(self)
        return self

    def stop(self):
        """Turn the GPUs off: PyTorch is as it was before start(). Does nothing if they are off."""
        if self not in RUNNING:
            return
        if current() is not self:
            raise RuntimeError(f"{current()} was started after {self}: stop it first")
        RUNNING.pop()
        if not RUNNING:
            _patches.close()

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        while self in RUNNING:  # machines that were left on inside the block go first
            current().stop()


def mark_fork():
    for machine in RUNNING:
        machine.forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=mark_fork)


def find_backing(name):
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


_patches = contextlib.ExitStack()


def patch_everything():
    """Put the replacements that the other modules name in place."""
    # They need this module's names.
    from . import autocast, checkpoint, comm, cuda, factories, functions, gradients, modules
    with contextlib.ExitStack() as stack:  # undone if one of them fails
        replacements = {}
        for module in (factories, functions, modules, gradients, cuda, autocast, comm, checkpoint):
            for owner, name, value in module.patches():
                original = getattr(owner, name, None)
                if callable(original):
                    replacements[id(original)] = original, value  # kept, so that nothing else gets its id
                patch(stack, owner, name, value)
        for module, name, value in taken_out_before(replacements):
            patch(stack, module, name, value)
        autocast.register(stack)
        checkpoint.register(stack)
        forget = torch.cuda._check_bf16_tensor_supported.cache_clear  # asked of the GPUs that were there
        forget()
        stack.callback(forget)
        _patches.push(stack.pop_all())


def taken_out_before(replacements):
    """(module, name, replacement) for what modules took out of PyTorch before, as in `from torch import zeros`.

    `replacements` is {id of the original: (original, replacement)}. PyTorch's own modules keep theirs, and so does
    this package.
    """
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if isinstance(module, types.ModuleType) and not name.startswith(("torch", __package__)):
            for key, value in list(vars(module).items()):
                if id(value) in replacements:
                    yield module, key, replacements[id(value)][1]


def patch(stack, owner, name, value):
    """Set an attribute of a module or class; `stack` puts back what was there, or nothing if nothing was."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
