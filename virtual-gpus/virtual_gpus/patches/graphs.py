"""torch.cuda.CUDAGraph, torch.cuda.graph and make_graphed_callables: PyTorch's own Python, over a class of ours in the
place of C++'s."""

import contextlib
import importlib.util
import itertools
import warnings
from typing import Any

import torch
import torch.cuda.graphs

from virtual_gpus.clock.streams import current_stream
from virtual_gpus.compat import C
from virtual_gpus.graphs import Capture
from virtual_gpus.memory.ledger import GraphPool
from virtual_gpus.patches.cuda import not_imitated
from virtual_gpus.patches.patch import patch, put, replaces
from virtual_gpus.state import current

MODES = "global", "thread_local", "relaxed"
handles = itertools.count(1)  # of pools


class CUDAGraph:
    """What C++ has beneath torch.cuda.CUDAGraph and torch.accelerator.Graph. (aten/src/ATen/cuda/CUDAGraph.cpp)"""

    capture: Capture | None
    name: tuple[int, int]  # of its pool

    def __init__(self, keep_graph: bool = False, **options: Any):
        pass

    def __new__(cls, keep_graph: bool = False, **options: Any):
        self = super().__new__(cls)
        self.keeps_graph, self.capture, self.ended, self.instantiated = keep_graph, None, False, False
        return self

    @property
    def _has_graph_exec(self) -> bool:
        return self.instantiated

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Every generator of a GPU draws anew in a replay."""

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        if self.instantiated:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        stream = current_stream()
        mode = "global" if capture_error_mode == "default" else capture_error_mode  # torch.accelerator's
        if mode not in MODES:
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        if stream == stream.gpu.streams[0]:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        if current().capture is not None:
            raise current().capture.refusal()
        self.name = pool or graph_pool_handle(own=True)
        pools = stream.gpu.ledger.graph_pools
        pools[self.name] = shared = pools.get(self.name) or GraphPool(stream.gpu.ledger)
        self.capture = Capture(stream, shared, mode)

    def capture_end(self) -> None:
        """Before PyTorch 2.15, whose Python calls the parts."""
        self.capture_end_pre()
        if not self.keeps_graph:
            self.instantiate()

    def capture_end_pre(self) -> None:
        capture = self.capture
        if capture is None or capture is not current().capture:
            raise RuntimeError("capture_end() called before capture_begin().")
        if current_stream() != capture.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        capture.end()
        if not capture.nodes:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
                "device or stream.",
                stacklevel=3,
            )
        self.ended = True

    def capture_end_post(self) -> None:
        pass

    def instantiate(self) -> None:
        if not self.ended:
            raise RuntimeError("capture_end() must have been called before calling instantiate")
        self.instantiated = True

    def replay(self) -> None:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if not self.instantiated:
            self.instantiate()
        self.capture.replay()

    def reset(self) -> None:
        self.capture, self.ended, self.instantiated = None, False, False

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.name

    def pools(self) -> list[tuple[int, int]]:
        return [self.pool()]


REFUSED = (
    "raw_cuda_graph raw_cuda_graph_exec debug_dump enable_debug_mode begin_capture_to_if_node "
    "begin_capture_to_while_node end_capture_to_conditional_node set_conditional_handle_for_current_node"
)
for name in REFUSED.split():
    setattr(CUDAGraph, name, not_imitated(f"CUDAGraph.{name}"))


def graph_pool_handle(own: bool = False) -> tuple[int, int]:
    """A new name for a pool: of a graph's own, or one that programs hand to several."""
    handle = next(handles)
    return (handle, 0) if own else (0, handle)


def is_capturing() -> bool:
    return current().capture is not None and current_stream().capture is not None


def python_over(names: dict[str, Any], module: str) -> dict[str, Any]:
    """What a `module` of PyTorch's defines, executed once more over these `names` of C."""
    spec = importlib.util.find_spec(module)
    module = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as stack:
        for name, value in {"_CudaStreamBase": object, **names}.items():  # without that it would put dummies there
            put(stack, C, name, value)
        spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}


IN_C = {
    "_CUDAGraph": CUDAGraph,
    "_graph_pool_handle": graph_pool_handle,
    "_cuda_isCurrentStreamCapturing": is_capturing,
}
PYTHON = python_over(IN_C, "torch.cuda.graphs")
patch(torch.cuda.graphs, PYTHON)


@replaces(PYTHON["graph"], "__init__")
def init(original, self, *args, **kwargs):
    """The stream that captures share is one of the machine that is on."""
    stream = PYTHON["graph"].default_capture_stream
    if stream is not None and stream.gpu.machine is not current():
        PYTHON["graph"].default_capture_stream = None
    original(self, *args, **kwargs)


patch(torch.cuda, {name: value for name, value in PYTHON.items() if hasattr(torch.cuda, name)})
if hasattr(torch.accelerator, "Graph"):  # not in all that are supported
    ANY = python_over({"_acceleratorGraph": CUDAGraph}, "torch.accelerator.graphs")
    patch(torch.accelerator, ANY)
    patch(torch.accelerator.graphs, ANY)
patch(C, {**IN_C, **dict.fromkeys(("_host_emptyCache", "_accelerator_emptyHostCache"), lambda: None)})
