"""What Work.get_future() returns for operations on virtual GPUs.

As with NCCL, it is complete at once and its tensors are not: whoever uses them waits, on the GPU, for their values.
"""

from collections.abc import Callable
from typing import Any

import torch

from virtual_gpus.clock.streams import Stream, current_stream_of
from virtual_gpus.compat import functionalize_unsafe_set, tree_map_only
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.tensors.tensor import VirtualTensor, wrap


class AsyncTensor(VirtualTensor):
    """A result of an operation that may not be done: whatever uses it waits first, in the current stream."""

    source: Any  # a Work or an Event

    @classmethod
    def of(cls, tensor: VirtualTensor, source: Any) -> "AsyncTensor":
        """The values of `tensor` once source.wait() has returned."""
        made = wrap(tensor.inner, tensor.gpu)
        functionalize_unsafe_set(made, tensor)  # C++ compares storages, to see what is a view of what
        made.__class__, made.source = cls, source
        return made

    def wait(self) -> VirtualTensor:
        self.source.wait()
        made = wrap(self.inner, self.gpu)
        functionalize_unsafe_set(made, self)
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(AsyncTensor, AsyncTensor.wait, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.is_view:
            functionalize_unsafe_set(out, args[0])
        return out


class Future(torch.futures.Future):
    """Of a `source` that can be waited for, a Work or an Event, with these `outputs`.

    What `then` adds runs in a stream of its own, after the operation also in real time: it may look at whatever that
    wrote to.
    """

    def __init__(self, source: Any, outputs: Any, gpu: VirtualGPU):
        super().__init__()
        self.source, self.gpu = source, gpu
        self.set_result(tree_map_only(VirtualTensor, lambda tensor: AsyncTensor.of(tensor, source), outputs))

    def wait(self) -> Any:
        return tree_map_only(AsyncTensor, AsyncTensor.wait, super().wait())

    def then(self, callback: Callable) -> "Future":
        if self.gpu.capturing() is None:
            self.gpu.callbacks = stream = self.gpu.callbacks or Stream(gpu=self.gpu)
        else:
            stream = current_stream_of(self.gpu)
        with stream:
            self.source.wait()
            outputs = tree_map_only(AsyncTensor, AsyncTensor.wait, callback(self))
        return Future(stream.record_event(), outputs, self.gpu)

    def add_done_callback(self, callback: Callable) -> None:
        self.then(callback)
