"""CUDA graphs: the operations of a stream are recorded as they come by, and run when the graph is replayed.

As on a GPU nothing is computed during a capture: operations are asked on meta tensors for the shapes of their results,
and those are allocated. A replay runs them by `VirtualGPU.run`, on the same memory, with a host that takes no time. A
graph keeps the tensors that were there before its capture. Those made in it live as long as the program holds them; for
the others a replay makes its own, and the ledger's `GraphPool` counts what they take.
"""

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtual_gpus import compat
from virtual_gpus.clock.clock import waits_for
from virtual_gpus.clock.host import temporarily
from virtual_gpus.clock.rates import GRAPH_LAUNCH, GRAPH_NODE
from virtual_gpus.clock.streams import Stream, current_stream_of, set_stream
from virtual_gpus.clock.work import is_view
from virtual_gpus.compat import Base, DispatchKey, Generator, disable_current_modes, tree_map_only
from virtual_gpus.errors import capture_error
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.memory.ledger import GraphPool
from virtual_gpus.meta_cache import cached_call, tensor_meta_of
from virtual_gpus.state import select
from virtual_gpus.tree import tensors_in

Device, empty_strided = torch.device, torch.empty_strided  # PyTorch's own, also while they are replaced
WITH_WORKSPACE = {"mkldnn_rnn_layer"}  # whose size PyTorch doesn't know on meta: what these compute isn't kept
PLACED = Tensor, Device, Generator  # what says where an operation runs
HELD = "held"  # in the place of a Register: a tensor that is not on a GPU, and that nodes write to or read anew
Values = dict["Register", torch.UntypedStorage]  # of one replay


class Register:
    """A storage made during a capture, with a tensor like `made`."""

    def __init__(self, made: Tensor):
        self.meta, self.storage = tensor_meta_of(made), weakref.ref(made.untyped_storage())

    def store(self, value: Tensor, values: Values) -> None:
        """A replay has computed `value`: it goes to the storage if the program holds that, else to `values`."""
        storage = self.storage()
        if storage is not None:
            Base.copy_(view(storage, 0, *self.meta), value)
            if value.is_meta:  # a dry run may know it
                storage.constant = getattr(value.untyped_storage(), "constant", None)
        elif tensor_meta_of(value) == self.meta and value.storage_offset() == 0:
            values[self] = value.untyped_storage()
        else:  # PyTorch foretold other strides
            shape, stride, dtype = self.meta
            like = empty_strided(shape, stride, dtype=dtype, device=value.device)
            values[self] = Base.copy_(like, value).untyped_storage()


class Slot:
    """An argument that lies in a Register."""

    def __init__(self, tensor: Tensor, register: Register):
        self.register, self.where = register, (tensor.storage_offset(), *tensor_meta_of(tensor))

    def tensor(self, values: Values) -> Tensor:
        return view(self.register.storage() or values[self.register], *self.where)


