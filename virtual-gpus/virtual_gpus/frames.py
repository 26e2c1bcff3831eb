"""The three questions about who called that only the stack can answer."""

import os
import sys

import torch

OPERATIONS = "virtual_gpus.tensors"  # the modules that an operation goes through, from __torch_dispatch__ on
LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


def called_from_cpp_autograd() -> bool:
    """Whether C++ calls this operation for a derivative, asked from within `__torch_dispatch__`.

    Derivatives written in C++ make tensors like those that they are given, and take a virtual tensor for one on the
    CPU. Hooks and `Function.backward` run inside of the engine, too, but from Python frames of their own: no flag that
    the engine sets could tell them apart.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(OPERATIONS):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"  # None: a thread of the engine


def called_by_torch_load() -> bool:
    """Whether torch.load is running: what a `map_location` function does to a storage is allowed only there."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.serialization":
        frame = frame.f_back
    return frame is not None


def program_line() -> str:
    """File and line of the user's program, where it has called this library or PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