def view(
    storage: torch.UntypedStorage, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    tensor = empty_strided((0,), (1,), dtype=dtype, device=storage.device)
    return Base.set_(tensor, storage, offset, shape, stride)


class Node(NamedTuple):
    """What a replay does in `stream`: run(*args), which gives the values of `outs`, where they aren't None."""

    stream: Stream
    run: Callable
    args: Sequence = ()
    outs: Sequence[Register | None] = ()
    phase: str = ""  # of the timeline
    keys: tuple | None = None  # by which C++ dispatches


class Mark:
    """An event that was recorded in a capture, when its stream had `seen` so much; its `time` in a replay."""

    def __init__(self, stream: Stream, seen: Counter[Stream]):
        self.stream, self.seen, self.time = stream, seen, 0.0

    def record(self) -> None:
        self.time = current_stream_of(self.stream.gpu).done_at

    def wait(self) -> None:
        stream = current_stream_of(self.stream.gpu)
        stream.done_at = max(stream.done_at, self.time)


class Capture:
    """What has come by since it began on the stream `origin`, there and on the streams that have joined it.

    works  collectives that the program has not waited for
    seen  {stream: {stream: how much of its work comes before what the first is given next}}
    """

    def __init__(self, origin: Stream, pool: GraphPool, mode: str):
        self.origin, self.pool, self.mode, self.thread = origin, pool, mode, threading.get_ident()
        self.gpu: VirtualGPU = origin.gpu
        self.nodes: list[Node] = []
        self.registers: set[Register] = set()
        self.seen: dict[Stream, Counter[Stream]] = {origin: Counter()}
        self.marks: set[Mark] = set()
        self.works: set[Any] = set()
        self.failed = False
        origin.capture = self.gpu.machine.capture = self
        self.gpu.ledger.graph_pool = pool
        pool.graphs += 1
        weakref.finalize(self, pool.leave).atexit = False

    def end(self) -> None:
        """Its streams run again what they are given. torch.AcceleratorError if something was refused before."""
        for stream in self.seen:
            stream.capture = None
        self.gpu.machine.capture = self.gpu.ledger.graph_pool = None
        self.works.clear()
        if self.failed:
            raise capture_error(901)
        if any(seen[stream] > self.seen[self.origin][stream] for stream, seen in self.seen.items()):
            raise capture_error(904)

    def refusal(self, code: int = 900) -> torch.AcceleratorError:
        """CUDA's error of that number; the capture is of no use any more."""
        self.failed = True
        return capture_error(code)

    def check_waiting(self, streams: Sequence[Stream]) -> None:
        """The host wants to wait for `streams`."""
        if any(getattr(stream, "capture", None) is self for stream in streams):
            raise self.refusal()

    def check_asking(self) -> None:
        """The host asks whether something is done, which it may of others than the capture's, or not: the mode says."""
        if self.mode == "global" or (self.mode == "thread_local" and self.thread == threading.get_ident()):
            raise self.refusal()

    # Recording

    def run(self, gpu: VirtualGPU, func: Callable, args: Sequence, kwargs: dict, key: tuple) -> Any:
        """What gpu.run was asked for: tensors like its results, without values."""
        name = getattr(func, "overloadpacket", func).__name__
        if name == "_local_scalar_dense" or waits_for(name, args):
            raise self.refusal()
        if any(tensor.layout is not torch.strided for tensor in tensors_in((args, kwargs))):
            raise RuntimeError(f"virtual GPUs can't capture {name} of a sparse tensor")
        out = self.results(func, args, kwargs, key)
        gpu.clock.record_op(gpu, func, args, kwargs, out, key)
        if not is_view(func):
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
            made = [tensor.untyped_storage() for tensor in tensors_in((out,))]
            outs = [None if storage._cdata in given else storage.register for storage in made]
            self.append(functools.partial(gpu.run, func, key=key), (args, kwargs), outs)
        return out

    def results(self, func: Callable, args: Sequence, kwargs: dict, key: tuple) -> Any:
        if is_view(func) or torch.Tag.inplace_view in getattr(func, "tags", ()):
            return getattr(func, "_op", func)(*args, **kwargs)  # computes nothing
        tensors = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        metas = {i: empty_like(tensor, "meta") for i, tensor in tensors.items()}
        meta_args, meta_kwargs = tree_map_only(PLACED, functools.partial(on_meta, metas), (list(args), kwargs))
        name = getattr(func, "overloadpacket", func).__name__
        try:
            out = func(*args, **kwargs) if name in WITH_WORKSPACE else cached_call(func, meta_args, meta_kwargs, key)
        except NotImplementedError as error:
            if hasattr(func, "_schema") and not func._schema.returns:
                return None  # such as _fused_adamw_, which writes to its arguments and nowhere else
            raise NotImplementedError(f"virtual GPUs can't capture {name}: PyTorch needs values for it") from error
        given = {id(meta): tensors[i] for i, meta in metas.items()}
        shared = {meta.untyped_storage()._cdata for meta in metas.values()}
        if any(id(t) not in given and t.untyped_storage()._cdata in shared for t in tensors_in((out,))):
            return getattr(func, "_op", func)(*args, **kwargs)  # a view that doesn't say so
        for i, meta in metas.items():
            if meta.shape != tensors[i].shape:  # of out=
                tensors[i].resize_(meta.shape)
        return tree_map_only(Tensor, lambda t: given[id(t)] if id(t) in given else self.allocate(t), out)

    def allocate(self, meta: Tensor) -> Tensor:
        """A tensor like `meta`. Nothing has been written there yet, so numbers are NaN where their type has one."""
        made = empty_like(meta, self.gpu.backing)
        if not made.is_meta:
            made.untyped_storage().fill_(0xFF if made.is_floating_point() or made.is_complex() else 0)
        register = made.untyped_storage().register = Register(made)
        self.registers.add(register)
        return made

    def resolve_conj(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` without the conjugate bit; part of the operation that it comes from."""
        made = self.allocate(tensor)
        self.append(Base.conj_physical, [tensor.conj()], [made.untyped_storage().register])
        return made

    def call(self, function: Callable, *args: Any) -> None:
        """See VirtualGPU.call."""
        for tensor in tensors_in(args):
            if not hasattr(tensor.untyped_storage(), "block") and not hasattr(tensor.untyped_storage(), "register"):
                tensor.untyped_storage().register = HELD
        self.append(function, args)

    def append(self, run: Callable, args: Sequence, outs: Sequence[Register | None] = ()) -> None:
        """A replay does run(*args) in what is the current stream now."""
        stream = current_stream_of(self.gpu)
        self.seen[stream][stream] += 1
        excluded = compat.dispatch_tls_local_exclude_set().remove(DispatchKey.PythonTLSSnapshot)  # before PyTorch 2.15
        keys = compat.dispatch_tls_local_include_set(), excluded
        held = tree_map_only(Tensor, self.hold, list(args))
        self.nodes.append(Node(stream, run, held, outs, self.gpu.clock.host().phase, keys))

    def hold(self, tensor: Tensor) -> Tensor | Slot:
        """`tensor` as an argument of a Node. A number on the CPU is handed over with the call, as it is now."""
        storage = tensor.untyped_storage()
        register = getattr(storage, "register", None)
        if register in self.registers:
            return Slot(tensor, register)
        return tensor.detach() if register is not None or hasattr(storage, "block") else tensor.clone()

    def check_made(self, gpu: VirtualGPU, storage: torch.UntypedStorage) -> None:
        """RuntimeError for a storage that is to be on `gpu` and that no Node makes: replays wouldn't fill it."""
        if gpu.capturing() is self and not hasattr(storage, "register"):
            raise RuntimeError(
                "virtual GPUs capture what runs as an operation of PyTorch on one GPU, and here a tensor was made in "
                "another way. Make it before the capture, or leave this part out of the graph"
            )

    # Streams

    def mark(self, stream: Stream) -> Mark:
        """An event is recorded in `stream`."""
        mark = Mark(stream, self.seen[stream].copy())
        self.marks.add(mark)
        self.nodes.append(Node(stream, mark.record))
        return mark

    def wait(self, stream: Stream, mark: Mark | None) -> None:
        """`stream` waits for an event, recorded in this capture if there is a `mark`; so it joins."""
        if mark not in self.marks:
            raise self.refusal(905)
        stream.capture = self
        self.seen[stream] = self.seen.get(stream, Counter()) | mark.seen
        self.nodes.append(Node(stream, mark.wait))

    # Replaying

    def replay(self) -> None:
        """The host launches all nodes at once; what ran in `origin` runs in the current stream."""
        gpu, clock, stream = self.gpu, self.gpu.clock, current_stream_of(self.gpu)
        if stream.capture is not None:
            raise RuntimeError("virtual GPUs don't capture what replays another graph: capture its operations anew")
        host = clock.host_in_use()
        if not host.paused:
            launch = host.advance(GRAPH_LAUNCH + GRAPH_NODE * len(self.nodes), gpu.index)
            clock.record_host("launch a graph", host.thread, *launch)
        values: Values = {}
        before = select(gpu.index)
        with temporarily(host, factor=0.0, ranges=[]), disable_current_modes():
            try:
                for node in self.nodes:
                    set_stream(stream if node.stream is self.origin else node.stream)
                    host.ranges = [node.phase]
                    replay_node(node, values)
            finally:
                set_stream(stream)
                select(before)


def replay_node(node: Node, values: Values) -> None:
    args = tree_map_only(Slot, lambda slot: slot.tensor(values), node.args)
    with compat.ForceDispatchKeyGuard(*node.keys) if node.keys else contextlib.nullcontext():
        out = node.run(*args)
        for register, value in zip(node.outs, tensors_in((out,)), strict=False):
            if register is not None:
                register.store(value, values)


def empty_like(tensor: Tensor, device: Any) -> Tensor:
    return empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def on_meta(metas: dict[int, Tensor], value: Any) -> Any:
    """An argument of an operation as it is on meta, where no numbers are drawn."""
    if isinstance(value, Tensor):
        return metas[id(value)]
    return None if isinstance(value, Generator) else torch.device("meta")
